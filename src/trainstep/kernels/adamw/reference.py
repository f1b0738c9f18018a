"""The AdamW update in plain tensor operations: the only oracle, and what a CPU runs."""

from torch import Tensor


def adamw_(
    master: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """See the package; also in float64. Nothing waits for the device: the bias corrections stay tensors."""
    beta1, beta2 = betas
    gradient = gradient.to(master.dtype)
    correction1, correction2 = (1.0 - beta ** step.double() for beta in betas)
    master.mul_(1.0 - lr * weight_decay)
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    denominator = square.sqrt().div_(correction2.sqrt()).add_(eps)
    master.sub_(mean.mul(lr / correction1).div_(denominator))
    if copy is not None:
        copy.copy_(master)
