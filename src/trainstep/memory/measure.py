"""Measure what one block costs, for the planner: on the device it will run on, or on the meta device."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from trainstep.memory import checkpointing
from trainstep.memory.live import LiveBytes
from trainstep.memory.offload import count_host_bytes
from trainstep.memory.planner import BlockCost, Unit
from trainstep.memory.storages import storage_bytes

Region = Callable[[], AbstractContextManager[Any]]


def measure_unit(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *args: Any,
    parameters: Iterable[torch.nn.Parameter] = (),
    new_gradients: bool = True,
    region: Region = nullcontext,
) -> Unit:
    """Run one forward and one backward, counting live bytes.

    Args:
        function: from `x` and `args` to one tensor; called twice, eagerly (a compiled region's inside is not
            seen).
        x: input on any device. An integer input counts its bytes and gets no gradient.
        parameters: what the function trains; their `.grad` is left as it was found.
        new_gradients: the gradients appear during the step (they were set to None before it); False when they
            are accumulated into existing ones.
        region: makes the context that a forward runs in (autocast).

    Returns:
        The unit's bytes, and its FLOPs as PyTorch's counter knows them (operators that it does not know count
        0).
    """
    return _measure(function, x, *args, parameters=parameters, new_gradients=new_gradients, region=region)[0]


def measure_block(
    block: torch.nn.Module,
    x: torch.Tensor,
    *args: Any,
    new_gradients: bool = True,
    region: Region = nullcontext,
) -> BlockCost:
    """Measure a block run plainly, without saving, under the selective policy and offloaded.

    Args:
        block: one of the equal blocks of a model.
        x: its input; the output must have the same size.
        args: its further arguments (positions).
        new_gradients, region: see `measure_unit`.

    Offloading is measured on a GPU only; elsewhere `offload` is None. The block runs a few times.
    """
    parameters = list(block.parameters())

    def under(policy: str) -> tuple[Unit, int]:
        return _measure(
            lambda x: checkpointing.run([block], x, *args, policy=policy),
            x,
            parameters=parameters,
            new_gradients=new_gradients,
            region=region,
        )

    plain, plain_flops = under("none")
    selective, selective_flops = under("selective")
    boundary = storage_bytes(x)
    with region(), LiveBytes(x.device.type) as live:
        live.ignore(x)
        y = checkpointing.run([block], x, *args, policy="every-block")
        casts = live.live_bytes - storage_bytes(y)
    with region(), count_host_bytes([*parameters, *block.buffers()]) as host:
        block(x.detach().requires_grad_(), *args)
    return BlockCost(
        boundary_bytes=boundary,
        cast_bytes=casts,
        incoming_bytes=boundary,
        plain=plain,
        unsaved_peak_bytes=unsaved_peak_bytes(block, x, *args, region=region),
        host_bytes=host.bytes,
        selective=replace(
            selective, recomputed_flops=selective_flops - plain_flops, forward_only_bytes=casts
        ),
        offload=replace(under("offload")[0], forward_only_bytes=casts, host_bytes=host.bytes)
        if x.is_cuda
        else None,
    )


def unsaved_peak_bytes(
    function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, region: Region = nullcontext
) -> int:
    """Most bytes alive in a forward that saves nothing, input and output included."""
    with torch.no_grad(), region(), LiveBytes(x.device.type) as live:
        live.ignore(x)
        function(x, *args)
        return live.peak_bytes + storage_bytes(x)


def _measure(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *args: Any,
    parameters: Iterable[torch.nn.Parameter],
    new_gradients: bool,
    region: Region,
) -> tuple[Unit, int]:
    """The unit, and the FLOPs of its forward and backward together."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    x = x.detach().requires_grad_(x.is_floating_point())
    boundary = storage_bytes(x)
    try:
        with LiveBytes(x.device.type) as live:
            live.ignore(x)
            with region():
                y = function(x, *args)
            forward_peak = live.peak_bytes + boundary
            # The output belongs to the next unit, which is done with it when this one's backward starts.
            root, gradient = get_gradient_edge(y), torch.ones_like(y, requires_grad=False)
            del y
            kept = live.live_bytes - storage_bytes(gradient) + boundary
            live.reset_peak()
            torch.autograd.backward((root,), (gradient,))
            backward_peak = live.peak_bytes + boundary
            del gradient
        own = sum(storage_bytes(p.grad) for p in parameters if p.grad is not None)
        # A run of its own: PyTorch's counter keeps alive what a selective checkpoint wants to free.
        with FlopCounterMode(display=False) as flops:
            with region():
                y = function(x, *args)
            forward_flops = flops.get_total_flops()
            y.backward(torch.ones_like(y))
    finally:
        for parameter, gradient_before in zip(parameters, held, strict=True):
            parameter.grad = gradient_before
    unit = Unit(
        kept_bytes=kept,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        gradient_bytes=own if new_gradients else 0,
        forward_flops=forward_flops,
    )
    return unit, flops.get_total_flops()
