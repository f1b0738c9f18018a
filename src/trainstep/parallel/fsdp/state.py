"""Saving and loading a sharded model and its optimizer, in full or in parts, at any number of ranks.

A full state is what the unwrapped model and its plain optimizer would give: names, shapes and indices are
theirs and nothing is padded. A part holds what one rank has; `merge_*` joins the parts of all ranks into the
full state without any communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainstep.parallel.agreement import require_all_ranks

if TYPE_CHECKING:
    from trainstep.parallel.fsdp.shard import ShardedWeight
    from trainstep.parallel.fsdp.wrapper import FSDP

State = dict[str, Any]


def _sharded_names(fsdp: FSDP) -> dict[str, ShardedWeight]:
    """Every name of every sharded weight in the wrapped model."""
    by_shard = {id(weight.shard): weight for weight in fsdp.weights}
    return {
        name: by_shard[id(parameter)]
        for name, parameter in fsdp.module.named_parameters(remove_duplicate=False)
        if id(parameter) in by_shard
    }


@torch.no_grad()
def full_parameters(fsdp: FSDP) -> dict[str, Tensor]:
    """See `FSDP.gather_full_params`."""
    require_all_ranks("FSDP.gather_full_params")
    sharded = _sharded_names(fsdp)
    whole: dict[int, Tensor] = {}
    found = {}
    for name, parameter in fsdp.module.named_parameters(remove_duplicate=False):
        if id(parameter) not in whole:
            if name in sharded:
                whole[id(parameter)] = sharded[name].join(parameter.detach())
            else:
                whole[id(parameter)] = parameter.detach().clone()
        found[name] = whole[id(parameter)]
    return found


@torch.no_grad()
def full_state_dict(fsdp: FSDP) -> dict[str, Tensor]:
    """The unwrapped model's state dict, in host memory on every rank; the device holds one whole weight.

    Raises:
        RuntimeError: some ranks did not call it in time.
    """
    require_all_ranks("FSDP.state_dict")
    sharded = _sharded_names(fsdp)
    whole: dict[int, Tensor] = {}
    found = {}
    for name, value in fsdp.module.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            value_whole = sharded[name].join(value.detach()) if name in sharded else value.detach()
            whole[id(value)] = value_whole.to("cpu", copy=True)
        found[name] = whole[id(value)]
    return found


@torch.no_grad()
def load_full_state_dict(fsdp: FSDP, state_dict: dict[str, Tensor], strict: bool = True) -> Any:
    """Take this rank's part of a full state dict; no communication.

    Returns:
        Missing and unexpected names, as `nn.Module.load_state_dict`.

    Raises:
        ValueError: a weight has another shape.
    """
    parts = dict(state_dict)
    for name, weight in _sharded_names(fsdp).items():
        if name in parts:
            if parts[name].shape != weight.shape:
                raise ValueError(
                    f"{name} has shape {tuple(parts[name].shape)} in the state dict, "
                    f"{tuple(weight.shape)} in the model"
                )
            parts[name] = weight.cut(parts[name])
    return fsdp.module.load_state_dict(parts, strict)


def sharded_state_dict(fsdp: FSDP) -> State:
    """This rank's part, in host memory; no communication."""
    return {
        "shapes": {name: tuple(weight.shape) for name, weight in _sharded_names(fsdp).items()},
        "state": {
            name: value.detach().to("cpu", copy=True) for name, value in fsdp.module.state_dict().items()
        },
    }


def merge_state_dicts(parts: Sequence[State]) -> dict[str, Tensor]:
    """The full state dict from the parts of all ranks of one shard group, in rank order."""
    full = dict(parts[0]["state"])
    for name, shape in parts[0]["shapes"].items():
        full[name] = _join([part["state"][name] for part in parts]).view(shape)
    return full


# Optimizer state. A shard's moments have the shard's shape; anything else (a 0-d step) is alike on all ranks.


def _weights_by_index(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> dict[int, ShardedWeight]:
    by_shard = {id(weight.shard): weight for weight in fsdp.weights}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: by_shard[id(p)] for i, p in enumerate(parameters) if id(p) in by_shard}


def full_optimizer_state_dict(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """The plain optimizer's state dict, in host memory on every rank; every rank calls it.

    Raises:
        RuntimeError: some ranks did not call it in time.
    """
    require_all_ranks("full_optimizer_state_dict")
    weights = _weights_by_index(fsdp, optimizer)
    local = optimizer.state_dict()
    state: dict[int, State] = {}
    for index, values in local["state"].items():
        state[index] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                if index in weights and value.shape == weights[index].shard.shape:
                    value = weights[index].join(value)
                value = value.to("cpu", copy=True)
            state[index][key] = value
    return {"state": state, "param_groups": local["param_groups"]}


def load_full_optimizer_state_dict(fsdp: FSDP, optimizer: torch.optim.Optimizer, state_dict: State) -> None:
    """Take this rank's part of a full optimizer state; no communication."""
    weights = _weights_by_index(fsdp, optimizer)
    state = {index: dict(values) for index, values in state_dict["state"].items()}
    for index, weight in weights.items():
        for key, value in state.get(index, {}).items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                state[index][key] = weight.cut(value).clone()
    optimizer.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


def sharded_optimizer_state_dict(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part; no communication."""
    weights = _weights_by_index(fsdp, optimizer)
    shapes = {i: (tuple(w.shard.shape), tuple(w.shape)) for i, w in weights.items()}
    return {"shapes": shapes, **optimizer.state_dict()}


def merge_optimizer_state_dicts(parts: Sequence[State]) -> State:
    """The full optimizer state from the parts of all ranks of one shard group, in rank order."""
    state = {index: dict(values) for index, values in parts[0]["state"].items()}
    for index, (shard_shape, shape) in parts[0]["shapes"].items():
        for key, value in state.get(index, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == shard_shape:
                state[index][key] = _join([part["state"][index][key] for part in parts]).view(shape)
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def _join(parts: Sequence[Tensor]) -> Tensor:
    """All parts as one flat tensor on the first one's device: each may have been saved from a device of its own."""
    return torch.cat([part.to(parts[0].device) for part in parts])
