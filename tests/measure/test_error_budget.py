"""The error budget: what is allowed, and that nothing bad passes it."""

import pytest
import torch

from benchmarks.measure.error_budget import (
    GRADIENT_FACTOR,
    attention_terms,
    budget,
    compare,
    largest_error,
)

INF, NAN = float("inf"), float("nan")


def test_the_budget_is_a_multiple_of_the_plain_error_plus_round_off():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.5])
    assert budget(plain, exact, 2, torch.tensor([-10.0, 4.0])) == 2 * 0.5 + 8 * 2.0**-23 * 10
    assert budget(exact, exact, 3, 0.5) == 8 * 2.0**-23 * 0.5  # above zero where plain is exact


def test_within_and_beyond():
    exact = torch.zeros(3, dtype=torch.float64)
    assert compare(torch.tensor([0.0, -0.5, 0.25]), exact, 0.5).green
    assert not compare(torch.tensor([0.0, -0.5, 0.25]), exact, 0.49).green


@pytest.mark.parametrize("bad", [[NAN, 0.0], [0.0, NAN], [INF, 0.0], [-INF, 0.0]])
def test_nan_and_infinity_never_pass(bad):
    assert not compare(torch.tensor(bad), torch.zeros(2), 1e30).green


def test_nan_never_equals_nan():
    assert not compare(torch.tensor([NAN]), torch.tensor([NAN]), 1e30).green


def test_equal_infinities_are_no_error():
    # The log-sum-exp of a query that sees no key.
    assert largest_error(torch.tensor([-INF, 1.0]), torch.tensor([-INF, 1.5])) == 0.5
    assert not compare(torch.tensor([-INF]), torch.tensor([INF]), 1e30).green


def test_a_nan_plain_result_allows_nothing():
    exact = torch.zeros(2)
    assert not compare(exact, exact, budget(torch.tensor([NAN, 0.0]), exact, 2, 1.0)).green


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shapes differ"):
        largest_error(torch.zeros(2), torch.zeros(2, 1))


def test_round_off_of_scores_is_allowed_where_plain_makes_none():
    """Scores of 7 queries summed one product after another in float32, the rest exact.

    A kernel did so on a GPU, where a library's sum for few rows was several times closer.
    """
    generator = torch.Generator().manual_seed(0)
    q, d_out = (torch.randn(16, 1, 7, 128, generator=generator) for _ in range(2))
    k, v = (torch.randn(16, 1, 300, 128, generator=generator) for _ in range(2))
    scale = 128**-0.5
    wide_q, wide_k = q.double(), k.double()
    scores = torch.zeros(16, 1, 7, 300)
    for h in range(128):  # a float64 product and sum, rounded once: a fused multiply-add
        scores = (scores.double() + wide_q[..., h, None] * wide_k[..., None, :, h]).float()

    def dv(scores: torch.Tensor) -> torch.Tensor:
        return (scores.double() * scale).softmax(-1).mT @ d_out.double()

    exact, seen = dv(wide_q @ wide_k.mT), torch.ones(7, 300, dtype=torch.bool)
    terms = attention_terms(q, k, v, d_out, seen=seen, scale=scale)[3]
    assert compare(dv(scores), exact, budget(exact, exact, GRADIENT_FACTOR, terms)).green
    without_scores = (wide_q @ wide_k.mT * scale).softmax(-1).mT @ d_out.double().abs()
    assert not compare(dv(scores), exact, budget(exact, exact, GRADIENT_FACTOR, without_scores)).green
