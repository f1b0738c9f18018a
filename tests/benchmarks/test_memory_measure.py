"""Out-of-memory errors are read, memory is released, peaks belong to their phases."""

import gc
import weakref

import pytest
import torch

from benchmarks.measure.memory import (
    PeakMeter,
    describe_out_of_memory,
    read_out_of_memory,
    release,
    size_text,
)

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of which "
    "512.00 MiB is free. Including non-PyTorch memory, this process has 139.30 GiB in use.\nSee documentation"
)


def test_amounts_are_read():
    read = read_out_of_memory(torch.OutOfMemoryError(MESSAGE))
    assert read.asked_bytes == 5 * 2**29
    assert read.free_bytes == 2**29
    assert describe_out_of_memory(torch.OutOfMemoryError(MESSAGE)) == (
        "out of memory: asked for 2684354560 bytes (2.50 GiB), free: 536870912 bytes (512.00 MiB)"
    )


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "out of memory"),
        ("no amounts here\nsecond line", "out of memory: no amounts here"),
        ("Tried to allocate 20 bytes.", "out of memory: asked for 20 bytes (20 B), free: unknown"),
    ],
)
def test_messages_without_amounts(message, line):
    assert describe_out_of_memory(torch.OutOfMemoryError(message)) == line


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "3.00 TiB",
    ]


def test_release_collects_cycles():
    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, torch.ones(10)
    alive = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert alive() is not None
        release("cpu")
    finally:
        gc.enable()
    assert alive() is None


def test_peaks_by_phase():
    weight = torch.ones(1000)
    with PeakMeter("cpu", (weight, weight.view(10, 100))) as meter:
        with meter.phase("small"):
            kept = weight * 2
        with meter.phase("large"):
            (weight * 3).repeat(10)
        with meter.phase("nothing"):
            pass
    assert meter.start_bytes == 4000
    assert meter.peaks_bytes == {"small": 8000, "large": 8000 + 4000 + 40000, "nothing": 8000}
    assert meter.peak_bytes == 52000
    del kept


def test_a_phase_does_not_remember_the_one_before():
    def peak():
        with PeakMeter("cpu") as meter, meter.phase("only"):
            torch.ones(100).add(1)
        return meter.peak_bytes

    alone = peak()
    torch.ones(100_000).add(1)
    assert peak() == alone == 800


def test_the_counter_is_off_after_an_exception():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    with pytest.raises(RuntimeError, match="stop"), PeakMeter("cpu") as meter, meter.phase("broken"):
        raise RuntimeError("stop")
    assert _get_current_dispatch_mode() is None
    assert meter.peaks_bytes == {}
