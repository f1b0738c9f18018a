"""How far a fast implementation may be from the exact answer: measured, never tuned by hand."""

from collections.abc import Iterable
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


def largest_share(shares: Iterable[float]) -> Check:
    """Errors as shares of their budgets, as one check with a budget of 1; a NaN is larger than all."""
    return Check(error=max(shares, key=lambda share: (share != share, share)), budget=1.0)


def attention_terms(
    q: "torch.Tensor",
    k: "torch.Tensor",
    v: "torch.Tensor",
    d_out: "torch.Tensor",
    *,
    seen: "torch.Tensor",
    scale: float,
    d_lse: "torch.Tensor | None" = None,
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """For attention's output and gradients the sum of the absolute values of the terms that each adds up.

    The scores are sums as well, and their rounding reaches every result through P = exp(S - L): an error of S_ij is
    the same relative error of P_ij. In float32 with few queries it is most of the error, and it hangs on the order in
    which a library adds up H products, so that plain PyTorch's own error can be several times smaller than that of
    one sum after another. So P counts with 1 + e_ij + sum_j P_ij e_ij, where e_ij = scale * sqrt(sum_h (q_ih k_jh)^2):
    rounding errors add up like a random walk (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019).

    Args:
        q, d_out: [B, N, S, H].
        k, v: [B, K, T, H].
        seen: [S, T], which keys a query sees.
        scale: of the scores.
        d_lse: [B, N, S], gradient of the log-sum-exp, if it has one.

    Returns:
        In float64: for out and dq [B, N, S, H], for dk and dv [B, K, T, H].
    """
    q, k, v, d_out = (x.detach().double() for x in (q, k, v, d_out))
    group = q.shape[1] // k.shape[1]
    key_shape = (k.shape[0], k.shape[1], group, *k.shape[2:])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = ((q @ k.mT) * scale).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    score_terms = (q.square() @ k.square().mT).sqrt() * scale
    p_terms = p * (1.0 + score_terms + (p * score_terms).sum(-1, keepdim=True))
    dp = d_out.abs() @ v.abs().mT
    delta = (p_terms * dp).sum(-1, keepdim=True)
    if d_lse is not None:
        delta = delta + d_lse.detach().double().abs().unsqueeze(-1)
    ds = p_terms * dp + p * delta
    dk, dv = ds.mT @ q.abs() * scale, p_terms.mT @ d_out.abs()
    return (
        p_terms @ v.abs(),
        ds @ k.abs() * scale,
        dk.reshape(key_shape).sum(2),
        dv.reshape(key_shape).sum(2),
    )
