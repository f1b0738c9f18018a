"""What kernels say of derivatives that they do not have; torch's own answer is often a wrong one.

Of a custom operator torch takes a missing forward-mode tangent for zeros, and of a kernel that is launched as it is it
knows nothing at all. Each refusal is a NotImplementedError of one line that names the kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import debug_unwrap


def inside_func(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is at work on one of these."""
    # torch.compile traces transforms away, and cannot trace this.
    return not torch.compiler.is_compiling() and any(debug_unwrap(x, recurse=False) is not x for x in tensors)


def _has_tangent(x: Tensor) -> bool:
    """Whether x carries a forward-mode tangent. Torch cannot tell under vmap: then inside any forward-mode level."""
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:
        return True


def refuse_forward_mode(name: str, *tensors: Tensor) -> None:
    """For what has a derivative in reverse mode only.

    Raises:
        NotImplementedError: a tensor carries a forward-mode tangent.
    """
    if any(_has_tangent(x) for x in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative; the reference implementation has")


def refuse_func_gradients(name: str, *tensors: Tensor) -> None:
    """For operators whose derivative torch.autograd knows by `register_autograd`, which torch.func does not take.

    Raises:
        NotImplementedError: torch.func differentiates with respect to a tensor.
    """
    for x in tensors:
        while inside_func(x):  # one level of transforms after the other
            if x.requires_grad:
                raise NotImplementedError(
                    f"{name} has no derivative in torch.func; the reference implementation has"
                )
            x = debug_unwrap(x, recurse=False)


def refuse_derivatives(name: str, *tensors: Tensor) -> None:
    """For kernels that autograd knows nothing of.

    Raises:
        NotImplementedError: autograd, forward mode or a transform of torch.func would need more than values.
    """
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if graph or inside_func(*tensors) or any(_has_tangent(x) for x in tensors):
        raise NotImplementedError(
            f"{name} has no derivative: call it under torch.no_grad() and outside of torch.func and forward mode"
        )


def no_double_backward(name: str) -> Callable[..., None]:
    """The backward pass, `(ctx, *grads)`, of what is a first derivative already: it raises NotImplementedError."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise NotImplementedError(f"{name} has no double backward; the reference implementation has")

    return refuse
