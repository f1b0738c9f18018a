"""Records: strict JSON, whole rows, resuming, damaged files, names from outside (field case R1)."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.measure import record
from benchmarks.measure.foreign import stamp_asv
from benchmarks.measure.record import RunWriter, check_machine, destination, load, safe_name, strict_json
from tests.benchmarks.rows import A, B, row


def written(path):
    """What a strict parser, written apart from the loader's, makes of a file of JSON lines."""

    def refuse(word):
        raise AssertionError(f"{word} in the file")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_kind_of_row_is_strict_json_and_comes_back(tmp_path):
    rows = [
        row("a/x/p/S1,fp32,w1", status="oom"),
        row("a/x/p/S2,fp32,w1", status="skipped"),
        row("a/x/p/S3,fp32,w1", (0.5,)),
        row(
            "a/x/p/S4,fp32,w1",
            (0.0, 0.0),
            metrics={"rate": {"value": math.inf, "unit": "1/s", "better": "higher"}},
        ),
        row("a/x/p/S5,fp32,w1", status="red", check={"error": math.nan, "budget": 1e-6}),
    ]
    writer = RunWriter(tmp_path, "run-1")
    for each in rows:
        writer.add(each)
    stored = written(writer.path)
    assert [s["status"] for s in stored] == ["oom", "skipped", "ok", "ok", "red"]
    assert stored[3]["metrics"]["rate"]["value"] is None and stored[4]["check"]["error"] is None
    back, problems = load([tmp_path])
    assert problems == [] and [b.case for b in back] == [r.case for r in rows]
    assert back[2] == rows[2] and back[0] == rows[0]


def test_a_sample_that_is_not_finite_takes_the_others_with_it(tmp_path):
    writer = RunWriter(tmp_path, "r")
    writer.add(row(seconds=(1.0, math.nan, 1.0)))
    (stored,) = written(writer.path)
    assert stored["status"] == "ok" and stored["samples_seconds"] == []


def test_one_sample_has_no_spread_anywhere_in_the_file(tmp_path):
    writer = RunWriter(tmp_path, "r")
    writer.add(row(metrics={"spread": {"value": float("nan"), "unit": "s", "better": None}}))
    (stored,) = written(writer.path)
    assert stored["metrics"]["spread"]["value"] is None


def test_resuming_keeps_rows_and_knows_what_is_done(tmp_path):
    RunWriter(tmp_path, "r").add(row("a/x/p/S1,fp32,w1", process=0))
    again = RunWriter(tmp_path, "r")
    assert again.done_ids() == {"a/x/p/S1,fp32,w1"}
    assert again.done_ids(process=0) and again.done_ids(process=1) == set()
    again.add(row("a/x/p/S2,fp32,w1", process=0))
    assert len(written(again.path)) == 2


def test_resuming_on_other_sources_is_refused(tmp_path):
    RunWriter(tmp_path, "r").add(row())
    with pytest.raises(ValueError, match="other sources"):
        RunWriter(tmp_path, "r").add(row(source_sha256="7" * 64))


def test_an_interruption_during_a_write_leaves_the_rows_before_it(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path, "r")
    writer.add(row("a/x/p/S1,fp32,w1"))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.add(row("a/x/p/S2,fp32,w1"))
    monkeypatch.undo()
    assert [s["case"] for s in written(writer.path)] == ["a/x/p/S1,fp32,w1"]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"], "no half-written file stays"


