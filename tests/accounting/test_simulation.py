import itertools

import pytest

from trainstep.accounting.pipeline_bubble import bubble_fraction
from trainstep.accounting.planner import sharded_seconds
from trainstep.accounting.simulation import (
    Task,
    interleaved_pipeline,
    makespan,
    one_forward_one_backward,
    pipeline,
    sharded_pass,
    simulate,
)


def test_lanes_run_in_order_and_wait():
    times = simulate(
        [
            Task("a", "x", 2.0),
            Task("b", "x", 1.0),
            Task("c", "y", 1.0, (("a", 0.5),)),
            Task("d", "y", 1.0, (("b", 0.0),)),
        ]
    )
    assert times == {"a": (0, 2), "b": (2, 3), "c": (2.5, 3.5), "d": (3.5, 4.5)}


@pytest.mark.parametrize("after", ["b", "ghost"])
def test_a_circle_or_a_ghost_is_an_error_and_no_hang(after):
    with pytest.raises(ValueError, match="never ends"):
        simulate([Task("a", "x", 1.0, ((after, 0.0),)), Task("b", "y", 1.0, (("a", 0.0),))])


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_every_pass_runs_once_and_in_flight_stays_bounded(stages, microbatches):
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, microbatches)
        assert sorted(order) == sorted([(k, i) for k in "FB" for i in range(microbatches)])
        held = peak = 0
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            peak = max(peak, held)
        assert peak == min(stages - stage, microbatches)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_the_bubble_is_the_formula(stages, microbatches):
    tasks = pipeline([1.0] * stages, [2.0] * stages, microbatches)
    span = makespan(tasks)
    assert span == pytest.approx((microbatches + stages - 1) * 3.0)
    idle = 1 - 3.0 * microbatches / span
    assert idle == pytest.approx(bubble_fraction(stages=stages, microbatches=microbatches))


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
@pytest.mark.parametrize(
    ("compute", "gather", "scatter"),
    [(3.0, 1.0, 0.0), (1.0, 3.0, 0.0), (5.0, 1.0, 2.0), (1.0, 2.0, 4.0), (3.0, 4.0, 1.0)],
)
def test_a_sharded_pass_hides_what_it_can(layers, compute, gather, scatter):
    span = makespan(sharded_pass(layers, compute, gather, scatter))
    assert span == pytest.approx(sharded_seconds(layers, compute, gather, scatter))
    assert span >= max(gather + layers * compute + scatter, layers * (gather + scatter))
    assert span <= layers * (compute + gather + scatter)


def test_never_more_than_the_prefetched_layers_are_whole():
    times = simulate(sharded_pass(8, 1.0, 0.1, 0.0))
    for moment in (0.05 + 0.1 * i for i in range(90)):
        whole = sum(times[f"gather {i}"][1] <= moment < times[f"compute {i}"][1] for i in range(8))
        assert whole <= 2


def test_interleaving_divides_the_bubble():
    for stages, groups, chunks in itertools.product((1, 2, 4), (1, 2, 5), (1, 2, 3)):
        microbatches = stages * groups
        span = makespan(interleaved_pipeline(stages, chunks, microbatches, 1.0, 2.0))
        idle = 1 - 3.0 * microbatches * chunks / span
        formula = bubble_fraction(stages=stages, microbatches=microbatches, chunks=chunks)
        assert idle == pytest.approx(formula, abs=1e-12), (stages, groups, chunks)
    with pytest.raises(ValueError, match="do not divide into groups of 4"):
        interleaved_pipeline(4, 2, 6, 1.0, 2.0)
    with pytest.raises(ValueError, match="at least 1"):
        bubble_fraction(stages=0, microbatches=8)
