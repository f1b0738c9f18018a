"""Data parallelism: one training step on every rank, naive to bucketed, beside torch's (SPEC 8.3)."""

import contextlib
import math
from statistics import median
from typing import Any

from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.cases.collectives import enough_devices
from benchmarks.cases.collectives import runs_here as two_ranks_run_here
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.clock import slowest_rank
from benchmarks.measure.ranks import drop, keep, kept, on_ranks

AREA = "data_parallel"
PHASE = "train_step"
ROWS = {row.name: row for row in ruler_module("parallel/registry.py").DATA_PARALLEL}
LOGGED_STEPS = 5
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
    """One step of `preset` with the global batch `batch` spread over the ranks; buckets in MB, 25 by default."""
    model = _MODELS.get_model(preset, batch_size=batch, context_length=context)
    if model.batch_size % world_size:
        raise ValueError(f"a global batch of {model.batch_size} does not divide over {world_size} ranks")
    shape: dict[str, Any] = {"preset": preset, "B": model.batch_size, "S": model.context_length}
    if bucket_mb is not None and ROWS[target].buckets:
        shape["bucket"] = bucket_mb
    return Case(
        area=AREA, target=target, phase=PHASE, shape=shape, dtype=dtype, world_size=world_size, tier=tier,
        peer=ROWS[target].peer,
    )  # fmt: skip


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

    def ranks(function: Any, *arguments: Any, timeout_seconds: float = 120) -> list[Any]:
        return on_ranks(
            one.world_size, device, function, *arguments, timeout_seconds=timeout_seconds, name=one.id
        )

    plan = (one.id, one.target, one.shape.get("bucket"), config, one.dtype, device)
    state = {"made": False}

    def run() -> list[float]:
        if not state["made"]:  # after the check, which uses the ranks' place too
            ranks(_make, *plan)
            state["made"] = True
        return ranks(_repetition, one.id)

    def check() -> Check:
        results = ranks(_check, *plan)
        state["made"] = False
        error, budget = max(results, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])
        return Check(error=error, budget=budget)

    def metrics() -> dict[str, dict[str, Any]]:
        logged = ranks(_communication, one.id)
        slowest = max(range(len(logged)), key=lambda rank: logged[rank]["communication"])
        found = {
            "communication": {"value": logged[slowest]["communication"], "unit": "s", "better": "lower"},
            "peak_memory": {
                "value": max(entry["peak"] for entry in logged),
                "unit": "byte",
                "better": "lower",
            },
        }
        if logged[slowest]["hidden"] is not None:
            found["hidden_share"] = {"value": logged[slowest]["hidden"], "unit": "1", "better": "higher"}
        if found["peak_memory"]["value"] == 0:
            del found["peak_memory"]
        return found

    def close() -> None:
        on_ranks(one.world_size, device, drop)

    flops = ruler_module("accounting/flops.py").model_flops(config, phase=PHASE, causal_half=True)
    return Prepared(
        run=run,
        clock=slowest_rank,
        close=close,
        work=Work(flops=flops.total, tokens=config.batch_size * config.context_length),
        check=check,
        metrics=metrics,
        state="advances",
    )


def _attention(device: str, dtype: Any) -> str:
    """The fastest attention of torch that takes the dtype: a step's communication stands beside a good step."""
    if device == "cpu":
        return "sdpa-math"
    return (
        "sdpa-flash"
        if dtype.autocast or dtype.bytes == 2
        else "sdpa-efficient"
        if dtype.bytes == 4
        else "sdpa-math"
    )


# What follows runs on the ranks.


