"""Peak memory of a step under each checkpointing policy, prediction beside fact (SPEC 5.2, 5.3)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from benchmarks.cases import step as steps
from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.clock import host_clock
from benchmarks.measure.memory import (
    HostMemoryError,
    PeakMeter,
    available_host_bytes,
    release,
    size_text,
)

AREA = "memory"
# "inference" is a forward that saves nothing; the others are those of the step area.
PHASES = ("inference", "forward", "forward_backward", "train_step")
# Phases whose rows keep active memory over time.
TIMELINE_PHASES = ("inference", "train_step")
TIMELINE_POINTS = 600
GROUP_SIZES = (1, 2, 4, 8, 16)
# A block that saves more is not run on a CPU merely to predict what a model needs.
LARGEST_CPU_BLOCK_BYTES = 2**30
_MODELS = ruler_module("specs/model.py")


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A checkpointing policy as a target; "groups" takes its size from the case's shape.

    Attributes:
        name: target in case ids.
        devices: where it runs. To "offload" from a CPU to its host would move nothing.
        peer: somebody else's work: none is.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    peer: bool = False


ROWS = {
    row.name: row
    for row in (
        MemoryRow(name="none"),
        MemoryRow(name="groups"),
        MemoryRow(name="recursive"),
        MemoryRow(name="selective"),
        MemoryRow(name="offload", devices=("cuda",)),
    )
}


def policy_of(one: Case) -> str:
    """The policy's name as `trainstep.memory.policy` reads it."""
    return f"groups-{one.shape['group']}" if one.target == "groups" else one.target


def case(
    policy: str,
    phase: str,
    preset: str,
    *,
    dtype: str = "fp32",
    tier: str = "standard",
    batch: int | None = None,
    context: int | None = None,
) -> Case:
    """One case; `policy` as `trainstep.memory.policy` has it ("every-block" is "groups-1").

    Raises:
        ValueError: unknown policy, phase, dtype or preset, or a shape that cannot be built.
    """
    parsed = ruler_module("memory/policy.py").parse_policy(policy)
    ruler_module("specs/dtype.py").get_dtype(dtype)
    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
    model = _MODELS.get_model(preset, batch_size=batch, context_length=context)
    shape: dict[str, Any] = {"preset": preset, "B": model.batch_size, "S": model.context_length}
    if parsed.kind == "groups":
        shape["group"] = parsed.group_size
    return Case(area=AREA, target=parsed.kind, phase=phase, shape=shape, dtype=dtype, tier=tier)


