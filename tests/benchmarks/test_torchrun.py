"""Under torchrun every process runs the command: the first writes and prints, and all agree on what is measured."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.measure.record import load

ROOT = Path(__file__).resolve().parents[2]
TWO = "^(collective/(torch|ring)/all_reduce/bytes1000000,fp32,w2|data_parallel/naive/.*toy.*w2)$"
OTHER = "^(collective/torch/all_reduce/bytes1000000,fp32,w4|attention/sdpa-math/forward/B1,N4,K4,S256,.*)$"


def torchrun(*arguments):
    """Two ranks of one node."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *words, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )


def test_the_first_rank_writes_and_prints_for_all(tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["run", "--tier", "full", "--device", "cpu", "--out", str(out)]
    # Sampling ends by a clock, which is not the same on both.
    done = torchrun(*words, "--only", f"{TWO}|{OTHER}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"rows in {out}") == 1
    rows, problems = load([out])
    assert problems == []
    cases = [row.case for row in rows]
    assert len(cases) == len(set(cases))
    by_status = {status: {row.case for row in rows if row.status == status} for status in ("ok", "skipped")}
    assert len(by_status["ok"]) == 3 and all(case.endswith(",w2") for case in by_status["ok"])
    assert len(by_status["skipped"]) == len(rows) - 3 >= 2
    for row in rows:
        if row.status == "ok":
            assert len(row.samples_seconds) >= 5
        else:
            assert row.reason.startswith("torchrun started 2 ranks, and this case takes")


def test_what_the_first_rank_refuses_ends_all(tmp_path):
    damaged, text = tmp_path / "rows.jsonl", '{"schema": 1, "case"'
    damaged.write_text(text)
    done = torchrun("run", "--only", TWO, "--device", "cpu", "--out", str(damaged))
    assert done.returncode != 0 and f"error: {damaged} is damaged" in done.stderr
    assert damaged.read_text() == text
