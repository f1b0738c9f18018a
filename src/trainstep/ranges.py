"""Named ranges for profilers that cost nothing when off.

Off by default. Switched on, each range is pushed twice: as an NVTX range of the domain `trainstep` (the
`nvtx` package; Nsight Systems reads it) and as a `torch.profiler.record_function` of the same name, so that
torch.profiler groups kernels by the same ranges where nsys is not installed. Code that is being traced by
torch.compile opens no range: a compiled graph has no place to put one, and the same source must compile
whether ranges are on or off.
"""

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import nvtx
import torch

P = ParamSpec("P")
R = TypeVar("R")

DOMAIN = "trainstep"

_enabled = False
# One object for every range that is off: nothing is allocated. nullcontext keeps no state, so sharing is
# safe.
_OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def enable() -> None:
    """Let ranges opened from now on reach the profilers."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Make ranges free again; ranges already open close as usual."""
    global _enabled
    _enabled = False


def is_enabled() -> bool:
    """Whether ranges opened now reach the profilers."""
    return _enabled


class _Range:
    """One open range: an NVTX range around a profiler record."""

    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        nvtx.push_range(self._name, domain=DOMAIN)
        self._record.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._record.__exit__(kind, error, traceback)
        finally:
            nvtx.pop_range(domain=DOMAIN)


def annotate(name: str) -> contextlib.AbstractContextManager[None]:
    """Open a range around a `with` block: `with annotate("softmax"): ...`.

    Ranges nest and close on exceptions. For a whole function use `annotated`, which asks at every call
    whether ranges are on.

    Args:
        name: what the profiler shows.

    Returns:
        A context manager; the same do-nothing object for every name while ranges are off.
    """
    if not _enabled or torch.compiler.is_compiling():
        return _OFF
    return _Range(name)


def annotated(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that each call is a range while ranges are on."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with annotate(name):
                return function(*args, **kwargs)

        return wrapper

    return decorate
