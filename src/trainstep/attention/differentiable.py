"""Forward and backward passes as functions that autograd and `torch.func` know; shared by the implementations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from trainstep.derivatives import no_double_backward


class Passes(NamedTuple):
    """What an implementation gives: q, out, d_out, dq [B, N, S, H]; k, v, dk, dv [B, K, T, H]; lse, d_lse [B, N, S].

    Attributes:
        name: for messages.
        forward: (q, k, v, *rule) -> out, lse. The rule is whatever else the passes take: not tensors.
        backward: (q, k, v, out, lse, d_out, d_lse or None, *rule) -> dq, dk, dv.
    """

    name: str
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def _save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, output: tuple[Tensor, Tensor], rule: tuple[Any, ...]
) -> None:
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs nothing
    ctx.rule = rule


def _operands(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the backward pass takes before the rule."""
    q, k, v, out, lse = ctx.saved_tensors
    return q, k, v, out, lse, torch.zeros_like(out) if d_out is None else d_out, d_lse


def register_derivatives(passes: Passes) -> None:
    """Make one custom operator the derivative of the other, and its own derivative a refusal."""
    forward, backward, name = passes.forward, passes.backward, passes.name
    assert isinstance(forward, CustomOpDef) and isinstance(backward, CustomOpDef)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *rule = inputs
        _save(ctx, q, k, v, output, tuple(rule))

    def differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*backward(*_operands(ctx, d_out, d_lse), *ctx.rule), *[None] * len(ctx.rule))

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(no_double_backward(name))


def _over_batch(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """`torch.func.vmap` of a function of tensors [B, ...], passes and rule: the mapped axis joins the batch."""

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    *tensors, passes, rule = arguments
    results = function.apply(*map(fold, tensors, in_dims), passes, rule)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0,) * len(results)


class AttentionGradient(torch.autograd.Function):
    """`apply(q, k, v, out, lse, d_out, d_lse, passes, rule)`: the backward pass, which torch.func can map.

    Raises:
        NotImplementedError: later, where it is differentiated.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
        passes: Passes, rule: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return passes.backward(q, k, v, out, lse, d_out, d_lse, *rule)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[-2].name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        no_double_backward(ctx.name)(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _over_batch(AttentionGradient, info, in_dims, arguments)


class Attention(torch.autograd.Function):
    """`apply(q, k, v, passes, rule)` -> out, lse, differentiable once, in reverse mode; saves q, k, v and both."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, passes: Passes, rule: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return passes.forward(q, k, v, *rule)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.passes, rule = inputs
        _save(ctx, q, k, v, output, rule)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            *AttentionGradient.apply(*_operands(ctx, d_out, d_lse), ctx.passes, ctx.rule), None, None
        )  # fmt: skip

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _over_batch(Attention, info, in_dims, arguments)