def policies(n_layers: int) -> list[str]:
    """Every policy that differs from the others on this many blocks; the one that needs most of the host last."""
    groups = [f"groups-{size}" for size in GROUP_SIZES if size <= max(1, n_layers // 2)]
    return ["none", *groups, "recursive", "selective", "offload"]


def cases() -> list[Case]:
    """Every memory case."""
    found = [case(policy, "forward_backward", "toy", tier="smoke", context=128) for policy in policies(2)]
    found += [case("none", phase, "toy", tier="smoke", context=128) for phase in ("inference", "train_step")]
    found += [case(policy, "forward_backward", "small") for policy in policies(12)]
    dtypes = ("fp32", "amp-bf16")
    found += [
        case("none", phase, "xl", dtype=dtype, context=context, tier="full")
        for dtype in dtypes
        for context in (128, 2048)
        for phase in ("inference", "forward", "train_step")
    ]
    found += [
        case(policy, "forward_backward", "xl", dtype=dtype, context=2048, tier="full")
        for policy in policies(32)
        for dtype in dtypes
    ]
    return found


def runs_here(target: str, device: str) -> None:
    """Raises NotImplementedError, with the reason, where a policy cannot run."""
    if device not in ROWS[target].devices:
        raise NotImplementedError(f"{target} does not run on {device}")


def config_of(one: Case) -> Any:
    """The ModelConfig that the case names."""
    from trainstep.specs.model import get_model

    return get_model(one.shape["preset"], batch_size=one.shape["B"], context_length=one.shape["S"])


def parts_of(step: steps.Step, phase: str) -> list[tuple[str, Callable[[], None]]]:
    """Named parts of a phase, in order."""
    if phase != "inference":
        return step.parts(phase)

    def inference() -> None:
        import torch

        with torch.no_grad():
            step.forward()

    return [("forward", inference)]


def build(config: Any, dtype: str, device: str, policy: str) -> steps.Step:
    """The plain step (materialised attention, for-loop AdamW, eager) with its blocks under a policy."""
    from trainstep.memory import checkpointing

    step = steps.Step(steps.ROWS["plain"], config, dtype, device)
    step.model.run_blocks = partial(_run_blocks, partial(checkpointing.run, policy=policy))
    return step


def _run_blocks(run: Callable[..., Any], blocks: Any, x: Any, positions: Any) -> Any:
    return run(blocks, x, positions)


def resident(step: steps.Step) -> tuple[Any, ...]:
    """Tensors that are alive between steps: parameters, buffers, gradients, optimizer state and the batch."""
    import torch

    state = [value for entry in step.optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in step.model.parameters()]
    found = [*step.model.parameters(), *step.model.buffers(), *gradients, *state, step.inputs, step.targets]
    return tuple(tensor for tensor in found if isinstance(tensor, torch.Tensor))


def prepare(one: Case, device: str) -> Prepared:
    """Build the step under the case's policy; peaks come from a step of their own after the samples."""
    config = config_of(one)
    runs_here(one.target, device)
    expected = predict(config, one.dtype, policy_of(one), one.phase, device)
    require_host_memory(expected, device)
    step = build(config, one.dtype, device, policy_of(one))
    parts = parts_of(step, one.phase)

    def run() -> None:
        for _, part in parts:
            part()

    def fresh() -> None:
        step.reset_gradients()
        step.loss = None  # with what the last forward saved

    def metrics() -> dict[str, dict[str, Any]]:
        fresh()
        with PeakMeter(device, resident(step)) as meter:
            for name, part in parts:
                with meter.phase(name):
                    part()
        found = {
            "peak_memory": _bytes(meter.peak_bytes, "lower"),
            "predicted_peak": _bytes(expected.peak_bytes),
        }
        if len(parts) > 1:
            found |= {f"peak_{name}": _bytes(peak, "lower") for name, peak in meter.peaks_bytes.items()}
        if one.phase in TIMELINE_PHASES:
            found["active_memory"] = active_memory(step, parts, device)
        block = step.model.blocks[0]
        gradients = [p.grad.untyped_storage().nbytes() for p in block.parameters() if p.grad is not None]
        if gradients:
            found["block_gradient"] = _bytes(sum(gradients))
        return found

    flops = ruler_module("accounting/flops.py")
    phase = "forward" if one.phase == "inference" else one.phase
    return Prepared(
        run=run,
        clock=host_clock(device),
        before=fresh,
        work=Work(
            flops=flops.model_flops(config, phase=phase, causal_half=True).total,
            tokens=config.batch_size * config.context_length,
        ),
        check=lambda: check(policy_of(one), one.dtype, device),
        metrics=metrics,
        state="advances" if one.phase == "train_step" else "same",
    )


def active_memory(
    step: steps.Step, parts: list[tuple[str, Callable[[], None]]], device: str
) -> dict[str, Any]:
    """Active memory over one step as a metric: bytes in use, each from the same place of "seconds" on.

    "phases" are (second at which one begins, name); "allocations" the largest, with the frame that made them.
    """
    from dataclasses import asdict

    from trainstep.memory.snapshot import record_history, timeline

    step.reset_gradients()
    step.loss = None
    with record_history(device, resident=resident(step)) as history:
        for name, part in parts:
            history.phase(name)
            part()
    seen = timeline(history.snapshot)
    thin = seen.thinned(TIMELINE_POINTS)
    return _bytes(seen.peak_bytes) | {
        "seconds": [seconds for seconds, _ in thin],
        "samples": [used for _, used in thin],
        "phases": [list(phase) for phase in seen.phases],
        "allocations": [asdict(allocation) for allocation in seen.allocations],
    }


def _bytes(value: float, better: str | None = None) -> dict[str, Any]:
    return {"value": int(value), "unit": "byte", "better": better}


@cache
def check(policy: str, dtype: str, device: str) -> Check:
    """Loss and block gradients of a small model are those of running its blocks plainly, bit for bit.

    The embedding's gradient is left out: a GPU may add its rows in any order.
    """
    import torch

    config = _MODELS.get_model("toy", n_layers=4, context_length=32)

    def gradients(policy: str) -> list[Any]:
        step = build(config, dtype, device, policy)
        step.forward()
        step.backward()
        return [step.loss.detach(), *(parameter.grad for parameter in step.model.blocks.parameters())]

    pairs = zip(gradients("none"), gradients(policy), strict=True)
    same = all(torch.equal(first, second) for first, second in pairs)
    return Check(error=0.0 if same else 1.0, budget=0.0)


def with_neighbours(policies: list[str], config: Any, dtype: str, device: str) -> list[str]:
    """The policies, and the planner's best group size with the sizes beside it where they are missing."""
    from trainstep.memory.planner import best_group_size

    cost = model_cost(config, dtype, device)
    best, _ = best_group_size(config.n_layers, cost.block, [cost.embedding], [cost.head])
    near = [f"groups-{size}" for size in (best - 1, best, best + 1) if 1 <= size <= config.n_layers]
    return [*policies, *(name for name in near if name not in policies)]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the planner says of a whole model.

    Attributes:
        peak_bytes: of the phase, parameters and optimizer state included.
        static_bytes: the part that is alive between steps.
        recomputed_flops: forward work done a second time.
        host_bytes: pinned memory of the host, besides.
    """

    peak_bytes: float
    static_bytes: float
    recomputed_flops: float
    host_bytes: float = 0


def require_host_memory(expected: Expected, device: str) -> None:
    """Refuse what needs more of the host's memory than there is: the kernel would end the process and its sweep.

    Raises:
        HostMemoryError: with the bytes asked for and free. On a CPU everything is the host's memory.
    """
    asked = expected.host_bytes + (expected.peak_bytes if device == "cpu" else 0)
    free = available_host_bytes()
    if free is not None and asked > free:
        raise HostMemoryError(int(asked), free)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Measured costs of a model's three parts, and what is alive whatever it does.

    Attributes:
        static_bytes: parameters, buffers and batch.
        parameter_bytes: the parameters alone.
        largest_parameter_bytes: of the largest single parameter.
        embedding, head: units around the blocks.
        block: of one block.
        unsaved_peak_bytes: most alive in a forward that saves nothing, in any part; autocast's copies of weights
            stay until its end.
    """

    static_bytes: float
    parameter_bytes: float
    largest_parameter_bytes: float
    embedding: Any
    head: Any
    block: Any
    unsaved_peak_bytes: float


def measuring_device(attention: str, dtype: str, device: str) -> str:
    """Where costs are measured: on the GPU itself, instead of a CPU on the meta device, which needs no
    memory.

    Autocast knows only real devices, and so may an attention implementation: these are measured on the CPU.
    """
    if device == "cuda":
        return device
    import torch

    from trainstep.attention.registry import get_attention, load_attention

    if ruler_module("specs/dtype.py").get_dtype(dtype).autocast is None:
        with contextlib.suppress(Exception):
            q = torch.empty(1, 1, 2, 8, device="meta")
            load_attention(get_attention(attention))(q, q, q, causal=True)
            return "meta"
    return device


@cache
def model_cost(config: Any, dtype: str, device: str) -> ModelCost:
    """Measure embedding, one block and head of a model, plainly and eagerly, at their real size."""
    cost = _measure_parts(config, dtype, device)
    release(device)
    return cost


def _measure_parts(config: Any, dtype: str, device: str) -> ModelCost:
    import torch

    from trainstep.memory.measure import measure_block, measure_unit, unsaved_peak_bytes
    from trainstep.model.loss import cross_entropy
    from trainstep.model.transformer import TransformerLM
    from trainstep.specs.dtype import get_dtype

    spec = get_dtype(dtype)
    where = measuring_device(config.attention, dtype, device)
    needed = ruler_module("accounting/memory.py").block_activation_bytes(
        config, attention="materialised", element_bytes=spec.bytes
    )
    if where == "cpu" and sum(needed.values()) > LARGEST_CPU_BLOCK_BYTES:
        raise ValueError(
            f"a block of {config.name} at context {config.context_length} in {dtype} has to be measured on a GPU: "
            f"here it would need {size_text(sum(needed.values()))}"
        )
    parameter_dtype = getattr(torch, spec.torch_name)
    model = TransformerLM(config.with_overrides(n_layers=1), device=where, dtype=parameter_dtype)

    def region() -> contextlib.AbstractContextManager[Any]:
        if spec.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(where, dtype=getattr(torch, spec.autocast))

    tokens = torch.zeros(config.batch_size, config.context_length, dtype=torch.long, device=where)
    embedding, block, norm, projection = model.embedding, model.blocks[0], model.norm, model.head

    def head(x: Any) -> Any:
        return cross_entropy(projection(norm(x)), tokens)

    x = torch.zeros(*tokens.shape, config.d_model, dtype=parameter_dtype, device=where)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    one_block = sum(parameter.nbytes for parameter in block.parameters())
    parameter_bytes = sum(sizes) + (config.n_layers - 1) * one_block
    # Whoever calls the blocks holds their first input until the last is done.
    held = x.nbytes * (config.n_layers > 1)
    costs = measure_block(block, x, region=region)
    return ModelCost(
        static_bytes=parameter_bytes
        + sum(buffer.nbytes for buffer in set(model.buffers()))
        + 2 * tokens.nbytes,
        parameter_bytes=parameter_bytes,
        largest_parameter_bytes=max(sizes),
        embedding=measure_unit(embedding, tokens, parameters=embedding.parameters(), region=region),
        head=measure_unit(head, x, parameters=[*norm.parameters(), *projection.parameters()], region=region),
        block=costs,
        unsaved_peak_bytes=max(
            unsaved_peak_bytes(embedding, tokens, region=region),
            held + unsaved_peak_bytes(block, x, region=region) + (config.n_layers - 1) * costs.cast_bytes,
            unsaved_peak_bytes(head, x, region=region) + config.n_layers * costs.cast_bytes,
        ),
    )


def predict(config: Any, dtype: str, policy: str, phase: str, device: str) -> Expected:
    """The planner's answer for a whole model.

    Forward and backward are walked by `trainstep.memory.planner`. A training step besides holds two moments a
    parameter all the time, and its optimizer needs gradients and two temporaries of the largest parameter.

    Raises:
        ValueError: unknown policy or phase.
    """
    from trainstep.memory import planner
    from trainstep.memory.policy import parse_policy

    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
    cost = model_cost(config, dtype, device)
    kind = parse_policy(policy).kind
    if phase == "inference":
        return Expected(
            peak_bytes=cost.static_bytes + cost.unsaved_peak_bytes,
            static_bytes=cost.static_bytes,
            recomputed_flops=0,
        )
    block = cost.block
    if kind == "offload" and block.offload is None:
        block = planner.assume_offload(block)
    units = [cost.embedding, *planner.units_of(parse_policy(policy), config.n_layers, block), cost.head]
    whole = planner.chain(units)
    peak, static = whole.forward_peak_bytes, cost.static_bytes
    if phase != "forward":
        peak = max(peak, whole.backward_peak_bytes)
    if phase == "train_step":
        static += 2 * cost.parameter_bytes
        peak = max(peak, cost.parameter_bytes + 2 * cost.largest_parameter_bytes)
    return Expected(
        peak_bytes=static + peak,
        static_bytes=static,
        recomputed_flops=0 if phase == "forward" else whole.recomputed_flops,
        host_bytes=whole.host_bytes,
    )
