"""Gradient clipping by the global norm when ranks hold different parts of the gradient."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.model.clip import EPS


@torch.no_grad()
def clip_grad_norm(
    whole: Iterable[Tensor],
    parts: Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm over all ranks' distinct elements is at most `max_norm`.

        norm^2 = sum of squares in whole + sum over ranks of the sum of squares in parts

    in float64, rounded once to float32, so that how a gradient is cut does not change the norm. Each gradient
    is multiplied by min(1, max_norm / (norm + 1e-6)).

    Args:
        whole: parameters whose gradients every rank holds alike; counted once.
        parts: parameters whose gradients are this rank's own: shards, or parameters it owns.
        max_norm: at least 0.
        group: ranks that together hold the parts once; None means all. Where there are parts, every one
            of them calls this.

    Returns:
        The norm before clipping, a 0-d float32 tensor, the same on every rank.

    Raises:
        ValueError: `max_norm` is negative or NaN.
    """
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")
    whole, parts = list(whole), list(parts)
    device = (whole + parts)[0].device if whole + parts else torch.device("cpu")
    own = [parameter.grad for parameter in parts if parameter.grad is not None]
    common = [parameter.grad for parameter in whole if parameter.grad is not None]
    square = _sum_of_squares(own, device)
    if parts:
        dist.all_reduce(square, group=group)
    square += _sum_of_squares(common, device)
    norm = square.sqrt().float()
    factor = (max_norm / (norm + EPS)).clamp(max=1.0)
    for gradient in own + common:
        gradient.mul_(factor)
    return norm


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum over all elements in float64, 0-d."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return total