class RankStep:
    """One rank's model, wrapper, optimizer and part of the global batch."""

    def __init__(
        self, target: str, bucket_mb: int | None, config: Any, dtype: str, device: str, logged: bool = False
    ) -> None:
        import torch
        import torch.distributed as dist

        from trainstep.model.transformer import TransformerLM
        from trainstep.parallel.communication import CommunicationLog
        from trainstep.parallel.launch import rank_device
        from trainstep.specs.dtype import get_dtype

        registry = ruler_module("parallel/registry.py")
        self.device, self.spec = rank_device(), get_dtype(dtype)
        torch.manual_seed(0)
        model = TransformerLM(
            config.with_overrides(attention=_attention(device, self.spec)),
            device=self.device,
            dtype=getattr(torch, self.spec.torch_name),
        )
        options = {"bucket_size_mb": bucket_mb} if bucket_mb is not None else {}
        self.log = CommunicationLog(self.device) if logged else None
        wrapper = registry.load_data_parallel(registry.get_data_parallel(target))
        self.wrapper = wrapper(model, communication=self.log, **options)
        self.optimizer = torch.optim.AdamW(self.wrapper.parameters(), lr=1e-5, fused=True)
        generator = torch.Generator(device=self.device).manual_seed(0)
        shape = (config.batch_size, config.context_length + 1)
        tokens = torch.randint(config.vocab_size, shape, device=self.device, generator=generator)
        self.all_tokens = tokens
        self.tokens = tokens.tensor_split(dist.get_world_size())[dist.get_rank()]

    def loss(self, model: Any, tokens: Any) -> Any:
        """Mean cross-entropy of `tokens` [B, S+1] under autocast where the dtype asks for it."""
        import torch

        from trainstep.model.loss import cross_entropy

        autocast: Any = contextlib.nullcontext()
        if self.spec.autocast:
            autocast = torch.autocast(self.device.type, dtype=getattr(torch, self.spec.autocast))
        with autocast:
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def gradients(self) -> None:
        """Forward, backward and the reduction."""
        self.loss(self.wrapper, self.tokens).backward()
        self.wrapper.finish_gradient_synchronization()

    def step(self) -> None:
        """A whole training step but for dropping the gradients."""
        self.gradients()
        self.optimizer.step()


def _make(case_id: str, target: str, bucket_mb: int | None, config: Any, dtype: str, device: str) -> None:
    drop()
    plan = (target, bucket_mb, config, dtype, device)
    keep(case_id, {"step": RankStep(*plan), "plan": plan})


def _repetition(case_id: str) -> float:
    import torch.distributed as dist

    from benchmarks.measure.clock import host_clock

    step = kept(case_id)["step"]
    step.optimizer.zero_grad(set_to_none=True)
    clock = host_clock(step.device.type)
    clock.synchronize()
    dist.barrier()
    return clock(step.step)


def _communication(case_id: str) -> dict[str, float | None]:
    """Median communication time and hidden share of some steps of a wrapper that notes them."""
    import torch

    state = kept(case_id)
    step = state["step"]
    cuda = step.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    plan = state["plan"]
    state.clear()
    del step
    drop()
    target, bucket_mb, config, dtype, device = plan
    logged = RankStep(target, bucket_mb, config, dtype, device, logged=True)
    keep(case_id, {"step": logged, "plan": plan})
    log: Any = logged.log
    seconds, shares = [], []
    for index in range(LOGGED_STEPS + 1):
        logged.optimizer.zero_grad(set_to_none=True)
        log.reset()
        logged.step()
        times = log.read()
        if index:  # the first step allocates
            seconds.append(times.total_seconds)
            shares.append(times.hidden_share)
    known = [share for share in shares if share is not None]
    return {"communication": median(seconds), "hidden": median(known) if known else None, "peak": peak}


def _check(
    case_id: str, target: str, bucket_mb: int | None, config: Any, dtype: str, device: str
) -> tuple[float, float]:
    """Reduced gradients of a small model beside those of one process over the whole batch, in float64.

    Returns:
        The largest error as a share of its budget, and 1.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.measure.error_budget import GRADIENT_FACTOR, budget, largest_error
    from trainstep.specs.model import get_model

    drop()
    small = get_model("toy", batch_size=2 * dist.get_world_size(), context_length=32)
    ours = RankStep(target, bucket_mb, small, dtype, device)
    ours.gradients()

    def whole(dtype: str) -> list[Any]:
        one = RankStep("naive", None, small, dtype, device)
        one.loss(one.wrapper.module, one.all_tokens).backward()
        return [parameter.grad for parameter in one.wrapper.module.parameters()]

    shares = []
    with torch.no_grad():
        got = [parameter.grad for parameter in ours.wrapper.module.parameters()]
    for mine, plain, exact in zip(got, whole(dtype), whole("fp64"), strict=True):
        shares.append(largest_error(mine, exact) / budget(plain, exact, GRADIENT_FACTOR, exact))
    return max(shares, key=lambda share: (share != share, share)), 1.0
