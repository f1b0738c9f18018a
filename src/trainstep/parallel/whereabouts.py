"""Where a rank is that does not return, for whoever waits for it.

A rank that hangs waits inside of a collective, or for a device that does: no code of ours runs in its main thread. So
another thread, which sleeps until it is asked, tells what the main thread is in; nothing is paid before.
"""

import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Protocol
from weakref import WeakSet

import torch

_FRAMES = 3
_WORKER = "_worker.py"


class Teller(Protocol):
    """What knows more than the stack does."""

    def where(self) -> str | None:
        """What its part of this rank is at; None for nothing worth telling."""
        ...


_tellers: WeakSet[Teller] = WeakSet()


def ask(teller: Teller) -> None:
    """Have `teller` asked too, while it lives."""
    _tellers.add(teller)


def whereabouts() -> str:
    """What the main thread is in, innermost first, outside of torch and the standard library; and what tellers say."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    not_ours = (os.path.dirname(os.__file__), os.path.dirname(torch.__file__), "<")
    found = [
        f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})"
        for entry in reversed(traceback.extract_stack(frame))
        if not entry.filename.startswith(not_ours) and os.path.basename(entry.filename) != _WORKER
    ]
    told = [words for teller in list(_tellers) if (words := teller.where())]
    return ", ".join([*told, "in " + " < ".join(found[:_FRAMES]) if found else "nowhere"])


def list_whereabouts(found: dict[int, str]) -> str:
    """What to add to a message about ranks that did not return."""
    return "".join(f"; rank {rank}: {words}" for rank, words in found.items())


def answer_from_a_thread(connection: Connection) -> None:
    """Answer whatever comes through `connection` with `whereabouts`, until it is closed."""

    def answer() -> None:
        try:
            while True:
                connection.recv_bytes()
                connection.send_bytes(whereabouts().encode())
        except (EOFError, OSError):
            return

    threading.Thread(target=answer, name="whereabouts", daemon=True).start()
