"""Predict peak memory and recomputation of every checkpointing policy, and choose the group size.

A training step is seen as a chain of units. A unit keeps some bytes from its forward to its backward, needs
some more while either runs, and leaves gradients behind. A block run plainly is a unit; a checkpointed
segment is a unit made of the chain that its recomputation runs. The peak of a chain is found by walking it
forward and back, so that policies differ only in how blocks are grouped into units, and nested segments need
no formula of their own.

With boundary b and residuals r the textbook curve is (L/k)*b + k*r for groups of k, least at k = sqrt(L*b/r);
b = r gives the sqrt(L) of Chen et al. 2016. Materialised attention has r far above b, and then k = 1 is best.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainstep.memory.policy import Policy, parse_policy


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Bytes of one unit of a chain; its input counts as its own, its output as the next unit's.

    Attributes:
        kept_bytes: alive from its forward until its backward, input included.
        forward_peak_bytes: most alive during its forward, input, output and what it keeps included.
        backward_peak_bytes: most alive during its backward: what it keeps, the incoming gradient, its own
            parameters' gradients and temporaries.
        forward_only_bytes: alive from its forward to the end of the whole forward: autocast's copies of
            weights that nobody saved.
        gradient_bytes: parameter gradients that stay afterwards; 0 when they existed before the step.
        host_bytes: of the host's memory, taken from its forward to its backward.
        forward_flops: of one forward.
        recomputed_flops: done again during the backward.
    """

    kept_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    forward_only_bytes: float = 0
    gradient_bytes: float = 0
    host_bytes: float = 0
    forward_flops: float = 0
    recomputed_flops: float = 0


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """What one block costs, measured (`measure_block`) or from two numbers (`block_cost`).

    Attributes:
        boundary_bytes: its input, the same as its output.
        cast_bytes: autocast's copies of its weights.
        incoming_bytes: the gradient of its output, waiting while a segment is recomputed.
        plain: run as it is.
        unsaved_peak_bytes: most alive in a forward that saves nothing, input and output included.
        host_bytes: of the host's memory that its residuals take when offloaded.
        selective: run under the selective policy; None where it was not measured.
        offload: run with its residuals in the host's memory; None where it was not measured.
    """

    boundary_bytes: float
    plain: Unit
    unsaved_peak_bytes: float
    cast_bytes: float = 0
    incoming_bytes: float = 0
    host_bytes: float = 0
    selective: Unit | None = None
    offload: Unit | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A policy's cost for a whole list of blocks.

    Attributes:
        policy: its name.
        peak_bytes: most alive at any moment between the first forward and the last backward, besides
            parameters.
        recomputed_flops: forward work done a second time.
        kept_bytes: alive between forward and backward.
        host_bytes: of the host's memory, taken meanwhile.
    """

    policy: str
    peak_bytes: float
    recomputed_flops: float
    kept_bytes: float
    host_bytes: float = 0


def block_cost(residual_bytes: float, boundary_bytes: float, forward_flops: float = 0) -> BlockCost:
    """A block known only by what it saves (its input included) and by the size of its input.

    Temporaries and gradients count as nothing: peaks are then exactly boundaries and residuals.

    Raises:
        ValueError: a size is not positive.
    """
    if residual_bytes <= 0 or boundary_bytes <= 0:
        raise ValueError(
            f"residual and boundary bytes must be positive, got {residual_bytes}, {boundary_bytes}"
        )
    return BlockCost(
        boundary_bytes=boundary_bytes,
        unsaved_peak_bytes=boundary_bytes,
        plain=Unit(
            kept_bytes=residual_bytes,
            forward_peak_bytes=residual_bytes,
            backward_peak_bytes=residual_bytes,
            forward_flops=forward_flops,
        ),
    )


def chain(units: Sequence[Unit]) -> Unit:
    """One unit that behaves like these in a row: forward in order, backward in reverse."""
    before = [0.0]
    forward_only = forward_peak = 0.0
    for unit in units:
        forward_peak = max(forward_peak, before[-1] + forward_only + unit.forward_peak_bytes)
        forward_only += unit.forward_only_bytes
        before.append(before[-1] + unit.kept_bytes)
    gradients = 0.0
    backward_peak = 0.0
    for kept, unit in zip(reversed(before[:-1]), reversed(units), strict=True):
        backward_peak = max(backward_peak, kept + unit.backward_peak_bytes + gradients)
        gradients += unit.gradient_bytes
    return Unit(
        kept_bytes=before[-1],
        forward_peak_bytes=forward_peak,
        forward_only_bytes=forward_only,
        backward_peak_bytes=backward_peak,
        gradient_bytes=gradients,
        host_bytes=sum(unit.host_bytes for unit in units),
        forward_flops=sum(unit.forward_flops for unit in units),
        recomputed_flops=sum(unit.recomputed_flops for unit in units),
    )


def segment(units: Sequence[Unit], block: BlockCost, blocks: int) -> Unit:
    """A checkpointed segment of some blocks, whose recomputation runs a chain of units before its
    backward."""
    inner = chain(units)
    return replace(
        inner,
        kept_bytes=block.boundary_bytes,
        # The segment's input is held while the last of several blocks runs; a single block counts it already.
        forward_peak_bytes=block.unsaved_peak_bytes
        + (block.boundary_bytes + (blocks - 1) * block.cast_bytes) * (blocks > 1),
        forward_only_bytes=blocks * block.cast_bytes,
        backward_peak_bytes=max(inner.forward_peak_bytes + block.incoming_bytes, inner.backward_peak_bytes),
        recomputed_flops=inner.forward_flops + inner.recomputed_flops,
    )


def assume_offload(block: BlockCost) -> BlockCost:
    """A block whose offloaded cost was not measured: between its forward and backward nothing of it is kept.

    While it runs it needs at most what it needs plainly: in forward without keeping, in backward all brought
    back at once.
    """
    unit = replace(
        block.plain,
        kept_bytes=0,
        forward_peak_bytes=block.unsaved_peak_bytes,
        forward_only_bytes=block.cast_bytes,
        host_bytes=block.host_bytes,
    )
    return replace(block, offload=unit)


def units_of(policy: Policy, n_blocks: int, block: BlockCost) -> list[Unit]:
    """The chain that `checkpointing.run` makes of equal blocks.

    Raises:
        ValueError: the block's cost under this policy was not measured.
    """
    if policy.kind == "none":
        return [block.plain] * n_blocks
    if policy.kind == "groups":
        sizes = [policy.group_size] * (n_blocks // policy.group_size)
        if n_blocks % policy.group_size:
            sizes.append(n_blocks % policy.group_size)
        return [segment([block.plain] * size, block, size) for size in sizes]
    if policy.kind == "recursive":
        if n_blocks == 1:
            return [block.plain]
        middle = (n_blocks + 1) // 2
        first = segment(units_of(policy, middle, block), block, middle)
        return [first, *units_of(policy, n_blocks - middle, block)]
    unit = block.selective if policy.kind == "selective" else block.offload
    if unit is None:
        raise ValueError(f"the block was not measured under the {policy.kind} policy")
    return [unit] * n_blocks


def predict(
    policy: str, n_blocks: int, block: BlockCost, before: Sequence[Unit] = (), after: Sequence[Unit] = ()
) -> Prediction:
    """Predict one policy over `n_blocks` equal blocks.

    Args:
        policy: a policy's name, see `parse_policy`.
        n_blocks: blocks L, at least 1.
        block: what one of them costs.
        before: units that run plainly ahead of the blocks (the embedding).
        after: units behind them (final norm, projection, loss).

    Raises:
        ValueError: the policy is unknown, was not measured for this block, or there are no blocks.
    """
    if n_blocks < 1:
        raise ValueError(f"a plan needs at least one block, got {n_blocks}")
    whole = chain([*before, *units_of(parse_policy(policy), n_blocks, block), *after])
    return Prediction(
        policy=policy,
        peak_bytes=max(whole.forward_peak_bytes, whole.backward_peak_bytes),
        recomputed_flops=whole.recomputed_flops,
        kept_bytes=whole.kept_bytes,
        host_bytes=whole.host_bytes,
    )


def textbook_group_size(n_blocks: int, block: BlockCost) -> float:
    """sqrt(L * boundary / residual): where (L/k)*b + k*r is least, a real number."""
    return math.sqrt(n_blocks * block.boundary_bytes / block.plain.kept_bytes)


def best_group_size(
    n_blocks: int, block: BlockCost, before: Sequence[Unit] = (), after: Sequence[Unit] = ()
) -> tuple[int, tuple[Prediction, ...]]:
    """The group size with the least predicted peak, and the predictions of all sizes 1..L in order.

    Every size is walked, not only the integers beside the textbook's: a last group that is shorter than the
    others, and gradients that grow while boundaries shrink, move the minimum. Of equal peaks the one that
    recomputes less wins, then the smaller size.
    """
    predictions = tuple(
        predict(f"groups-{size}", n_blocks, block, before, after) for size in range(1, n_blocks + 1)
    )
    best = min(range(n_blocks), key=lambda i: (predictions[i].peak_bytes, predictions[i].recomputed_flops, i))
    return best + 1, predictions
