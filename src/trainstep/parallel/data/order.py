"""Starting reductions from backward, in one order on every rank."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook that calls a bound method while its object lives.

    Autograd holds hooks from C++, where Python's garbage collector does not look: a hook that holds a wrapper, which
    holds the parameter, would keep the model's memory for good.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Any) -> None:
        call = reference()
        if call is not None:
            call(parameter)

    return hook


class OrderedUnits:
    """Launches units of parameters in order, each as soon as its gradients are complete and its turn has come.

    Backward may reach parameters in another order on another rank, or not at all; the order of launches is
    that of `units` nonetheless. What backward left over is launched by `launch_rest`.

    Args:
        units: disjoint lists of parameters, in the order backward is expected to complete them.
        launch: called with a unit's index when it is its turn.
        active: hooks do nothing while it returns False.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Parameter]],
        launch: Callable[[int], None],
        active: Callable[[], bool],
    ) -> None:
        self._units = units
        self._launch = launch
        self._active = active
        self._unit_of = {id(p): index for index, unit in enumerate(units) for p in unit}
        # After accumulation: the hook sees the gradient that the optimizer would, micro-batches included.
        ready = weakly(self._ready)
        self._hooks = [p.register_post_accumulate_grad_hook(ready) for unit in units for p in unit]
        self._restart()

    def _restart(self) -> None:
        self._next = 0
        self._seen: set[int] = set()
        self._incomplete = [len(unit) for unit in self._units]

    def _ready(self, parameter: torch.Tensor) -> None:
        # Already on its way: a further share, also one of no_sync, would be lost or mixed into the sum.
        if id(parameter) in self._seen:
            raise RuntimeError(
                "a second backward before finish_gradient_synchronization; put all but the last in no_sync()"
            )
        if not self._active():
            return
        self._seen.add(id(parameter))
        unit = self._unit_of[id(parameter)]
        self._incomplete[unit] -= 1
        if unit == self._next and not self._incomplete[unit]:
            if (
                torch.is_grad_enabled()
            ):  # backward(create_graph=True); the context costs microseconds a parameter
                with torch.no_grad():
                    self._launch_complete()
            else:
                self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < len(self._units) and not self._incomplete[self._next]:
            self._launch(self._next)
            self._next += 1

    def launch_rest(self) -> None:
        """Launch every unit that backward did not complete, and start over."""
        for index in range(self._next, len(self._units)):
            self._launch(index)
        self._restart()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
