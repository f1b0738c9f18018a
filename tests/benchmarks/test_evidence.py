"""The rule that says when two sides differ, against models of what machines do to times (seeded)."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence import (
    COUNT,
    CPU_TIME,
    GPU_TIME,
    WITHDRAWN,
    Evidence,
    NotFiniteError,
    better,
    metric,
    ratio,
    seconds,
    worse,
)
from benchmarks.gate import compare, exit_status
from benchmarks.measure.record import load
from tests.benchmarks.rows import GPU, row

TRIALS = 400


def shared_cpu(rng, true=1.0, repetitions=20):
    """One process on a shared core: jitter that only adds, a busy spell through the whole process at times,
    and bursts in single repetitions."""
    samples = true * (1 + 0.01 * rng.exponential(size=repetitions))
    if rng.random() < 0.25:
        samples *= 1 + rng.uniform(0.05, 0.6)
    return samples * np.where(rng.random(repetitions) < 0.2, 1 + rng.exponential(0.3, repetitions), 1)


def cpu_side(rng, true=1.0, drift=(1.0,) * 5):
    return [row(seconds=shared_cpu(rng, true * d), process=i) for i, d in enumerate(drift)]


def boosted_side(rng, true=1.0):
    """The worst case of the rule, which takes noise to add time: five processes, each at times on a core 12%
    faster."""
    return cpu_side(rng, true, [1 / 1.12 if rng.random() < 0.15 else 1.0 for _ in range(5)])


def crowded_side(rng, true=1.0):
    """A machine with more work than cores: every process is slowed, by anything up to a few times."""
    return cpu_side(rng, true, 1 + rng.exponential(1.0, 5))


def gpu_side(rng, true=1.0, spread=0.003):
    return [row(seconds=true * (1 + spread * rng.standard_normal(15)), env=GPU)]


def two_modes(rng, true=1.0):
    """A launch-bound GPU case that is 6% slower in about half of its repetitions."""
    return [
        row(seconds=true * (1 + 0.06 * (rng.random(15) < 0.5) + 0.002 * rng.standard_normal(15)), env=GPU)
    ]


def rate(side, slowdown, seed, judge=worse):
    rng = np.random.default_rng(seed)
    return sum(judge(seconds(side(rng)), seconds(side(rng, slowdown))) for _ in range(TRIALS)) / TRIALS


def naive_rate(slowdown, seed):
    rng = np.random.default_rng(seed)
    pairs = ((shared_cpu(rng), shared_cpu(rng, slowdown)) for _ in range(TRIALS))
    return sum(np.median(new) / np.median(old) > 1.1 for old, new in pairs) / TRIALS


def twice(side, slowdown, seed):
    """The gate's alarm: seen once, then again in a re-measurement."""
    rng = np.random.default_rng(seed)
    fired = 0
    for _ in range(TRIALS):
        fired += all(worse(seconds(side(rng)), seconds(side(rng, slowdown))) for _ in range(2))
    return fired / TRIALS


def test_the_noise_is_hard_enough_for_a_naive_rule():
    assert naive_rate(1.0, seed=1) > 0.1, "false alarms"
    assert naive_rate(1.15, seed=2) < 0.9, "misses"


@pytest.mark.parametrize(
    "side, rarely",
    [(cpu_side, 0.01), (boosted_side, 0.1), (crowded_side, 0.06), (gpu_side, 0), (two_modes, 0.02)],
)
def test_the_same_code_raises_no_alarm(side, rarely):
    assert rate(side, 1.0, seed=3) <= rarely, "a first sight may err"
    assert twice(side, 1.0, seed=4) <= rarely**2


def test_planted_slowdowns_are_found():
    assert rate(cpu_side, 1.15, seed=5) >= 0.97
    assert rate(gpu_side, 1.05, seed=6) == 1


def test_where_no_two_processes_agree_only_full_separation_counts():
    old, new, far = (
        [row(seconds=(s,) * 5) for s in side]
        for side in ((1, 2, 3, 4, 5), (2, 4, 6, 8, 9), (6, 8, 9, 10, 11))
    )
    assert not seconds(old).steady and seconds([row(seconds=(1.0, 9.0))] * 5).steady
    assert not worse(seconds(old), seconds(new)) and worse(seconds(old), seconds(far))
    assert seconds(old[:1]).steady


def test_of_ten_processes_one_may_be_lucky():
    # Seen: a planted 15%, each side measured in two times five processes.
    old = (0.65, 0.67, 0.67, 0.84, 0.66, 0.92, 0.79, 0.82, 0.59, 0.87)
    new = (0.76, 0.99, 1.03, 1.02, 0.74, 0.76, 0.74, 0.72, 1.1, 0.77)
    before, after = (seconds([row(seconds=(level,)) for level in side]) for side in (old, new))
    assert before.steady and worse(before, after)
    lucky = seconds([row(seconds=(level,)) for level in (0.4, 0.5, *old[2:])])
    assert not lucky.steady  # two of them


def test_planted_speedups_are_found():
    assert rate(cpu_side, 1 / 1.15, seed=7, judge=better) >= 0.97
    assert rate(gpu_side, 1 / 1.05, seed=8, judge=better) == 1


