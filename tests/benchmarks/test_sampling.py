"""What is inside the timed window and what is not, how many samples, and what a sample means."""

import statistics

import pytest

from benchmarks.measure.clock import HostClock, slowest_rank
from benchmarks.measure.sampling import Policy, is_tight, median_interval, take_samples


class FakeTime:
    """A clock that only the work advances."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def spend(self, seconds):
        self.seconds += seconds


def test_sampling_takes_its_time_even_when_the_samples_agree():
    time = FakeTime()
    for floor, taken in ((0.0, 6), (0.25, 25), (10.0, 40)):
        policy = Policy(warmup=1, min_samples=5, max_samples=40, cap_seconds=20, floor_seconds=floor)
        samples = take_samples(
            lambda: time.spend(0.01), clock=HostClock(now=time.now), policy=policy, now=time.now
        )
        assert len(samples.seconds) == pytest.approx(taken, abs=1)


def test_compile_flush_and_reset_stay_outside_the_window():
    """Field case B2: the first three calls compile, each sample is preceded by a flush and a gradient reset."""
    time = FakeTime()
    time.spend(50)  # setup
    calls = []

    def run():
        calls.append(1)
        time.spend(100 if len(calls) <= 3 else 1)

    def before():
        time.spend(7 + 2)

    samples = take_samples(
        run,
        clock=HostClock(now=time.now),
        policy=Policy(warmup=3, min_samples=10, max_samples=10),
        before=before,
    )
    assert samples.seconds == [1.0] * 10
    assert samples.first_seconds == 100.0


def test_without_warmup_the_first_call_is_a_visible_sample():
    """Field case B2, second half: warmup=0 must not hide the cold start."""
    time, calls = FakeTime(), []

    def run():
        calls.append(1)
        time.spend(100 if len(calls) == 1 else 1)

    policy = Policy(warmup=0, min_samples=4, max_samples=4)
    samples = take_samples(run, clock=HostClock(now=time.now), policy=policy)
    assert samples.seconds == [100, 1, 1, 1]
    assert samples.first_seconds == 100
    assert len(calls) == 4


@pytest.mark.parametrize("inner", [1, 7, 100])
def test_inner_iterations_do_not_change_the_time_of_one(inner):
    """Field case B5: a one-second step takes one second, however many calls a sample holds."""
    time = FakeTime()
    policy = Policy(warmup=1, min_samples=3, max_samples=3, inner=inner)
    samples = take_samples(lambda: time.spend(1), clock=HostClock(now=time.now), policy=policy)
    assert samples.seconds == pytest.approx([1.0] * 3)


def test_a_device_clock_that_only_synchronisation_advances():
    """SPEC 2.2: work is queued at no cost; the time passes while the host waits for the device."""
    time, queue = FakeTime(), []

    def synchronize():
        while queue:
            time.spend(queue.pop())

    clock = HostClock(synchronize=synchronize, now=time.now)
    phases = [
        (name, lambda s=s: queue.append(s)) for name, s in (("forward", 3), ("backward", 6), ("optimizer", 1))
    ]
    assert clock.phases(phases) == {"forward": 3, "backward": 6, "optimizer": 1}
    assert clock(lambda: [step() for _, step in phases]) == 10


def test_work_queued_before_the_window_is_not_in_it():
    time, queue = FakeTime(), [40]

    def synchronize():
        while queue:
            time.spend(queue.pop())

    clock = HostClock(synchronize=synchronize, now=time.now)
    assert clock(lambda: queue.append(3)) == 3


def test_the_slowest_rank_counts():
    assert slowest_rank(lambda: [0.1, 0.4, 0.2]) == 0.4


def test_sampling_ends_when_the_median_is_tight_or_the_time_is_spent():
    time = FakeTime()
    steady = take_samples(
        lambda: time.spend(1),
        clock=HostClock(now=time.now),
        policy=Policy(min_samples=5, max_samples=100, cap_seconds=1e9),
        now=time.now,
    )
    assert len(steady.seconds) == 6  # the fewest that have an interval
    durations = iter([1, 1] + [1, 5] * 50)
    noisy = take_samples(
        lambda: time.spend(next(durations)),
        clock=HostClock(now=time.now),
        policy=Policy(min_samples=5, max_samples=100, cap_seconds=50),
        now=time.now,
    )
    assert 5 <= len(noisy.seconds) < 100
    assert sum(noisy.seconds) >= 50


def test_the_interval_of_the_median_covers_it_at_the_stated_rate():
    import random

    generator = random.Random(5)
    hits = 0
    for _ in range(400):
        samples = [generator.expovariate(1.0) for _ in range(25)]
        low, high = median_interval(samples)
        hits += low <= 0.6931 <= high
    assert 0.92 <= hits / 400 <= 0.99


def test_few_samples_have_no_interval_and_are_never_tight():
    assert median_interval([1.0] * 5) is None
    assert not is_tight([1.0] * 5, 0.5)
    assert statistics.median([1.0]) == 1.0


@pytest.mark.parametrize("bad", [{"min_samples": 0}, {"warmup": -1}, {"inner": 0}])
def test_impossible_counts_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        Policy(**bad)
