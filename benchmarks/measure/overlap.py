"""How much of the communication of a step was hidden behind computation, from a trace."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.trace import kernels_of

Interval = tuple[float, float]

# On a CPU a collective's own operation only queues it, or waits for it: it is neither computing nor
# communicating.
_QUEUEING = ("c10d::", "gloo:", "nccl:")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Two lanes of one trace.

    Attributes:
        computation, communication: disjoint (start, end) in microseconds, in order.
    """

    computation: tuple[Interval, ...]
    communication: tuple[Interval, ...]

    @property
    def communication_seconds(self) -> float:
        """Time in which something was being communicated."""
        return _length(self.communication) / 1e6

    @property
    def hidden_seconds(self) -> float:
        """The part of it in which something was also being computed."""
        return _length(intersection(self.computation, self.communication)) / 1e6

    @property
    def hidden_share(self) -> float | None:
        """0 (all of it waited for) to 1 (all of it hidden); None when nothing was communicated."""
        total = self.communication_seconds
        return self.hidden_seconds / total if total else None


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same points as disjoint intervals in order; empty ones are dropped."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return tuple((start, end) for start, end in merged)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[Interval, ...]:
    """Points in both; each argument disjoint and in order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap_of(trace: dict[str, Any]) -> Overlap:
    """Lanes of a trace: NCCL kernels, or gloo's work on a CPU, against computing ones; copies are neither."""
    kernels = kernels_of(trace)
    communication = union((k.start_us, k.end_us) for k in kernels if k.kind == "communication")
    if any(kernel.lane.startswith("stream") for kernel in kernels):
        computation = union(
            (k.start_us, k.end_us) for k in kernels if k.kind not in ("communication", "copy")
        )
    else:
        # Whole operations: a kernel's own time leaves out what its inner operations took, and does not say
        # when.
        computation = union(
            (event["ts"], event["ts"] + event["dur"])
            for event in trace["traceEvents"]
            if event.get("ph") == "X"
            and event.get("cat") == "cpu_op"
            and not event["name"].startswith(_QUEUEING)
        )
    return Overlap(computation=computation, communication=communication)


def draw(overlap: Overlap, path: Path, title: str = "Computation and communication") -> None:
    """Both lanes as a picture (PNG or SVG by the path's suffix), the exposed part of communication marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from benchmarks.report.style import LIGHT, color_of, matplotlib_style

    begun = min((start for start, _ in (*overlap.computation, *overlap.communication)), default=0.0)
    hidden = intersection(overlap.computation, overlap.communication)

    def bars(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
        return [((start - begun) / 1e3, (end - start) / 1e3) for start, end in intervals]

    with matplotlib_style():
        figure = Figure(figsize=(9, 2.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.broken_barh(bars(overlap.computation), (1.1, 0.8), color=color_of(0))
        axes.broken_barh(bars(overlap.communication), (0.1, 0.8), color=color_of(1), label="exposed")
        axes.broken_barh(bars(hidden), (0.1, 0.8), color=color_of(2), label="hidden behind computation")
        axes.set_yticks([0.5, 1.5], ["communication", "computation"])
        axes.set_xlabel("ms")
        axes.grid(False, axis="y")
        share = overlap.hidden_share
        said = "nothing was communicated" if share is None else f"{share:.0%} of communication hidden"
        axes.set_title(f"{title}: {said}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9, labelcolor=LIGHT.ink)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name("." + path.name)
        figure.savefig(part, format=path.suffix.removeprefix("."))
        part.replace(path)
