"""What the processes that torchrun (or SLURM, by the template) started settle together about every job.

Each of them starts its own rank as a process of its own (see `launch`), which a failure ends and which a fresh one
replaces. They speak through torchrun's store only, never by a collective: a rank that failed may have left the others
inside one. The first verdict on a job counts for all, so that all of them raise alike and stay in step.
"""

import contextlib
import itertools
import os
import pickle
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from trainstep.parallel.whereabouts import list_whereabouts

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_SECONDS = 300.0
_LEAVE_SECONDS = 30.0  # one that was killed never says that it leaves
_TELL_SECONDS = 3.0  # for the others to find that time is up, and to ask their ranks
_PIECE_BYTES = 4 * 2**20  # the store drops the connection of who sends a value of 8 MiB
_rounds = itertools.count()  # of this process: alike on all of them


def under_torchrun() -> bool:
    """Whether this process was started as one rank of many by torchrun."""
    return all(name in os.environ for name in _NAMES)


def _agent_holds_store() -> bool:
    """False where the ranks were started by hand: the first of them holds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def connect(serve: bool) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, once a process.

    Args:
        serve: whether the first rank holds the store itself where torchrun's agent, which usually does, does not.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serve and not _agent_holds_store() and os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
        multi_tenant=True,
    )
    return dist.PrefixStore(f"trainstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def leave() -> None:
    """At the end of a process, its ranks closed: the first stays until all have left, where it holds the store.

    It stays for _LEAVE_SECONDS at most.
    """
    if _agent_holds_store():
        return
    store, rank = connect(True), int(os.environ["RANK"])
    keys = [f"left/{r}" for r in range(int(os.environ["WORLD_SIZE"]))]
    with contextlib.suppress(dist.DistError):  # the first did not stay
        store.set(keys[rank], "")
    deadline = time.monotonic() + _LEAVE_SECONDS
    while rank == 0 and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.02)


class Round:
    """One job of all ranks, and the one verdict on it.

    A verdict is {"ok": True}, or {"ok": False, "late": bool, "rank", "message", "details"} as in `RankFailure`. A
    process that comes late to a round finds its verdict.

    Attributes:
        name: alike on all ranks, never used again.
    """

    def __init__(self) -> None:
        self._number = next(_rounds)
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = connect(True)
        self.name = f"round/{self._number}"

    def _value_key(self, rank: int) -> str:
        return f"{self.name}/value/{rank}"

    def verdict(self, wait_seconds: float = 0.0) -> dict[str, Any] | None:
        """The verdict if there is one, or comes within this time."""
        key = f"{self.name}/verdict"
        if wait_seconds > 0.001:  # 0 would wait for ever
            try:
                self._store.wait([key], timedelta(seconds=wait_seconds))
            except dist.DistStoreError:
                return None
        found: dict[str, Any] | None = (
            pickle.loads(self._store.get(key)) if self._store.check([key]) else None
        )
        return found

    def _decide(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Give this verdict unless there is one already; the one that counts."""
        data: Any = pickle.dumps(verdict)  # bytes, whatever the stub says
        found: dict[str, Any] = pickle.loads(self._store.compare_set(f"{self.name}/verdict", "", data))
        return found

    def done(self, value: bytes) -> None:
        """This process's rank returned; the last to say so gives the verdict."""
        pieces: list[Any] = [value[i : i + _PIECE_BYTES] for i in range(0, len(value), _PIECE_BYTES)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{self._value_key(self._rank)}/{i}", piece)
        self._store.set(self._value_key(self._rank), str(len(pieces)))
        if self._store.add(f"{self.name}/done", 1) == self._size:
            self._decide({"ok": True})

    def fail(self, rank: int, message: str, details: str) -> None:
        """This process's rank failed."""
        self._decide({"ok": False, "late": False, "rank": rank, "message": message, "details": details})

    def tell_whereabouts(self, whereabouts: dict[int, str]) -> None:
        """Time is up: what this process's rank, which has not returned, is in."""
        for rank, words in whereabouts.items():
            self._store.set(f"{self.name}/where/{rank}", words)

    def _hear_whereabouts(self, ranks: list[int]) -> dict[int, str]:
        """What these ranks are in; their processes give up at about the same time."""
        keys = {rank: f"{self.name}/where/{rank}" for rank in ranks}
        with contextlib.suppress(dist.DistStoreError):
            self._store.wait(list(keys.values()), timedelta(seconds=_TELL_SECONDS))
        return {r: self._store.get(key).decode() for r, key in keys.items() if self._store.check([key])}

    def give_up(self, message: str) -> dict[str, Any]:
        """Time is up: blame the first rank that has not returned, unless all have by now; the verdict that counts.

        Args:
            message: what to say, with places for {late} and {done}.
        """
        done = [r for r in range(self._size) if self._store.check([self._value_key(r)])]
        late = [r for r in range(self._size) if r not in done]
        if not late:
            return self._decide({"ok": True})
        said = message.format(late=", ".join(map(str, late)), done=", ".join(map(str, done)) or "none")
        said += list_whereabouts(self._hear_whereabouts(late))
        return self._decide({"ok": False, "late": True, "rank": late[0], "message": said, "details": ""})

    def values(self) -> list[bytes]:
        """After a good verdict: what each rank returned."""
        found = []
        for key in map(self._value_key, range(self._size)):
            pieces = [self._store.get(f"{key}/{i}") for i in range(int(self._store.get(key)))]
            found.append(b"".join(pieces))
        if self._number:  # all have begun this round, so all have read the one before
            before = f"round/{self._number - 1}"
            mine = f"{before}/value/{self._rank}"
            if self._store.check([mine]):
                for i in range(int(self._store.get(mine))):
                    self._store.delete_key(f"{mine}/{i}")
                self._store.delete_key(mine)
            if self._rank == 0:
                self._store.delete_key(f"{before}/done")
                self._store.delete_key(f"{before}/verdict")
        return found
