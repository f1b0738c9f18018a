"""Snapshots: the format, the timeline made from it, phases, frames, and nothing left recording."""

import pickle

import pytest
import torch

from trainstep.memory import snapshot as snapshots
from trainstep.memory.snapshot import Timeline, frame_of, load_snapshot, record_history, timeline

MINE = [{"filename": "/somewhere/src/trainstep/model/block.py", "line": 7, "name": "forward"}]


def event(action, size, moment, address, frames=MINE):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": moment, "frames": frames}


def cuda_like():
    """What CUDA's allocator would give: 100 bytes were in use before, 40 remain besides them at the end."""
    return {
        "segments": [
            {
                "device": 0,
                "blocks": [
                    {"size": 100, "state": "active_allocated"},
                    {"size": 40, "state": "active_allocated"},
                    {"size": 500, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [
            [
                event("segment_alloc", 640, 1_000_000, 1),
                event("alloc", 300, 1_000_000, 1),
                event("alloc", 40, 2_000_000, 2),
                event("free_requested", 300, 3_000_000, 1),
                event("free_completed", 300, 4_000_000, 1),
                event("alloc", 40, 5_000_000, 3, frames=[]),
                event("free_completed", 40, 5_500_000, 3),
            ]
        ],
        "trainstep": {"phases": [(1_500_000, "forward"), (4_500_000, "backward")], "start_bytes": None},
    }


def test_timeline_from_the_allocators_history():
    seen = timeline(cuda_like())
    assert seen.samples == ((0.0, 100), (0.0, 400), (1.0, 440), (3.0, 140), (4.0, 180), (4.5, 140))
    assert seen.phases == ((0.5, "forward"), (3.5, "backward"))
    assert seen.peak_bytes == 440
    assert seen.phase_peaks() == {"forward": 440, "backward": 180}
    assert [(a.bytes, a.count, a.phase, a.frame) for a in seen.allocations] == [
        (300, 1, "", "trainstep/model/block.py:7 forward"),
        (40, 1, "forward", "trainstep/model/block.py:7 forward"),
        (40, 1, "backward", "autograd engine (no Python frame)"),
    ]


def test_equal_allocations_are_counted_together():
    given = cuda_like()
    given["device_traces"][0].insert(3, event("alloc", 40, 2_100_000, 9))
    (_, small, *_) = timeline(given).allocations
    assert (small.bytes, small.count) == (40, 2)


def test_a_snapshot_without_our_marks_and_times():
    given = cuda_like()
    del given["trainstep"]
    for entry in given["device_traces"][0]:
        del entry["time_us"]
    seen = timeline(given)
    assert [used for _, used in seen.samples] == [100, 400, 440, 140, 180, 140]
    assert seen.phases == ()


def test_frames_of_pytorch_are_passed_over():
    inner = {"filename": torch.__file__, "line": 1, "name": "linear"}
    assert frame_of([inner, *MINE]) == "trainstep/model/block.py:7 forward"
    assert frame_of([inner]) == "autograd engine (no Python frame)"


def make_large_tensor():
    return torch.ones(1000)


def test_recording_on_a_cpu(tmp_path):
    weight = torch.ones(250, requires_grad=True)
    file = tmp_path / "deep" / "step.pickle"
    with record_history("cpu", file, resident=[weight, weight]) as history:
        history.phase("forward")
        loss = (weight * 2).sum() + make_large_tensor().sum()
        history.phase("backward")
        loss.backward()
    seen = timeline(load_snapshot(file))
    assert load_snapshot(file) == history.snapshot
    assert seen.samples[0] == (0.0, 1000)
    assert seen.peak_bytes >= 1000 + 4000
    assert [name for _, name in seen.phases] == ["forward", "backward"]
    largest = seen.allocations[0]
    assert (largest.bytes, largest.phase) == (4000, "forward")
    assert largest.frame.endswith("make_large_tensor")
    # At the end the gradient is alive, and what the loss keeps.
    assert seen.samples[-1][1] >= 2000
    addresses = [
        entry["addr"] for entry in history.snapshot["device_traces"][0] if entry["action"] == "alloc"
    ]
    assert len(set(addresses)) == len(addresses)


def test_pytorchs_own_viewer_reads_it():
    from torch.cuda._memory_viz import trace, trace_plot

    with record_history("cpu") as history:
        torch.ones(100).mul(2)
    walked = trace(history.snapshot).splitlines()
    assert [line.split(" #")[0] for line in walked if line.startswith(("a = MEM", "del a"))] == [
        "a = MEM[1048576:400.0B]",
        "del a",
    ]
    assert "add_local_files" in trace_plot(history.snapshot)


def test_nothing_stays_on_after_an_exception_and_the_record_is_kept(tmp_path):
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    file = tmp_path / "broken.pickle"
    with pytest.raises(RuntimeError, match="stop"), record_history("cpu", file) as history:
        history.phase("forward")
        torch.ones(5)
        raise RuntimeError("stop")
    assert _get_current_dispatch_mode() is None
    assert timeline(load_snapshot(file)).peak_bytes == 20
    assert [path.name for path in tmp_path.iterdir()] == ["broken.pickle"]


def test_cuda_recording_is_switched_off_when_the_step_or_the_snapshot_fails(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **_: calls.append(enabled)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: cuda_like())
    with pytest.raises(RuntimeError, match="stop"), record_history("cuda") as history:
        raise RuntimeError("stop")
    assert calls == ["all", None]
    assert timeline(history.snapshot).peak_bytes == 440

    def refuse():
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
    with pytest.raises(RuntimeError, match="no snapshot"), record_history("cuda"):
        pass
    assert calls == ["all", None, "all", None]


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1, 2]), pickle.dumps(3)])
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "other.pickle"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a memory snapshot"):
        load_snapshot(file)


def test_an_empty_history_is_refused():
    with pytest.raises(ValueError, match="no allocation history of device 1"):
        timeline(cuda_like(), device=1)


def test_thinning_keeps_the_peak_and_the_end():
    samples = tuple((i / 1000, i % 97) for i in range(10_000))
    seen = Timeline(samples=samples, phases=(), allocations=())
    thin = seen.thinned(100)
    assert len(thin) <= 102
    assert max(used for _, used in thin) == 96
    assert thin[-1] == samples[-1]
    assert list(thin) == sorted(thin)
    short = Timeline(samples=samples[:50], phases=(), allocations=())
    assert short.thinned(100) == samples[:50]


def test_events_are_bounded(monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_EVENTS", 3)
    with record_history("cpu") as history:
        for _ in range(10):
            torch.ones(1)
    assert len(history.snapshot["device_traces"][0]) == 3
