"""Ranks start, answer, fail with their own message, and leave nothing behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainstep.parallel.launch import RankFailure, Ranks, RankTimeout, launch, rank_device

ROOT = Path(__file__).resolve().parents[2]


class Answer:
    """A class of a test module, which travels both ways."""

    def __init__(self, rank):
        self.rank = rank


def describe(word):
    """What a rank sees."""
    value = torch.full((), dist.get_rank() + 1.0, device=rank_device())
    dist.all_reduce(value)
    return word, dist.get_rank(), dist.get_world_size(), value.item(), os.getpid(), os.getpgid(0)


def answer(given):
    """Take and return a class of this module."""
    assert isinstance(given, Answer)
    return Answer(dist.get_rank())


def cell(kind):
    """One cell of case D8: healthy, or wrong on rank 1 in one of three ways."""
    value = torch.ones((), device=rank_device())
    if dist.get_rank() == 1:
        if kind == "raise":
            raise ValueError("batch ran out")
        if kind == "exit":
            os._exit(1)
        if kind == "skip":
            return "rank 1 is done"
    dist.all_reduce(value)
    return value.item()


def is_alive(pid):
    """Whether a process still runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid():
    """A rank's process id."""
    return os.getpid()


def threads():
    """Threads a rank computes with."""
    return torch.get_num_threads()


def local_function():
    """A function that no other process can find."""
    return lambda: None


def unpicklable():
    """Return what cannot be brought back."""
    return lambda: None


def test_values_of_every_rank_come_back_in_order(ranks):
    answers = ranks.run(describe, "hello")
    assert [a[:4] for a in answers] == [("hello", 0, 2, 3.0), ("hello", 1, 2, 3.0)]
    assert {a[5] for a in answers} == {os.getpgid(0)}


def test_classes_of_this_module_travel(ranks):
    assert [a.rank for a in ranks.run(answer, Answer(7))] == [0, 1]
    assert type(ranks.run(answer, Answer(7))[0]) is Answer


def test_launch_starts_fresh_ranks_and_leaves_none(device):
    answers = launch(describe, 2, "once", device=device)
    assert [a[1] for a in answers] == [0, 1]
    assert not any(is_alive(a[4]) for a in answers)


@pytest.mark.parametrize(
    ("kind", "failure", "text"),
    [
        ("raise", RankFailure, "rank 1: ValueError: batch ran out"),
        ("exit", RankFailure, "rank 1: exited with status 1"),
        ("skip", RankTimeout, r"cell-2: rank 0: no answer after 3 s .*; rank 0: in cell \(test_launch.py:"),
    ],
)
def test_a_failing_rank_ends_its_cell_and_only_that(pools, kind, failure, text):
    started = time.monotonic()
    first = pools(2)
    assert first.run(cell, "healthy", name="cell-1") == [2.0, 2.0]
    pids = first.run(pid)
    with pytest.raises(failure, match=text) as caught:
        first.run(cell, kind, timeout_seconds=3, name="cell-2")
    assert caught.value.rank == (0 if kind == "skip" else 1)
    if kind == "raise":
        assert 'raise ValueError("batch ran out")' in str(caught.value)  # its traceback
    assert first.closed and not any(is_alive(p) for p in pids)
    with pytest.raises(RuntimeError, match="closed"):
        first.run(cell, "healthy")
    second = pools(2)
    assert second is not first and second.run(cell, "healthy", name="cell-3") == [2.0, 2.0]
    assert time.monotonic() - started < 60


def test_more_ranks_than_allowed_are_refused_before_anything_starts():
    started = time.monotonic()
    with pytest.raises(ValueError, match="at most 16 ranks"):
        Ranks(17)
    with pytest.raises(ValueError, match=f"this machine has {torch.cuda.device_count()}"):
        launch(describe, 100, "x", device="cuda")
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="positive integer"):
            Ranks(wrong)
    with pytest.raises(ValueError, match="'tpu'"):
        Ranks(1, "tpu")
    assert time.monotonic() - started < 1


def test_what_cannot_travel_is_refused_and_the_pool_lives_on(ranks):
    with pytest.raises(ValueError, match="top of a module"):
        ranks.run(local_function())
    assert ranks.run(pid)[0] != os.getpid()


def test_a_value_that_cannot_travel_back_fails_its_rank(device):
    with Ranks(1, device) as pool, pytest.raises(RankFailure, match="top of a module"):
        pool.run(unpicklable)


def test_a_rank_computes_with_one_thread(ranks, device):
    if device == "cpu" and os.environ["OMP_NUM_THREADS"] == "1":
        assert ranks.run(threads) == [1, 1]


