"""Planted laws: the intervals must hold the truth as often as they say."""

import numpy as np
import pytest

from trainstep.accounting.compute_optimal import SURFACES, compute_optimal, isoflop_minimum
from trainstep.accounting.scaling_law import fit_power_law, fit_saturating

TRIALS = 200
COMPUTE = np.geomspace(1e17, 1e21, 16)
# 200 trials at 95%: 190 expected, standard deviation 3.1; three of them to either side.
EXPECTED = range(181, 200)


def covered(fits, truths):
    """How often each truth lies in its interval."""
    return {name: sum(truth in getattr(fit, name) for fit in fits) for name, truth in truths.items()}


def test_a_saturating_law_is_recovered_at_the_stated_rate():
    truth = {"floor": 1.8, "scale": 2.2e3, "exponent": 0.19}
    clean = truth["floor"] + truth["scale"] * COMPUTE ** -truth["exponent"]
    noise = np.random.default_rng(0).normal(0, 0.004, (TRIALS, len(COMPUTE)))
    fits = [fit_saturating(COMPUTE, clean + errors) for errors in noise]
    for name, count in covered(fits, truth).items():
        assert count in EXPECTED, (name, count)
    assert np.median([fit.exponent.value for fit in fits]) == pytest.approx(0.19, rel=0.02)
    inside = sum(clean[3] in fit.predict(COMPUTE[3]) for fit in fits)
    assert inside in EXPECTED


@pytest.mark.parametrize("method", ["log-linear", "least-squares"])
def test_a_learning_rate_law_is_recovered_at_the_stated_rate(method):
    truth = {"scale": 12.0, "exponent": 0.21}
    clean = truth["scale"] * COMPUTE ** -truth["exponent"]
    noise = np.random.default_rng(1).normal(0, 1, (TRIALS, len(COMPUTE)))
    if method == "log-linear":
        observed = clean * np.exp(0.05 * noise)
    else:
        observed = clean + 0.02 * clean.min() * noise
    fits = [fit_power_law(COMPUTE, row, method=method) for row in observed]
    for name, count in covered(fits, truth).items():
        assert count in EXPECTED, (name, count)
    inside = sum(clean[-1] in fit.predict(COMPUTE[-1]) for fit in fits)
    assert inside in EXPECTED


def test_the_rate_follows_the_confidence():
    clean = 3.0 * COMPUTE**-0.1
    noise = np.random.default_rng(2).normal(0, 0.05, (TRIALS, len(COMPUTE)))
    fits = [fit_power_law(COMPUTE, clean * np.exp(errors), confidence=0.5) for errors in noise]
    assert 0.39 * TRIALS < sum(0.1 in fit.exponent for fit in fits) < 0.61 * TRIALS


def test_exact_data_give_exact_laws():
    fit = fit_saturating(COMPUTE, 2.0 + 500.0 * COMPUTE**-0.15)
    assert fit.floor.value == pytest.approx(2.0, rel=1e-5)
    assert fit.scale.value == pytest.approx(500.0, rel=1e-4)
    assert fit.exponent.value == pytest.approx(0.15, rel=1e-5)
    for method in ("log-linear", "least-squares"):
        rate = fit_power_law(COMPUTE, 0.3 * COMPUTE**-0.05, method=method)
        assert rate.floor is None
        assert rate.scale.value == pytest.approx(0.3)
        assert rate.exponent.value == pytest.approx(0.05)
        assert rate.predict(1e22).value == pytest.approx(0.3 * 1e22**-0.05)


def test_the_closed_form_is_the_line_through_the_logarithms():
    x, y = np.array([1.0, 2.0, 5.0, 9.0]), np.array([3.0, 2.0, 1.4, 1.0])
    slope, level = np.polyfit(np.log(x), np.log(y), 1)
    fit = fit_power_law(x, y)
    assert fit.exponent.value == pytest.approx(-slope)
    assert fit.scale.value == pytest.approx(np.exp(level))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_power_law([1, 2], [3, 2]), "2 unknowns need at least 3 different x, got 2"),
        (lambda: fit_saturating([1, 2, 3], [3, 2, 1]), "3 unknowns need at least 4 different x"),
        (lambda: fit_power_law([1, 2, 3], [3, 0, 1]), "positive"),
        (lambda: fit_power_law([1, 2, float("nan")], [3, 2, 1]), "positive, finite"),
        (lambda: fit_power_law([1, 2, 3], [3, 2]), "equal length"),
        (lambda: fit_power_law([1, 2, 3], [3, 2, 1], method="guess"), "unknown method 'guess'"),
        (lambda: fit_power_law([1, 2, 3], [3, 2, 1], confidence=95), "between 0 and 1"),
        (lambda: fit_saturating([1, 2, 3, 4], [1, 2, 3, 4]), "do not fall"),
    ],
)
def test_bad_data_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
@pytest.mark.parametrize("flops", [1e19, 5.76e23])
def test_the_optimum_equals_a_search(surface, flops):
    best = compute_optimal(flops, surface)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)
    sizes = best.parameters * np.geomspace(0.2, 5, 20001)
    losses = surface.loss(sizes, flops / 6 / sizes)
    assert sizes[losses.argmin()] == pytest.approx(best.parameters, rel=1e-3)
    assert best.loss <= losses.min() + 1e-12


def test_twenty_tokens_a_parameter():
    best = compute_optimal(5.76e23, SURFACES["besiroglu-2024"])
    assert 15 < best.tokens / best.parameters < 30


def test_isoflop_bottoms_lead_to_the_optimum():
    surface, budgets = SURFACES["besiroglu-2024"], np.geomspace(1e18, 1e21, 7)
    bottoms = []
    for flops in budgets:
        sizes = compute_optimal(flops, surface).parameters * np.geomspace(0.7, 1.4, 9)
        size, loss = isoflop_minimum(sizes, surface.loss(sizes, flops / 6 / sizes))
        assert loss == pytest.approx(compute_optimal(flops, surface).loss, rel=1e-3)
        bottoms.append(size)
    law = fit_power_law(budgets, bottoms)
    assert -law.exponent.value == pytest.approx(surface.beta / (surface.alpha + surface.beta), rel=0.01)
    with pytest.raises(ValueError, match="no minimum"):
        isoflop_minimum([1, 2, 3], [1.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="three sizes"):
        isoflop_minimum([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        compute_optimal(0.0, surface)
