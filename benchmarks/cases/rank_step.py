"""One rank's training step, shared by the areas that spread a step over ranks.

The functions below run on the ranks; the areas call them through `measure.ranks.on_ranks`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.cases.registries import ruler_module
from benchmarks.measure.ranks import drop, keep, kept

LOGGED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank builds: an area's row by name, on a model, a dtype and a device."""

    area: str
    target: str
    config: Any
    dtype: str
    device: str
    bucket_mb: int | None = None


def _attention(device: str, dtype: Any) -> str:
    """The fastest attention of torch that takes the dtype: communication stands beside a good step."""
    if device == "cpu":
        return "sdpa-math"
    if dtype.autocast or dtype.bytes == 2:
        return "sdpa-flash"
    return "sdpa-efficient" if dtype.bytes == 4 else "sdpa-math"


class RankStep:
    """One rank's model, wrapper, optimizer and part of the global batch.

    Args:
        plan: what to build.
        log: notes when collectives ran; None notes nothing.
        optimizer: class and hyper-parameters.
    """

    def __init__(
        self, plan: Plan, log: Any = None, optimizer: tuple[Any, dict[str, Any]] | None = None
    ) -> None:
        import torch
        import torch.distributed as dist

        from trainstep.model.transformer import TransformerLM
        from trainstep.parallel.launch import rank_device
        from trainstep.specs.dtype import get_dtype

        self.device, self.spec, self.log = rank_device(), get_dtype(plan.dtype), log
        torch.manual_seed(0)
        model = TransformerLM(
            plan.config.with_overrides(attention=_attention(plan.device, self.spec)),
            device=self.device,
            dtype=getattr(torch, self.spec.torch_name),
        )
        optimizer_cls, options = optimizer or (torch.optim.AdamW, {"lr": 1e-5, "fused": True})
        self.training = _build(plan, self.spec, model, log, optimizer_cls, options)
        generator = torch.Generator(device=self.device).manual_seed(0)
        shape = (plan.config.batch_size, plan.config.context_length + 1)
        self.all_tokens = torch.randint(
            plan.config.vocab_size, shape, device=self.device, generator=generator
        )
        self.tokens = self.all_tokens.tensor_split(dist.get_world_size())[dist.get_rank()]

    def loss(self, model: Any, tokens: Any) -> Any:
        """Mean cross-entropy of `tokens` [B, S+1] under autocast where the dtype asks for it."""
        import torch

        from trainstep.model.loss import cross_entropy

        autocast: Any = contextlib.nullcontext()
        if self.spec.autocast:
            autocast = torch.autocast(self.device.type, dtype=getattr(torch, self.spec.autocast))
        with autocast:
            return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    def forward_backward(self) -> None:
        """Forward and backward on this rank's part."""
        self.loss(self.training.model, self.tokens).backward()

    def gradients(self) -> None:
        """Forward, backward and the reduction."""
        self.forward_backward()
        self.training.finish()

    def step(self) -> None:
        """A whole training step but for dropping the gradients."""
        self.gradients()
        self.training.optimizer.step()

    def reset_gradients(self) -> None:
        """Drop the gradients; never inside a timed window."""
        self.training.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, kw_only=True)
class _Replicated:
    """A data-parallel wrapper and its optimizer, with the calls of `parallel.training.Training`."""

    model: Any
    optimizer: Any
    finish: Callable[[], None]

    def full_parameters(self) -> dict[str, Any]:
        """Every parameter by its name in the wrapped module."""
        return {name: parameter.detach() for name, parameter in self.model.module.named_parameters()}


def _build(plan: Plan, spec: Any, model: Any, log: Any, optimizer_cls: Any, options: dict[str, Any]) -> Any:
    import torch

    registry = ruler_module("parallel/registry.py")
    if plan.area == "sharding":
        row = registry.get_sharded(plan.target)
        compute_dtype = getattr(torch, spec.autocast) if row.compute_dtype and spec.autocast else None
        return registry.load_sharded(row)(
            model, optimizer_cls, communication=log, compute_dtype=compute_dtype, **options
        )
    bucket = {} if plan.bucket_mb is None else {"bucket_size_mb": plan.bucket_mb}
    wrapper = registry.load_data_parallel(registry.get_data_parallel(plan.target))
    wrapped = wrapper(model, communication=log, **bucket)
    return _Replicated(
        model=wrapped,
        optimizer=optimizer_cls(wrapped.parameters(), **options),
        finish=wrapped.finish_gradient_synchronization,
    )


def make(case_id: str, plan: Plan) -> None:
    """Build the step and hold it for the repetitions."""
    drop()
    keep(case_id, {"step": RankStep(plan), "plan": plan})


