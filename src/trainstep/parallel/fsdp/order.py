"""Whether all ranks gather and reduce the same weights in the same order.

Ranks that run different layers of one shape exchange their parts without a word from the backend: a gathered weight
is then half of one layer, half of another, and a reduced gradient the sum of two. Each rank therefore notes what it
gathers and reduces, and before gradients count the notes are compared. Layers of different shapes, or more of them on
one rank, end in a timeout, which the latest note explains.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel import whereabouts

_PRIME = 2**61 - 1


class CollectiveOrder:
    """The collectives of one rank since the last comparison, in order.

    The notes travel as integers, a maximum over ranks of each and of its negative: where they differ, the ranks'
    notes do. A rank whose notes are those of the last comparison, when all were alike, need not read the answer on
    CUDA and so does not wait for the device: if another rank changed its mind, that one reads and raises.

    Args:
        names: of the sharded weights, alike on every rank.
        device: of the tensors that are reduced.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = names
        self._device = device
        # A step gathers a weight twice and reduces it once. What exceeds two such steps is hashed.
        self._kept = 6 * len(names)
        self._agreed: tuple[list[int], int] | None = None
        self._marks: Tensor | None = None
        self._restart()
        whereabouts.ask(self)

    def _restart(self) -> None:
        self._notes: list[int] = []
        self._rest = 0
        self._latest = 0

    def note(self, what: str, index: int) -> None:
        """Weight `index` is gathered ("gather") or its gradient reduced ("reduce")."""
        code = self._latest = 2 * index + 1 + (what == "reduce")
        if len(self._notes) < self._kept:
            self._notes.append(code)
        else:
            self._rest = (self._rest * 1_000_003 + code) % _PRIME

    def require_alike(self, maximum: Callable[[Tensor], dist.Work]) -> None:
        """Compare with the other ranks, all of which call this, and start over.

        Args:
            maximum: starts an all-reduce in place, over all ranks, to the maximum.

        Raises:
            RuntimeError: the ranks' notes differ; the message names the first difference.
        """
        if not self._names:
            return
        notes, rest = self._notes, self._rest
        self._restart()
        known = (notes, rest) == self._agreed
        if not known or self._marks is None:
            row = [*notes, *[0] * (self._kept - len(notes)), rest]
            self._marks = torch.tensor([row, [-mark for mark in row]], dtype=torch.int64, device=self._device)
        maximum(self._marks).wait()  # changes nothing where all are alike: the marks serve again
        if known and self._device.type == "cuda":
            return
        self._agreed = None
        for position, (most, least) in enumerate(zip(*self._marks.tolist(), strict=True)):
            if most != -least:
                raise RuntimeError(self._difference(position, most, -least))
        self._agreed = notes, rest

    def where(self) -> str | None:
        """What this rank did last, in the middle of a step."""
        return f"FSDP {self._words(self._latest)}" if self._latest else None

    def _difference(self, position: int, most: int, least: int) -> str:
        self._marks = None
        if position == self._kept:
            what = f"after {position} alike"
        else:
            what = f"one {self._words(least)} where another {self._words(most)} (number {position + 1})"
        return (
            "ranks did not run the same layers in the same order, so that parts of different weights were mixed: "
            f"of the collectives since the last finish_gradient_synchronization, {what}"
        )

    def _words(self, code: int) -> str:
        if code == 0:
            return "has none left"
        index, reduces = divmod(code - 1, 2)
        return f"{'reduces the gradient of' if reduces else 'gathers'} {self._names[index]}"
