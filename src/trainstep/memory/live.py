"""Count the bytes that tensors keep alive while a region runs, on any device and without an allocator's help.

A dispatch mode sees every operation's results. Each new storage adds its bytes when it appears and takes them
away when it dies, so the sum is what a perfect allocator would have in use. On the meta device nothing is
allocated at all: the peak of a 3-billion-parameter step can be counted on a laptop in seconds. What a kernel
allocates inside (workspace, temporaries of a fused or compiled region) is not seen; INSIDE says it of the one
kernel of a plain step where it weighs as much as the scores.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# (device, operation) -> bytes that its kernel takes and gives back before it returns, from its arguments. CUDA's
# softmax backward first multiplies gradient and output into a tensor of its own (`softmax_backward_cuda_out` in
# aten/src/ATen/native/cuda/SoftMax.cu).
INSIDE: dict[tuple[str, Any], Callable[[Any], int]] = {
    ("cuda", torch.ops.aten._softmax_backward_data.default): lambda args: args[0].nbytes,
}


class LiveBytes(TorchDispatchMode):
    """Context manager that counts storages born inside it.

    Attributes:
        live_bytes: now.
        peak_bytes: the most since the start or the last `reset_peak`.
    """

    def __init__(self, device: str | None = None) -> None:
        """`device`: count storages of this device type only ("cuda" leaves out copies on the host); None: all."""
        super().__init__()
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.live_bytes

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Never count these tensors' storages (results that only look at them are not new)."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # An argument seen for the first time existed before the region, and so did a result that shares its
        # storage.
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._sizes.setdefault(tensor.untyped_storage(), 0)
        devices = set()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
                devices.add(tensor.device.type)
        for device in devices:
            if inside := INSIDE.get((device, func)):
                self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside(args))
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        if storage in self._sizes or (self.device is not None and storage.device.type != self.device):
            return
        size = storage.nbytes()
        self._sizes[storage] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # Not at the interpreter's exit: what is alive then has not died.
        weakref.finalize(storage, self._forget, size, self._born(size)).atexit = False

    def _forget(self, size: int, token: Any) -> None:
        self.live_bytes -= size
        self._died(size, token)

    def _born(self, size: int) -> Any:
        """For subclasses: a storage of this size appeared. What it returns is given to `_died`."""

    def _died(self, size: int, token: Any) -> None:
        """For subclasses: the storage that `_born` returned `token` for is gone."""