def repetition(case_id: str) -> float:
    """Seconds of one step on this rank, all ranks starting together."""
    import torch.distributed as dist

    from benchmarks.measure.clock import host_clock

    step = kept(case_id)["step"]
    step.reset_gradients()
    clock = host_clock(step.device.type)
    clock.synchronize()
    dist.barrier()
    return clock(step.step)


def communication(case_id: str) -> dict[str, Any]:
    """Median communication time and hidden share of some steps that note them; peak memory of those that do not.

    Ends the repetitions: the step is built anew with a log. The lanes of the last step come along in seconds.
    """
    import torch

    from trainstep.parallel.communication import CommunicationLog

    state = kept(case_id)
    plan, device = state["plan"], state["step"].device
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    lanes = traced(state["step"]) if device.type == "cuda" else None
    state.clear()
    drop()
    log = CommunicationLog(device)
    step = RankStep(plan, log)
    seconds, shares = [], []
    times = None
    for index in range(LOGGED_STEPS + 1):
        step.reset_gradients()
        log.reset()
        step.step()
        times = log.read()
        if index:  # the first step allocates
            seconds.append(times.total_seconds)
            shares.append(times.hidden_share)
    known = [share for share in shares if share is not None]
    keep(case_id, {"step": step, "plan": plan})
    assert times is not None
    return {
        "communication": median(seconds),
        "hidden": median(known) if known else None,
        "peak": peak,
        "spans": [list(span) for span in times.spans],
        "waits": [list(wait) for wait in times.waits],
        "lanes": lanes,
    }


def traced(step: RankStep) -> dict[str, Any]:
    """One profiled step of a wrapper that notes nothing: what ran on the device, and the hidden share it shows.

    The intervals are seconds from the first kernel on; gaps below a thousandth of the step are closed in them,
    after the share was taken.
    """
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    from benchmarks.measure.overlap import overlap_of
    from benchmarks.measure.profile import profile_parts
    from benchmarks.measure.trace import load_trace

    def before() -> None:
        step.reset_gradients()
        dist.barrier()

    with tempfile.TemporaryDirectory(prefix="trainstep-trace-") as folder:
        path = Path(folder) / "step.json"
        profile_parts([("step", step.step)], path, device=step.device.type, before=before, warmup=1)
        overlap = overlap_of(load_trace(path))
    both = (*overlap.computation, *overlap.communication)
    first, last = min(start for start, _ in both), max(end for _, end in both)

    def thinned(lane: Any) -> list[list[float]]:
        kept_intervals: list[list[float]] = []
        for start, end in lane:
            if kept_intervals and start - kept_intervals[-1][1] < (last - first) / 1000:
                kept_intervals[-1][1] = end
            else:
                kept_intervals.append([start, end])
        return [
            [round((start - first) / 1e6, 7), round((end - first) / 1e6, 7)] for start, end in kept_intervals
        ]

    return {
        "hidden": overlap.hidden_share,
        "communication_seconds": overlap.communication_seconds,
        "computation": thinned(overlap.computation),
        "communication": thinned(overlap.communication),
    }


def memory(case_id: str, plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes by component when built, before and after the first optimizer step; see `parallel.memory`."""
    from trainstep.parallel.memory import bytes_by_phase

    drop()
    step = RankStep(plan)
    found = bytes_by_phase(step.training, step.forward_backward)
    keep(case_id, {"step": step, "plan": plan})
    return found


def check(plan: Plan) -> tuple[float, float]:
    """One step of plain gradient descent on a small model beside one process over the whole batch in float64.

    With learning rate 1 the parameters move by their gradients, which is what every way of sharding can show.

    Returns:
        The largest error as a share of its budget, and 1.
    """
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from benchmarks.measure.error_budget import GRADIENT_FACTOR, budget, largest_error, largest_share
    from trainstep.specs.model import get_model

    drop()
    small = replace(plan, config=get_model("toy", batch_size=2 * dist.get_world_size(), context_length=32))
    descent = (torch.optim.SGD, {"lr": 1.0})
    ours = RankStep(small, optimizer=descent)
    ours.step()
    got = {name: value.clone() for name, value in ours.training.full_parameters().items()}

    def whole(dtype: str) -> dict[str, Any]:
        one = RankStep(replace(small, area="data_parallel", target="naive", dtype=dtype), optimizer=descent)
        one.loss(one.training.model.module, one.all_tokens).backward()
        one.training.optimizer.step()
        return one.training.full_parameters()

    plain, exact = whole(plan.dtype), whole("fp64")
    assert set(got) == set(exact), "a parameter is missing after the step"
    worst = largest_share(
        largest_error(got[name], exact[name]) / budget(plain[name], exact[name], GRADIENT_FACTOR, exact[name])
        for name in exact
    )
    return worst.error, worst.budget
