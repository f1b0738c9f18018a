"""Record what autograd saves for the backward pass: which tensor, made by what, where, and how many bytes.

Autograd calls a pack hook for every tensor that a node keeps (`torch.autograd.graph.saved_tensors_hooks`).
The recorder listens there, notes the module that was running and the operation that produced the tensor, and
leaves the tensor as it is. Nothing is synchronised and nothing is copied, so it works on any device; on the
meta device it counts models that would not fit anywhere.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import Function

from trainstep.memory.storages import StorageNumbers, storage_bytes

KINDS = ("activation", "boundary", "parameter", "buffer")

# Gradient functions of operations that only look at memory; the name wanted is the one of what filled it.
# fmt: off
_VIEWS = frozenset({
    "View", "UnsafeView", "Transpose", "T", "Permute", "Expand", "Reshape", "ReshapeAlias", "Alias", "Slice",
    "Select", "Split", "SplitWithSizes", "Unbind", "Unsqueeze", "Squeeze", "AsStrided", "Detach",
})
# fmt: on

_FUNCTION_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


@dataclass(frozen=True, kw_only=True)
class Save:
    """One call of autograd's pack hook.

    Attributes:
        shape, dtype: of the tensor saved.
        operation: what produced it: the name of its gradient function without "Backward0", the
            autograd.Function that saved it when it never had a gradient (compiled regions do this), "leaf"
            for tensors that came from outside.
        module: dotted path of the innermost module that was running, "" outside all of them.
        bytes: of the whole storage that is kept alive.
        storage: number of the storage within the recording.
        kind: "activation", "boundary" (input that a checkpointed segment keeps), "parameter" or "buffer".
        first: no earlier save of the recording kept this storage alive.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str
    module: str
    bytes: int
    storage: int
    kind: str
    first: bool

    @property
    def counted(self) -> bool:
        """True when this save adds bytes: the storage's first save, and not a parameter."""
        return self.first and self.kind != "parameter"


