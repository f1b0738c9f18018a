"""What one side of a comparison knows about one case, and when two sides differ.

On a CPU a process is one observation: its minimum. Whatever else runs on the machine only ever adds time, for
whole processes at once, so that a process's repetitions are not independent and its median says how busy the
machine was. On a GPU a repetition is an observation and the median the statistic: clocks move both ways.

A difference counts when the distributions moved apart, not only a number:

- CPU: the smallest of the minima and their lower quartile both moved by more than the threshold, and on each side
  two processes agree on the smallest (the second smallest, of ten or more). One lucky process moves only the smallest;
  busy spells, even if they hit half of the processes, leave both where they are; a machine so crowded that no two
  processes agree says nothing, unless every process of one side is beyond every one of the other. (Simulated with five
  processes a side, a quarter of them busy by 5-60%: 0.1% false alarms and 98% of 15% slowdowns found; comparing medians
  of the minima gives 9% and 91%. `tests/benchmarks/test_evidence.py`.)
- GPU: the median moved by more than the threshold, and the current samples' lower quartile lies above the
  baseline's upper quartile. A case that flips between two modes moves its median without that.

The thresholds are half of what must be found (15% and 5%): a measured slowdown scatters about the true one,
and a threshold at the true one would miss every second. What is left of false alarms, the re-measurement
catches.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from benchmarks.measure.record import Row


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When two sides differ.

    Attributes:
        threshold: relative change of the statistic that counts; with `absolute`, its difference.
        needed: observations a side for that.
        weak_threshold: what counts with fewer, for lack of anything better.
        processes: an observation is a process (CPU), not a repetition (GPU).
        absolute: for shares from 0 to 1, of which 0.02 is not half of 0.04 but as good as equal.
    """

    threshold: float
    needed: int
    weak_threshold: float
    processes: bool
    absolute: bool = False

    def exceeds(self, old: float, new: float, threshold: float) -> bool:
        """Whether the cost `new` is above `old` by more than the threshold; nothing is divided."""
        # new > old first: inf (a rate of zero) does not exceed inf.
        return new > old and new > (old + threshold if self.absolute else old * (1 + threshold))

    def cost(self, value: float, better: str) -> float:
        """What is worse when larger: of a rate its inverse, of a share that should be high its negative."""
        if better == "lower":
            return value
        if self.absolute:
            return -value
        return 1 / value if value else math.inf


