"""Profile the parts of a step with torch.profiler, and answer what people ask of the result."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.kernel_names import short_name
from benchmarks.measure.trace import Kernel, kernels_of, load_trace

Part = tuple[str, Callable[[], Any]]

# Per score: subtract the maximum, exponentiate, add to the sum, divide, and the comparison that finds the
# maximum.
SOFTMAX_FLOPS_PER_SCORE = 5


@dataclass(frozen=True, kw_only=True)
class KernelLine:
    """One kernel in one phase's table: calls, total seconds and the share of the phase's device time
    (0..1)."""

    name: str
    kind: str
    calls: int
    seconds: float
    share: float


def profile_parts(
    parts: Sequence[Part],
    trace: Path,
    *,
    device: str,
    before: Callable[[], None] = lambda: None,
    warmup: int = 2,
) -> list[Kernel]:
    """Run the parts once under the profiler, each in a range of its name, and write the Chrome trace.

    Args:
        parts: (name, function) in order, e.g. forward, backward, optimizer.
        trace: file to write, compressed when it ends in ".gz"; its directory is made.
        device: "cpu" or "cuda".
        before: runs before each round, outside the profile (gradient reset).
        warmup: rounds that are not profiled.

    Profiler and ranges are as they were afterwards, also when a part raises.

    Raises:
        RuntimeError: on CUDA the profiler saw no kernels.
    """
    import torch

    from trainstep import ranges

    def round_of_parts() -> None:
        for name, part in parts:
            with ranges.annotate(name):
                part()
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(warmup):
        before()
        round_of_parts()
    before()
    # Above its highest level, or the profiler's library reports every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with ranges_on(), torch.profiler.profile(activities=activities) as profiler:
        round_of_parts()
    trace.parent.mkdir(parents=True, exist_ok=True)
    part = trace.with_name(f".{trace.name}")  # the suffix decides whether the profiler compresses
    try:
        profiler.export_chrome_trace(str(part))
        part.replace(trace)
    finally:
        part.unlink(missing_ok=True)
    kernels = kernels_of(load_trace(trace))
    if device == "cuda" and not any(kernel.lane.startswith("stream") for kernel in kernels):
        raise RuntimeError("the profiler saw no kernels of the GPU; with KINETO_LOG_LEVEL=0 it may say why")
    return kernels


@contextlib.contextmanager
def ranges_on() -> Iterator[None]:
    """Ranges reach the profilers inside, and are as they were afterwards."""
    from trainstep import ranges

    was = ranges.is_enabled()
    ranges.enable()
    try:
        yield
    finally:
        if not was:
            ranges.disable()


@contextlib.contextmanager
def measured_range(device: str) -> Iterator[None]:
    """What `nsys` with a capture range records."""
    if device != "cuda":
        yield
        return
    import torch

    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextlib.contextmanager
def attention_ranges(model: Any) -> Iterator[None]:
    """Put every attention call of a model (modules with an `attend` function) into a range "attention"."""
    from trainstep.ranges import annotated

    marked = [module for module in model.modules() if callable(getattr(module, "attend", None))]
    plain = [module.attend for module in marked]
    for module in marked:
        module.attend = annotated("attention")(module.attend)
    try:
        yield
    finally:
        for module, attend in zip(marked, plain, strict=True):
            module.attend = attend


def kernel_table(kernels: Sequence[Kernel], phase: str | None = None) -> list[KernelLine]:
    """Kernels of a phase (None: of all) by name, the most expensive first."""
    chosen = [kernel for kernel in kernels if phase is None or kernel.phase == phase]
    grouped: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in chosen:
        grouped[(kernel.name, kernel.kind)].append(kernel.duration_us)
    total = sum(kernel.duration_us for kernel in chosen)
    lines = [
        KernelLine(
            name=name,
            kind=kind,
            calls=len(times),
            seconds=sum(times) / 1e6,
            share=sum(times) / total if total else 0.0,
        )
        for (name, kind), times in grouped.items()
    ]
    return sorted(lines, key=lambda line: (-line.seconds, line.name))


def shares(kernels: Sequence[Kernel], phases: Sequence[str]) -> dict[str, float]:
    """Share of device time (0..1) of each kind of work over some phases; empty when nothing ran."""
    times: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.phase in phases:
            times[kernel.kind] += kernel.duration_us
    total = sum(times.values())
    return {kind: time / total for kind, time in sorted(times.items())} if total else {}


@dataclass(frozen=True, kw_only=True)
class AttentionSplit:
    """Time inside attention, in one forward: softmax, the two products, and masks, scales and copies."""

    softmax_seconds: float
    matmul_seconds: float
    other_seconds: float

    @property
    def seen(self) -> bool:
        """False when softmax and products cannot be told apart: fused or compiled attention."""
        return self.softmax_seconds > 0 and self.matmul_seconds > 0


def attention_split(kernels: Sequence[Kernel], phase: str = "forward") -> AttentionSplit:
    """Split the kernels of the ranges "attention ..." by what they do.

    The reference marks its scores, mask, softmax and value product; elsewhere names of kernels decide.
    """
    times = {"softmax": 0.0, "matmul": 0.0, "other": 0.0}
    for kernel in kernels:
        if kernel.phase != phase or not any(name.startswith("attention") for name in kernel.ranges):
            continue
        if any("softmax" in name.lower() for name in (*kernel.ranges, kernel.name, kernel.operation)):
            times["softmax"] += kernel.duration_us
        elif kernel.kind == "matmul":
            times["matmul"] += kernel.duration_us
        else:
            times["other"] += kernel.duration_us
    return AttentionSplit(
        softmax_seconds=times["softmax"] / 1e6,
        matmul_seconds=times["matmul"] / 1e6,
        other_seconds=times["other"] / 1e6,
    )


def attention_flops(config: Any) -> tuple[float, float]:
    """(softmax, products) FLOPs of all layers in one forward, over full S x S scores as materialised."""
    scores = config.n_layers * config.batch_size * config.n_heads * config.context_length**2
    return float(SOFTMAX_FLOPS_PER_SCORE * scores), float(4 * scores * config.head_dim)


def unit_of(device: str) -> str:
    """What a line of a table is: on a CPU no kernel is seen, only the operator that computes."""
    return "kernel" if device == "cuda" else "operator"


def answers(kernels: Sequence[Kernel], config: Any | None = None, device: str = "cuda") -> list[str]:
    """The usual questions about a profiled step, answered in words from its kernels."""
    what = unit_of(device)
    said = []
    phases = [phase for phase in dict.fromkeys(kernel.phase for kernel in kernels) if phase]
    tables = {phase: kernel_table(kernels, phase) for phase in phases}
    for phase, table in tables.items():
        first = table[0]
        said.append(
            f"{phase}: the {what} with most time is {short_name(first.name)} ({first.kind}): {first.share:.1%} of the "
            f"phase, {first.calls} calls, {first.seconds * 1e3:.3f} ms."
        )
    if len(phases) > 1 and "forward" in tables:
        first = kernel_table(kernels)[0]
        calls = sum(line.calls for line in tables["forward"] if line.name == first.name)
        same = "the same as" if tables["forward"][0].name == first.name else "another than"
        said.append(
            f"whole step: most time takes {short_name(first.name)} ({first.share:.1%}), {same} in forward alone; one "
            f"forward calls it {calls} times."
        )
    if "forward" in tables:
        said += _about_products(kernels, phases, tables["forward"])
    return said + _about_attention(kernels, config, what)


def _about_products(
    kernels: Sequence[Kernel], phases: Sequence[str], forward: Sequence[KernelLine]
) -> list[str]:
    alone, step = shares(kernels, ["forward"]), shares(kernels, phases)
    text = f"matrix products take {alone.get('matmul', 0):.1%} of the time in forward"
    if len(phases) > 1:
        text += f" and {step.get('matmul', 0):.1%} in {' + '.join(phases)}"
    fused = step.get("attention", 0)
    said = [f"{text}." + (f" Fused attention takes another {fused:.1%}." if fused else "")]
    rest = next((line for line in forward if line.kind not in ("matmul", "attention")), None)
    if rest is not None:
        said.append(
            f"forward, besides products: most time takes {short_name(rest.name)} ({rest.share:.1%}, "
            f"{rest.calls} calls)."
        )
    return said


def _about_attention(kernels: Sequence[Kernel], config: Any | None, what: str) -> list[str]:
    split = attention_split(kernels)
    if split.seen and config is not None:
        softmax, products = attention_flops(config)
        ratio, expected = split.softmax_seconds / split.matmul_seconds, softmax / products
        return [
            f"inside attention softmax takes {split.softmax_seconds * 1e3:.3f} ms and the products "
            f"{split.matmul_seconds * 1e3:.3f} ms, a ratio of {ratio:.2f}, for {softmax:.3g} and "
            f"{products:.3g} FLOPs, a ratio of {expected:.3f}: a softmax FLOP costs {ratio / expected:.0f} "
            "times one of a product."
        ]
    if any(kernel.kind == "attention" for kernel in kernels):
        return [f"softmax and products of attention are one fused {what} here and cannot be told apart."]
    return []
