"""What ranges cost while they are off: a fair comparison, on a clock that decides what each step takes."""

import contextlib
import itertools
import math
import random
import statistics

import pytest

from benchmarks.measure import clock as clock_module
from benchmarks.measure.off_ratio import MOST_ROUNDS, off_ratio
from trainstep import ranges


@pytest.fixture
def measured(monkeypatch):
    """measured(cost, ...): the ratio on a clock by which the n-th step takes cost(n, is it marked)."""
    opened = []

    def annotate(name):
        opened.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(ranges, "annotate", annotate)

    def measure(cost, **options):
        number = itertools.count()

        def clock(run):
            opened.clear()
            run()
            return cost(next(number), bool(opened))

        monkeypatch.setattr(clock_module, "host_clock", lambda device: clock)
        return off_ratio([("forward", lambda: None)], device="cpu", **options)

    return measure


def busy(seed, marked_costs=1.0):
    """A host on which the same step takes now more, now less."""
    draw = random.Random(seed)
    return lambda number, marked: 0.05 * (marked_costs if marked else 1) * math.exp(draw.gauss(0, 0.3))


def test_ranges_that_cost_nothing_are_found_to_cost_nothing_on_a_busy_host(measured):
    found = [measured(busy(seed)) for seed in range(200)]
    # No bias: as often above as below, and none on average.
    assert abs(statistics.fmean(math.log(one.ratio) for one in found)) < 0.03
    assert 70 < sum(one.ratio > 1 for one in found) < 130
    assert sum(one.within_noise for one in found) >= 190
    assert all(one.noise >= 1 for one in found)


def test_a_cost_is_seen(measured):
    found = [measured(busy(seed, marked_costs=3.0)) for seed in range(50)]
    assert all(not one.within_noise and one.ratio == pytest.approx(3, rel=0.5) for one in found)
    assert "beyond the noise" in str(found[0]) and "within the noise" in str(measured(busy(1)))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_no_place_in_a_round_is_a_disadvantage(measured, slow):
    """The host falters in step with the rounds."""
    found = measured(lambda number, marked: 0.05 * (1.3 if number % 3 == slow else 1))
    assert found.ratio == 1 and found.within_noise


def test_a_slow_stretch_of_the_run_changes_no_ratio(measured):
    found = measured(lambda number, marked: 0.05 * (1 + number / 10))
    assert found.ratio == pytest.approx(1, abs=0.01) and found.within_noise


@pytest.mark.parametrize(("step_seconds", "rounds"), [(10.0, 12), (0.01, 72), (1e-6, MOST_ROUNDS)])
def test_rounds_are_bounded_by_time(measured, step_seconds, rounds):
    calls = []
    found = measured(lambda number, marked: step_seconds, before=lambda: calls.append(1))
    assert found.rounds == rounds and len(calls) == 3 * rounds
    assert (found.ratio, found.noise, found.within_noise) == (1, 1, True)


def test_a_real_clock():
    found = off_ratio([("forward", lambda: sum(range(1000)))], device="cpu", seconds=0)
    assert found.rounds == 12 and found.ratio > 0 and found.noise >= 1
