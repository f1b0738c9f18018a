"""Weighted sum as the formula says, and as a library call; autograd differentiates both."""

from torch import Tensor


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """y = sum over the last dimension of x * weight: x [..., D], weight [D] -> [...]."""
    return (x * weight).sum(-1)


def matrix_vector(x: Tensor, weight: Tensor) -> Tensor:
    """The peer: the same sum as PyTorch's matrix-vector product."""
    return x @ weight
