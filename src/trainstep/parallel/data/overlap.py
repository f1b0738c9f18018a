"""Data parallelism, overlapped: each parameter's all-reduce starts while backward is still at work."""

import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.data.order import OrderedUnits
from trainstep.parallel.data.protocol import DataParallel


class Overlap(DataParallel):
    """Reduces gradients in place, in reverse order of registration: the last layers are complete first."""

    _order: OrderedUnits | None = None

    def _prepare(self) -> None:
        if self._order is not None:
            self._order.remove()
        self._units = [[parameter] for parameter in reversed(self._trainable)]
        self._flying: list[tuple[Tensor, dist.Work]] = []
        self._order = OrderedUnits(self._units, self._launch, lambda: self._synchronizing)

    def _launch(self, index: int) -> None:
        gradient = self._take(self._units[index][0])
        self._flying.append((gradient, self._all_reduce(gradient)))

    def _reduce_gradients(self) -> None:
        assert self._order is not None
        self._order.launch_rest()
        with self._waiting():
            for _, work in self._flying:
                work.wait()
        for (parameter,), (gradient, _) in zip(self._units, self._flying, strict=True):
            self._give(parameter, gradient)
        self._flying.clear()
