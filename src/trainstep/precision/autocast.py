"""Report every dtype of a training step under autocast: module outputs, parameters, loss and gradients.

Autocast (Micikevicius et al. 2018, "Mixed Precision Training"; PyTorch's operator lists) chooses a dtype for
each
operation, not for each module, and the lists differ between devices: a LayerNorm gives float32 on CUDA and
the lower dtype on a CPU. So the probe runs the step and looks.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """What was seen; names are dotted paths, dtypes without the "torch." prefix.

    Attributes:
        device: type of the device that ran.
        autocast: lower dtype of the region, None when autocast was off.
        outputs: module path -> dtypes of the floating-point tensors it returned, over all its calls. "" is
            the model.
        parameters: name -> dtype.
        loss: dtype of the loss.
        gradients: name -> dtype; parameters without a gradient are missing.
    """

    device: str
    autocast: str | None
    outputs: dict[str, tuple[str, ...]]
    parameters: dict[str, str]
    loss: str
    gradients: dict[str, str]


def probe(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor],
    dtype: torch.dtype | None = torch.float16,
    loss_in_autocast: bool = True,
) -> Dtypes:
    """Run one forward and backward under autocast and report the dtypes.

    Args:
        model: any module; its device decides autocast's operator list. Gradients it holds are put back
            afterwards.
        inputs: its positional arguments, on its device.
        loss: from the model's output to a scalar.
        dtype: lower dtype, None for no autocast.
        loss_in_autocast: compute the loss inside the region, as training steps do.

    Returns:
        The dtypes seen. No loss scaling is done: only dtypes are reported, not values.

    Raises:
        ValueError: the model has no parameters, or the loss is not a scalar.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ValueError("the model has no parameters, so it has no device to probe on")
    device = next(iter(parameters.values())).device.type
    held = {name: parameter.grad for name, parameter in parameters.items()}
    outputs: dict[str, list[str]] = {}

    def note(name: str, output: Any) -> None:
        seen = outputs.setdefault(name, [])
        for tensor in tree_leaves(output):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and _name(tensor.dtype) not in seen
            ):
                seen.append(_name(tensor.dtype))

    try:
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.callback(
                    module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output)).remove
                )
            for parameter in parameters.values():
                parameter.grad = None
            region = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
            with region:
                output = model(*inputs)
                if loss_in_autocast:
                    value = loss(output)
            if not loss_in_autocast:
                value = loss(output)
            if value.numel() != 1:
                raise ValueError(f"the loss must be a scalar, got shape {tuple(value.shape)}")
            value.backward()
        gradients = {
            name: _name(parameter.grad.dtype)
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
    finally:
        for name, parameter in parameters.items():
            parameter.grad = held[name]
    return Dtypes(
        device=device,
        autocast=None if dtype is None else _name(dtype),
        outputs={name: tuple(seen) for name, seen in outputs.items()},
        parameters={name: _name(parameter.dtype) for name, parameter in parameters.items()},
        loss=_name(value.dtype),
        gradients=gradients,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ToyModel(nn.Module):
    """fc1 -> relu -> LayerNorm -> fc2, without biases: the smallest model in which autocast disagrees with
    itself.

    Args:
        d_in, d_out: widths of the input [B, d_in] and of the logits [B, d_out].
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, d_out] of `x` [B, d_in]."""
        return self.fc2(self.ln(self.relu(self.fc1(x))))
