"""ZeRO stage 2: gradients too are kept only by the rank that owns their parameter.

Rajbhandari et al., "ZeRO", section 5.2. Backward sends each gradient to its owner as soon as it is complete
and drops it everywhere else: reductions to all owners together are one reduce-scatter. The owner steps and
broadcasts as in stage 1.
"""

import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.clip import clip_grad_norm
from trainstep.parallel.data.order import weakly
from trainstep.parallel.data.protocol import DataParallel
from trainstep.parallel.overflow import spread_overflow
from trainstep.parallel.zero.stage1 import ShardedOptimizer

_IN_FLIGHT = 2  # reductions under way at once: bounds the gradients held, hides the communication


class ShardedGradients(DataParallel):
    """The data-parallel protocol, with gradients left on their owners only (None elsewhere).

    Several backwards before finish add up on the owners, whether or not inside `no_sync()`; inside it a rank
    holds whole gradients. Outside of it every backward must reach some parameter on every rank.

    A gradient that is not finite on its owner makes one element NaN on every rank that owns a gradient, so that a
    `torch.amp.GradScaler` skips the step on all of them and they keep one scale. (A rank that owns none needs torch's
    `ShardedGradScaler`: the plain one insists on a gradient.)

    Args:
        module: see `DataParallel`, as for the other options.
        optimizer: holds every trainable parameter of the module and says who owns it.

    Raises:
        ValueError: the optimizer lacks a trainable parameter.
    """

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, **options: Any) -> None:
        self._optimizer = optimizer
        self._hooks: list[Any] = []
        super().__init__(module, **options)

    def _prepare(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._trainable:
            if parameter not in self._optimizer.owners:
                raise ValueError("the optimizer lacks a trainable parameter: nobody would own its gradient")
        self._order = list(reversed(self._trainable))  # the last layers' gradients are complete first
        self._index = {id(p): i for i, p in enumerate(self._order)}
        ready, set_aside = weakly(self._ready), weakly(self._set_aside)
        self._hooks = [p.register_post_accumulate_grad_hook(ready) for p in self._order]
        # Runs before a backward adds to the gradient.
        for p in filter(self._owns, self._order):
            itself = weakref.ref(p)
            self._hooks.append(p.register_hook(lambda _, itself=itself: set_aside(itself())))
        self._sums: dict[Tensor, Tensor] = {}
        self._delivered: set[int] = set()  # gradients of the last finish
        self._kept: set[int] = set()  # those of them to which a further backward adds
        self._present_here: set[int] = set()
        self._flying: deque[tuple[nn.Parameter, Tensor, dist.Work]] = deque()
        self._rounds = 0
        self._restart()

    def _owns(self, parameter: Tensor) -> bool:
        return self._optimizer.owns(parameter)

    def _restart(self) -> None:
        self._next = 0
        self._complete: set[int] = set()
        self._in_backward = False

    def no_sync(self) -> Any:
        """Only accumulate, whole gradients on every rank; the next backward outside or finish sends them."""
        self._rounds = 0  # what accumulates needs a round of its own, if no later backward makes one
        return super().no_sync()

    def _set_aside(self, parameter: Tensor) -> None:
        """Keep a finished gradient that was not cleared out of what this rank contributes next."""
        if id(parameter) in self._delivered:
            self._delivered.discard(id(parameter))
            if parameter.grad is not None:
                self._sums[parameter] = parameter.grad
                self._kept.add(id(parameter))
                parameter.grad = None

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self._synchronizing:
            return
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_round)
        self._complete.add(self._index[id(parameter)])
        while self._next in self._complete:
            self._send(self._next)

    @torch.no_grad()
    def _finish_round(self) -> None:
        """At the end of a backward: send what it did not reach, so that all ranks have sent everything."""
        while self._next < len(self._order):
            self._send(self._next)
        self._rounds += 1
        self._restart()

    def _send(self, index: int) -> None:
        parameter = self._order[index]
        self._next = index + 1
        self._set_aside(parameter)
        gradient = self._take(parameter)
        if parameter.grad is not None:
            self._present_here.add(id(parameter))
            parameter.grad = None
        work = self._reduce(gradient, self._optimizer.owners[parameter])
        self._flying.append((parameter, gradient, work))
        if len(self._flying) > _IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        parameter, gradient, work = self._flying.popleft()
        with self._waiting():
            work.wait()
        if self._owns(parameter):
            if parameter in self._sums:
                self._sums[parameter] += gradient
            else:
                self._sums[parameter] = gradient

    def _reduce_gradients(self) -> None:
        if not self._rounds:
            self._finish_round()
        while self._flying:
            self._land()
        self._rounds = 0

    def _settle_missing(self) -> None:
        absent = {id(p) for p in self._trainable} - self._present_here
        used = self._agree_on_used(absent)
        for parameter, gradient in self._sums.items():
            if id(parameter) in used or id(parameter) in self._kept:
                parameter.grad = gradient
                self._delivered.add(id(parameter))
        own = [parameter.grad for parameter in self._trainable if parameter.grad is not None]
        with self._waiting():
            spread_overflow(own, [], self._device, self._maximum)
        self._sums.clear()
        self._kept.clear()
        self._present_here.clear()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters, after finish, on every rank; see `parallel.clip`."""
        return clip_grad_norm([], self._trainable, max_norm, self._group)