def test_a_killed_run_leaves_only_whole_rows(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.benchmarks.rows import row; from benchmarks.measure.record import RunWriter\n"
        f"writer = RunWriter({str(tmp_path)!r}, 'r')\n"
        "for i in range(10**6):\n"
        "    writer.add(row(f'a/x/p/S{i},fp32,w1', (0.1,) * 500)); print(i, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        last = int(child.stdout.readline())
    child.kill()
    child.wait()
    assert len(written(tmp_path / "r.jsonl")) >= last + 1
    assert not load([tmp_path])[1]


@pytest.mark.parametrize(
    "name, content",
    [
        ("torn.jsonl", None),
        ("nan.jsonl", '{"schema":1,"case":NaN}\n'),
        ("huge.jsonl", '{"schema":1,"case":1e999}\n'),
        ("other.json", "{}"),
        ("list.jsonl", "[]\n"),
        ("binary.jsonl", "\udcff"),
        ("future.jsonl", '{"schema":99}\n'),
        ("field.jsonl", None),
        ("status.jsonl", None),
        ("sideways.jsonl", None),
        ("valueless.jsonl", None),
        ("asv.json", '{"result_columns": 3, "results": {}}'),
    ],
)
def test_a_damaged_file_is_named_skipped_and_left_alone(tmp_path, name, content):
    good = record.to_line(row())
    content = {
        "torn.jsonl": good + good[:-20],
        "field.jsonl": good.replace('"status"', '"statuz"'),
        "status.jsonl": good.replace('"ok"', '"fine"'),
        "sideways.jsonl": good.replace('"metrics":{}', '"metrics":{"m":{"value":1,"better":"sideways"}}'),
        "valueless.jsonl": good.replace('"metrics":{}', '"metrics":{"m":1}'),
    }.get(name, content)
    bad = tmp_path / name
    bad.write_bytes(content.encode("utf-8", "surrogateescape"))
    before = bad.read_bytes()
    RunWriter(tmp_path, "good").add(row())
    rows, problems = load([tmp_path])
    assert len(rows) == 1 and len(problems) == 1 and name in problems[0] and "\n" not in problems[0]
    if name.endswith(".jsonl"):
        with pytest.raises(ValueError, match="damaged"):
            RunWriter(tmp_path, name.removesuffix(".jsonl"))
    assert bad.read_bytes() == before


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "metric",
    ['{"value":"5"}', '{"value":[5]}', '{"value":true}', f'{{"value":{HUGE}}}', '{"value":1e300}',
     '{"value":1,"samples":["a"]}', '{"value":1,"samples":5}', '{"value":1,"samples":[[]]}',
     '{"value":-1,"unit":"s"}', '{"value":1,"unit":"s","samples":[1,-1]}', '{"value":1e-300,"unit":"s"}'],
)  # fmt: skip
def test_a_metric_that_nobody_measured_is_damage(tmp_path, metric):
    damaged_with(tmp_path, '"metrics":{}', f'"metrics":{{"m":{metric}}}')


@pytest.mark.parametrize("sample", ['"1"', "[1]", "-1", "true", HUGE, "1e-300", "1e308", "null"])
def test_a_time_that_nobody_measured_is_damage(tmp_path, sample):
    damaged_with(tmp_path, '"samples_seconds":[1.0]', f'"samples_seconds":[1.0,{sample}]')
    if sample != "null":
        damaged_with(tmp_path, '"first_seconds":null', f'"first_seconds":{sample}')


@pytest.mark.parametrize("check", ["5", "[]", '{"error":"1","budget":1}', f'{{"error":1,"budget":{HUGE}}}'])
def test_a_check_that_nobody_made_is_damage(tmp_path, check):
    damaged_with(tmp_path, '"check":null', f'"check":{check}')


def test_a_shape_that_nothing_has_is_damage(tmp_path):
    damaged_with(tmp_path, "S256", "S" + "9" * 19)


def damaged_with(tmp_path, old, new):
    text = record.to_line(row(commit=A))
    assert old in text
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text.replace(old, new))
    rows, problems = load([bad])
    assert rows == [] and len(problems) == 1 and "damaged" in problems[0], problems
    assert main(["gate", "--baseline", str(bad), "--current", str(bad)]) == 2


@pytest.mark.parametrize("sample", [-1.0, 1e308, pytest.param(int(HUGE), id="huge"), 1e-300])
def test_other_tools_files_are_held_to_the_same_rules(tmp_path, sample):
    path = asv_file(tmp_path / "asv")
    data = json.loads(path.read_text())
    data["results"]["bench_attention.ForwardBackward.sampled"][5][0] = [0.2, sample]
    path.write_text(json.dumps(data))
    stats = {"median": 2.0, "data": [1.0, sample]}
    benchmark = {"name": "t[step/plain/forward/toy,B4,fp32,w1]", "stats": stats}
    data = {
        "machine_info": {"node": "box"},
        "commit_info": {"id": B, "dirty": False},
        "benchmarks": [benchmark],
    }
    (tmp_path / "pytest.json").write_text(json.dumps(data))
    rows, problems = load([tmp_path])
    assert rows == [] and len(problems) == 2


