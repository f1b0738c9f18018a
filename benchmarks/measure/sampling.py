"""How many repetitions: warm up, then sample until the median is known tightly or the time is spent."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one case is sampled.

    Attributes:
        warmup: untimed calls before the first sample; the very first of all calls is kept apart.
        min_samples: samples taken whatever they cost. Never below 5 in a stored result.
        max_samples: samples after which sampling ends.
        tight: half-width of the median's 95% interval, as a share of the median, that is good enough.
        cap_seconds: time after which no further sample starts once min_samples are there.
        floor_seconds: time that sampling takes at least, unless max_samples end it: other load on a shared CPU
            comes in spells, and the least of samples that all fell into one says nothing.
        inner: calls a sample; a sample is their mean. 1 wherever a call must start from a cold cache.
        timed: the samples are stored. False where bytes are wanted and too few calls are made to speak of a time.
    """

    warmup: int = 2
    min_samples: int = 5
    max_samples: int = 30
    tight: float = 0.01
    cap_seconds: float = 1.0
    floor_seconds: float = 0.0
    inner: int = 1
    timed: bool = True

    def __post_init__(self) -> None:
        for name in ("min_samples", "max_samples", "inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What sampling gave.

    Attributes:
        first_seconds: the first call of all: compilation, autotuning and cold caches included.
        seconds: the timed samples, in order. With warmup=0 the first call is the first of them as well.
    """

    first_seconds: float
    seconds: list[float] = field(default_factory=list)


def median_interval(samples: Sequence[float], z: float = 1.96) -> tuple[float, float] | None:
    """The distribution-free interval of the median from order statistics, None below six samples.

    Ranks n/2 -+ z*sqrt(n)/2 of the sorted samples (normal approximation of the binomial; Conover, Practical
    Nonparametric Statistics, section 3.2).
    """
    n = len(samples)
    if n < 6:
        return None
    ordered = sorted(samples)
    half = z * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half) - 1)
    return ordered[low], ordered[high]


def is_tight(samples: Sequence[float], share: float) -> bool:
    """True when the median's interval reaches at most `share` of it to either side."""
    interval = median_interval(samples)
    middle = median(samples)
    return interval is not None and max(middle - interval[0], interval[1] - middle) <= share * middle


def take_samples(
    run: Callable[[], Any],
    *,
    clock: Callable[[Callable[[], Any]], float],
    policy: Policy,
    before: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time `run` repeatedly. `before` precedes every call outside the timed window.

    Args:
        run: the work.
        clock: seconds of one call; see `measure.clock`.
        policy: how many.
        before: cache flush, gradient reset and the like.
        now: the clock of the time cap, not of the samples.
    """

    def once() -> float:
        before()
        if policy.inner == 1:
            return clock(run)
        return clock(lambda: [run() for _ in range(policy.inner)]) / policy.inner

    before()
    first = clock(run)
    seconds = [first] if policy.warmup == 0 else []
    for _ in range(policy.warmup - 1):
        before()
        clock(run)
    start = now()
    while len(seconds) < policy.max_samples:
        spent = now() - start
        if len(seconds) >= policy.min_samples and (
            spent >= policy.cap_seconds or (spent >= policy.floor_seconds and is_tight(seconds, policy.tight))
        ):
            break
        seconds.append(once())
    return Samples(first_seconds=first, seconds=seconds)
