"""What marking a step with ranges costs while they are off: marked and bare steps, alternating in one run."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

MOST_ROUNDS = 600


@dataclass(frozen=True, kw_only=True)
class OffRatio:
    """Marked against bare steps.

    Attributes:
        ratio: marked over bare seconds of the same round: the median over all rounds and both bare series.
        noise: the factor, at least 1, by which the median of one bare series over the other may differ from 1 in 19 of
            20 such runs. A ratio within it, either way, says nothing.
        rounds: each has one marked step and a step of each bare series.
    """

    ratio: float
    noise: float
    rounds: int

    @property
    def within_noise(self) -> bool:
        """True when marked steps differ from bare ones no more than bare ones differ from each other."""
        return 1 / self.noise <= self.ratio <= self.noise

    def __str__(self) -> str:
        verdict = "within" if self.within_noise else "beyond"
        return (
            f"ranges that are switched off take {self.ratio:.3f} times the bare step, {verdict} the noise: in the "
            f"same {self.rounds} rounds two bare series are equal up to a factor of {self.noise:.3f}."
        )


def off_ratio(
    parts: Sequence[tuple[str, Callable[[], Any]]],
    *,
    device: str,
    before: Callable[[], None] = lambda: None,
    seconds: float = 2.0,
) -> OffRatio:
    """Time parts bare, in ranges that are switched off, and bare again, in every order by turns.

    All six orders are taken equally often: 12 rounds at least, 600 at most, and as many between as fit into `seconds`
    of measured time.
    """
    from benchmarks.measure.clock import host_clock
    from trainstep import ranges

    clock = host_clock(device)

    def bare() -> None:
        for _, part in parts:
            part()

    def marked() -> None:
        for name, part in parts:
            with ranges.annotate(name):
                part()

    first: list[float] = []
    on: list[float] = []
    second: list[float] = []
    orders = list(permutations([(bare, first), (marked, on), (bare, second)]))
    while len(on) < 2 * len(orders) or (len(on) < MOST_ROUNDS and sum(first + on + second) < seconds):
        for order in orders:
            for run, series in order:
                before()
                series.append(clock(run))
    bare_ratios = sorted(_ratios(second, first))
    low, high = _interval(bare_ratios)
    return OffRatio(
        ratio=statistics.median([*_ratios(on, first), *_ratios(on, second)]),
        noise=max(high, 1 / low),
        rounds=len(on),
    )


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round: what slows a whole round down changes no ratio."""
    return [one / other for one, other in zip(over, under, strict=True)]


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where the median of a population lies with 95% confidence, by the sign test: between the k-th smallest and the
    k-th largest of a sample, k the largest with P(Binomial(n, 1/2) < k) <= 2.5%."""
    count = len(ordered)
    rank, tail = 0, 1
    while 40 * tail <= 2**count:
        rank += 1
        tail += math.comb(count, rank)
    assert rank >= 1, "six or more rounds"
    return ordered[rank - 1], ordered[-rank]
