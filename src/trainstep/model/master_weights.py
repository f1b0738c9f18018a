"""Autocast without its casts: the optimizer keeps the 16-bit copies of the weights that products read."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstep.kernels.adamw import function, reference
from trainstep.model.linear import Linear, PackedLinear


def lower_products(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """Let every linear map of a float32 model hold its weight in a lower dtype, and hand out the float32 weights.

    Under autocast a product casts its float32 weight to `dtype` in each forward (and backward) pass, and the
    gradient, which the product makes in `dtype`, to float32. Here the weight is that copy already, and its
    gradient stays as the product made it. With `MasterAdamW`, which updates the float32 weight from the gradient
    and rounds it into the copy, every value of a training step under autocast is the same as before. (Micikevicius
    et al. 2018, "Mixed Precision Training", section 3.1.) Everything else of the model stays float32.

    Load weights before: from now on those of the model are rounded ones.

    Args:
        model: changed in place; run it under autocast to the same dtype.
        dtype: torch.bfloat16, or torch.float16 without loss scaling.

    Returns:
        The float32 master of each new parameter.

    Raises:
        ValueError: a weight that is not float32, or is shared with another module, which would not see the copy.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    maps = [
        (name, module) for name, module in model.named_modules() if isinstance(module, Linear | PackedLinear)
    ]
    for name, module in maps:
        if module.weight.dtype != torch.float32:
            raise ValueError(f"{name}.weight must be float32, got {module.weight.dtype}")
        if uses[id(module.weight)] > 1:
            raise ValueError(f"{name}.weight is shared with another module and cannot be held in {dtype}")
    masters: dict[Tensor, Tensor] = {}
    for _, module in maps:
        master = module.weight.detach()
        module.weight = nn.Parameter(master.to(dtype), requires_grad=module.weight.requires_grad)
        masters[module.weight] = master
    return masters


class MasterAdamW(Optimizer):
    """AdamW over float32 master weights, one pass over memory for each parameter.

    The update is that of torch.optim.AdamW on the masters to round-off; parameters without a master are float32
    and their own. On CUDA the kernel of `kernels.adamw` runs, elsewhere its reference. A step may be captured in a
    CUDA graph. State: `master` (where there is one), `exp_avg`, `exp_avg_sq` and `step` (0-d), all float32 and on
    the parameter's device.

    Raises:
        ValueError: a parameter that is not float32 and has no master.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        masters: Mapping[Tensor, Tensor],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        programs: int | None = None,
    ) -> None:
        """Hyper-parameters as in `model.adamw.AdamW`; `programs` as in `kernels.adamw.function.adamw_`."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._programs = programs
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in masters:
                    self.state[parameter]["master"] = masters[parameter]
                elif parameter.dtype != torch.float32:
                    raise ValueError(f"a parameter of {parameter.dtype} needs a float32 master")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again, with gradients on, and returns the loss.

        Returns:
            What the closure returned, None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in moved]
            if moved:
                torch._foreach_add_([state["step"] for state in states], 1.0)
            for parameter, state in zip(moved, states, strict=True):
                arguments = (
                    state.get("master", parameter),
                    parameter.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    parameter if "master" in state else None,
                )
                options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                if parameter.is_cuda:
                    function.adamw_(*arguments, **options, programs=self._programs)
                else:
                    reference.adamw_(*arguments, **options)
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            master = state.get("master", parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state
