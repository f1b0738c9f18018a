"""Checks and the launch of the AdamW kernel."""

import math

import torch
import triton
from torch import Tensor

from trainstep.derivatives import refuse_derivatives
from trainstep.interpreter import holds_bare_bits, interpreted
from trainstep.kernels.adamw.triton import adamw_kernel

# Sixteen elements a thread and as many threads as a multiprocessor's registers allow: loads in flight hide latency
# even where the update has but a few multiprocessors to itself.
_BLOCK = 8192
_WARPS = 16
_LOW = (torch.float16, torch.bfloat16)


def adamw_(
    master: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    programs: int | None = None,
) -> None:
    """See the package.

    Args:
        programs: at most so many run at once, for updates beside products that need the other multiprocessors;
            None fills the device.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit, tensors that are not on one CUDA device.
        NotImplementedError: a derivative of the update is asked for.
    """
    for name, tensor in {"mean": mean, "square": square}.items():
        if tensor.shape != master.shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 {tuple(master.shape)}")
    if master.dtype != torch.float32 or not master.is_contiguous():
        raise ValueError(f"master must be contiguous float32, got {master.dtype}")
    for name, low in {"gradient": gradient, "copy": copy}.items():
        if low is not None and (low.shape != master.shape or low.dtype not in (torch.float32, *_LOW)):
            raise ValueError(f"{name} must be {tuple(master.shape)} of float32, float16 or bfloat16")
    if copy is not None and not copy.is_contiguous():
        raise ValueError("copy must be contiguous")
    if step.dim() or step.dtype != torch.float32:
        raise ValueError(f"step must be a float32 scalar tensor, got {tuple(step.shape)} {step.dtype}")
    refuse_derivatives("the Triton AdamW", master, gradient, mean, square, step)
    written = [master, mean, square, *([] if copy is None else [copy])]
    if len({tensor.device for tensor in (*written, gradient, step)}) != 1:
        raise ValueError("all tensors must be on one device")
    if master.device.type != "cuda" and not interpreted():
        raise ValueError(
            f"the Triton AdamW needs CUDA tensors, got {master.device} without TRITON_INTERPRET=1"
        )
    if master.numel() == 0:
        return
    # The kernel writes behind autograd's back: a backward pass that still needs the old values must notice.
    torch.autograd.graph.increment_version(written)
    written_copy = None if copy is None or holds_bare_bits(copy) else copy
    blocks = triton.cdiv(master.numel(), _BLOCK)
    grid = min(blocks, programs or _fill(master.device))
    with torch.cuda.device_of(master):
        adamw_kernel[(grid,)](
            master, gradient.contiguous(), mean, square, step, written_copy, master.numel(),
            triton.cdiv(blocks, grid), lr, *map(_log, betas), 1.0 - lr * weight_decay, 1.0 - betas[0], betas[1],
            1.0 - betas[1], eps, HAS_COPY=written_copy is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    if copy is not None and written_copy is None:
        with torch.no_grad():
            copy.copy_(master)


def _log(beta: float) -> float:
    """The kernel takes beta^t as exp(t * log(beta))."""
    return math.log(beta) if beta else -math.inf


def _fill(device: torch.device) -> int:
    """How many programs fill a device: one a multiprocessor. The interpreter runs them one after the other."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
