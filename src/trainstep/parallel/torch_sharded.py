"""The peers of our sharding, ZeroRedundancyOptimizer and fully_shard, behind the calls of `training`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainstep.parallel.collectives import reduce_scatter_single, start_all_gather, start_reduce_scatter
from trainstep.parallel.communication import CommunicationLog
from trainstep.parallel.data.torch_ddp import TorchDDP
from trainstep.parallel.training import Training, parameters_by_name, refuse_compute_dtype


def torch_zero1(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """ZeroRedundancyOptimizer under DistributedDataParallel."""
    refuse_compute_dtype(compute_dtype)
    wrapper = TorchDDP(module, communication=communication)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=optimizer_cls, **hyper_parameters
    )
    return Training(
        model=wrapper,
        optimizer=optimizer,
        finish=wrapper.finish_gradient_synchronization,
        clip=lambda max_norm: nn.utils.clip_grad_norm_(module.parameters(), max_norm),
        full_parameters=lambda: parameters_by_name(module),
    )


class _Logged:
    """A collective of fully_shard, written down; otherwise what fully_shard does by itself."""

    def __init__(self, log: CommunicationLog) -> None:
        self.log = log

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The collective's buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, launch: Callable[[], dist.Work], async_op: bool) -> dist.Work | None:
        work = self.log.track(launch)
        if async_op:
            return work
        with self.log.waiting():  # on CUDA only the stream that communicates waits
            work.wait()
        return None


class _LoggedAllGather(_Logged):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return self._run(lambda: start_all_gather(output_tensor, input_tensor, group), async_op)


class _LoggedReduceScatter(_Logged):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if dist.get_backend(group) != "gloo":
            return self._run(
                lambda: reduce_scatter_single(output_tensor, input_tensor, op, group, True), async_op
            )
        part = output_tensor

        def launch() -> dist.Work:
            nonlocal part
            part, work = start_reduce_scatter(input_tensor, group, op)
            return work

        self._run(launch, False)
        output_tensor.copy_(part)
        return None


def torch_fsdp(
    module: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    communication: CommunicationLog | None = None,
    compute_dtype: torch.dtype | None = None,
    **hyper_parameters: Any,
) -> Training:
    """fully_shard of each of the module's `blocks` (of its children where it has none), then of the rest.

    The module itself is changed. On CUDA the log knows when collectives ran, but not what waited for them.
    """
    device = next(module.parameters()).device
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype)
    parts = getattr(module, "blocks", None) or [
        m for m in module.children() if any(True for _ in m.parameters())
    ]
    for part in (*parts, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        if communication is not None:
            part.set_custom_all_gather(_LoggedAllGather(communication))
            part.set_custom_reduce_scatter(_LoggedReduceScatter(communication))
    if communication is not None and device.type == "cuda":
        communication.waits_are_known = False

    def clip(max_norm: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def full_parameters() -> dict[str, Tensor]:
        return {
            n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters_by_name(module).items()
        }

    return Training(
        model=module,
        optimizer=optimizer_cls(module.parameters(), **hyper_parameters),
        finish=lambda: None,
        clip=clip,
        full_parameters=full_parameters,
    )
