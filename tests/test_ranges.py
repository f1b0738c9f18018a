"""Profiler ranges: nothing when off, nested and closed when on."""

import contextlib

import pytest
import torch

from trainstep import ranges


@pytest.fixture
def pushed(monkeypatch):
    """Every call of the nvtx package, in order."""
    calls = []
    monkeypatch.setattr(ranges.nvtx, "push_range", lambda name, domain: calls.append((name, domain)))
    monkeypatch.setattr(ranges.nvtx, "pop_range", lambda domain: calls.append(("pop", domain)))
    yield calls
    ranges.disable()


def test_off_by_default_and_free(pushed):
    assert not ranges.is_enabled()
    with ranges.annotate("a") as entered:
        pass
    assert entered is None
    assert pushed == []
    # One object for all: an inner loop allocates nothing.
    assert ranges.annotate("a") is ranges.annotate("b")


def test_on_ranges_nest(pushed):
    ranges.enable()
    with ranges.annotate("outer"), ranges.annotate("inner"):
        pass
    domain = "trainstep"
    assert pushed == [("outer", domain), ("inner", domain), ("pop", domain), ("pop", domain)]


def test_closed_after_an_exception(pushed):
    ranges.enable()
    with contextlib.suppress(KeyError), ranges.annotate("a"):
        raise KeyError
    assert [name for name, _ in pushed] == ["a", "pop"]


def test_disabled_inside_a_range_still_closes_it(pushed):
    ranges.enable()
    with ranges.annotate("a"):
        ranges.disable()
    assert [name for name, _ in pushed] == ["a", "pop"]


def test_decorator_asks_at_each_call(pushed):
    @ranges.annotated("f")
    def double(x):
        """Twice x."""
        return 2 * x

    assert double.__doc__ == "Twice x."
    assert double(3) == 6 and pushed == []
    ranges.enable()
    assert double(3) == 6
    assert [name for name, _ in pushed] == ["f", "pop"]


def test_torch_profiler_sees_the_ranges(pushed):
    ranges.enable()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, ranges.annotate("my phase"):
        torch.ones(2).neg()
    assert "my phase" in {event.key for event in profile.key_averages()}


def test_the_real_package_takes_the_calls():
    ranges.enable()
    try:
        with ranges.annotate("a"):
            pass
    finally:
        ranges.disable()


@pytest.mark.parametrize("on", [False, True])
def test_compiled_code_keeps_one_graph(pushed, on):
    if on:
        ranges.enable()

    def f(x):
        with ranges.annotate("sine"):
            y = x.sin()
        return y + 1

    torch.compiler.reset()
    x = torch.linspace(0, 1, 5)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="eager")(x), f(x))
    assert [name for name, _ in pushed] == (["sine", "pop"] if on else [])  # the eager call's own
