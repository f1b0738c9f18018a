"""What a reader wants to know about one row: times, spread, rates, share of the roofline, provenance.

Rates live here and nowhere else: a row stores seconds and the work one repetition must do, so that every
table and every chart divides the same numbers in the same way. Absent means None, never NaN or zero.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.cases.case import parse_id
from benchmarks.measure.record import AGAIN, STUDY, Row

# Order of the provenance line; other keys of `env` stay in the records.
_CONTEXT_KEYS = ("driver", "cuda", "torch", "triton", "python", "host")
# Metrics that say what was to be done, not what came of it.
WORK = ("flops", "bytes", "tokens")
ABOVE_PEAK = "above the peak: work or peak is wrong"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Samples of one quantity, in its own unit.

    Attributes:
        count: samples taken.
        mean, median, minimum: of the samples.
        std: standard deviation with n - 1 in the denominator, None for one sample.
        spread: distance between the quartiles over the median, None for fewer than four samples or a zero
            median.
    """

    count: int
    mean: float
    median: float
    minimum: float
    std: float | None
    spread: float | None


def summarize(samples: Iterable[float | None]) -> Summary | None:
    """Summarize finite samples; None when there are none."""
    finite = [float(value) for value in samples if value is not None and math.isfinite(value)]
    if not finite:
        return None
    median = statistics.median(finite)
    spread = None
    if len(finite) >= 4 and median > 0:
        low, _, high = statistics.quantiles(finite, n=4, method="inclusive")
        spread = (high - low) / median
    return Summary(
        count=len(finite),
        mean=statistics.fmean(finite),
        median=median,
        minimum=min(finite),
        std=statistics.stdev(finite) if len(finite) > 1 else None,
        spread=spread,
    )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One row with its id taken apart and its samples summarized.

    Attributes:
        row: as stored.
        area, target, phase, dtype, world_size, shape: from the case id.
        configuration: area, phase and parameters: what rows must share to be peers of one another.
        time: summary of the row's seconds; None unless its status is "ok".
    """

    row: Row
    area: str
    target: str
    phase: str
    dtype: str
    world_size: int
    parameters: str
    shape: dict[str, Any] = field(default_factory=dict)
    time: Summary | None = None

    @property
    def configuration(self) -> tuple[str, str, str]:
        return self.area, self.phase, self.parameters

    @property
    def seconds(self) -> float | None:
        """Median time of one repetition."""
        return self.time.median if self.time else None

    @property
    def label(self) -> str:
        """The configuration as one reads it: phase and parameters."""
        return f"{self.phase} · {self.parameters}"

    @property
    def oversubscribed(self) -> bool:
        """More ranks than cores: a time that says little."""
        cores = self.row.env.get("cpu_count")
        return self.row.env.get("device") == "cpu" and isinstance(cores, int) and self.world_size > cores

    def metric(self, name: str) -> float | None:
        """The value of a metric, None when absent or not finite, or when the row has no result."""
        entry = self.row.metrics.get(name)
        if entry is None or self.row.status != "ok":
            return None
        value = entry.get("value")
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def metric_summary(self, name: str) -> Summary | None:
        """Summary of a metric's samples, of its one value where samples were not kept."""
        entry = self.row.metrics.get(name)
        if entry is None or self.row.status != "ok":
            return None
        return summarize(entry.get("samples") or [entry.get("value")])

    def per_second(self, metric: str) -> float | None:
        """A work metric ("flops", "bytes", "tokens") over the median time; None where one is missing."""
        work = self.metric(metric)
        return work / self.seconds if work is not None and self.seconds else None

    @property
    def device_name(self) -> str | None:
        """The GPU as torch names it; None on a CPU, whose peak nobody lists."""
        name = self.row.env.get("gpu")
        return str(name) if name else None

    @property
    def attainable_flops_per_second(self) -> float | None:
        """The roofline over this row on its ranks: the compute peak, or intensity times bandwidth."""
        peak = peak_of(self.device_name, self.dtype)
        if peak is None:
            return None
        flops, moved = self.metric("flops"), self.least_bytes
        attainable = peak.flops_per_second
        if flops and moved and peak.bytes_per_second:
            attainable = min(attainable, flops / moved * peak.bytes_per_second)
        return attainable * self.world_size

    @property
    def above_peak(self) -> bool:
        """Faster than its device can be: the work is counted wrong, or the clock or the peak is."""
        peak, moved = peak_of(self.device_name, self.dtype), self.per_second("bytes")
        if peak and peak.bytes_per_second and moved and moved > peak.bytes_per_second * self.world_size:
            return True
        return (self.roofline_share or 0) > 1

    @property
    def least_bytes(self) -> float | None:
        """Bytes that must pass through device memory: what the row notes, for attention each tensor once.

        Forward: q, k, v and the output. Backward, alone or after a forward pass: these and their gradients. None
        for other rows that note nothing.
        """
        noted = self.metric("bytes")
        if (
            noted is not None
            or self.area != "attention"
            or not {"B", "N", "K", "S", "T", "H"} <= set(self.shape)
        ):
            return noted
        from trainstep.specs.dtype import get_dtype

        shape = self.shape
        elements = shape["B"] * shape["H"] * (shape["N"] * shape["S"] + shape["K"] * shape["T"])
        return elements * get_dtype(self.dtype).bytes * (2 if self.phase == "forward" else 4)

    @property
    def roofline_share(self) -> float | None:
        """Rate over the attainable rate; above 1 see `above_peak`."""
        rate, attainable = self.per_second("flops"), self.attainable_flops_per_second
        return rate / attainable if rate is not None and attainable else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: rate over the compute peak of all ranks, without recomputed FLOPs."""
        rate, peak = self.per_second("flops"), peak_of(self.device_name, self.dtype)
        return rate / (peak.flops_per_second * self.world_size) if rate is not None and peak else None


def facts_of(row: Row) -> Facts:
    """Take one row apart. A row whose id does not parse is kept: area "other", the whole id as target. One that is ok
    and has nothing to show, as the writer leaves it when a sample was not finite, has failed."""
    empty = not row.samples_seconds and set(row.metrics) <= set(WORK)
    if row.status == "ok" and row.suite != STUDY and empty:
        row = replace(row, status="error", reason="no finite samples")
    time = summarize(row.samples_seconds) if row.status == "ok" else None
    try:
        parsed = parse_id(row.case)
    except ValueError:
        return Facts(
            row=row, area="other", target=row.case, phase="", dtype="", world_size=1, parameters="", time=time
        )
    named = {key: parsed.pop(key) for key in ("area", "target", "phase", "dtype", "world_size")}
    return Facts(row=row, **named, parameters=row.case.rsplit("/", 1)[1], shape=parsed, time=time)


def latest(rows: Iterable[Row]) -> list[Facts]:
    """The newest row of each case on each machine, in the order of their cases' first appearance.

    asv keeps no work, check or reason, so its rows count only where no other suite measured the case, and its
    "n/a" never does: it also stands for pairs of parameters that nobody asked for. What the gate measured again
    answers an alarm and stands in no table. A case measured in several processes of one run is one row with the
    samples of all of them.
    """
    newest: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.suite == AGAIN or (row.suite == "asv" and row.status == "skipped"):
            continue
        kept = newest.setdefault((row.machine, row.case), [])
        if kept and (row.run, row.commit) == (kept[0].run, kept[0].commit) and "process" in row.env:
            kept.append(row)
        elif not kept or _age(row) >= _age(kept[0]):
            kept[:] = [row]
    return [facts_of(_pooled(kept)) for kept in newest.values()]


def _age(row: Row) -> tuple[bool, str]:
    return row.suite != "asv", row.started_at


def _pooled(rows: list[Row]) -> Row:
    """Processes of one run as one row; the first that failed speaks for all."""
    for row in rows:
        if row.status != "ok":
            return row
    samples = tuple(second for row in rows for second in row.samples_seconds)
    return replace(rows[0], samples_seconds=samples)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What one device can do at best with one dtype."""

    flops_per_second: float
    bytes_per_second: float | None = None