def test_an_absent_file_is_a_problem_not_a_crash(tmp_path):
    rows, problems = load([tmp_path / "nothing.jsonl"])
    assert rows == [] and "nothing.jsonl" in problems[0]


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write") as caught:
        RunWriter(tmp_path / "file" / "below", "r").add(row())
    assert "\n" not in str(caught.value)


def test_destination(tmp_path):
    assert destination("box", A, tmp_path) == tmp_path / "records" / "box" / A
    assert destination(None, B, tmp_path) == tmp_path / "local" / B
    assert destination(None, None, tmp_path) == tmp_path / "local" / "no-commit"
    for machine, commit in (("box", None), ("box", "abc"), ("../x", A), ("local", A), ("", A)):
        with pytest.raises(ValueError):
            destination(machine, commit, tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-x", "é", "a" * 64, "x.", "local", "a\n"])
def test_machine_names_from_outside(name):
    with pytest.raises(ValueError):
        check_machine(name)
    assert check_machine("gpu-h200.x1_b") == "gpu-h200.x1_b"


def test_names_from_outside_are_safe_and_distinct():
    outside = [
        "",
        ".",
        "..",
        "a",
        "a/b",
        "a_b",
        "a\\b",
        "a b",
        "../../etc/passwd",
        "é",
        "-rf",
        "\0",
        "NVIDIA H200/80",
    ]
    outside += ["x" * 300, "x" * 301, safe_name("a/b"), "<script>", ".hidden"]
    names = [safe_name(text) for text in outside]
    assert len(set(names)) == len(names)
    for name in names:
        assert name not in ("", ".", "..") and not set(name) & set('/\\ \0<>:"|?*') and name[0] not in ".-"
        assert len(name) <= 100
    assert safe_name("2026-01-02T030405Z") == "2026-01-02T030405Z"


def test_strict_parser_is_strict():
    for text in ("NaN", "[Infinity]", "-Infinity", "1e999", "{", ""):
        with pytest.raises(ValueError):
            strict_json(text)
    assert strict_json('{"a": [1.5, null]}') == {"a": [1.5, None]}


def asv_file(directory, **change):
    data = {
        "commit_hash": A,
        "env_name": "virtualenv-py3.11",
        "date": 1,
        "params": {
            "machine": "box",
            "os": "Linux",
            "arch": "x",
            "cpu": "c",
            "num_cpu": "2",
            "ram": "1",
            "python": "3.11",
        },
        "python": "3.11",
        "requirements": {"torch": "2.13.0", "numpy": ""},
        "env_vars": {},
        "result_columns": ["result", "params", "version", "started_at", "duration", "samples"],
        "results": {
            "bench_attention.ForwardBackward.sampled": [
                [0.25, None, math.nan],
                [["'reference'"], ["'S1,fp32,w1'", "'S2,fp32,w2'", "'S3,fp32,w1'"]],
                "3",
                1767322800000,
                None,
                [[0.2, 0.25, 0.3], None, None],
            ],
            "other.time_thing": [[1.0], [], "x"],
        },
        "durations": {},
        "version": 2,
        **change,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "aaaaaaaa-env.json"
    path.write_text(json.dumps(data))
    (directory / "machine.json").write_text("{}")
    return path


def test_asv_files_are_rows(tmp_path):
    asv_file(tmp_path / "asv" / "box")
    rows, problems = load([tmp_path])
    assert problems == []
    assert [r.case for r in rows] == [
        f"attention/reference/forward_backward/S{i},fp32,w{w}" for i, w in ((1, 1), (2, 2), (3, 1))
    ]
    assert [r.status for r in rows] == ["ok", "error", "skipped"], "asv: null is failed, NaN is n/a"
    ok = rows[0]
    assert (
        ok.samples_seconds == (0.2, 0.25, 0.3) and ok.version == 3 and ok.commit == A and ok.machine == "box"
    )
    assert (
        ok.env["torch"] == "2.13.0" and ok.env["world_size"] == 1 and ok.started_at.startswith("2026-01-02")
    )
    # What was read can be written again by our own strict writer.
    RunWriter(tmp_path / "own", "r").add(ok)


def test_asv_rows_carry_the_state_that_their_phase_declares(tmp_path):
    path = asv_file(tmp_path)
    text = path.read_text().replace("bench_attention.ForwardBackward", "bench_step.TrainStep")
    (tmp_path / "step.json").write_text(text)
    states = {r.case.split("/")[2]: r.env["state"] for r in load([tmp_path])[0]}
    assert states == {"forward_backward": "same", "train_step": "advances"}


def test_the_tables_declare_the_state_by_phase():
    """What stands for asv's rows must be what the cases themselves say."""
    from benchmarks import cases as tables
    from benchmarks.circumstances import state_of_phase

    seen = set()
    for case in tables.select(tier="smoke"):
        if (case.area, case.phase) in seen or case.area == "collective":  # which starts ranks to prepare
            continue
        try:
            made = tables.prepare(case, "cpu")
        except NotImplementedError:
            continue
        seen.add((case.area, case.phase))
        assert made.state == state_of_phase(case.phase), case.id
        if case.area not in ("data_parallel", "sharding"):  # whose ranks have not been started
            made.close()
    assert {("step", "train_step"), ("attention", "forward"), ("sharding", "train_step")} <= seen


def test_results_of_an_existing_environment_can_be_stamped(tmp_path):
    path = asv_file(tmp_path, requirements={})
    env = {
        "torch": "2.13.0",
        "asv_runner": "0.3.2",
        "cpu": "other",
        "device": "cpu",
        "gpu": None,
        "warmup": 2,
    }
    stamp_asv(path, env)
    row = load([path])[0][0]
    assert row.env["asv_runner"] == "0.3.2" and row.env["torch"] == "2.13.0" and row.env["device"] == "cpu"
    assert row.env["cpu"] == "c" and "gpu" not in row.env and "warmup" not in row.env
    built = asv_file(tmp_path / "built")
    stamp_asv(built, env | {"torch": "9"})
    assert load([built])[0][0].env["torch"] == "2.13.0"
    for text in ("{}", "[", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="no result file of asv"):
            stamp_asv(path, env)
        assert path.read_text() == text


def test_pytest_benchmark_files_are_rows(tmp_path):
    stats = {"median": 2.0, "data": [1.0, 2.0, 3.0]}
    case = "step/plain/forward/toy,B4,fp32,w1"
    data = {
        "machine_info": {"node": "box", "trainstep": {"device": "cpu", "torch": "1"}},
        "commit_info": {"id": B, "dirty": True},
        "benchmarks": [
            {"name": f"test_step[{case}]", "fullname": "f", "extra_info": {}, "stats": stats},
            {
                "name": "test_x",
                "fullname": "f",
                "extra_info": {"case": case, "version": 2, "env": {"torch": "2"}},
                "stats": {"median": 2.0},
            },
            {"name": "test_foreign", "fullname": "f", "extra_info": {}, "stats": stats},
        ],
        "datetime": "2026-01-02T03:04:05+00:00",
        "version": "5.3.1",
    }
    (tmp_path / "0001.json").write_text(json.dumps(data))
    rows, problems = load([tmp_path])
    assert problems == [] and len(rows) == 2
    assert rows[0].samples_seconds == (1.0, 2.0, 3.0) and rows[0].dirty and rows[0].commit == B
    assert rows[1].samples_seconds == (2.0,) and rows[1].version == 2 and rows[1].env["torch"] == "2"
    assert rows[0].env["torch"] == "1" and rows[0].env["device"] == "cpu"
    assert rows[0].env["pytest_benchmark"] == "5.3.1" and rows[0].machine == "box"


def test_rows_are_equal_after_the_round_trip(tmp_path):
    first = row(
        seconds=(1e-9, 0.1 + 0.2, 1 / 3),
        first_seconds=2.5,
        metrics={"peak": {"value": 5, "unit": "bytes", "better": "lower"}},
    )
    RunWriter(tmp_path, "r").add(first)
    assert load([tmp_path])[0] == [first]
    assert replace(first, run="x") != first
