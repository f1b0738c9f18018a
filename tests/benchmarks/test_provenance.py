"""Hashes without git, dirtiness, environment."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks.measure.provenance import (
    committed_tree_sha256,
    environment,
    git,
    head_commit,
    host_mark,
    provenance,
    tree_id,
    tree_sha256,
)

pytest_plugins = ["tests.benchmarks.scratch"]

FILES = {
    "src/p/__init__.py": "x = 1\n",
    "src/p/a.py": "",
    "src/p/data.json": "{}",
    "benchmarks/r.py": "y\n",
    "README": "z",
}


def test_a_checkout_an_archive_and_the_commit_hash_equal(scratch, tmp_path):
    commit = scratch.commit(FILES)
    archive = scratch.unpack(commit, tmp_path / "archive")
    here, there = provenance(scratch.root), provenance(archive)
    assert (here.source_sha256, here.ruler_sha256) == (there.source_sha256, there.ruler_sha256)
    assert here.commit == commit and not here.dirty
    assert there.commit is None and not there.dirty
    assert committed_tree_sha256(scratch.root, tree_id(scratch.root, commit, "src")) == here.source_sha256


def test_an_archive_unpacked_inside_another_repository_has_no_commit(scratch):
    scratch.commit(FILES)
    inner = scratch.root / "unpacked"
    for path, text in FILES.items():
        scratch.write(f"unpacked/{path}", text)
    assert head_commit(inner) is None and provenance(inner).commit is None


def test_what_tools_leave_behind_does_not_count(scratch):
    scratch.commit(FILES)
    before = provenance(scratch.root)
    for litter in (
        "src/p/__pycache__/a.pyc",
        "src/p.egg-info/PKG-INFO",
        "src/.cache/x",
        "src/p/a.py~",
        "src/build/x.py",
    ):
        scratch.write(litter, "litter")
    scratch.write("README", "changed")
    assert provenance(scratch.root) == before


@pytest.mark.parametrize(
    "path, text",
    [("src/p/a.py", "y = 2\n"), ("src/p/new.py", ""), ("benchmarks/r.py", "n\n"), ("src/p/data.json", "[]")],
)
def test_a_change_in_either_tree_is_dirty(scratch, path, text):
    scratch.commit(FILES)
    scratch.write(path, text)
    assert provenance(scratch.root).dirty


def test_names_and_contents_do_not_run_into_each_other(tmp_path):
    hashes = set()
    for number, files in enumerate(
        [{"ab": "c"}, {"a": "bc"}, {"a": "b", "c": ""}, {"a/b": "c"}, {}, {"ab": ""}]
    ):
        top = tmp_path / str(number)
        top.mkdir()
        for path, text in files.items():
            (top / path).parent.mkdir(exist_ok=True)
            (top / path).write_text(text)
        hashes.add(tree_sha256(top))
    assert len(hashes) == 6


def test_another_source_under_todays_ruler(scratch, tmp_path):
    old = scratch.commit(FILES)
    scratch.commit({"src/p/a.py": "slow\n", "benchmarks/r.py": "newer\n"})
    source = scratch.unpack(old, tmp_path / "old", "src")
    found = provenance(scratch.root, source=source / "src", commit=old[:12])
    assert found.commit == old and not found.dirty, "the ruler is today's on purpose"
    assert found.ruler_sha256 == provenance(scratch.root).ruler_sha256
    assert provenance(scratch.root, source=source / "src").commit is None
    (source / "src/p/a.py").write_text("edited")
    assert provenance(scratch.root, source=source / "src", commit=old).dirty


def test_bad_input_is_one_line(scratch, tmp_path):
    scratch.commit(FILES)
    for call in (
        lambda: tree_sha256(tmp_path / "nothing"),
        lambda: provenance(scratch.root, source=scratch.root / "src", commit="f" * 40),
        lambda: git(scratch.root, "rev-parse", "--verify", "no-such-thing"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_environment_names_what_results_depend_on_and_no_place(tmp_path):
    # In a fresh process: the thread count is the process's own.
    program = (
        "import json, sys; sys.path.insert(0, '.')\n"
        "from benchmarks.measure.provenance import environment\n"
        "print(json.dumps(environment('cpu')))"
    )
    env = json.loads(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )
    assert env["device"] == "cpu" and env["cpu"] and env["cpu_count"] >= 1 and env["cpu_threads"] >= 1
    for tool in ("torch", "python", "asv", "asv_runner", "pytest_benchmark", "triton"):
        assert tool in env
    import platform

    assert re.fullmatch("[0-9a-f]{12}", env["host"]) and env["host"] == host_mark()
    texts = [str(v) for v in env.values()]
    assert not any(t == platform.node() or t.startswith(("/", "~")) for t in texts)
    assert environment("cpu")["torch"] == env["torch"]
