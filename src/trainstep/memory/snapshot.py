"""Record every allocation of a region, in the file format that PyTorch's memory viewer opens.

On CUDA the caching allocator keeps the history itself. On a CPU, where PyTorch keeps none, the same format is
written from the bytes of tensors as operations make and drop them. Either way the file is a pickle of a
dictionary with one list of events a device (`device_traces`); drop it on https://docs.pytorch.org/memory_viz.
Phases are marked by the host's clock, the one that stamps the events, under a key of our own that the viewer
ignores.
"""

import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainstep.memory.live import LiveBytes

MAX_EVENTS = 1_000_000
OURS = "trainstep"
_TORCH = str(Path(torch.__file__).parent)
_ENDS = ("free_completed", "free")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Equal allocations of a region taken together.

    Attributes:
        bytes: of one of them.
        count: how many.
        phase: in which they were made, "" before the first.
        frame: the innermost Python frame outside PyTorch, "file:line function"; allocations of the autograd
            engine's own thread have none.
    """

    bytes: int
    count: int
    phase: str
    frame: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Active memory over time.

    Attributes:
        samples: (seconds since the first event, bytes in use from then on).
        phases: (seconds at which it begins, name).
        allocations: the largest first.
    """

    samples: tuple[tuple[float, int], ...]
    phases: tuple[tuple[float, str], ...]
    allocations: tuple[Allocation, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest sample."""
        return max((used for _, used in self.samples), default=0)

    def phase_peaks(self) -> dict[str, int]:
        """Most bytes in use during each phase, what was in use at its beginning included."""
        peaks: dict[str, int] = {}
        ends = [*(seconds for seconds, _ in self.phases[1:]), float("inf")]
        for (start, name), end in zip(self.phases, ends, strict=True):
            before = [used for seconds, used in self.samples if seconds <= start]
            inside = [used for seconds, used in self.samples if start <= seconds < end]
            peaks[name] = max([*before[-1:], *inside, peaks.get(name, 0)], default=0)
        return peaks

    def thinned(self, count: int = 2000) -> tuple[tuple[float, int], ...]:
        """At most about `count` samples for drawing; of each stretch the highest and the last stay."""
        if len(self.samples) <= count:
            return self.samples
        size = -(-2 * len(self.samples) // count)
        kept: list[tuple[float, int]] = []
        for start in range(0, len(self.samples), size):
            stretch = self.samples[start : start + size]
            highest = max(stretch, key=lambda sample: sample[1])
            kept.extend([highest, stretch[-1]] if highest != stretch[-1] else [highest])
        return tuple(kept)


@dataclass(kw_only=True)
class History:
    """A recording in progress.

    Attributes:
        device: "cpu" or "cuda".
        snapshot: the recording, complete once the region has ended.
    """

    device: str
    snapshot: dict[str, Any] = field(default_factory=dict)
    _phases: list[tuple[int, str]] = field(default_factory=list)

    def phase(self, name: str) -> None:
        """A phase begins here and lasts until the next begins."""
        self._phases.append((_now_us(), name))


def _now_us() -> int:
    return time.time_ns() // 1000


class _CountedHistory(LiveBytes):
    """Events of tensors' storages in the allocator's format, with addresses that are never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self._next_address = 1 << 20

    def _event(self, action: str, size: int, address: int, frames: list[dict[str, Any]]) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size,
                    "stream": 0,
                    "time_us": _now_us(),
                    "frames": frames,
                }
            )

    def _born(self, size: int) -> int:
        address = self._next_address
        self._next_address += max(size, 1)
        self._event("alloc", size, address, _stack(sys._getframe(3)))
        return address

    def _died(self, size: int, token: int) -> None:
        for action in ("free_requested", "free_completed"):
            self._event(action, size, token, [])


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """Innermost first, as the allocator has it."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames


@contextmanager
def record_history(
    device: str, path: Path | None = None, resident: Iterable[torch.Tensor] = ()
) -> Iterator[History]:
    """Record the allocations of the `with` block and write them when it ends, also when it ends by an
    exception.

    Args:
        device: "cpu" or "cuda" (the current one).
        path: file to write, `.pickle` by custom; None keeps the snapshot in memory only.
        resident: tensors alive before the block; only a CPU needs to be told, CUDA's allocator knows.

    The region's result is complete only up to MAX_EVENTS events. Recording is off afterwards, whatever
    happened.
    """
    history = History(device=device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=MAX_EVENTS, clear_history=True
        )
        try:
            yield history
        finally:
            try:
                torch.cuda.synchronize()
                history.snapshot = torch.cuda.memory._snapshot()
            finally:
                torch.cuda.memory._record_memory_history(None)
            _finish(history, None, path)
    else:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in resident}
        counted = _CountedHistory()
        counted.ignore(*storages.values())
        try:
            with counted:
                yield history
        finally:
            history.snapshot = {"segments": [], "device_traces": [counted.events]}
            _finish(history, sum(t.untyped_storage().nbytes() for t in storages.values()), path)


def _finish(history: History, start_bytes: int | None, path: Path | None) -> None:
    history.snapshot[OURS] = {"phases": history._phases, "start_bytes": start_bytes}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(pickle.dumps(history.snapshot))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def load_snapshot(path: Path) -> dict[str, Any]:
    """Read a snapshot file, ours or PyTorch's. A pickle runs code: open only files that you trust.

    Raises:
        ValueError: the file is not a memory snapshot.
    """
    try:
        snapshot = pickle.loads(path.read_bytes())
        if "device_traces" in snapshot and "segments" in snapshot:
            return snapshot
    except (pickle.UnpicklingError, EOFError, TypeError):
        pass
    raise ValueError(f"{path} is not a memory snapshot")


def timeline(snapshot: dict[str, Any], device: int = 0, largest: int = 5) -> Timeline:
    """Active memory over time, from a snapshot alone.

    Memory counts from its allocation until the allocator has it back (a free on another stream completes
    late). What was in use before the recording is the difference between what is in use at its end and what
    the events add up to.

    Raises:
        ValueError: the snapshot holds no history of this device.
    """
    traces = snapshot["device_traces"]
    if device >= len(traces) or not traces[device]:
        raise ValueError(f"the snapshot holds no allocation history of device {device}")
    events = [event for event in traces[device] if event["action"] in ("alloc", *_ENDS)]
    deltas = [event["size"] if event["action"] == "alloc" else -event["size"] for event in events]
    ours = snapshot.get(OURS, {})
    start = ours.get("start_bytes")
    if start is None:
        start = _active_at_end(snapshot, device) - sum(deltas)
    times = [event.get("time_us", index) for index, event in enumerate(events)]
    begun = min([times[0] if times else 0, *(moment for moment, _ in ours.get("phases", ()))])
    used = start
    samples = [(0.0, used)]
    for moment, delta in zip(times, deltas, strict=True):
        used += delta
        samples.append(((moment - begun) / 1e6, used))
    phases = tuple(((moment - begun) / 1e6, name) for moment, name in ours.get("phases", ()))
    counted: Counter[tuple[int, str, str]] = Counter()
    for moment, event in zip(times, events, strict=True):
        if event["action"] == "alloc":
            counted[event["size"], _phase_at((moment - begun) / 1e6, phases), frame_of(event["frames"])] += 1
    ranked = sorted(counted.items(), key=lambda item: -item[0][0])[:largest]
    return Timeline(
        samples=tuple(samples),
        phases=phases,
        allocations=tuple(
            Allocation(bytes=size, count=count, phase=phase, frame=frame)
            for (size, phase, frame), count in ranked
        ),
    )


def _active_at_end(snapshot: dict[str, Any], device: int) -> int:
    return sum(
        block["size"]
        for segment in snapshot["segments"]
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    )


def _phase_at(seconds: float, phases: tuple[tuple[float, str], ...]) -> str:
    name = ""
    for begins, phase in phases:
        if begins <= seconds:
            name = phase
    return name


def frame_of(frames: list[dict[str, Any]]) -> str:
    """The innermost frame that is neither PyTorch's nor this recorder's, as "file:line function"."""
    for frame in frames:
        name = frame["filename"]
        if (
            name.endswith(".py")
            and not name.startswith(_TORCH)
            and "/torch/" not in name
            and name != __file__
        ):
            for root in ("/site-packages/", "/src/"):
                _, found, rest = name.rpartition(root)
                name = rest if found else name
            return f"{'/'.join(Path(name).parts[-3:]).lstrip('/')}:{frame['line']} {frame['name']}"
    return "autograd engine (no Python frame)"
