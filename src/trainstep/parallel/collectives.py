"""The collectives by name, on buffers that can be refilled and checked: what an all-reduce sweep measures.

A collective of S bytes, N ranks (NCCL's meaning of size): all-reduce and broadcast, the tensor; all-gather,
the output; reduce-scatter, the input; all-to-all, a rank's input. S is rounded down to whole elements, the same
number a rank where ranks hold parts, and the buffers say so. Values are small integers, so sums are exact in any order and every dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.memory.storages import overlaps
from trainstep.parallel import ring

Group = dist.ProcessGroup | None
_PERIOD = 7  # values repeat with it: rank r's element i is (r + i) mod 7

# A stretch of a tensor (start, stop) and the seven values that repeat in it: to check a payload takes no
# copy.
Segment = tuple[int, int, Tensor]


@dataclass(kw_only=True)
class Buffers:
    """One rank's tensors of one collective.

    Attributes:
        source: [M_in], what this rank contributes; in-place collectives overwrite it.
        output: [M_out], where the result is; may be `source` itself.
        payload_bytes: S after rounding down to whole elements, by the meaning above.
        run: does the collective once; returns the bytes this rank sent where they are counted (ring).
    """

    source: Tensor
    output: Tensor
    payload_bytes: int
    run: Callable[[], int | None]
    _start: Tensor
    _expected: list[Segment]

    def refill(self) -> None:
        """Put the starting values back, so that repeated sums stay finite and exact."""
        whole = self.source.numel() // _PERIOD * _PERIOD
        self.source[:whole].view(-1, _PERIOD).copy_(self._start)
        self.source[whole:].copy_(self._start[: self.source.numel() - whole])

    def check(self) -> bool:
        """Whether the result on this rank is right, exactly."""
        right = self.output.numel() == self._expected[-1][1]
        for start, stop, values in self._expected:
            whole = start + (stop - start) // _PERIOD * _PERIOD
            right = right and bool((self.output[start:whole].view(-1, _PERIOD) == values).all())
            right = right and torch.equal(self.output[whole:stop], values[: stop - whole])
        return right


def _values(rank: int, start: int) -> Tensor:
    """Seven values of rank `rank`, from element `start` on."""
    return (torch.arange(start, start + _PERIOD) + rank) % _PERIOD


def all_reduce(tensor: Tensor, group: Group = None) -> None:
    """Sum `tensor` [M] over ranks, in place."""
    dist.all_reduce(tensor, group=group)


# Renamed in torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(output: Tensor, shard: Tensor, group: Group = None) -> dist.Work:
    """`all_gather` without waiting."""
    return all_gather_single(output, shard, group=group, async_op=True)


def start_reduce_scatter(
    tensor: Tensor, group: Group = None, op: Any = dist.ReduceOp.SUM
) -> tuple[Tensor, dist.Work]:
    """`reduce_scatter` of a `tensor` [M] that may be overwritten, without waiting: the part and the work.

    gloo's own all-reduces a clone; here it all-reduces in place and the part is a view.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        work = dist.all_reduce(tensor, op, group, async_op=True)
        return tensor.view(size, -1)[rank], work
    part = tensor.new_empty(tensor.numel() // size)
    return part, reduce_scatter_single(part, tensor, op, group, async_op=True)


def all_gather(output: Tensor, shard: Tensor, group: Group = None) -> None:
    """Join the ranks' `shard` [M/N] into `output` [M]."""
    all_gather_single(output, shard, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group = None) -> None:
    """Sum `tensor` [M] over ranks; this rank keeps `output` [M/N] (gloo: an all-reduce of a clone)."""
    reduce_scatter_single(output, tensor, group=group)


def broadcast(tensor: Tensor, group: Group = None) -> None:
    """Overwrite `tensor` [M] with rank 0's, in place."""
    dist.broadcast(tensor, group=group, group_src=0)


def all_to_all(output: Tensor, tensor: Tensor, group: Group = None) -> None:
    """Send part j of `tensor` [M] to rank j; `output` [M] holds the parts received, by sender."""
    dist.all_to_all_single(output, tensor, group=group)


@torch.no_grad()
def broadcast_each(tensors: Sequence[Tensor], sources: Sequence[int], group: Group = None) -> None:
    """Overwrite every tensor with the one of its source rank: any dtype (as bytes), any strides (also expanded,
    and not alike on every rank), all at once.

    Args:
        tensors: the same shapes and dtypes in the same order on every rank.
        sources: for each tensor, the rank in the group that holds the right values.
        group: ranks that take part; None means all.
    """
    started = []
    for tensor, source in zip(tensors, sources, strict=True):
        if tensor.numel():
            flat = tensor.detach().contiguous()
            data = flat.reshape(-1).view(torch.uint8)
            started.append((tensor, flat, dist.broadcast(data, group=group, group_src=source, async_op=True)))
    for tensor, flat, work in started:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            _overwrite(tensor, flat)


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Make `tensor` hold `values`, also where its elements share memory (expanded; sliding windows) and `copy_` refuses.

    Then the memory is kept if it can hold the values, and is replaced if it cannot.
    """
    if not overlaps(tensor):
        tensor.copy_(values)
        return
    _write_slices(tensor.detach(), values)
    if not torch.equal(tensor, values):
        tensor.data = values


def _write_slices(tensor: Tensor, values: Tensor) -> None:
    """Copy slice by slice; of an expanded dimension only the first."""
    if not overlaps(tensor):
        tensor.copy_(values)
        return
    only = 1 if tensor.stride(0) == 0 else None
    for part, value in zip(tensor[:only], values[:only], strict=True):
        _write_slices(part, value)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
RING_COLLECTIVES = ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter", "whole_tensor_all_reduce")


def make_buffers(
    name: str, size_bytes: int, dtype: torch.dtype, device: torch.device | str, group: Group = None
) -> Buffers:
    """Make this rank's buffers of one collective.

    Args:
        name: one of COLLECTIVES or RING_COLLECTIVES.
        size_bytes: S; rounded down to a whole number of elements, a rank's where ranks hold parts.
        dtype: of the elements.
        device: this rank's.
        group: ranks that take part; None means all.

    Raises:
        ValueError: unknown name, or a size below one element, a rank's where ranks hold parts.
    """
    if name not in COLLECTIVES + RING_COLLECTIVES:
        known = ", ".join(COLLECTIVES + RING_COLLECTIVES)
        raise ValueError(f"unknown collective {name!r}; known: {known}")
    device = torch.device(device)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind = name.removeprefix("ring_").removeprefix("whole_tensor_")
    least = dtype.itemsize * (1 if kind in ("all_reduce", "broadcast") else size)
    if size_bytes < least:
        raise ValueError(f"{name} on {size} ranks needs at least {least} bytes of {dtype}, got {size_bytes}")
    elements = size_bytes // least * least // dtype.itemsize
    part = elements // size
    mine = rank * part

    source_elements, begin = (part, mine) if kind == "all_gather" else (elements, 0)
    if kind == "all_reduce":
        expected = [(0, elements, torch.stack([_values(r, 0) for r in range(size)]).sum(0))]
    elif kind == "reduce_scatter":
        expected = [(0, part, torch.stack([_values(r, mine) for r in range(size)]).sum(0))]
    elif kind == "broadcast":
        expected = [(0, elements, _values(0, 0))]
    else:
        # From rank r comes its own part (all-gather) or the part it holds for this rank (all-to-all).
        starts = [r * part if kind == "all_gather" else mine for r in range(size)]
        expected = [(r * part, (r + 1) * part, _values(r, starts[r])) for r in range(size)]

    source = torch.empty(source_elements, dtype=dtype, device=device)
    in_place = name in ("all_reduce", "broadcast")
    output = source if in_place else torch.zeros(expected[-1][1], dtype=dtype, device=device)

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
        payload_bytes=elements * dtype.itemsize,
        run=run,
        _start=_values(rank, begin).to(device=device, dtype=dtype),
        _expected=[(a, b, values.to(device=device, dtype=dtype)) for a, b, values in expected],
    )
    buffers.refill()
    return buffers
