"""AdamW, one parameter after the other."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), in plain tensor operations.

    For each parameter p with gradient g at its step t:

        p <- p - lr * weight_decay * p
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The update is that of torch.optim.AdamW to round-off (`eps` is added after the bias correction), and so
    are the names, shapes and dtypes in the state: `step` (0-d float32 on the CPU), `exp_avg`, `exp_avg_sq`
    (as the parameter), which makes state dicts interchangeable. Parameters without a gradient are left alone.

    Raises:
        ValueError: a hyper-parameter outside its range.
        RuntimeError: a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0.0:  # also refuses NaN
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        t = state["step"].item()
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]

        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        denominator = (square.sqrt() / (1.0 - beta2**t) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1.0 - beta1**t))
