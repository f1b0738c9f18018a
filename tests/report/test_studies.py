"""Profiles and precision on the page: where a step's time goes, what sums lose, what autocast chooses."""

from dataclasses import replace

import pytest

from benchmarks.commands.report import collect
from benchmarks.measure.record import RunWriter
from benchmarks.report import study_tables
from benchmarks.report.facts import latest
from benchmarks.report.page import build_page
from tests.report.synthetic import CPU_ENV, FULL_NAME, GPU_ENV, SHORT_NAME, is_peer, study_rows
from tests.report.test_page import Elements
from tests.report.test_tables import pick, records


@pytest.fixture(scope="module")
def made():
    return build_page(study_rows(), is_peer=is_peer)


def shown(made):
    return "".join(data for name, data in Elements(made.html).texts if name not in ("script", "style"))


def test_the_page_has_both_sections_and_only_there(made):
    elements = Elements(made.html)
    sections = [a["id"] for name, a in elements.found if name == "section"]
    assert sections == [f"machine--gpu-h200--{name}" for name in ("time", "precision", "statuses")]
    text = shown(made)
    assert "Where a step's time goes" in text and "Other cases" not in text
    assert "driver 570.124" in text and "asked for 9 GiB" in text


def test_each_profiled_step_folds_out_its_answers_and_kernels(made):
    elements = Elements(made.html)
    folds = [a for name, a in elements.found if name == "details"]
    assert len(folds) == 2 and ["open" in a for a in folds] == [True, False]
    assert "toy,B4,S512,fp32,w1 · plain train_step" in shown(made)
    assert f"most time is {SHORT_NAME} (other)" in shown(made)
    assert "<i>literally</i>" in shown(made) and "<i>literally" not in made.html
    tips = [a["title"] for name, a in elements.found if name == "tr" and "title" in a]
    assert tips.count(FULL_NAME) == 2 * 3 and len(tips) == 2 * 3 * 8


def test_a_phase_shows_its_most_expensive_kernels_and_sums_the_rest():
    fact = latest(study_rows())[1]
    frame = study_tables.kernels(fact, 8)
    lines = [line for line in records(frame) if line["phase"] == "backward"]
    assert len(lines) == 9 and lines[0]["kernel"] == SHORT_NAME and lines[0]["ms"] == pytest.approx(1.536)
    rest = lines[-1]
    assert (rest["kernel"], rest["kind"], rest["calls"]) == ("2 others", None, 18 + 19)
    assert sum(line["share %"] for line in lines) == pytest.approx(100)
    assert len(records(study_tables.kernels(fact, 10))) == 30  # nothing is left over


def test_on_a_cpu_they_are_operators():
    rows = [r for r in study_rows() if r.case.startswith("profile/plain/train_step/toy")]
    on_cpu = [replace(r, env=CPU_ENV) for r in rows]
    assert list(study_tables.kernels(latest(on_cpu)[0], 8).columns)[1] == "operator"


def test_profiled_steps_stand_side_by_side():
    line = pick(study_tables.profiles(latest(study_rows())), parameters="toy,B4,S512,fp32,w1")
    assert line["forward ms"] == pytest.approx(6.144) and line["optimizer ms"] == pytest.approx(6.144)
    assert (line["products in forward %"], line["products in step %"]) == pytest.approx((75, 75))
    assert (line["softmax ms"], line["attention products ms"]) == pytest.approx((0.4, 0.1))
    assert line["softmax/products"] == 4 and line["most time"] == SHORT_NAME


def test_sums_keep_four_decimals_and_dtypes_have_a_column_each(made):
    facts = latest(study_rows())
    assert records(study_tables.sums(facts)) == [
        {"sum": "float16 += float16", "result": "9.9531", "lesson": "rounded"}
    ]
    assert records(study_tables.dtypes(facts)) == [
        {
            "model": "fc1-ln",
            "tensor": "output",
            "of": "fc1",
            "under fp16": "float16",
            "under bf16": "bfloat16",
        },
        {"model": "fc1-ln", "tensor": "loss", "of": "", "under fp16": "float32", "under bf16": "float32"},
    ]
    for name in ("sums", "dtypes", "profiles", "kernels-plain-train-step-toy-b4-s128-fp32-w1"):
        assert set(made.tables[f"gpu-h200-{name}"]) == {"md", "tex", "typ", "csv"}
    assert "9.9531" in made.tables["gpu-h200-sums"]["tex"]


def test_what_the_commands_leave_beside_their_traces_is_collected(tmp_path):
    local = tmp_path / "results" / "local"
    for name in ("profile", "precision"):
        writer = RunWriter(local / name, f"{name}-cuda-1")
        for one in study_rows():
            if one.case.startswith(name):
                writer.add(one)
    (local / "profile" / "toy.trace.json.gz").write_bytes(b"no row")
    (local / "profile" / "older.json").write_text("{}")
    rows, damaged = collect(tmp_path / "results")
    assert damaged == [] and len(rows) == len(study_rows())
    assert all(row.env == GPU_ENV for row in rows)
