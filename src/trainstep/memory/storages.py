"""Give every storage a number that no later storage gets, even when the allocator reuses its address."""

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
