"""Random states that torch's checkpoints leave alone, remembered when a segment starts and put in place when it is
recomputed.

`torch.utils.checkpoint` does so for its default generators. Here: Python's `random`, and every `torch.Generator` that
is an attribute of a block that is a module, or of a module inside it. Nobody restores NumPy's state nor generators kept elsewhere (in
a list, a closure, a global variable).
"""

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

Contexts = tuple[AbstractContextManager, AbstractContextManager]


def generators_of(blocks: Iterable[Any]) -> list[torch.Generator]:
    """The generators that blocks, or modules inside them, hold as attributes; one that is shared may come twice."""
    found = []
    for block in blocks:
        if isinstance(block, torch.nn.Module):
            attributes = vars(block)
            found += [value for value in attributes.values() if type(value) is torch.Generator]
            found += generators_of(attributes["_modules"].values())  # `children` takes three times as long
    return found


class _State:
    """Python's random state and those of some generators."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.python = random.getstate()
        self.own = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        random.setstate(self.python)
        for generator, state in self.own:
            generator.set_state(state)


class _First(AbstractContextManager):
    """The first run of a segment: keeps the states that it starts from."""

    def __init__(self, generators: list[torch.Generator], inner: AbstractContextManager) -> None:
        self.generators, self.inner = generators, inner

    def __enter__(self) -> None:
        self.start = _State(self.generators)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.inner.__exit__(*error)


class _Again(AbstractContextManager):
    """Every later run of it: starts from the same states, and leaves them as they were before it."""

    def __init__(self, first: _First, inner: AbstractContextManager) -> None:
        self.first, self.inner = first, inner

    def __enter__(self) -> None:
        self.before = _State(self.first.generators)
        self.first.start.restore()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.inner.__exit__(*error)
        finally:
            self.before.restore()


def contexts(blocks: Iterable[Any], inner: Callable[[], Contexts]) -> Contexts:
    """The two contexts of one segment, for `context_fn`: its first run, and each time that it is recomputed.

    `inner` makes two more, entered inside these.
    """
    before, after = inner()
    first = _First(generators_of(blocks), before)
    return first, _Again(first, after)
