"""Keep what autograd saves in the host's memory until the backward pass asks for it."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from trainstep.memory.storages import StorageNumbers

# A small tensor costs more in launches than its bytes are worth on the device.
SMALL_BYTES = 64 * 1024


class HostCopy:
    """One tensor's values in host memory, and how to bring them back.

    On CUDA the copy goes to pinned memory on the current stream without blocking the host; the caching
    allocator may then reuse the device memory for later work of the same stream, which runs after the copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.values = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        )
        self.values.copy_(tensor, non_blocking=True)

    def bring_back(self) -> torch.Tensor:
        """The values on their device, with the strides they had: compiled backward graphs insist on them."""
        values = self.values
        back = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=self.device)
        return back.copy_(values, non_blocking=True)


def _overlaps(tensor: torch.Tensor) -> bool:
    """True when two indices may name one element, as in an expanded tensor."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


@contextmanager
def offload_to_host(stays: Iterable[torch.Tensor] = (), small_bytes: int = SMALL_BYTES) -> Iterator[None]:
    """Send every tensor that autograd saves inside the `with` block to the host, each one once.

    Args:
        stays: tensors that live on the device anyway (parameters, buffers); what shares their storage is not
            copied.
        small_bytes: tensors below this size stay on the device, and so do expanded ones (their bytes belong
            to what they expand).

    Values come back as they went, bit for bit. A tensor that several operations save is copied once. Host
    bytes: the sum of the distinct tensors saved; two views of one storage are two copies.
    """
    numbers = StorageNumbers()
    resident = {numbers.number(tensor) for tensor in stays}
    copies: weakref.WeakValueDictionary[tuple, HostCopy] = weakref.WeakValueDictionary()

    def pack(tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        storage = numbers.number(tensor)
        if (
            storage in resident
            or isinstance(tensor, torch.nn.Parameter)
            or tensor.nbytes < small_bytes
            or _overlaps(tensor)
        ):
            return tensor.detach()
        # The version tells apart what a storage held before and after it was written in place.
        key = (
            storage,
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        copy = copies.get(key)
        if copy is None:
            copy = copies[key] = HostCopy(tensor)
        return copy

    def unpack(packed: torch.Tensor | HostCopy) -> torch.Tensor:
        return packed.bring_back() if isinstance(packed, HostCopy) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
