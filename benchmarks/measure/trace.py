"""Read a Chrome trace of torch.profiler: which kernels ran, in which phase and range, for what kind of work.

Pure functions over the trace's JSON, so that a trace from another machine is read the same way. On CUDA a
kernel belongs
where it was launched: its correlation id leads to the launch on the host, and the ranges open there are its
ranges. On a CPU the operations themselves are the kernels, each with the time that no inner operation
accounts for.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "optimizer")
KINDS = ("matmul", "attention", "communication", "copy", "other")

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH = {"cuda_runtime", "cuda_driver"}
_PRODUCTS = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::_scaled_mm",
    "aten::mv",
    "aten::dot",
}
_MATMUL = re.compile(r"gemm|nvjet|cutlass|cublas|wgmma|triton_tem_\w*mm|splitk|matmul", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|attn", re.IGNORECASE)
_COMMUNICATION = re.compile(r"^(nccl(Dev)?Kernel|nccl_|ncclKernel|gloo:)", re.IGNORECASE)
# Names that other libraries give their annotations; they are no ranges of ours.
_FOREIGN = re.compile(r"^(gloo:|nccl:|ProfilerStep#|## |Torch-Compiled Region|Optimizer\.)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One piece of work of the device (on a CPU: one operation's own time).

    Attributes:
        name: the kernel's, or the operation's.
        operation: PyTorch operation that launched it, "" where the trace does not say.
        phase: the phase that was open at its launch, "" outside all.
        ranges: ranges open in the launching thread, outermost first, phases included.
        start_us, duration_us: on the device's clock.
        lane: stream, or thread.
        kind: one of KINDS; a fused attention kernel is "attention", products inside it are not told apart.
    """

    name: str
    operation: str
    phase: str
    ranges: tuple[str, ...]
    start_us: float
    duration_us: float
    lane: str
    kind: str

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


def load_trace(path: Path) -> dict[str, Any]:
    """Read a trace file, compressed by gzip or not.

    Raises:
        ValueError: it cannot be read, or is not a Chrome trace.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    try:
        trace = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
        if isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list):
            return trace
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile):
        pass
    raise ValueError(f"{path} is not a Chrome trace")


def kind_of(name: str, operation: str = "") -> str:
    """What kind of work a kernel does, from its name and the operation that launched it."""
    if _COMMUNICATION.search(name):
        return "communication"
    if name.startswith(("Memcpy", "Memset")):
        return "copy"
    if _ATTENTION.search(name) or (operation and _ATTENTION.search(operation)):
        return "attention"
    if operation in _PRODUCTS or name in _PRODUCTS or _MATMUL.search(name):
        return "matmul"
    return "other"


def kernels_of(trace: dict[str, Any], phases: Sequence[str] = PHASES) -> list[Kernel]:
    """The kernels of a trace in order of time."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    annotations = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and not _FOREIGN.search(event["name"])
    ]
    open_phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in annotations
        if event["name"] in phases
    )
    on_device = any(event.get("cat") in _DEVICE for event in events)
    found = (
        _device_kernels(events, annotations, open_phases)
        if on_device
        else _host_kernels(events, annotations, open_phases)
    )
    return sorted(found, key=lambda kernel: kernel.start_us)


def _phase_at(moment: float, open_phases: Iterable[tuple[float, float, str]]) -> str:
    """Phases are opened by the main thread, and what autograd's threads launch meanwhile belongs to them."""
    for start, end, name in open_phases:
        if start <= moment <= end:
            return name
    return ""


def _by_thread(events: Iterable[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        threads[(event.get("pid"), event.get("tid"))].append(event)
    return threads


def _device_kernels(
    events: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
    open_phases: list[tuple[float, float, str]],
) -> list[Kernel]:
    launches = [event for event in events if event.get("cat") in _LAUNCH]
    hosts = [event for event in events if event.get("cat") == "cpu_op"]
    origin: dict[Any, tuple[float, str, tuple[str, ...]]] = {}
    for thread in _by_thread([*annotations, *hosts, *launches]).values():
        stack: list[dict[str, Any]] = []
        # Of events that begin together the longer one is outside.
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            correlation = event.get("args", {}).get("correlation")
            if event.get("cat") in _LAUNCH and correlation is not None:
                operations = [outer["name"] for outer in stack if outer["cat"] == "cpu_op"]
                ranges = tuple(outer["name"] for outer in stack if outer["cat"] == "user_annotation")
                origin[correlation] = (event["ts"], operations[-1] if operations else "", ranges)
            else:
                stack.append(event)
    found = []
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        arguments = event.get("args", {})
        moment, operation, ranges = origin.get(arguments.get("correlation"), (event["ts"], "", ()))
        found.append(
            Kernel(
                name=event["name"],
                operation=operation,
                phase=_phase_at(moment, open_phases),
                ranges=ranges,
                start_us=event["ts"],
                duration_us=event["dur"],
                lane=f"stream {arguments.get('stream', event.get('tid'))}",
                kind=kind_of(event["name"], operation),
            )
        )
    return found


def _host_kernels(
    events: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
    open_phases: list[tuple[float, float, str]],
) -> list[Kernel]:
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    found = [
        _host_kernel(event, event["dur"], (), open_phases)
        for event in events
        if event.get("cat") == "user_annotation" and _COMMUNICATION.search(event["name"])
    ]
    for thread in _by_thread([*annotations, *operations]).values():
        inner: dict[int, float] = defaultdict(float)
        opened: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        stack: list[dict[str, Any]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            if event["cat"] == "cpu_op":
                if stack and stack[-1]["cat"] == "cpu_op":
                    inner[id(stack[-1])] += event["dur"]
                ranges = tuple(outer["name"] for outer in stack if outer["cat"] == "user_annotation")
                opened.append((event, ranges))
            stack.append(event)
        for event, ranges in opened:
            found.append(_host_kernel(event, event["dur"] - inner[id(event)], ranges, open_phases))
    return found


def _host_kernel(
    event: dict[str, Any],
    own_us: float,
    ranges: tuple[str, ...],
    open_phases: list[tuple[float, float, str]],
) -> Kernel:
    name = event["name"]
    return Kernel(
        name=name,
        operation=name,
        phase=_phase_at(event["ts"], open_phases),
        ranges=ranges,
        start_us=event["ts"],
        duration_us=max(0.0, own_us),
        lane=f"thread {event.get('tid')}",
        kind=kind_of(name, name),
    )
