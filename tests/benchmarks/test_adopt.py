"""Filing rows that were measured without git."""

import json
from dataclasses import replace

import pytest

from benchmarks.adopt import adopt
from benchmarks.measure.provenance import provenance
from benchmarks.measure.record import STUDY, RunWriter, load
from tests.benchmarks.rows import row

pytest_plugins = ["tests.benchmarks.scratch"]

FILES = {"src/p.py": "1\n", "benchmarks/r.py": "2\n", "README": "3\n"}


def measured(
    tree,
    out,
    *,
    machine="local",
    run="run-1",
    cases=("a/x/p/S1,fp32,w1", "a/x/p/S2,fp32,w1"),
    seconds=(1.0,) * 5,
    **fields,
):
    """The rows a run in the unpacked `tree` would write to `out`."""
    where = provenance(tree)
    assert where.commit is None
    for case in cases:
        RunWriter.to_file(out).add(
            row(
                case,
                seconds,
                machine=machine,
                run=run,
                source_sha256=where.source_sha256,
                ruler_sha256=where.ruler_sha256,
                **{"commit": None, "dirty": True, **fields},
            )
        )
    return out


@pytest.fixture
def history(scratch):
    """Three commits of code, then one of text only."""
    commits = [scratch.commit(FILES)]
    commits.append(scratch.commit({"src/p.py": "11\n"}))
    commits.append(scratch.commit({"benchmarks/r.py": "22\n"}))
    commits.append(scratch.commit({"README": "33\n"}))
    return commits


def test_rows_are_filed_under_the_commit_with_the_same_trees(scratch, history, tmp_path):
    tree = scratch.unpack(history[1], tmp_path / "tree")
    file = measured(tree, tmp_path / "out.jsonl")
    (place,) = adopt(file, root=scratch.root, machine="gpu", results=tmp_path / "results")
    assert place == tmp_path / "results" / "records" / "gpu" / history[1] / "run-1.jsonl"
    rows, problems = load([tmp_path / "results"])
    assert not problems and len(rows) == 2
    assert all(r.commit == history[1] and r.machine == "gpu" and r.dirty is False for r in rows)


def test_adopting_twice_and_after_resuming(scratch, history, tmp_path):
    tree = scratch.unpack(history[1], tmp_path / "tree")
    file = measured(tree, tmp_path / "out.jsonl")
    (place,) = adopt(file, root=scratch.root, machine="gpu", results=tmp_path / "results")
    before = place.read_bytes()
    adopt(file, root=scratch.root, machine="gpu", results=tmp_path / "results")
    assert place.read_bytes() == before
    measured(tree, file, cases=("a/x/p/S3,fp32,w1",))
    adopt(file, root=scratch.root, machine="gpu", results=tmp_path / "results")
    assert len(load([tmp_path / "results"])[0]) == 3


def test_of_commits_with_equal_trees_the_oldest(scratch, history, tmp_path):
    tree = scratch.unpack(history[3], tmp_path / "tree")
    file = measured(tree, tmp_path / "out.jsonl", machine="gpu")
    (place,) = adopt(file, root=scratch.root, results=tmp_path / "results")
    assert place.parent.name == history[2], "the last commit changed only a text file"
    scratch.commit({"src/p.py": "other\n"})
    scratch.commit({"src/p.py": "11\n"}, "revert")
    assert adopt(file, root=scratch.root, results=tmp_path / "results") == [place], "stays where it was"


def test_a_merge_is_found_on_the_first_parent_line_only(scratch, history, tmp_path):
    scratch.git("checkout", "-q", "-b", "side", history[0])
    side = scratch.commit({"src/q.py": "side\n"})
    scratch.git("checkout", "-q", "main")
    scratch.git("merge", "-q", "--no-ff", "--no-edit", "side")
    merge = scratch.git("rev-parse", "HEAD")
    file = measured(scratch.unpack(merge, tmp_path / "m"), tmp_path / "m.jsonl", machine="gpu")
    assert adopt(file, root=scratch.root, results=tmp_path / "results")[0].parent.name == merge
    file = measured(scratch.unpack(side, tmp_path / "s"), tmp_path / "s.jsonl", machine="gpu", run="run-2")
    with pytest.raises(ValueError, match="no commit"):
        adopt(file, root=scratch.root, results=tmp_path / "results")


def test_an_older_source_under_a_newer_ruler(scratch, history, tmp_path):
    """Alternating runs measure two sources with one ruler and say which commit each source is of."""
    ruler = provenance(scratch.unpack(history[2], tmp_path / "new")).ruler_sha256
    old = scratch.unpack(history[0], tmp_path / "old")
    file = measured(old, tmp_path / "old.jsonl", machine="gpu", commit=history[0])
    text = file.read_text().replace(provenance(old).ruler_sha256, ruler)
    file.write_text(text)
    assert adopt(file, root=scratch.root, results=tmp_path / "results")[0].parent.name == history[0]
    file.write_text(text.replace(history[0], history[1]))
    with pytest.raises(ValueError, match="no commit"):
        adopt(file, root=scratch.root, results=tmp_path / "results")


