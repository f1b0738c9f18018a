"""A model and its optimizer under each way of sharding, behind one set of calls; the peers are in
`torch_sharded`.

Every builder takes `(module, optimizer_cls, *, communication=None, compute_dtype=None, **hyper_parameters)`
and returns a `Training`. The step is `training.model(batch)`, backward, `training.finish()`,
`training.optimizer.step()`, `training.optimizer.zero_grad()`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.clip import clip_grad_norm
from trainstep.parallel.communication import CommunicationLog
from trainstep.parallel.data.bucketed import Bucketed
from trainstep.parallel.data.protocol import DataParallel
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.zero.stage1 import ShardedOptimizer
from trainstep.parallel.zero.stage2 import ShardedGradients


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training loop needs.

    Attributes:
        model: takes this rank's batch.
        optimizer: over this rank's parameters.
        finish: after backward, before clipping and the optimizer's step.
        clip: scales gradients to a global norm and returns the norm before.
        full_parameters: every parameter whole, by its name in the wrapped module; every rank calls it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]
    clip: Callable[[float], Tensor]
    full_parameters: Callable[[], dict[str, Tensor]]


def parameters_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter as this rank holds it, tied ones by each name."""
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}


def refuse_compute_dtype(compute_dtype: torch.dtype | None) -> None:
    """For what keeps whole parameters.

    Raises:
        ValueError: there is one.
    """
    if compute_dtype is not None:
        raise ValueError("only sharded parameters are cast to a compute dtype; use autocast")


def _with_whole_gradients(wrapper: DataParallel, optimizer: torch.optim.Optimizer) -> Training:
    return Training(
        model=wrapper,
        optimizer=optimizer,
        finish=wrapper.finish_gradient_synchronization,
        # Gradients are alike on all ranks, so nothing is summed over them.
        clip=lambda max_norm: clip_grad_norm(wrapper.module.parameters(), [], max_norm),
        full_parameters=lambda: parameters_by_name(wrapper.module),
    )


def replicated(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """Nothing sharded: bucketed data parallelism and the plain optimizer."""
    refuse_compute_dtype(compute_dtype)
    wrapper = Bucketed(module, communication=communication)
    return _with_whole_gradients(wrapper, optimizer_cls(module.parameters(), **hyper_parameters))


def zero1(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """Optimizer state sharded."""
    refuse_compute_dtype(compute_dtype)
    wrapper = Bucketed(module, communication=communication)
    return _with_whole_gradients(
        wrapper, ShardedOptimizer(module.parameters(), optimizer_cls, **hyper_parameters)
    )


def zero2(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """Optimizer state and gradients sharded."""
    refuse_compute_dtype(compute_dtype)
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, **hyper_parameters)
    wrapper = ShardedGradients(module, optimizer, communication=communication)
    return Training(
        model=wrapper,
        optimizer=optimizer,
        finish=wrapper.finish_gradient_synchronization,
        clip=wrapper.clip_grad_norm,
        full_parameters=lambda: parameters_by_name(module),
    )


def fsdp(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """Optimizer state, gradients and parameters sharded."""
    wrapper = FSDP(module, compute_dtype, communication=communication)
    return Training(
        model=wrapper,
        optimizer=optimizer_cls(wrapper.parameters(), **hyper_parameters),
        finish=wrapper.finish_gradient_synchronization,
        clip=wrapper.clip_grad_norm,
        full_parameters=wrapper.gather_full_params,
    )
