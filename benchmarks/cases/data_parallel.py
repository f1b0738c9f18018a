"""Data parallelism: one training step on every rank, naive to bucketed, beside torch's (SPEC 8.3)."""

import math
from typing import Any

from benchmarks.cases import rank_step
from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.cases.collectives import enough_devices
from benchmarks.cases.collectives import runs_here as two_ranks_run_here
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.clock import slowest_rank
from benchmarks.measure.ranks import drop, on_ranks

AREA = "data_parallel"
PHASE = "train_step"
ROWS = {row.name: row for row in ruler_module("parallel/registry.py").DATA_PARALLEL}
_MODELS = ruler_module("specs/model.py")


def case(
    target: str,
    preset: str,
    world_size: int,
    *,
    dtype: str = "fp32",
    batch: int | None = None,
    context: int | None = None,
    bucket_mb: int | None = None,
    tier: str = "standard",
) -> Case:
    """One step of `preset` with the global batch `batch` spread over the ranks; buckets in MB, 25 by default.

    Raises:
        ValueError: the batch does not divide over the ranks.
    """
    shape = step_shape(preset, world_size, batch, context)
    if bucket_mb is not None and ROWS[target].buckets:
        shape["bucket"] = bucket_mb
    return Case(
        area=AREA, target=target, phase=PHASE, shape=shape, dtype=dtype, world_size=world_size, tier=tier,
        peer=ROWS[target].peer,
    )  # fmt: skip


def step_shape(preset: str, world_size: int, batch: int | None, context: int | None) -> dict[str, Any]:
    """The shape of a step that is spread over ranks.

    Raises:
        ValueError: unknown preset, or a batch that does not divide over the ranks.
    """
    model = _MODELS.get_model(preset, batch_size=batch, context_length=context)
    if model.batch_size % world_size:
        raise ValueError(f"a global batch of {model.batch_size} does not divide over {world_size} ranks")
    return {"preset": preset, "B": model.batch_size, "S": model.context_length}


def cases() -> list[Case]:
    """Every data-parallel case."""
    found = [case(name, "toy", 2, context=128, tier="smoke") for name in ROWS]
    for preset in ("small", "xl"):
        for dtype in ("fp32", "amp-bf16"):
            found += [case(name, preset, 2, dtype=dtype) for name in ROWS]
    found += [
        case(name, "small", 2, bucket_mb=size, tier="full")
        for name, row in ROWS.items()
        if row.buckets
        for size in (1, 10, 100, 1000)
    ]
    return found


def runs_here(target: str, device: str) -> None:
    """Raises NotImplementedError, with the reason, where two ranks cannot run."""
    two_ranks_run_here(target, device)


def prepare(one: Case, device: str) -> Prepared:
    """Model, wrapper, optimizer and batch on every rank; the step of the slowest rank counts.

    Communication is noted in a pass of its own after the samples, so that noting costs them nothing.
    """
    from trainstep.specs.model import get_model

    enough_devices(one.world_size, device)
    config = get_model(one.shape["preset"], batch_size=one.shape["B"], context_length=one.shape["S"])
    plan = rank_step.Plan(
        area=one.area,
        target=one.target,
        config=config,
        dtype=one.dtype,
        device=device,
        bucket_mb=one.shape.get("bucket"),
    )
    made = False

    def ranks(function: Any, *arguments: Any) -> list[Any]:
        return on_ranks(one.world_size, device, function, *arguments, name=one.id)

    def run() -> list[float]:
        nonlocal made
        if not made:  # after the check, which uses the ranks' place too
            ranks(rank_step.make, one.id, plan)
            made = True
        return ranks(rank_step.repetition, one.id)

    def check() -> Check:
        nonlocal made
        made = False
        results = ranks(rank_step.check, plan)
        error, budget = max(results, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])
        return Check(error=error, budget=budget)

    def metrics() -> dict[str, dict[str, Any]]:
        return communication_metrics(ranks(rank_step.communication, one.id))

    flops = ruler_module("accounting/flops.py").model_flops(config, phase=PHASE, causal_half=True)
    return Prepared(
        run=run,
        clock=slowest_rank,
        close=lambda: _close(one, device),
        work=Work(flops=flops.total, tokens=config.batch_size * config.context_length),
        check=check,
        metrics=metrics,
        state="advances",
    )


def _close(one: Case, device: str) -> None:
    on_ranks(one.world_size, device, drop)


def communication_metrics(logged: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Metrics of the rank that communicated longest, and the largest peak of any."""
    slowest = max(logged, key=lambda entry: entry["communication"])
    found: dict[str, dict[str, Any]] = {
        "communication": {
            "value": slowest["communication"],
            "unit": "s",
            "better": "lower",
            "spans": slowest["spans"],
            "waits": slowest["waits"],
        }
    }
    if slowest["hidden"] is not None:
        found["hidden_share"] = {"value": slowest["hidden"], "unit": "1", "better": "higher"}
    lanes = slowest["lanes"]
    if lanes is not None and lanes["hidden"] is not None:
        # From the profiler's trace: what the log says, seen from the device. Not compared between commits.
        found["traced_hidden_share"] = {
            "value": lanes["hidden"],
            "unit": "1",
            "better": None,
            "communication_seconds": lanes["communication_seconds"],
            "computation": lanes["computation"],
            "communication": lanes["communication"],
        }
    if peak := max(entry["peak"] for entry in logged):
        found["peak_memory"] = {"value": peak, "unit": "byte", "better": "lower"}
    return found
