"""Measure several sources alternately in fresh processes: how a suspicion is confirmed on a machine that
drifts.

Each round starts a process for every commit, in an order that turns round by round (A B, B A, A B, ...): a
drift that is linear in time then weighs equally on both. All sources are measured with this checkout's ruler.
"""

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.measure.provenance import RULER, SOURCE, git, tree_sha256
from benchmarks.measure.record import Row, read_rows

PROCESSES = 5  # a side: the least that the gate's rule decides on


def order(sides: int, rounds: int) -> list[int]:
    """Which side each process measures: forwards and backwards in turn, `rounds` times each."""
    assert sides > 0 and rounds > 0
    forwards = list(range(sides))
    return [side for turn in range(rounds) for side in (forwards if turn % 2 == 0 else forwards[::-1])]


def unpack_source(root: Path, commit: str, directory: Path) -> Path:
    """Put the `src/` of a commit under `directory`, which needs no git worktree; returns its `src`.

    Raises:
        ValueError: git does not know the commit, or it has no src/.
    """
    packed = git(root, "archive", "--format=tar", commit, SOURCE)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    return directory / SOURCE


def only(case_ids: Sequence[str]) -> str:
    """A regular expression for `run --only` that matches exactly these ids."""
    return f"^(?:{'|'.join(re.escape(case) for case in case_ids)})$"


def alternate(
    root: Path,
    commits: Sequence[str | None],
    case_ids: Sequence[str],
    *,
    device: str = "cpu",
    processes: int = PROCESSES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Row]]:
    """Measure the cases at each commit in `processes` fresh processes, the commits taking turns.

    Args:
        root: the repository, whose ruler measures.
        commits: full ids; None is the work tree's src/ as it stands.
        case_ids: what to measure.
        device: "cpu" or "cuda".
        processes: a side.
        progress: called with processes done and all.

    Returns:
        Rows by commit, in the order of `commits`, `env["process"]` numbered within each. A process that ends
        without rows gives an "error" row a case: nothing is silently absent.

    Raises:
        ValueError: git does not know a commit.
    """
    if not case_ids:
        return [[] for _ in commits]
    turns = order(len(commits), processes)
    with tempfile.TemporaryDirectory(prefix="trainstep-alternate-") as scratch:
        sources = [
            root / SOURCE if commit is None else unpack_source(root, commit, Path(scratch) / str(side))
            for side, commit in enumerate(commits)
        ]
        outs = [Path(scratch) / f"{side}.jsonl" for side in range(len(commits))]
        failures: list[tuple[int, int, str]] = []
        counts = [0] * len(commits)
        for done, side in enumerate(turns):
            progress(done, len(turns))
            number, counts[side] = counts[side], counts[side] + 1
            commit = commits[side]
            command = [sys.executable, "-m", "benchmarks", "run", "--tier", "full", "--only", only(case_ids)]
            command += ["--device", device, "--process", str(number), "--out", str(outs[side])]
            if commit is not None:
                command += ["--source", str(sources[side]), "--commit", commit]
            reason = _run(command, root)
            if reason is not None:
                failures.append((side, number, reason))
        progress(len(turns), len(turns))
        found = [read_rows(out) if out.exists() else [] for out in outs]
        blank = Row(
            case="",
            version=0,
            suite="run",
            run="alternate",
            machine="local",
            commit=None,
            dirty=False,
            source_sha256="",
            ruler_sha256=tree_sha256(root / RULER),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            status="error",
        )
        blanks = [
            replace(blank, commit=commit, dirty=commit is None, source_sha256=tree_sha256(source))
            for commit, source in zip(commits, sources, strict=True)
        ]
    return [
        _complete(rows, blanks[side], case_ids, [(n, why) for s, n, why in failures if s == side])
        for side, rows in enumerate(found)
    ]


def _run(command: list[str], root: Path) -> str | None:
    """Run one process to its end; why it has no rows, None when it wrote them."""
    # PYTHONPATH would put another trainstep before the one that is measured.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode in (0, 11):  # 11: a case failed, and its row says so
        return None
    if done.returncode in (130, -2):
        raise KeyboardInterrupt
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _complete(
    rows: list[Row], blank: Row, case_ids: Sequence[str], failures: list[tuple[int, str]]
) -> list[Row]:
    """The rows, and an error row for every case that a process which failed did not get to.

    It is like the rows that other processes wrote; where none did, `blank` says what was to be measured.
    """
    complete = list(rows)
    for number, reason in failures:
        have = {row.case for row in rows if row.env.get("process") == number}
        for case in case_ids:
            if case in have:
                continue
            like = next((row for row in rows if row.case == case), replace(blank, case=case))
            complete.append(
                replace(
                    like,
                    status="error",
                    reason=reason,
                    samples_seconds=(),
                    first_seconds=None,
                    metrics={},
                    check=None,
                    env=like.env | {"process": number},
                )
            )
    return complete
