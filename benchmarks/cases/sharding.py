"""Sharded training: one step under ZeRO-1, ZeRO-2 and FSDP beside torch's, and what each rank holds (SPEC 8.4, 8.5)."""

from typing import Any

from benchmarks.cases import data_parallel, rank_step
from benchmarks.cases.case import Case, Prepared
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.ranks import on_ranks

AREA = "sharding"
PHASE = data_parallel.PHASE
ROWS = {row.name: row for row in ruler_module("parallel/registry.py").SHARDED}


def case(
    target: str,
    preset: str,
    world_size: int,
    *,
    dtype: str = "fp32",
    batch: int | None = None,
    context: int | None = None,
    tier: str = "standard",
) -> Case:
    """One step of `preset` with the global batch spread over the ranks.

    Raises:
        ValueError: the batch does not divide over the ranks.
    """
    shape = data_parallel.step_shape(preset, world_size, batch, context)
    return Case(
        area=AREA, target=target, phase=PHASE, shape=shape, dtype=dtype, world_size=world_size, tier=tier,
        peer=ROWS[target].peer,
    )  # fmt: skip


def cases() -> list[Case]:
    """Every sharding case."""
    found = [case(name, "toy", 2, context=128, tier="smoke") for name in ROWS]
    for preset in ("small", "xl"):
        for dtype in ("fp32", "amp-bf16"):
            found += [case(name, preset, 2, dtype=dtype) for name in ROWS]
    return found


runs_here = data_parallel.runs_here


def prepare(one: Case, device: str) -> Prepared:
    """As for data parallelism; besides, bytes by component, measured beside predicted.

    Under autocast, rows that take a compute dtype gather weights in it.
    """
    from dataclasses import replace

    base = data_parallel.prepare(one, device)

    def metrics() -> dict[str, dict[str, Any]]:
        assert base.metrics is not None
        return base.metrics() | _memory_metrics(one, device)

    return replace(base, metrics=metrics)


def _memory_metrics(one: Case, device: str) -> dict[str, dict[str, Any]]:
    """Bytes of the fullest rank by phase and component; `predicted` beside each.

    Raises:
        NotImplementedError: this trainstep cannot count them.
    """
    from trainstep.parallel.memory import predicted_by_phase
    from trainstep.specs.dtype import get_dtype
    from trainstep.specs.model import get_model

    config = get_model(one.shape["preset"], batch_size=one.shape["B"], context_length=one.shape["S"])
    plan = rank_step.Plan(area=AREA, target=one.target, config=config, dtype=one.dtype, device=device)
    held = on_ranks(
        one.world_size,
        device,
        rank_step.memory,
        one.id,
        plan,
        name=one.id,
    )
    precision = "fp32" if get_dtype(one.dtype).torch_name == "float32" else "bf16"
    predicted = predicted_by_phase(config, precision, zero_stage=ROWS[one.target].stage, ranks=one.world_size)
    return {
        f"{phase}_{component}": {
            "value": max(rank[phase][component] for rank in held),
            "unit": "byte",
            "better": "lower",
            "predicted": expected,
        }
        for phase, components in predicted.items()
        for component, expected in components.items()
        if expected
    }