@dataclass(frozen=True, kw_only=True)
class OperationShare:
    """Bytes that one kind of operation keeps alive, and its share of the whole (0..1)."""

    operation: str
    bytes: int
    saves: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Everything that was saved in a region, in order; duplicates and parameters included."""

    saves: tuple[Save, ...]

    @property
    def storages(self) -> tuple[Save, ...]:
        """Each storage once, without parameters."""
        return tuple(save for save in self.saves if save.counted)

    @property
    def total_bytes(self) -> int:
        """Bytes kept alive besides parameters."""
        return sum(save.bytes for save in self.storages)

    @property
    def buffer_bytes(self) -> int:
        """The part of the total that is buffers: alive anyway, so releasing the graph does not free it."""
        return sum(save.bytes for save in self.storages if save.kind == "buffer")

    @property
    def activation_bytes(self) -> int:
        """The part of the total that exists only for the backward pass."""
        return self.total_bytes - self.buffer_bytes

    @property
    def boundaries(self) -> tuple[Save, ...]:
        """Inputs that checkpointed segments keep, each storage once."""
        seen: set[int] = set()
        kept = []
        for save in self.saves:
            if save.kind == "boundary" and save.storage not in seen:
                seen.add(save.storage)
                kept.append(save)
        return tuple(kept)

    def module_bytes(self, prefix: str) -> int:
        """Bytes first saved under one module path, itself and everything below.

        A block's output that the next block saves counts there, so that blocks add up to the total.
        """
        inside = prefix + "."
        return sum(s.bytes for s in self.storages if s.module == prefix or s.module.startswith(inside))

    def largest_operations(self, count: int = 5) -> tuple[OperationShare, ...]:
        """The producing operations that keep most bytes alive, with their share of the total."""
        by_operation: dict[str, list[int]] = defaultdict(list)
        for save in self.storages:
            by_operation[save.operation].append(save.bytes)
        total = self.total_bytes
        ranked = sorted(by_operation.items(), key=lambda item: (-sum(item[1]), item[0]))
        return tuple(
            OperationShare(operation=name, bytes=sum(sizes), saves=len(sizes), share=sum(sizes) / total)
            for name, sizes in ranked[:count]
        )


@dataclass(kw_only=True)
class Recorder:
    """Collects saves while `record_residuals` is active; `residuals()` may be asked for at any time."""

    _saves: list[Save] = field(default_factory=list)
    _numbers: StorageNumbers = field(default_factory=StorageNumbers)
    _seen: set[int] = field(default_factory=set)
    _kinds: dict[int, str] = field(default_factory=dict)
    _path: list[str] = field(default_factory=list)

    def residuals(self) -> Residuals:
        """What was saved so far."""
        return Residuals(saves=tuple(self._saves))

    def _know(self, module: nn.Module) -> None:
        for kind, tensors in (("buffer", module.buffers()), ("parameter", module.parameters())):
            for tensor in tensors:
                self._kinds[self._numbers.number(tensor)] = kind

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._numbers.number(tensor)
        function, is_boundary = _who_saves()
        kind = self._kinds.get(storage, "parameter" if isinstance(tensor, nn.Parameter) else "activation")
        if is_boundary and kind == "activation":
            kind = "boundary"
        self._saves.append(
            Save(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                operation=_operation(tensor, function),
                module=self._path[-1] if self._path else "",
                bytes=storage_bytes(tensor),
                storage=storage,
                kind=kind,
                first=storage not in self._seen,
            )
        )
        self._seen.add(storage)
        # A node that saved its own output would keep itself alive through the hook; the detached tensor
        # shares the storage without the graph.
        return tensor.detach()


def _operation(tensor: torch.Tensor, function: str | None) -> str:
    node = tensor.grad_fn
    while node is not None:
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name not in _VIEWS:
            return "leaf" if name.endswith("AccumulateGrad") else name
        node = node.next_functions[0][0]
    if function is not None and not tensor.requires_grad:
        return function
    return "leaf"


def _who_saves() -> tuple[str | None, bool]:
    """Name of the autograd.Function whose `apply` is saving, and whether a checkpoint keeps its input."""
    frame: FrameType | None = sys._getframe(2)
    depth = 0
    # The saving frame is within a few calls of the hook; going further would find a function that merely
    # encloses it.
    while frame is not None and depth < 4:
        if frame.f_code is _FUNCTION_APPLY:
            return frame.f_locals["cls"].__name__, False
        if frame.f_code.co_filename == _CHECKPOINT_FILE and frame.f_code.co_name == "save_inputs":
            return None, True
        frame = frame.f_back
        depth += 1
    return None, False


@contextmanager
def record_residuals(module: nn.Module | None = None) -> Iterator[Recorder]:
    """Record every tensor that autograd saves inside the `with` block.

    Args:
        module: its parameters and buffers are told apart from activations, and saves carry the path of its
            submodules. None records without paths; parameters are still recognised where the tensor saved is
            an `nn.Parameter` itself. Compiled submodules are one step: a compiled region saves at its end.

    Saves inside a checkpointed segment are not autograd's to keep and are not seen; the segment's inputs are,
    with kind "boundary". What a selective checkpoint or an offload keeps elsewhere is not seen either.
    The region's own hooks are gone afterwards, also when it raises. Double backward through the region is not
    supported.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        if module is not None:
            recorder._know(module)
            stack.callback(recorder._path.clear)
            for undo in _follow_modules(module, recorder._path):
                stack.callback(undo)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder._pack, _as_it_is))
        yield recorder


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _follow_modules(root: nn.Module, path: list[str]) -> Iterator[Callable[[], None]]:
    """Keep `path` equal to the stack of running modules; gives back what undoes each change."""
    names = _eager_modules(root)
    for module, name in names.items():
        compiled_call: Any = module._compiled_call_impl
        if compiled_call is not None:
            # Hooks of a module compiled in place run inside its graph, so the call itself is wrapped.
            module._compiled_call_impl = _with_path(compiled_call, path, name)
            yield partial(setattr, module, "_compiled_call_impl", compiled_call)
            continue

        def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
            path.append(name)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if path:  # a hook of a region that has ended finds the path cleared
                path.pop()

        yield module.register_forward_pre_hook(enter, prepend=True).remove
        yield module.register_forward_hook(leave, always_call=True).remove


def _with_path(call: Callable[..., Any], path: list[str], name: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        path.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            path.pop()

    return wrapped


def _eager_modules(root: nn.Module) -> dict[nn.Module, str]:
    """Modules whose calls Python sees, with their paths: nothing below a compiled one."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in found:  # a module used twice goes by its first name
            return
        found[module] = name
        # `_orig_mod`: what torch.compile(module) wraps.
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(root, "")
    return found
