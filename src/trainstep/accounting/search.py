"""The search over layouts."""

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt, log, prod

from trainstep.accounting.layout import EMPTY_AXIS, Layout, Plan, Question, refuse
from trainstep.accounting.planner import evaluate, memory


@lru_cache(maxsize=1024)
def _all_divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _divisors(n: int, limit: int) -> list[int]:
    return [d for d in _all_divisors(n) if d <= limit]


def layouts(question: Question, devices: int, fixed: dict[str, int]) -> Iterator[Layout]:
    """Layouts worth evaluating on up to `devices` devices.

    Tensor parallelism stays within a node. The data axis takes the largest divisors of the batch that fit, so
    a few devices may stay idle.

    Args:
        fixed: axes (fields of `Layout`) that the caller has decided.
    """
    config, batch = question.config, question.batch
    node = question.network.levels[0].devices
    tensors = [fixed["tensor"]] if "tensor" in fixed else _divisors(config.n_heads, node)
    contexts = [1]
    if "context" in fixed:
        contexts = [fixed["context"]]
    elif question.execution.attention == "flash":
        contexts = [2**i for i in range(9) if 2**i <= min(devices, config.context_length // 128)] or [1]
    stages = [fixed["pipeline"]] if "pipeline" in fixed else _divisors(config.n_layers, devices)
    for tensor in tensors:
        for context in contexts:
            for pipe in stages:
                room = devices // (tensor * context * pipe)
                if room < 1:
                    continue
                fitting = _divisors(batch, room)[-3:]
                for data in [fixed["data"]] if "data" in fixed else fitting:
                    if tensor * context * pipe * data > devices:
                        continue
                    for shard in _shards(question, tensor, context * data, fixed):
                        # Sequences that are cut over devices are not also passed several at a time.
                        alone = {"microbatch": 1} if context > 1 else {}
                        for microbatch in _microbatches(batch, data, pipe, alone | fixed):
                            for checkpoint in (False, True):
                                yield Layout(
                                    tensor=tensor,
                                    context=context,
                                    data=data,
                                    shard=shard,
                                    pipeline=pipe,
                                    microbatch=microbatch,
                                    checkpoint=checkpoint,
                                )


def _shards(question: Question, tensor: int, ranks: int, fixed: dict[str, int]) -> list[int]:
    """Shard groups: none, as many as share a node, a few nodes' worth, all."""
    if "shard" in fixed:
        return [fixed["shard"]]
    node = max(1, question.network.levels[0].devices // tensor)
    wanted = {1, ranks, *(node * 2**i for i in range(0, 8, 2))}
    return sorted(size for size in wanted if size <= ranks and ranks % size == 0)


def _microbatches(batch: int, data: int, stages: int, fixed: dict[str, int]) -> list[int]:
    """Sequences a pass, the most first, so that of equally fast plans the one with the fewest passes stays."""
    if "microbatch" in fixed:
        return [fixed["microbatch"]]
    each = max(1, batch // data)  # a batch smaller than its ranks is refused later, in words
    small = [d for d in _divisors(each, each) if d in (1, 2, 4, 8)]
    return small[::-1] if stages > 1 else [*dict.fromkeys([each, *small[::-1]])]


def _preference(plan: Plan) -> tuple[float, int, int, float]:
    """Faster first; among layouts within a thousandth of each other, fewer axes and fewer devices."""
    layout = plan.layout
    axes = sum(size > 1 for size in (layout.tensor, layout.context, layout.data, layout.pipeline))
    return round(log(plan.seconds), 3), axes, layout.devices, plan.seconds


def search(
    question: Question, devices: int, *, fixed: dict[str, int] | None = None, keep: int = 5
) -> list[Plan]:
    """The fastest layouts that fit, best first, each a different way of cutting.

    Of those that differ only in micro-batch, checkpointing or size of the shard groups, the fastest one
    stands.

    Args:
        devices: at hand. A layout may leave up to half of them idle where batch and shapes do not divide.
        fixed: axes that the caller has decided.
        keep: how many.

    Raises:
        ValueError: nothing is possible; the sentence says what stands in the way.
    """
    if devices < 1:
        raise ValueError(f"a plan needs at least one device, got {devices}")
    if question.batch < 1:
        raise ValueError(f"a batch needs at least one sequence, got {question.batch}")
    if any(size < 1 for size in (fixed or {}).values()):
        raise ValueError(EMPTY_AXIS)
    needed = prod((fixed or {}).get(axis, 1) for axis in ("tensor", "context", "data", "pipeline"))
    if needed > devices:
        raise ValueError(f"the axes that were fixed need {needed} devices, more than the {devices} at hand")
    best: dict[tuple[int | bool, ...], Plan] = {}
    reason: str | None = None
    smallest, most = None, 0
    for layout in layouts(question, devices, fixed or {}):
        refused = refuse(question, layout)
        if refused is not None:
            reason = reason or refused
            continue
        most = max(most, layout.devices)
        if 2 * layout.devices < devices:
            continue
        need = sum(memory(question, layout).values())
        if smallest is None or need < smallest:
            smallest = need
        if need > question.device.memory_bytes:
            continue
        plan = evaluate(question, layout)
        way = (layout.tensor, layout.context, layout.data, layout.pipeline, layout.shard > 1)
        if way not in best or plan.seconds < best[way].seconds:
            best[way] = plan
    if best:
        return sorted(best.values(), key=_preference)[:keep]
    name, device = question.config.name, question.device
    if smallest is not None:
        raise ValueError(
            f"{name} does not fit on {devices} {device.name}: the leanest layout needs "
            f"{smallest / 2**30:.1f} GiB a device, which has {device.memory_bytes / 2**30:.1f} GiB"
        )
    if most:
        raise ValueError(
            f"a batch of {question.batch} sequences of {name} keeps at most {most} of {devices} devices busy"
        )
    raise ValueError(reason or f"no layout of {name} uses {devices} devices with the axes that were fixed")
