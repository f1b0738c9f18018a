"""Run a list of blocks so that the backward pass keeps less and computes more.

One function, `run`, and six ways to spend: keep everything, recompute by block or by groups of blocks (Chen
et al. 2016, "Training Deep Nets with Sublinear Memory Cost", sections 4.1 and 4.4), keep only the results of
matrix products and attention, or keep everything in the host's memory. All of them do the same arithmetic in
the same order, so losses and gradients are bit-equal to running the blocks plainly, also with dropout: a
segment is recomputed under the random state that it started from, and the state is put back afterwards. That is
the state of torch's default generators, of Python's `random`, and of generators that modules hold as attributes; a
block that draws from another source (NumPy, a generator of what is no module) gets a wrong gradient. Compiled, a block may
draw from torch's default generators only.
Segments are not reentrant: they need no input that requires gradients, and gradient hooks fire once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trainstep.memory.offload import offload_to_host
from trainstep.memory.policy import parse_policy
from trainstep.memory.random_state import Contexts, RandomStates

Block = Callable[..., torch.Tensor]

# Products whose results are kept by "selective"; everything else in a block costs memory traffic only.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})


def run(blocks: Sequence[Block], x: torch.Tensor, *args: Any, policy: str = "none") -> torch.Tensor:
    """Compute `x = block(x, *args)` for each block in order, saving for backward what the policy keeps.

    Args:
        blocks: callables from a tensor (and `args`) to a tensor of the same shape; an `nn.ModuleList` will
            do.
        x: input of the first block, any shape.
        args: further arguments that every block gets (positions, masks).
        policy: see `policy.parse_policy`. Without gradients (`torch.no_grad`) every policy runs the blocks
            plainly.

    Kept for the backward pass, with L blocks, a boundary b (bytes of `x`) and residuals r (bytes a block
    saves): none L*r; groups-K: ceil(L/K) boundaries, and K*r while one segment is recomputed; recursive: at
    most ceil(log2 L) boundaries and r; selective: L times the results of products and attention; offload: L*r
    in the host's memory. Recomputed: nothing, every block once, about log2(L)/2 times, all but the products,
    nothing.

    Returns:
        The last block's output; `x` itself when there are no blocks.

    Raises:
        ValueError: the policy's name is unknown.
    """
    parsed = parse_policy(policy)
    blocks = tuple(blocks)
    if parsed.kind == "none" or not torch.is_grad_enabled():
        return _plain(blocks, x, *args)
    if parsed.kind == "offload":
        with offload_to_host(_parameters(blocks)):
            return _plain(blocks, x, *args)
    # The compiler knows no contexts of our own.
    states = None if torch.compiler.is_compiling() else RandomStates(blocks)
    if parsed.kind == "recursive":
        x = _recursive(states, blocks, x, *args)
    else:
        selective = parsed.kind == "selective"
        size = 1 if selective else parsed.group_size
        for start in range(0, len(blocks), size):
            segment = blocks[start : start + size]
            x = _checkpoint(states, _plain, segment, x, *args, keep_products=selective)
    if states is not None:
        states.first_run_ended()
    return x


def _plain(blocks: tuple[Block, ...], x: torch.Tensor, *args: Any) -> torch.Tensor:
    for block in blocks:
        x = block(x, *args)
    return x


def _checkpoint(
    states: RandomStates | None,
    function: Block,
    blocks: tuple[Block, ...],
    x: torch.Tensor,
    *args: Any,
    keep_products: bool = False,
) -> torch.Tensor:
    """`function(blocks, x, *args)` as one segment; None for states where it is compiled."""
    if states is None:
        if keep_products:
            return checkpoint(function, blocks, x, *args, use_reentrant=False, context_fn=_keep_products)
        return checkpoint(function, blocks, x, *args, use_reentrant=False)
    around = partial(states.contexts, blocks, _keep_products if keep_products else noop_context_fn)
    return checkpoint(function, blocks, x, *args, use_reentrant=False, context_fn=around)


def _recursive(
    states: RandomStates | None, blocks: tuple[Block, ...], x: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Checkpoint the first half as one segment that recurses when it is recomputed, then recurse into the
    second.

    The second half needs no segment of its own: backward reaches it first, when nothing else was recomputed
    yet. So a block is recomputed once for each first half that it lies in, and one boundary a level is alive
    at any time.
    """
    if len(blocks) <= 1:
        return _plain(blocks, x, *args)
    middle = (len(blocks) + 1) // 2
    x = _checkpoint(states, partial(_recursive, states), blocks[:middle], x, *args)
    return _recursive(states, blocks[middle:], x, *args)


def keeps(operator: Any) -> bool:
    """True for operators whose results "selective" keeps: products and attention, also custom ones."""
    namespace, _, name = operator.name().rpartition("::")
    name = name.partition(".")[0]
    return (namespace == "aten" and name in _PRODUCTS) or "attention" in name


def _choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_products() -> Contexts:
    return create_selective_checkpoint_contexts(_choose)


def _parameters(blocks: tuple[Block, ...]) -> list[torch.Tensor]:
    """Parameters and buffers of the blocks that are modules: they stay on the device anyway."""
    found: list[torch.Tensor] = []
    for block in blocks:
        if isinstance(block, torch.nn.Module):
            found.extend(block.parameters())
            found.extend(block.buffers())
    return found
