"""The collectives by name, on buffers that can be refilled and checked: what an all-reduce sweep measures.

A collective of S bytes, N ranks (NCCL's meaning of size): all-reduce and broadcast, the tensor; all-gather,
the output; reduce-scatter, the input; all-to-all, a rank's input. Where N must divide the elements, S is
rounded up and the buffers say so. Values are small integers, so sums are exact in any order and every dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel import ring

Group = dist.ProcessGroup | None
_PERIOD = 7  # values repeat with it: rank r's element i is (r + i) mod 7


@dataclass(kw_only=True)
class Buffers:
    """One rank's tensors of one collective.

    Attributes:
        source: [M_in], what this rank contributes; in-place collectives overwrite it.
        output: [M_out], where the result is; may be `source` itself.
        expected: [M_out], the right result.
        payload_bytes: S after rounding to whole elements, by the meaning above.
        run: does the collective once; returns the bytes this rank sent where they are counted (ring), else
            None.
    """

    source: Tensor
    output: Tensor
    expected: Tensor
    payload_bytes: int
    run: Callable[[], int | None]
    _start: Tensor

    def refill(self) -> None:
        """Put the starting values back, so that repeated sums stay finite and exact."""
        self.source.copy_(self._start)

    def check(self) -> bool:
        """Whether the result on this rank is right, exactly."""
        return torch.equal(self.output, self.expected)


def _pattern(rank: int, start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return ((torch.arange(start, stop, device=device) + rank) % _PERIOD).to(dtype)


def all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Sum `tensor` [M] over ranks, in place."""
    dist.all_reduce(tensor, group=group)


def all_gather(output: Tensor, shard: Tensor, group: Group = None) -> None:
    """Join the ranks' `shard` [M/N] into `output` [M]."""
    dist.all_gather_into_tensor(output, shard, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group = None) -> None:
    """Sum `tensor` [M] over ranks; this rank keeps `output` [M/N] (gloo: an all-reduce of a clone)."""
    dist.reduce_scatter_tensor(output, tensor, group=group)


def broadcast(tensor: Tensor, group: Group = None) -> None:
    """Overwrite `tensor` [M] with rank 0's, in place."""
    dist.broadcast(tensor, group=group, group_src=0)


def all_to_all(output: Tensor, tensor: Tensor, group: Group = None) -> None:
    """Send part j of `tensor` [M] to rank j; `output` [M] holds the parts received, by sender."""
    dist.all_to_all_single(output, tensor, group=group)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
RING_COLLECTIVES = ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter", "whole_tensor_all_reduce")


def make_buffers(
    name: str, size_bytes: int, dtype: torch.dtype, device: torch.device | str, group: Group = None
) -> Buffers:
    """Make this rank's buffers of one collective.

    Args:
        name: one of COLLECTIVES or RING_COLLECTIVES.
        size_bytes: S; rounded up to a whole number of elements a rank where ranks hold parts.
        dtype: of the elements.
        device: this rank's.
        group: ranks that take part; None means all.

    Raises:
        ValueError: unknown name, or a size below one byte.
    """
    if name not in COLLECTIVES + RING_COLLECTIVES:
        known = ", ".join(COLLECTIVES + RING_COLLECTIVES)
        raise ValueError(f"unknown collective {name!r}; known: {known}")
    if size_bytes < 1:
        raise ValueError(f"a collective needs at least one byte, got {size_bytes}")
    device = torch.device(device)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    elements = -(-size_bytes // dtype.itemsize)
    if name not in ("all_reduce", "broadcast", "ring_all_reduce", "whole_tensor_all_reduce"):
        elements = -(-elements // size) * size
    part = elements // size
    mine = slice(rank * part, (rank + 1) * part)

    start = _pattern(rank, 0, elements, dtype, device)
    everyone = [_pattern(r, 0, elements, dtype, device) for r in range(size)]
    kind = name.removeprefix("ring_").removeprefix("whole_tensor_")
    if kind == "all_reduce":
        expected = torch.stack(everyone).sum(0).to(dtype)
    elif kind == "reduce_scatter":
        expected = torch.stack(everyone)[:, mine].sum(0).to(dtype)
    elif kind == "broadcast":
        expected = everyone[0]
    elif kind == "all_to_all":
        expected = torch.cat([theirs[mine] for theirs in everyone])
    else:
        start = start[mine].clone()
        expected = torch.cat([theirs[r * part : (r + 1) * part] for r, theirs in enumerate(everyone)])

    source = start.clone()
    in_place = name in ("all_reduce", "broadcast")
    output = source if in_place else torch.zeros_like(expected)

    def run() -> int | None:
        if name == "all_reduce":
            all_reduce(source, group)
        elif name == "broadcast":
            broadcast(source, group)
        elif name == "all_gather":
            all_gather(output, source, group)
        elif name == "reduce_scatter":
            reduce_scatter(output, source, group)
        elif name == "all_to_all":
            all_to_all(output, source, group)
        else:
            function = getattr(ring, name.removeprefix("ring_"))
            buffers.output, sent = function(source, group=group)
            return sent
        return None

    buffers = Buffers(
        source=source,
        output=output,
        expected=expected,
        payload_bytes=elements * dtype.itemsize,
        run=run,
        _start=start,
    )
    return buffers