SCRIPT = """
import os, sys, time
from tests.parallel.test_launch import cell
from trainstep.parallel import torchrun
from trainstep.parallel.launch import RankFailure, Ranks, launch

def rank():
    import torch.distributed as dist
    return dist.get_rank()

LARGE = bytes(10**7)

def large():
    return LARGE

def hang(path):
    import torch.distributed as dist
    with open(path + str(dist.get_rank()), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

if __name__ == "__main__":
    if sys.argv[1] == "run":
        print(launch(rank, 2), launch(large, 2) == [LARGE, LARGE])
    elif sys.argv[1] == "slow reader":
        if os.environ["RANK"] == "1":
            values = torchrun.Round.values
            torchrun.Round.values = lambda self: time.sleep(1.5) or values(self)
        pool = Ranks(2)  # not closed: it is when the process ends
        print(pool.run(rank))
    elif sys.argv[1] == "gone":
        torchrun._LEAVE_SECONDS = 1.0
        print(launch(rank, 2), flush=True)
        if os.environ["RANK"] == "1":
            os._exit(0)
    elif sys.argv[1] == "cells":
        for kind in sys.argv[2:]:
            ranks = Ranks(2)
            for name, now in (("before", "good"), (kind, kind)):
                started = time.monotonic()
                try:
                    said = ranks.run(cell, now, name=name, timeout_seconds=3 if now == "skip" else 50)
                except RankFailure as error:
                    said = f"{type(error).__name__} {str(error).splitlines()[0]}"
                line = f"{os.environ['RANK']} {said} | closed: {ranks.closed} | {time.monotonic() - started:.0f} s"
                os.write(1, (line + chr(10)).encode())
        ranks = Ranks(2)
        ranks.run(cell, "raise", name="last")
    else:
        launch(hang, 2, sys.argv[2], timeout_seconds=500)
"""


@pytest.fixture
def script(tmp_path):
    """A script outside of any package."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_functions_of_a_script_run(script):
    done = subprocess.run(
        [sys.executable, script, "run"], capture_output=True, text=True, timeout=60, env=with_path()
    )
    assert done.stdout == "[0, 1] True\n", done.stderr


def test_ranks_die_with_a_killed_parent(script, tmp_path):
    parent = subprocess.Popen([sys.executable, script, "hang", str(tmp_path / "pid")], env=with_path())
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    pids = [int(f.read_text()) for f in files]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_two_nodes_of_a_slurm_job_run_the_same_script(script, tmp_path):
    """Two nodes on this machine: the templates as they are, stand-ins for srun and scontrol."""
    shims = {
        "srun": '#!/bin/sh\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n',
        "scontrol": "#!/bin/sh\necho localhost\necho localhost\n",
    }
    for name, text in shims.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_port()  # the template's follows from the job's number
    environment = {
        **with_path(),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str((port - 10000) % 50000),
        "SLURM_JOB_NODELIST": "two",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    slurm = ROOT / "src/trainstep/parallel/templates/slurm.sh"
    done = subprocess.run(
        ["bash", slurm, script, "run"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0 and done.stdout.count("[0, 1] True") == 2, done.stderr


@pytest.mark.parametrize("kind", ["slow reader", "gone"])
def test_the_first_of_ranks_started_by_hand_keeps_the_store_until_all_have_left(script, kind):
    """Without torchrun's agent the first process holds the store: it waits for a slow one, but not for one that is gone."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, script, kind],
            env=with_path() | place | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    ended = [process.communicate(timeout=60) for process in started]
    assert [(output, process.returncode) for (output, _), process in zip(ended, started, strict=True)] == [
        ("[0, 1]\n", 0)
    ] * 2, ended
    assert not any("Error" in errors for _, errors in ended), ended


def test_a_failing_rank_ends_its_cell_and_only_that_under_torchrun(script):
    """Case D8 on ranks that torchrun started: each failure is followed by a healthy cell in a fresh group."""
    said = {
        "raise": "RankFailure raise: rank 1: ValueError: batch ran out",
        "exit": "RankFailure exit: rank 1: exited with status 1 without returning",
        "skip": "RankTimeout skip: rank 0: no answer after 3 s (waiting for ranks 0; returned: 1); rank 0: in cell (",
    }
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "cells", *said]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=200, env=with_path()
    )
    assert done.returncode != 0 and "RankFailure: last: rank 1: ValueError: batch ran out" in done.stderr
    for rank in "01":
        lines = [line[2:].split(" | ") for line in done.stdout.splitlines() if line.startswith(rank)]
        for line in lines:
            line[0] = line[0].partition("test_launch.py:")[0]  # the line's number follows
        expected = [
            end for text in said.values() for end in (["[2.0, 2.0]", "closed: False"], [text, "closed: True"])
        ]
        assert [line[:2] for line in lines] == expected, done.stderr
        assert all(int(line[2].removesuffix(" s")) < 10 for line in lines), lines


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def with_path():
    """This environment, with this process's import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}


def wait_until(condition, seconds=30):
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
