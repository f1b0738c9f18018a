"""Alternating measurements: turns, sources of the right commit, failures that show.

The ruler here is a stand-in of one file with the real command's options; it reports what it was asked to
measure.
"""

import pytest

from benchmarks.measure.alternate import alternate, only, order

pytest_plugins = ["tests.benchmarks.scratch"]

CASE, OTHER = "area/one/forward/S1,fp32,w1", "area/one/forward/S12,fp32,w1"

STAND_IN = """
import json, pathlib, re, sys
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "run"
source = pathlib.Path(arguments.get("--source", "src"))
code = (source / "trainstep" / "speed.py").read_text().strip()
log = pathlib.Path("log"); log.write_text((log.read_text() if log.exists() else "") + code + "\\n")
if code == "crash":
    print("first line\\nRuntimeError: no luck", file=sys.stderr); sys.exit(1)
with open(arguments["--out"], "a") as out:
    for case in CASES:
        if re.search(arguments["--only"], case):
            out.write(json.dumps({"schema": 1, "case": case, "version": 1, "suite": "run", "run": "r",
                "machine": "local", "commit": arguments.get("--commit"), "dirty": "--commit" not in arguments,
                "source_sha256": "", "ruler_sha256": "", "started_at": "", "status": "ok", "reason": None,
                "samples_seconds": [float(code)], "first_seconds": None, "metrics": {}, "check": None,
                "env": {"process": int(arguments["--process"]), "device": arguments["--device"]}}) + "\\n")
"""


@pytest.fixture
def repository(scratch):
    files = {"benchmarks/__init__.py": "", "benchmarks/__main__.py": f"CASES = {[CASE, OTHER]!r}\n{STAND_IN}"}
    scratch.write(".gitignore", "log\n")
    commits = [
        scratch.commit({**files, "src/trainstep/speed.py": speed}) for speed in ("1", "2", "crash", "4")
    ]
    scratch.write("src/trainstep/speed.py", "5")
    return scratch.root, commits


def test_turns_cancel_a_linear_drift():
    for sides, rounds in ((2, 6), (3, 4), (2, 5)):
        turns = order(sides, rounds)
        times = [[t for t, side in enumerate(turns) if side == s] for s in range(sides)]
        assert [len(t) for t in times] == [rounds] * sides
        means = [sum(t) / rounds for t in times]
        assert max(means) - min(means) <= (sides - 1) / rounds * (rounds % 2)


def test_commits_take_turns_and_each_measures_its_own_source(repository):
    root, commits = repository
    seen = []
    first, second = alternate(root, commits[:2], [CASE], processes=3, progress=lambda *at: seen.append(at))
    assert [(r.samples_seconds, r.commit, r.env["process"]) for r in first] == [
        ((1.0,), commits[0], i) for i in range(3)
    ]
    assert [(r.samples_seconds, r.commit, r.env["process"]) for r in second] == [
        ((2.0,), commits[1], i) for i in range(3)
    ]
    assert {r.case for r in first} == {CASE}, "the pattern matches whole ids"
    assert (root / "log").read_text().split() == ["1", "2", "2", "1", "1", "2"]
    assert seen[0] == (0, 6) and seen[-1] == (6, 6)


def test_the_work_tree_is_a_side_too(repository):
    root, commits = repository
    old, now = alternate(root, [commits[3], None], [CASE, OTHER], processes=1)
    assert [r.samples_seconds for r in old] == [(4.0,)] * 2 and not old[0].dirty
    assert [r.samples_seconds for r in now] == [(5.0,)] * 2 and now[0].dirty and now[0].commit is None


def test_a_crash_is_a_row_a_case_with_its_reason(repository):
    root, commits = repository
    good, bad = alternate(root, [commits[0], commits[2]], [CASE, OTHER], processes=1)
    assert [r.status for r in good] == ["ok", "ok"]
    assert [(r.case, r.status, r.reason) for r in bad] == [
        (c, "error", "RuntimeError: no luck") for c in (CASE, OTHER)
    ]
    from benchmarks.measure.provenance import tree_sha256

    assert {(r.commit, r.ruler_sha256) for r in bad} == {(commits[2], tree_sha256(root / "benchmarks"))}
    assert all(len(r.source_sha256) == 64 and r.started_at and r.env["process"] == 0 for r in bad)


def test_nothing_is_left_in_the_repository(repository):
    root, commits = repository
    from benchmarks.measure.provenance import git

    (root / ".git" / "info" / "exclude").write_text("__pycache__/\n")  # as this repository's .gitignore does
    before = git(root, "status", "--porcelain"), git(root, "worktree", "list")
    alternate(root, commits[:1], [CASE], processes=1)
    assert (git(root, "status", "--porcelain"), git(root, "worktree", "list")) == before
    assert alternate(root, commits[:2], []) == [[], []]


def test_an_unknown_commit_is_one_line(repository):
    with pytest.raises(ValueError) as caught:
        alternate(repository[0], ["f" * 40], [CASE])
    assert "\n" not in str(caught.value)


def test_the_pattern_matches_these_ids_only():
    import re

    ids = ["a/b+c/d/S1,w1", "a/x/d/S1,w1"]
    for text, match in ((ids[0], True), (ids[1], True), (ids[0] + "0", False), ("a/bc/d/S1,w1", False)):
        assert bool(re.search(only(ids), text)) == match
