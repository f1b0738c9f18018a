"""The initial distribution of every weight."""

import torch
from torch import Tensor, nn

CUT = 3.0


@torch.no_grad()
def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill a tensor in place with N(0, std^2) cut at 3 standard deviations.

    Drawn in float32 whatever the tensor's dtype: the inverse-error-function method would put half-precision
    draws on a coarse grid with too much mass at the cuts. Equal seeds so give equal weights, rounded, in
    every dtype.

    Args:
        weight: any shape, floating point.
        std: standard deviation before the cut.

    Returns:
        The same tensor.
    """
    if weight.is_meta:
        return weight
    exact = weight if weight.dtype == torch.float32 else torch.empty_like(weight, dtype=torch.float32)
    nn.init.trunc_normal_(exact, mean=0.0, std=std, a=-CUT * std, b=CUT * std)
    if exact is not weight:
        weight.copy_(exact)
    return weight


def linear_std(d_in: int, d_out: int) -> float:
    """Standard deviation of a linear map's weights: sqrt(2 / (d_in + d_out)) (Glorot and Bengio 2010, eq.
    16)."""
    return (2.0 / (d_in + d_out)) ** 0.5
