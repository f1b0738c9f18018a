"""Gradient clipping by the global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Keeps the quotient finite for zero gradients; the value torch.nn.utils.clip_grad_norm_ uses.
EPS = 1e-6


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their joint Euclidean norm is at most `max_norm`.

    norm = sqrt(sum over parameters of sum g^2), taken in float32 for half-precision gradients; each gradient
    is multiplied by min(1, max_norm / (norm + 1e-6)). Nothing waits for the device. With gradients that are
    not finite the norm is not finite either and the gradients are spoilt: look at the returned norm before
    stepping. Under loss scaling clip after unscaling.

    Args:
        parameters: their `grad` is scaled; those without one are passed over.
        max_norm: at least 0.

    Returns:
        The norm before clipping, a 0-d tensor on the first gradient's device.

    Raises:
        ValueError: `max_norm` is negative or NaN.
    """
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
    factor = (max_norm / (total + EPS)).clamp(max=1.0)
    for gradient in gradients:
        # Rounded once, in the gradient's own dtype: multiplying by a float32 0-d tensor keeps that dtype.
        gradient.mul_(factor.to(gradient.device))
    return total
