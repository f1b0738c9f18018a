"""Random states that torch's checkpoints leave alone, remembered when a segment starts and put in place when it is
recomputed.

`torch.utils.checkpoint` does so for its default generators. Here: Python's `random`, and every `torch.Generator` that
is an attribute of a block that is a module, or of a module inside it. Nobody restores NumPy's state nor generators
kept elsewhere (in a list, a closure, a global variable).

Python's state is a tuple of 625 integers; to read it takes as long as a small operation of torch. So the blocks' first
run reads it once a segment and once at its end. Where that shows that no block drew, recomputing reads and writes none.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

Contexts = tuple[AbstractContextManager, AbstractContextManager]
_GENERATOR = {torch.Generator}


def generators_of(block: Any) -> list[torch.Generator]:
    """The generators that a block, or modules inside it, hold as attributes; one that is shared may come twice."""
    found: list[torch.Generator] = []
    modules = [block] if isinstance(block, torch.nn.Module) else []
    for module in modules:  # which grows meanwhile
        attributes = module.__dict__
        if not _GENERATOR.isdisjoint(map(type, attributes.values())):
            found += [value for value in attributes.values() if type(value) is torch.Generator]
        if attributes["_modules"]:
            modules += [child for child in attributes["_modules"].values() if child is not None]
    return found


class RandomStates:
    """The random states of one run over some blocks, until its backward pass is done.

    Args:
        blocks: all that the run's segments consist of.
    """

    def __init__(self, blocks: Iterable[Any]) -> None:
        self._generators = {id(block): generators_of(block) for block in blocks}
        self._before = random.getstate()
        self._python_drawn = True  # until the first run has ended

    def first_run_ended(self) -> None:
        """All segments have run once: did any draw from Python's `random`?"""
        self._python_drawn = random.getstate() != self._before

    def _read(self, blocks: Sequence[Any]) -> "_State":
        return _State(
            random.getstate() if self._python_drawn else None,
            [(own, own.get_state()) for block in blocks for own in self._generators[id(block)]],
        )

    def contexts(self, blocks: Sequence[Any], inner: Callable[[], Contexts]) -> Contexts:
        """The two contexts of a segment of these blocks, for `context_fn`: its first run, and each time that it is
        recomputed.

        `inner` makes two more, entered inside these.
        """
        before, after = inner()
        first = _First(lambda: self._read(blocks), before)
        return first, _Again(first, after)


class _State:
    """Python's random state, where it matters, and those of some generators."""

    def __init__(self, python: Any, own: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        self.python, self.own = python, own

    def restore(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
        for generator, state in self.own:
            generator.set_state(state)


class _First(AbstractContextManager):
    """The first run of a segment: keeps the states that it starts from."""

    def __init__(self, read: Callable[[], _State], inner: AbstractContextManager) -> None:
        self.read, self.inner = read, inner

    def __enter__(self) -> None:
        self.start = self.read()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.inner.__exit__(*error)


class _Again(AbstractContextManager):
    """Every later run of it: starts from the same states, and leaves them as they were before it."""

    def __init__(self, first: _First, inner: AbstractContextManager) -> None:
        self.first, self.inner = first, inner

    def __enter__(self) -> None:
        self.before = self.first.read()
        if self.before.python is None:  # nobody draws
            self.first.start.python = None
        self.first.start.restore()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.inner.__exit__(*error)
        finally:
            self.before.restore()