CPU_TIME = Rule(threshold=0.075, needed=5, weak_threshold=0.5, processes=True)
GPU_TIME = Rule(threshold=0.025, needed=10, weak_threshold=0.075, processes=False)
SHARE = Rule(threshold=0.1, needed=5, weak_threshold=0.3, processes=True, absolute=True)
# Bytes do not scatter; allocators round a little.
COUNT = Rule(threshold=0.02, needed=1, weak_threshold=0.02, processes=True)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Observations of one quantity of one case at one commit.

    Attributes:
        observations: one a process or one a sample, in the rule's sense; finite.
        better: "lower" or "higher".
        unit: of the observations.
        rule: how they compare.
    """

    observations: tuple[float, ...]
    better: str
    unit: str
    rule: Rule

    @property
    def value(self) -> float:
        """The number shown: of processes the best, of samples the median."""
        if not self.rule.processes:
            return median(self.observations)
        return min(self.observations) if self.better == "lower" else max(self.observations)

    @property
    def enough(self) -> bool:
        """Whether there are as many observations as the rule needs."""
        return len(self.observations) >= self.rule.needed

    @property
    def steady(self) -> bool:
        """Whether two processes agree on the best one, within the threshold; of ten or more processes, each ten may
        have one lucky process less. A single one has nobody to differ."""
        if not self.rule.processes or len(self.observations) < 2:
            return True
        costs = sorted(self.rule.cost(value, self.better) for value in self.observations)
        pairs = list(pairwise(costs))[: len(costs) // 10 + 1]
        return any(not self.rule.exceeds(best, second, self.rule.threshold) for best, second in pairs)

    def without_best(self) -> "Evidence":
        """The same less its best observation."""
        cost = [self.rule.cost(value, self.better) for value in self.observations]
        best = cost.index(min(cost))
        return replace(self, observations=self.observations[:best] + self.observations[best + 1 :])

    def settled(self) -> "Evidence":
        """The same if it is steady; else as if all processes had been as good as the best."""
        if self.steady:
            return self
        return replace(self, observations=(self.value,) * len(self.observations))


# What a ruler (`Row.ruler_sha256`) measured wrongly. A case's version cannot say so: it would part the times too, which
# are right, and rows of the mended ruler have that version already.
WITHDRAWN = {
    # 33.5 MB of cuBLAS's workspaces a thread, left by earlier cells, counted or not by what had run before.
    "memory_before_backward": ("7c7566b8dbd80348e59f143214bcff89caddd6b9ddd28da182d349eb9c5d4f1f",),
}
_EXACT_UNITS = ("byte", "bytes", "B", "KiB", "MiB", "GiB", "FLOP", "token", "step")


class NotFiniteError(Exception):
    """A row that claims success has no finite number for the quantity."""


def seconds(rows: Iterable[Row]) -> Evidence | None:
    """The time of a case over the ok rows of one commit; None when the case has no times at all.

    Raises:
        NotFiniteError: only some of the rows have samples, or one is not finite.
    """
    rows = list(rows)
    if all(not row.samples_seconds and row.metrics for row in rows):
        return None
    rule = rule_of_times(rows[0])
    groups = [row.samples_seconds for row in rows]
    return Evidence(observations=_observations(groups, "lower", rule), better="lower", unit="s", rule=rule)


def metric(rows: Iterable[Row], name: str) -> Evidence | None:
    """A metric over the ok rows of one commit that have it; None when none has, or it has no better side. What is
    withdrawn no row has.

    Raises:
        NotFiniteError: a value is not finite.
    """
    withdrawn = WITHDRAWN.get(name, ())
    having = [row for row in rows if name in row.metrics and row.ruler_sha256 not in withdrawn]
    if not having:
        return None
    first = having[0].metrics[name]
    if first.get("better") is None:
        return None
    unit = str(first.get("unit") or "")
    rule = COUNT if unit in _EXACT_UNITS else SHARE if unit in ("1",) else rule_of_times(having[0])
    groups = []
    for row in having:
        stored = row.metrics[name]
        groups.append(stored.get("samples") or (stored.get("value"),))
    return Evidence(
        observations=_observations(groups, first["better"], rule),
        better=first["better"],
        unit=unit,
        rule=rule,
    )


def of(rows: Iterable[Row], name: str) -> Evidence | None:
    """The seconds or a metric over those rows of one commit that are ok; None where there are none.

    Raises:
        NotFiniteError: see `seconds` and `metric`.
    """
    ok = [row for row in rows if row.status == "ok"]
    if not ok:
        return None
    return seconds(ok) if name == "seconds" else metric(ok, name)


def by_commit(rows: Mapping[str, Iterable[Row]], name: str) -> dict[str, Evidence | None]:
    """`of` each commit's rows.

    Raises:
        NotFiniteError: see `of`.
    """
    return {commit: of(found, name) for commit, found in rows.items()}


def rule_of_times(row: Row) -> Rule:
    """The rule for times of a row's device."""
    return GPU_TIME if row.env.get("device") == "cuda" else CPU_TIME


def _observations(groups: Sequence[Sequence[float | None]], better: str, rule: Rule) -> tuple[float, ...]:
    for group in groups:
        if not group or any(value is None or not math.isfinite(value) for value in group):
            raise NotFiniteError
    finite = [[float(value) for value in group if value is not None] for group in groups]
    if rule.processes:
        best = min if better == "lower" else max
        return tuple(best(group) for group in finite)
    return tuple(value for group in finite for value in group)


def ratio(before: Evidence, after: Evidence) -> float | None:
    """The statistic after over before; None over a zero baseline, 1 when both are zero."""
    if before.value == 0:
        return 1.0 if after.value == 0 else None
    return after.value / before.value


def worse(before: Evidence, after: Evidence) -> bool:
    """Whether `after` is worse than `before` beyond doubt; see the module's text."""
    rule = after.rule
    threshold = rule.threshold if before.enough and after.enough else rule.weak_threshold
    old, new = ([rule.cost(value, e.better) for value in e.observations] for e in (before, after))
    if rule.processes:
        if not (before.steady and after.steady):
            return rule.exceeds(max(old), min(new), threshold)
        quartiles = _quantile(old, 0.25), _quantile(new, 0.25)
        return rule.exceeds(min(old), min(new), threshold) and rule.exceeds(*quartiles, threshold)
    return rule.exceeds(median(old), median(new), threshold) and _quantile(new, 0.25) > _quantile(old, 0.75)


def past_half(best: Evidence, after: Evidence, value: Evidence) -> bool:
    """Whether `value` lies more than half of the way from `best` to the worse `after`, or beyond it: of ratios, half
    of the logarithm."""
    rule = after.rule
    start, end, here = (rule.cost(e.value, e.better) for e in (best, after, value))
    return 2 * here > start + end if rule.absolute else here * here > start * end


def better(before: Evidence, after: Evidence) -> bool:
    """Whether `after` is better than `before` beyond doubt."""
    return worse(after, before)


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    if ordered[low] == ordered[high]:  # also inf, whose difference is NaN
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
