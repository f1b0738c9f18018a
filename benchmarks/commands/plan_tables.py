"""Predictions as rows for tables: plans, what they assume, and measured figures beside predicted ones."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.accounting.layout import Plan, Question
    from trainstep.accounting.parallel_limits import Layer

GIB = 2**30


def plan_rows(question: "Question", plans: list["Plan"]) -> list[dict[str, Any]]:
    """A row for each plan: layout, step time by formula and by simulation, MFU, memory, what binds."""
    from trainstep.accounting.planner import simulated_seconds

    tokens = question.batch * question.config.context_length
    return [
        {
            "layout": str(plan.layout),
            "devices": plan.layout.devices,
            "sequences a pass": plan.layout.microbatch,
            "checkpointing": "every block" if plan.layout.checkpoint else "none",
            "step ms": plan.seconds * 1e3,
            "simulated ms": simulated_seconds(question, plan.layout) * 1e3,
            "tokens/s": tokens / plan.seconds,
            "MFU %": plan.mfu * 100,
            "bound by": plan.bound,
            "memory GiB": plan.memory_bytes / GIB,
            "of GiB": question.device.memory_bytes / GIB,
        }
        for plan in plans
    ]


def part_rows(plans: list["Plan"]) -> list[dict[str, Any]]:
    """Milliseconds of each plan by cause."""
    return [
        {"layout": str(plan.layout), **{f"{name} ms": s * 1e3 for name, s in plan.parts.items()}}
        for plan in plans
    ]


def memory_rows(plans: list["Plan"]) -> list[dict[str, Any]]:
    """GiB of the fullest device of each plan by part."""
    return [
        {"layout": str(plan.layout), **{f"{name} GiB": size / GIB for name, size in plan.memory.items()}}
        for plan in plans
    ]


def assumption_rows(question: "Question") -> list[dict[str, Any]]:
    """The rates behind the plans, each with the measurement that it was fitted to."""
    from trainstep.accounting.calibration import MEASUREMENTS

    given = question.rates
    product = question.dtype.removeprefix("amp-")
    fitted = {row.fits: row.name for row in MEASUREMENTS.values() if row.fits}
    peak = question.device.peak(question.dtype)
    rate = given.products_flops_per_second[product]
    like = "fp32" if product in ("fp32", "fp64") else "bf16"
    head = question.config.head_dim

    def attention(phase: str) -> float:
        constant, slope = given.attention_pair_seconds[phase]
        flops = (1.0 if phase == "forward" else 2.5) * 4 * head
        return flops / (constant + slope * head) / 1e12

    def row(what: str, value: float, unit: str, source: str) -> dict[str, Any]:
        return {"assumed": what, "value": value, "unit": unit, "fitted to": source}

    rows = [row(f"{product} products", rate / 1e12, "TFLOP/s", fitted[f"{like} products"])]
    if peak:
        rows.append(row("  of the peak", rate / peak * 100, "%", question.device.source))
    if question.execution.attention == "flash":
        names = "attention H128 and H64 S16384 N16"
        rows += [row(f"attention {phase}, H {head}", attention(phase), "TFLOP/s", names) for phase in
                 ("forward", "backward")]  # fmt: skip
    rows += [
        row("fused kernels", given.fused_bytes_per_second / 1e9, "GB/s", fitted["fused kernels"]),
        row("eager kernels", given.eager_bytes_per_second / 1e9, "GB/s", fitted["eager kernels"]),
    ]
    rows += [
        row(f"host a kernel, {phase}", seconds * 1e6, "us", fitted[f"host, {phase}"])
        for phase, seconds in given.host_kernel_seconds.items()
    ]
    rows.append(row("a collective", given.collective_seconds * 1e6, "us", fitted["collective call"]))
    for level in question.network.levels:
        source = fitted["bus bandwidth"] if level.name == "node" else "the share reached within a node"
        rows.append(row(f"{level.name} of {level.devices}", level.bytes_per_second / 1e9, "GB/s", source))
        if level.hop_seconds:
            rows.append(row(f"a hop in the {level.name}", level.hop_seconds * 1e6, "us", "assumed"))
    return rows


def validation_rows() -> list[dict[str, Any]]:
    """Measured figures beside predicted ones, with the relative error."""
    from trainstep.accounting.validation import comparisons

    rows = []
    for one in comparisons():
        scale, unit = (1e3, "ms") if one.measured.unit == "s" else (1 / GIB, "GiB")
        low, high = one.measured.low * scale, one.measured.high * scale
        rows.append(
            {
                "what": one.measured.name,
                "measured": low if low == high else f"{low:.4g} to {high:.4g}",
                "predicted": one.predicted * scale,
                "unit": unit,
                "error %": one.error * 100,
                "part of it fitted": one.shares or None,
            }
        )
    return rows


def device_rows() -> list[dict[str, Any]]:
    """The device table: dense peaks, memory, links and their sources."""
    from trainstep.specs.device import DEVICES

    return [
        {
            "device": device.name,
            "bf16 TFLOP/s": _scaled(device.peak("bf16"), 1e-12),
            "tf32 TFLOP/s": _scaled(device.peak("tf32"), 1e-12),
            "fp32 TFLOP/s": _scaled(device.peak("fp32"), 1e-12),
            "memory GB": device.memory_bytes / 1e9,
            "memory GB/s": device.memory_bytes_per_second / 1e9,
            "ridge FLOP/byte": _scaled(device.peak("bf16"), 1 / device.memory_bytes_per_second),
            "NVLink GB/s": _scaled(device.links_bytes_per_second.get("nvlink"), 1e-9),
            "source": device.source,
        }
        for device in DEVICES.values()
    ]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def limit_rows(layer: "Layer") -> list[dict[str, Any]]:
    """Devices up to which one feed-forward layer stays bound by computing, by way of cutting it."""
    from trainstep.accounting.parallel_limits import data_limit, mesh_limit, tensor_limit

    overlapped, exposed = (mesh_limit(layer, overlapped=value) for value in (True, False))
    return [
        {"cut": "DP or FSDP", "devices": data_limit(layer)},
        {"cut": "TP, forward", "devices": tensor_limit(layer, "forward")},
        {"cut": "TP, backward", "devices": tensor_limit(layer, "backward")},
        {"cut": "FSDP x TP, overlapped", "devices": overlapped.devices, "data": overlapped.data,
         "tensor": overlapped.tensor},
        {"cut": "FSDP x TP, one after the other", "devices": exposed.devices, "data": exposed.data,
         "tensor": exposed.tensor},
    ]  # fmt: skip
