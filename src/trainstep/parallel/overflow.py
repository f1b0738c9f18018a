"""Making every rank see a gradient that is not finite, where ranks hold different gradients.

A `torch.amp.GradScaler` looks at the gradients of its own rank, skips the step and lowers the scale if one is not
finite. Where gradients are sharded only one rank may find it: the others would step, or wait for ever.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def spread_overflow(
    own: Sequence[Tensor],
    whole: Sequence[Tensor],
    device: torch.device,
    maximum: Callable[[Tensor], dist.Work],
) -> None:
    """Make one element of one gradient NaN on every rank when any rank has a gradient that is not finite.

    Nothing changes otherwise, not one bit. The host does not wait for a CUDA device. The price is one reading of the
    rank's own gradients and an all-reduce of a byte.

    Args:
        own: gradients of which this rank holds its part only.
        whole: gradients that all ranks hold alike; one serves where a rank has none of its own.
        device: of the gradients, also where there is none.
        maximum: starts an all-reduce in place, over all ranks, to the maximum; all of them call this.
    """
    own = [gradient for gradient in own if gradient.numel()]
    if own:
        norm = torch.nn.utils.get_total_norm(own, math.inf)  # the largest magnitude: no square may overflow
        found = norm.isfinite().logical_not().to(torch.uint8).view(1)
    else:
        found = torch.zeros(1, dtype=torch.uint8, device=device)
    maximum(found).wait()
    for gradient in (*own, *whole):
        if gradient.numel():
            first = gradient[(0,) * gradient.dim()]
            first.copy_(torch.where(found[0].bool(), math.nan, first))
            return
