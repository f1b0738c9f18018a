"""Bytes a rank holds in training, by component: counted by storages, and predicted.

Counted is what parameters, gradients, buffers and optimizer state hold, each storage once; works on any
device. Copies that a wrapper keeps for itself (the gradient buckets of torch's DistributedDataParallel) are
not seen this way.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainstep.accounting.memory import training_state_bytes
from trainstep.memory.storages import StorageNumbers, storage_bytes
from trainstep.parallel.training import Training
from trainstep.specs.model import ModelConfig

COMPONENTS = ("parameters", "gradients", "optimizer")
PHASES = ("built", "before_step", "after_step")


def component_bytes(training: Training) -> dict[str, int]:
    """Bytes of "parameters" (buffers left out), "gradients" and "optimizer" state on this rank, now."""
    parameters = list(training.model.parameters())
    optimizer: Any = training.optimizer
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its share there
    state = [value for values in inner.state.values() for value in values.values()]
    return {
        "parameters": _bytes_of(parameters),
        "gradients": _bytes_of(p.grad for p in parameters),
        "optimizer": _bytes_of(state),
    }


def _bytes_of(values: Iterable[Any]) -> int:
    numbers, total, seen = StorageNumbers(), 0, set()
    for value in values:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, Tensor) and (number := numbers.number(value)) not in seen:
            seen.add(number)
            total += storage_bytes(value)
    return total


def bytes_by_phase(training: Training, forward_backward: Callable[[], None]) -> dict[str, dict[str, int]]:
    """Components when built, before the optimizer's first step and after it.

    Args:
        training: fresh: no step taken yet.
        forward_backward: runs the model on this rank's batch, and backward.
    """
    found = {"built": component_bytes(training)}
    forward_backward()
    training.finish()
    found["before_step"] = component_bytes(training)
    training.optimizer.step()
    found["after_step"] = component_bytes(training)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found


def predicted_by_phase(
    config: ModelConfig, precision: str, *, zero_stage: int, ranks: int
) -> dict[str, dict[str, float]]:
    """What `bytes_by_phase` should find for AdamW, by `accounting.memory.training_state_bytes`."""
    state = training_state_bytes(config, precision, zero_stage=zero_stage, ranks=ranks)
    present = {
        "built": {"parameters"},
        "before_step": {"parameters", "gradients"},
        "after_step": set(COMPONENTS),
    }
    return {
        phase: {part: state[part] if part in present[phase] else 0.0 for part in COMPONENTS}
        for phase in PHASES
    }
