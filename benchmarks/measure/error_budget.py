"""How far a fast implementation may be from the exact answer: measured, never tuned by hand."""

from typing import TYPE_CHECKING

from benchmarks.cases.case import Check

if TYPE_CHECKING:
    import torch

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
_EPS_FLOAT32 = 2.0**-23


def largest_error(actual: "torch.Tensor", exact: "torch.Tensor") -> float:
    """Largest |actual - exact| in float64. Equal infinities differ by 0; a NaN on either side gives NaN.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != exact.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(exact.shape)}")
    left, right = actual.detach().double(), exact.detach().double()
    difference = (left - right).abs().masked_fill(left == right, 0.0)
    if difference.numel() == 0:
        return 0.0
    # amax propagates NaN, so that one bad element is never lost in a maximum.
    return float(difference.amax())


def budget(
    plain: "torch.Tensor", exact: "torch.Tensor", factor: float, terms: "torch.Tensor | float"
) -> float:
    """The largest error allowed: factor * max|plain - exact| + 8 * eps(float32) * max|terms|.

    Args:
        plain: the same formula in the same dtype in plain PyTorch.
        exact: the formula in float64.
        factor: `OUTPUT_FACTOR` (2) for outputs, `GRADIENT_FACTOR` (3) for gradients.
        terms: for each result the sum of the absolute values of the terms that it adds up, or a number that
            bounds it. It keeps the budget above zero where plain happens to be exact.
    """
    largest_term = terms if isinstance(terms, (int, float)) else float(terms.detach().abs().amax())
    return factor * largest_error(plain, exact) + 8.0 * _EPS_FLOAT32 * largest_term


def compare(actual: "torch.Tensor", exact: "torch.Tensor", allowed: float) -> Check:
    """The error of `actual` beside what is allowed; a NaN makes the check red."""
    return Check(error=largest_error(actual, exact), budget=allowed)
