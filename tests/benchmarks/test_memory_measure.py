"""Out-of-memory errors are read, memory is released, peaks belong to their phases."""

import gc
import traceback
import weakref

import pytest
import torch

from benchmarks.measure import memory
from benchmarks.measure.memory import (
    HostMemoryError,
    PeakMeter,
    available_host_bytes,
    describe_out_of_memory,
    is_out_of_memory,
    read_out_of_memory,
    release,
    release_cell,
    size_text,
)
from trainstep.parallel.launch import RankFailure

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


def test_the_hosts_memory_is_named():
    error = HostMemoryError(3 * 2**30, 2**30)
    assert is_out_of_memory(error)
    assert describe_out_of_memory(error) == (
        "out of memory of the host: asked for 3221225472 bytes (3.00 GiB), free: 1073741824 bytes (1.00 GiB)"
    )


def raised(*errors, context=False):
    """The last of `errors`, each raised from the one before, or only while that one is handled."""
    before = None
    for error in errors:
        try:
            if before is None:
                raise error
            try:
                raise before
            except BaseException:
                if context:
                    raise error  # noqa: B904
                raise error from before
        except BaseException as caught:
            before = caught
    return before


OUT = torch.OutOfMemoryError(MESSAGE)


@pytest.mark.parametrize(
    "error",
    [
        OUT,
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("NCCL error, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
        ),
        RuntimeError("unable to mmap 400 bytes from file </torch_1>: Cannot allocate memory (12)"),
        RuntimeError("rank 3 failed in f: torch.OutOfMemoryError: Tried to allocate 2.00 GiB"),
        RuntimeError("rank 3 failed in f: MemoryError"),
        RuntimeError("backend='inductor' raised:\nOutOfMemoryError: no room"),
        raised(OUT, RuntimeError("the step failed")),
        raised(MemoryError(), ValueError("one"), RuntimeError("two")),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:50],
)
def test_running_out_of_memory(error):
    assert is_out_of_memory(error)
    assert describe_out_of_memory(error).startswith("out of memory")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory"),
        RuntimeError("OutOfMemoryError flag is bad"),
        RuntimeError("FooMemoryErrorHandler: missing"),
        RuntimeError("no FooMemoryError: here"),
        RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(28, "No space left on device"),
        raised(OUT, ValueError("while the other was handled"), context=True),
        raised(ValueError("bad"), RuntimeError("worse")),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[:50],
)
def test_other_errors(error):
    assert not is_out_of_memory(error)


def failing_rank(error):
    """What the launcher raises for a rank that raised `error`."""
    lines = traceback.format_exception(error)
    return RankFailure("job", 1, f"{type(error).__name__}: {error}", "".join(lines))


def test_the_traceback_of_a_rank():
    assert is_out_of_memory(failing_rank(OUT))
    assert is_out_of_memory(failing_rank(raised(OUT, ValueError("compiling"))))
    assert not is_out_of_memory(failing_rank(raised(OUT, ValueError("bad shape"), context=True)))
    try:
        with pytest.raises(torch.OutOfMemoryError): raise ValueError("MemoryError flag")  # noqa: E701  # fmt: skip
    except ValueError as error:
        failure = failing_rank(error)
    assert "torch.OutOfMemoryError)" in str(failure) and not is_out_of_memory(failure)


def test_an_error_raised_from_none_stands_alone():
    try:
        try:
            raise OUT
        except torch.OutOfMemoryError:
            raise ValueError("bad shape") from None
    except ValueError as error:
        assert error.__context__ is OUT and not is_out_of_memory(error)


def test_a_chain_that_ends_in_itself():
    error = RuntimeError("a")
    error.__cause__ = error
    assert not is_out_of_memory(error)


def test_amounts_are_read_from_the_error_inside():
    outer = raised(OUT, ValueError("compiling"), RuntimeError("failed: CUDA out of memory"))
    assert read_out_of_memory(outer) == read_out_of_memory(OUT)
    assert describe_out_of_memory(outer) == describe_out_of_memory(OUT)
    host = HostMemoryError(3 * 2**30, 2**30)
    assert describe_out_of_memory(raised(host, RuntimeError("x"))) == describe_out_of_memory(host)


def write(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_available_memory_of_the_host(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available_host_bytes(proc, groups) is None
    write(proc, meminfo="MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\n")
    assert available_host_bytes(proc, groups) == 1_024_000 * 9 // 10


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/a/b", {"a/memory.max": "500000", "a/memory.current": "200000"}, 300_000),
        ("0::/a/b", {"a/memory.max": "max", "a/memory.current": "200000"}, 1_024_000),
        (  # cache that can be dropped is free; the tighter of two groups decides
            "0::/a/b",
            {
                "a/memory.max": "500000", "a/memory.current": "200000", "a/memory.stat": "anon 5\ninactive_file 70\n",
                "a/b/memory.max": "600000", "a/b/memory.current": "200000",
            },
            300_070,
        ),
        # A container's own root, while the path is the host's.
        ("0::/docker/123", {"memory.max": "40000", "memory.current": "10000"}, 30_000),
        (
            "5:cpu:/c\n4:memory:/m",
            {"memory/m/memory.limit_in_bytes": "7000", "memory/m/memory.usage_in_bytes": "2000"},
            5_000,
        ),
        ("0::/", {"memory.max": "10", "memory.current": "50"}, 0),
    ],
)  # fmt: skip
def test_limits_of_control_groups(tmp_path, membership, files, left):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc, **{"meminfo": "MemAvailable:  1000 kB\n", "self/cgroup": membership + "\n"})
    write(groups, **files)
    assert available_host_bytes(proc, groups) == int(left * 0.9)


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "3.00 TiB",
    ]


class _Cell:
    """Refers to itself, so that only a collection takes it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def allocated(monkeypatch):
    """A CUDA allocator that holds what the test says, and a collector left as it was found."""
    held = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["bytes"])
    monkeypatch.setattr(memory, "_empty_caches", lambda: None)
    monkeypatch.setattr(memory, "_surviving_bytes", None)
    yield held
    gc.unfreeze()


def test_release_of_a_cell_collects_its_cycles_and_looks_no_more_at_what_survived(allocated):
    release_cell("cuda")
    dead = _Cell()
    known = weakref.ref(dead)
    del dead
    gc.disable()
    try:
        release_cell("cuda")
        assert known() is None
        assert gc.get_freeze_count() > 10_000  # every module of this process
        assert len(gc.get_objects()) < 5_000  # what the next collection will look at
    finally:
        gc.enable()


def test_release_of_a_cell_looks_at_everything_when_device_memory_is_left_over(allocated):
    late = _Cell()
    known = weakref.ref(late)
    release_cell("cuda")
    del late  # survived, hence frozen, and died since
    release_cell("cuda")
    assert known() is not None
    allocated["bytes"] = 2**21
    release_cell("cuda")
    assert known() is None
    assert memory._surviving_bytes == 2**21


def test_release_collects_what_a_cell_froze(allocated):
    late = _Cell()
    known = weakref.ref(late)
    release_cell("cuda")
    del late
    release("cuda")
    assert known() is None


def test_release_of_a_cell_freezes_nothing_on_a_cpu():
    release_cell("cpu")
    assert gc.get_freeze_count() == 0


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
