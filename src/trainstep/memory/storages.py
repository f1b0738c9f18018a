"""Storages: a number that no later one gets, even when the allocator reuses its address, and how tensors lie in them."""

import itertools
import weakref

import torch


class StorageNumbers:
    """Numbers storages as they are met.

    Addresses (`data_ptr`, `_cdata`) come back after a storage died, and are 0 on the meta device, so neither
    can tell whether two tensors share memory over a region's time. A storage's Python object lives as long as
    the storage itself; a weak reference to it says whether an address still means the storage it meant.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._next = itertools.count()

    def number(self, tensor: torch.Tensor) -> int:
        """The number of this tensor's storage, a new one when it was not met before."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known[0]() is storage:
            return known[1]
        number = next(self._next)
        self._known[storage._cdata] = (weakref.ref(storage), number)
        return number


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that stay alive with this tensor: its whole storage, also when it is a narrow view of it."""
    return tensor.untyped_storage().nbytes()


def overlaps(tensor: torch.Tensor) -> bool:
    """True when two indices may name one element, as in an expanded tensor or a sliding window.

    Exact for what views of a contiguous tensor give; some layouts made by `as_strided` count as overlapping though no
    two indices meet.
    """
    span = 0  # from the first element of the dimensions so far to the last
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False
