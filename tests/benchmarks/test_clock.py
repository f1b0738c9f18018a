"""The event clock: what the host needs to launch a call is no part of the call's time on the device."""

import time

import pytest
import torch

from benchmarks.measure import clock
from benchmarks.measure.clock import EventClock


class Device:
    """A stream on which `_sleep` takes time and events record when they are reached."""

    def __init__(self, monkeypatch):
        self.busy_until = 0.0
        self.held = []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.busy_until = max(device.busy_until, time.perf_counter())

            def synchronize(self):
                time.sleep(max(0.0, self.at - time.perf_counter()))

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def sleep(self, cycles):
        self.held.append(cycles / clock.CYCLES_A_SECOND)
        self.work(self.held[-1])

    def work(self, seconds):
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds


def slow_launch(device, host_seconds, device_seconds):
    def run():
        time.sleep(host_seconds)
        device.work(device_seconds)

    return run


def test_launches_do_not_count(monkeypatch):
    device = Device(monkeypatch)
    timer = EventClock()
    run = slow_launch(device, host_seconds=0.003, device_seconds=0.001)
    assert timer(run) > 0.0035  # the first call of all meets an idle device
    for _ in range(3):
        assert timer(run) == pytest.approx(0.001, abs=2e-4)


def test_the_device_is_held_for_so_long_at_most(monkeypatch):
    device = Device(monkeypatch)
    timer = EventClock()
    run = slow_launch(device, host_seconds=0.05, device_seconds=0.001)
    timer(run)
    timer(run)
    assert device.held == [0.0, clock.LONGEST_HOLD_SECONDS]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_do_not_count_on_a_device():
    x = torch.ones(1 << 20, device="cuda")

    def run():
        time.sleep(0.002)
        x.add_(1)

    timer = EventClock()
    assert [timer(run), timer(run)][0] > 0.002
    assert max(timer(run) for _ in range(5)) < 0.0005
