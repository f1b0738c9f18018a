"""The parameters and buffers of a module, found quickly at every step."""

from operator import is_not
from typing import Any

from torch import Tensor, nn


class Members:
    """What `module.parameters()` and `module.buffers()` give, in the same order.

    Those walk the tree of modules; a step asks three times whether anything was replaced, and on a host that bounds the
    step each walk counts. Here the tree is walked again only when a module was added, removed or replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._walk()

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once."""
        return self._each_once("_parameters")

    def buffers(self) -> list[Tensor]:
        """Every buffer once."""
        return self._each_once("_buffers")

    def _walk(self) -> None:
        self._modules = list(self._module.modules())
        self._children = self._entries("_modules")

    def _entries(self, table: str) -> list[Any]:
        return [entry for module in self._modules for entry in module.__dict__[table].values()]

    def _each_once(self, table: str) -> list[Any]:
        children = self._entries("_modules")
        if len(children) != len(self._children) or any(map(is_not, children, self._children)):
            self._walk()
        return list({id(entry): entry for entry in self._entries(table) if entry is not None}.values())
