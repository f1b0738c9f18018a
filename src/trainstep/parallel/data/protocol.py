"""What every data-parallel variant shares; a variant only says how gradients are reduced.

The protocol: `wrapper(batch)`, backward, `wrapper.finish_gradient_synchronization()`, optimizer step;
`no_sync()` around all but the last backward when gradients accumulate. After finish every rank holds, bit for
bit, the same gradients and buffers:

    grad[p] = sum over ranks r of weight_r * grad_r[p],    weight_r = 1/N, or tokens_r / tokens

- Every rank runs the same collectives in the same order, whatever its batch used. A gradient missing on
  some ranks counts as zero there; missing on all it stays None.
- Weights are applied before the sum, so that a float16 sum cannot overflow where the mean does not (the
  price: a float16 gradient below N * 6e-8 may become 0). Each gradient keeps its dtype.
- Parameters are rank 0's from the start. Buffers are rank 0's from the start and again after every finish,
  also those that forward reassigns (`broadcast_buffers=False` leaves them to each rank after the start).
- Parameters may be frozen, unfrozen or replaced between steps, on all ranks alike: the next forward notices.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.agreement import require_alike_parameters
from trainstep.parallel.collectives import broadcast_each
from trainstep.parallel.communication import CommunicationLog
from trainstep.parallel.data.members import Members


class DataParallel(nn.Module):
    """Base of the variants.

    Args:
        module: the model, on this rank's device; the same structure on every rank.
        group: ranks that hold replicas; None means all.
        broadcast_buffers: also make buffers equal after every step.
        communication: where to note when collectives ran; None records nothing.

    Raises:
        ValueError: the ranks' models differ.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        communication: CommunicationLog | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._members = Members(module)
        self.communication = communication
        self._group = group
        self._broadcast_buffers = broadcast_buffers
        self._synchronizing = True
        self._launched = 0
        self._weight = 1.0 / dist.get_world_size(group)
        self._by_tokens = False  # alike on every rank, as the operation must be; a weight alone does not tell
        self._averages = dist.get_backend(group) == "nccl"
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._known: list[tuple[nn.Parameter, bool]] | None = None
        self._trainable: list[nn.Parameter] = []
        self._missing: list[tuple[nn.Parameter, Tensor]] = []
        managed = set(self._managed())
        require_alike_parameters([(n, p) for n, p in module.named_parameters() if p in managed], group)
        self._notice_parameters()
        self._broadcast(self._members.buffers())

    # What a variant defines.

    def _managed(self) -> list[nn.Parameter]:
        """The parameters that are whole on every rank."""
        return self._members.parameters()

    def _prepare(self) -> None:
        """Get ready for `self._trainable`, called whenever that list has changed."""

    def _reduce_gradients(self) -> None:
        """Leave the weighted sum over ranks in every trainable parameter's gradient, see `_give`."""
        raise NotImplementedError

    # What a user calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        self._notice_parameters()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of backwards inside; the next finish outside sends their sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def set_token_count(self, tokens: int) -> None:
        """Weight this step's gradients by tokens, for ranks with unequal counts.

        Call on all ranks before backward.
        Each rank's gradients must be those of its mean over `tokens` tokens; the result is the mean over all
        tokens. Holds until the next finish. A rank without tokens contributes zeros, whatever its gradients
        hold.

        Raises:
            ValueError: negative count, or no tokens on any rank.
            RuntimeError: gradients of this step are already on their way.
        """
        if tokens < 0:
            raise ValueError(f"a rank cannot hold {tokens} tokens")
        if self._launched:
            raise RuntimeError("set_token_count comes before backward: gradients are already on their way")
        total = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        dist.all_reduce(total, group=self._group)
        if total.item() == 0:
            raise ValueError("no rank holds a token")
        self._weight, self._by_tokens = tokens / total.item(), True

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Call on every rank after backward and before the optimizer's step; does nothing inside `no_sync`.

        Raises:
            RuntimeError: parameters were frozen, unfrozen or replaced since the last forward.
        """
        if not self._synchronizing:
            return
        if self._changed():
            raise RuntimeError(
                "parameters were frozen, unfrozen or replaced between forward and "
                "finish_gradient_synchronization; change them between steps"
            )
        self._reduce_gradients()
        self._settle_missing()
        if self._broadcast_buffers:
            self._broadcast(self._members.buffers())
        self._weight, self._by_tokens = 1.0 / dist.get_world_size(self._group), False
        self._launched = 0

    # What variants are made of.

    def _take(self, parameter: nn.Parameter) -> Tensor:
        """This rank's gradient, or zeros: contiguous, in place where possible, not yet weighted."""
        if parameter.grad is None:
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if parameter.grad.is_sparse:
            raise ValueError("sparse gradients are not reduced; build the embedding with sparse=False")
        return parameter.grad.contiguous()

    def _give(self, parameter: nn.Parameter, reduced: Tensor) -> None:
        """Store a reduced gradient; where this rank has none, `_settle_missing` decides."""
        if parameter.grad is None:
            self._missing.append((parameter, reduced))
        elif 0 in parameter.grad.stride():  # expanded by whoever assigned it: cannot hold just any sum
            parameter.grad = reduced
        elif parameter.grad.data_ptr() != reduced.data_ptr():  # else it was reduced in place
            parameter.grad.copy_(reduced)

    def _all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start the weighted sum of a contiguous `tensor` over ranks, in place."""
        operation = self._weigh(tensor)
        return self._start(lambda: self._collective(tensor, operation))

    def _reduce(self, tensor: Tensor, owner: int) -> dist.Work:
        """Start the weighted sum of a contiguous `tensor` on rank `owner`, in place; undefined elsewhere."""
        operation = self._weigh(tensor)
        return self._start(
            lambda: dist.reduce(tensor, op=operation, group=self._group, group_dst=owner, async_op=True)
        )

    def _weigh(self, tensor: Tensor) -> Any:
        """Weigh this rank's share in place; returns the operation that completes the weighted sum.

        NCCL's average scales each share as it enters the sum: equal weights then cost no pass over memory.
        """
        self._launched += 1
        if self._averages and not self._by_tokens:
            return dist.ReduceOp.AVG
        if self._weight == 0:
            tensor.zero_()  # 0 * NaN would be NaN
        else:
            tensor.mul_(self._weight)
        return dist.ReduceOp.SUM

    def _collective(self, tensor: Tensor, operation: Any) -> dist.Work:
        return dist.all_reduce(tensor, op=operation, group=self._group, async_op=True)

    def _maximum(self, tensor: Tensor) -> dist.Work:
        """Start the maximum of a small `tensor` over ranks, in place."""
        return self._start(lambda: self._collective(tensor, dist.ReduceOp.MAX))

    def _start(self, launch: Callable[[], dist.Work]) -> dist.Work:
        return self.communication.track(launch) if self.communication is not None else launch()

    def _waiting(self) -> Any:
        """Context of every wait for a collective."""
        return self.communication.waiting() if self.communication is not None else nullcontext()

    # How it is done.

    def _changed(self) -> bool:
        now = self._managed()
        return (
            self._known is None
            or len(now) != len(self._known)
            or any(
                parameter is not known or parameter.requires_grad != trained
                for parameter, (known, trained) in zip(now, self._known, strict=True)
            )
        )

    def _notice_parameters(self) -> None:
        """Take over the module's parameters; those not seen before become rank 0's."""
        if not self._changed():
            return
        seen = {id(parameter) for parameter, _ in self._known or ()}
        now = self._managed()
        self._broadcast([p for p in now if id(p) not in seen])
        self._known = [(p, p.requires_grad) for p in now]
        self._trainable = [p for p in now if p.requires_grad and p.numel()]
        self._present = torch.ones(len(self._trainable), dtype=torch.uint8, device=self._device)
        self._prepare()

    def _settle_missing(self) -> None:
        """Make the sum the gradient of parameters that other ranks used; those nobody used keep None."""
        used = self._agree_on_used({id(parameter) for parameter, _ in self._missing})
        for parameter, reduced in self._missing:
            if id(parameter) in used:
                parameter.grad = reduced
        self._missing.clear()

    def _agree_on_used(self, absent: set[int]) -> set[int]:
        """The trainable parameters, by id, that have a gradient on any rank, given those that have none here.

        Every rank takes part; one that misses nothing need not read the answer, and so does not wait for it.
        """
        everything = {id(parameter) for parameter in self._trainable}
        present = self._present
        if absent:
            flags = [id(parameter) not in absent for parameter in self._trainable]
            present = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        if present.numel():
            with self._waiting():
                self._maximum(present).wait()
        if not absent:
            return everything
        return {id(p) for p, flag in zip(self._trainable, present.tolist(), strict=True) if flag}

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        broadcast_each(tensors, [0] * len(tensors), self._group)


def pack(gradients: Sequence[Tensor]) -> Tensor:
    """Copy gradients of one dtype into one flat tensor [sum of elements]."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def unpack(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Views of `flat` in the parameters' shapes."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]
