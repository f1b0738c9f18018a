"""Keep what autograd saves in the host's memory until the backward pass asks for it.

The memory is pinned. Copies then run beside the computation, at the link's full speed, and PyTorch keeps freed
blocks for the next step: a page is mapped and pinned once, in the first step. Pageable memory
(`torch.autograd.graph.save_on_cpu` without `pin_memory`) is exact to the byte and goes back to the system at
once, but every copy blocks the host and every step maps all its pages anew.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from trainstep.memory.storages import StorageNumbers, overlaps

# A small tensor costs more in launches than its bytes are worth on the device.
SMALL_BYTES = 64 * 1024
SMALLEST_PIECE_BYTES = 1024 * 1024


class Kept(Protocol):
    """What stands for a stretch of memory until the backward pass."""

    def bring_back(self) -> torch.Tensor:
        """The values where they were, one after the other."""
        ...


class HostCopy:
    """The memory of one tensor, from its first to its last element, in host memory, and how to bring it back.

    On CUDA the copy goes to pinned memory on the current stream without blocking the host; the caching
    allocator may then reuse the device memory for later work of the same stream, which runs after the copy.
    The copy is in pieces, so that pinned blocks hold little but values (see `pieces`).
    """

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat`: the memory, [elements]."""
        self.device = flat.device
        self.counts = [size // flat.itemsize for size in pieces(flat.nbytes)]
        self.values = [
            torch.empty(count, dtype=flat.dtype, pin_memory=self.device.type == "cuda")
            for count in self.counts
        ]
        for values, piece in zip(self.values, flat.split(self.counts), strict=True):
            values.copy_(piece, non_blocking=True)

    def bring_back(self) -> torch.Tensor:
        """The values on their device, [elements]."""
        back = torch.empty(sum(self.counts), dtype=self.values[0].dtype, device=self.device)
        for values, piece in zip(self.values, back.split(self.counts), strict=True):
            piece.copy_(values, non_blocking=True)
        return back


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A saved tensor: where its memory is kept, and how it lies there. Compiled backward graphs insist on strides."""

    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first to its last element, [elements]; gaps of a strided view included."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
    return torch.as_strided(tensor.detach(), (last + 1,), (1,))


def pieces(needed_bytes: int) -> list[int]:
    """Sizes in bytes of the pieces that one copy is kept in: powers of two, and a rest below SMALLEST_PIECE_BYTES.

    PyTorch rounds a pinned block up to a power of two and never splits it (`allocate` in
    aten/src/ATen/core/CachingHostAllocator.h): 320 MiB in one piece would take 512.
    """
    sizes = []
    while needed_bytes >= SMALLEST_PIECE_BYTES:
        sizes.append(1 << (needed_bytes.bit_length() - 1))
        needed_bytes -= sizes[-1]
    return [*sizes, needed_bytes] if needed_bytes else sizes


def pinned_bytes(needed_bytes: int) -> int:
    """What the copy of so many bytes takes of the host."""
    return sum(1 << (size - 1).bit_length() for size in pieces(needed_bytes))


@contextmanager
def offload_to_host(stays: Iterable[torch.Tensor] = (), small_bytes: int = SMALL_BYTES) -> Iterator[None]:
    """Send every tensor that autograd saves inside the `with` block to the host, each one once.

    Args:
        stays: tensors that live on the device anyway (parameters, buffers); what shares their storage is not
            copied.
        small_bytes: tensors below this size stay on the device, and so do empty and expanded ones (their bytes
            belong to what they expand).

    Values come back as they went, bit for bit. Memory that several operations save is copied once, also when they
    see it in different shapes (softmax saves its result, and so does the product behind it). Host bytes: see
    `count_host_bytes`.
    """
    with _keep(HostCopy, stays, small_bytes):
        yield


@dataclass(kw_only=True)
class HostBytes:
    """Pinned memory of the host that a region takes, in bytes."""

    bytes: int = 0


@contextmanager
def count_host_bytes(
    stays: Iterable[torch.Tensor] = (), small_bytes: int = SMALL_BYTES
) -> Iterator[HostBytes]:
    """Count what `offload_to_host` would take of the host, on any device, and leave every tensor in place.

    Arguments as there. A distinct tensor counts as many bytes as its pinned pieces have (`pinned_bytes`).
    """
    found = HostBytes()

    class Counted:
        def __init__(self, flat: torch.Tensor) -> None:
            self.flat = flat
            found.bytes += pinned_bytes(flat.nbytes)

        def bring_back(self) -> torch.Tensor:
            return self.flat

    with _keep(Counted, stays, small_bytes):
        yield found


@contextmanager
def _keep(
    keep: Callable[[torch.Tensor], Kept], stays: Iterable[torch.Tensor], small_bytes: int
) -> Iterator[None]:
    """Give the memory of every tensor that autograd saves to `keep`, once, but for those that stay as they are."""
    numbers = StorageNumbers()
    resident = {numbers.number(tensor) for tensor in stays}
    copies: weakref.WeakValueDictionary[tuple, Kept] = weakref.WeakValueDictionary()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Packed:
        storage = numbers.number(tensor)
        if (
            storage in resident
            or isinstance(tensor, torch.nn.Parameter)
            or tensor.nbytes < max(small_bytes, 1)
            or overlaps(tensor)
        ):
            return tensor.detach()
        flat = _flat(tensor)
        # The version tells apart what a storage held before and after it was written in place.
        key = (storage, flat.storage_offset(), flat.numel(), tensor.dtype, tensor._version)
        kept = copies.get(key)
        if kept is None:
            kept = copies[key] = keep(flat)
        return _Packed(kept=kept, size=tensor.size(), stride=tensor.stride())

    def unpack(packed: torch.Tensor | _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return torch.as_strided(packed.kept.bring_back(), packed.size, packed.stride)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