def test_alternating_cancels_a_drift_that_would_alarm():
    """The machine slows by 3% a process. Side after side it is a slowdown, alternating it is none."""
    rng = np.random.default_rng(9)
    drift = [1.03**i for i in range(10)]
    blocks = [
        worse(seconds(cpu_side(rng, 1, drift[:5])), seconds(cpu_side(rng, 1, drift[5:]))) for _ in range(50)
    ]
    order = [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    sides = [[d for d, o in zip(drift, order, strict=True) if o == side] for side in (0, 1)]
    mixed = [
        worse(seconds(cpu_side(rng, 1, sides[0])), seconds(cpu_side(rng, 1, sides[1]))) for _ in range(50)
    ]
    assert np.mean(blocks) > 0.5 and np.mean(mixed) <= 0.02


def test_a_cpu_process_counts_by_its_minimum_a_gpu_by_its_samples():
    cpu = seconds([row(seconds=(3.0, 1.0, 2.0)), row(seconds=(5.0, 4.0))])
    assert cpu.observations == (1.0, 4.0) and cpu.rule is CPU_TIME and not cpu.enough
    gpu = seconds([row(seconds=(3.0, 1.0), env=GPU), row(seconds=(2.0,), env=GPU)])
    assert gpu.observations == (3.0, 1.0, 2.0) and gpu.value == 2.0 and gpu.rule is GPU_TIME


def test_few_observations_show_large_changes_only():
    one, slower, twice_ = ([row(seconds=(s,) * 5)] for s in (1.0, 1.2, 2.0))
    assert not worse(seconds(one), seconds(slower)) and worse(seconds(one), seconds(twice_))


def metrics(value, unit="bytes", better="lower", **more):
    return [row(metrics={"m": {"value": value, "unit": unit, "better": better, **more}})]


@pytest.mark.parametrize(
    "old, new, unit, direction, verdict",
    [
        (100, 50, "tokens/s", "higher", "worse"),
        (50, 100, "tokens/s", "higher", "better"),
        (10, 20, "ms", "lower", "worse"),
        (0, 5, "bytes", "lower", "worse"),
        (5, 0, "bytes", "lower", "better"),
        (0, 0, "bytes", "lower", "same"),
        (0, 0, "tokens/s", "higher", "same"),
        (0, 5, "tokens/s", "higher", "better"),
        (5, 0, "tokens/s", "higher", "worse"),
        (1000, 1010, "bytes", "lower", "same"),
        (1000, 1030, "bytes", "lower", "worse"),
        (0.9, 0.5, "1", "higher", "worse"),
        (0.5, 0.9, "1", "higher", "better"),
        (0.04, 0.02, "1", "higher", "same"),
        (0.0, 0.02, "1", "lower", "same"),
        (0.0, 0.5, "1", "lower", "worse"),
    ],
)
def test_direction_and_zero(old, new, unit, direction, verdict):
    before, after = (metric(metrics(v, unit, direction), "m") for v in (old, new))
    assert (worse(before, after), better(before, after)) == (verdict == "worse", verdict == "better")
    assert ratio(before, after) == (1.0 if old == new else None if old == 0 else new / old)


def test_a_metric_without_a_better_side_is_not_compared():
    assert metric(metrics(5, better=None), "m") is None and metric(metrics(5), "other") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_not_finite_is_an_error(value):
    with pytest.raises(NotFiniteError):
        metric(metrics(value), "m")
    with pytest.raises(NotFiniteError):
        metric(metrics(1.0, samples=[1.0, value]), "m")
    with pytest.raises(NotFiniteError):
        seconds([row(seconds=(1.0,)), row(seconds=(value,))])
    with pytest.raises(NotFiniteError):
        seconds([row(seconds=())])


def test_a_case_may_have_metrics_only():
    assert seconds([replace(metrics(1)[0], samples_seconds=())]) is None
    assert metric(metrics(1), "m").rule is COUNT
    assert Evidence(observations=(1.0,), better="lower", unit="s", rule=COUNT).enough


def test_what_a_ruler_measured_wrongly_is_no_evidence():
    """Memory in use before a backward pass that counted workspaces of earlier cells; the rest of the rows stays."""
    ((name, (ruler,)),) = WITHDRAWN.items()
    held = {"value": 2e8, "unit": "byte", "better": "lower"}
    old, new = (row(metrics={name: held, "peak": held}, ruler_sha256=sha) for sha in (ruler, "6" * 64))
    assert metric([old], name) is None and metric([old], "peak") and seconds([old])
    assert metric([old, new], name).observations == (2e8,)
    more = replace(old, metrics={name: {**held, "value": 3e8}, "peak": held})
    assert {finding.kind for finding in compare([old], [more])} == {"unchanged"}
    assert exit_status(compare([old], [new])) == 0


def test_withdrawn_is_what_committed_records_hold():
    """A mistyped hash would withdraw nothing."""
    rows, _ = load([Path(__file__).resolve().parents[2] / "results" / "records"])
    for name, rulers in WITHDRAWN.items():
        assert {row.ruler_sha256 for row in rows if name in row.metrics} >= set(rulers)