def damage(file):
    file.write_text(file.read_text()[:-10])


def edited(file):
    stored = [json.loads(line) for line in file.read_text().splitlines()]
    stored[1]["source_sha256"] = "0" * 64
    file.write_text("".join(json.dumps(s) + "\n" for s in stored))


@pytest.mark.parametrize(
    "change, machine, message",
    [
        (edited, "gpu", "no commit"),
        (damage, "gpu", "damaged"),
        (lambda f: f.write_text(""), "gpu", "no rows"),
        (lambda f: f.unlink(), "gpu", "no file"),
        (lambda f: None, "../gpu", "not usable"),
        (lambda f: f.write_text(f.read_text().replace('"local"', '"cpu"')), "gpu", "measured on 'cpu'"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(scratch, history, tmp_path, change, machine, message):
    file = measured(scratch.unpack(history[1], tmp_path / "tree"), tmp_path / "out.jsonl")
    change(file)
    with pytest.raises(ValueError, match=message) as caught:
        adopt(file, root=scratch.root, machine=machine, results=tmp_path / "results")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("named", [{"machine": "gpu"}, {}])
def test_rows_of_too_few_samples_are_not_published(scratch, history, tmp_path, named):
    """As `run --machine` refuses to measure them; a row without any times may count bytes."""
    tree, results = scratch.unpack(history[1], tmp_path / "tree"), tmp_path / "results"
    rows_name = "local" if named else "gpu"
    few = measured(tree, tmp_path / "few.jsonl", machine=rows_name, seconds=(1.0,) * 4)
    with pytest.raises(ValueError, match="has 4 samples, and a published row needs 5"):
        adopt(few, root=scratch.root, results=results, **named)
    none = measured(tree, tmp_path / "none.jsonl", machine=rows_name, seconds=())
    with pytest.raises(ValueError, match="has 0 samples"):
        adopt(none, root=scratch.root, results=results, **named)
    assert not results.exists()
    metrics = {"peak": {"value": 5, "unit": "byte", "better": "lower"}}
    bytes_only = measured(tree, tmp_path / "bytes.jsonl", machine=rows_name, seconds=(), metrics=metrics)
    assert len(adopt(bytes_only, root=scratch.root, results=results, **named)) == 1
    local = measured(tree, tmp_path / "local.jsonl", seconds=(1.0,), run="run-2")
    assert len(adopt(local, root=scratch.root, results=results)) == 1


def test_studies_are_filed_by_the_same_rules(scratch, history, tmp_path):
    """A profile has no samples and needs none; what no commit has is refused."""
    metrics = {"forward": {"value": 1e-3, "unit": "s", "better": None, "kernels": []}}
    study = {
        "suite": STUDY,
        "cases": ("profile/plain/forward/toy,B1,S8,fp32,w1",),
        "seconds": (),
        "metrics": metrics,
    }
    tree, results = scratch.unpack(history[1], tmp_path / "tree"), tmp_path / "results"
    file = measured(tree, tmp_path / "profile.jsonl", run="profile-cuda-1", **study)
    (place,) = adopt(file, root=scratch.root, machine="gpu", results=results)
    assert place == results / "records" / "gpu" / history[1] / "profile-cuda-1.jsonl"
    (row,) = load([results])[0]
    assert (row.suite, row.metrics, row.dirty) == (STUDY, metrics, False)
    (tree / "src" / "p.py").write_text("not committed\n")
    with pytest.raises(ValueError, match="no commit"):
        adopt(
            measured(tree, tmp_path / "dirty.jsonl", **study),
            root=scratch.root,
            machine="gpu",
            results=results,
        )


def test_another_run_of_the_same_name_is_kept(scratch, history, tmp_path):
    tree = scratch.unpack(history[1], tmp_path / "tree")
    file = measured(tree, tmp_path / "out.jsonl", machine="gpu")
    (place,) = adopt(file, root=scratch.root, results=tmp_path / "results")
    before = place.read_bytes()
    other = measured(tree, tmp_path / "other.jsonl", machine="gpu", cases=("a/x/p/S9,fp32,w1",))
    with pytest.raises(ValueError, match="other rows"):
        adopt(other, root=scratch.root, results=tmp_path / "results")
    assert place.read_bytes() == before
    assert replace(row(), run="r") == row(run="r")


def test_without_a_machine_rows_stay_local(scratch, history, tmp_path):
    file = measured(scratch.unpack(history[1], tmp_path / "tree"), tmp_path / "out.jsonl")
    (place,) = adopt(file, root=scratch.root, results=tmp_path / "results")
    assert place.parent == tmp_path / "results" / "local" / history[1]