def peak_of(device_name: str | None, dtype: str) -> Peak | None:
    """Peak of a device by its name; None for an unknown device or a dtype its sheet lacks. Never guessed."""
    if not device_name:
        return None
    try:
        from trainstep.specs.device import find_device
    except ImportError:
        return None
    device = find_device(device_name)
    flops = device.peak(dtype) if device else None
    return (
        Peak(flops_per_second=flops, bytes_per_second=device.memory_bytes_per_second)
        if device and flops
        else None
    )


def context_of(row: Row) -> dict[str, str]:
    """Machine, commit, date and versions of a row: what must stand beside an absolute number."""
    commit = (row.commit or "none")[:10] + (" + changes" if row.dirty else "")
    context = {"machine": row.machine}
    device = row.env.get("gpu") or row.env.get("cpu") or row.env.get("device")
    if device:
        context["device"] = str(device)
    versions = {key: str(row.env.get(key) or "") for key in _CONTEXT_KEYS}
    # asv may name a Python by its path, which is nobody's business.
    context |= {key: value for key, value in versions.items() if value and "/" not in value}
    return context | {"commit": commit, "date": row.started_at[:10]}


def contexts(facts: Sequence[Facts]) -> list[str]:
    """Each distinct provenance among rows as one line, in order of appearance."""
    lines = {
        " · ".join(_spoken(key, value) for key, value in context_of(fact.row).items()): None for fact in facts
    }
    return list(lines)


def _spoken(key: str, value: str) -> str:
    return value if key in ("machine", "device", "date") else f"{key} {value}"
