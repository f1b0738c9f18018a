"""The peer: torch's DistributedDataParallel behind the protocol of our own variants."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainstep.parallel.communication import CommunicationLog


class TorchDDP(nn.Module):
    """DistributedDataParallel with its defaults; it reduces and waits inside backward.

    Args:
        module: the model, on this rank's device.
        bucket_size_mb: megabytes (10^6 bytes) of a bucket.
        group: ranks that hold replicas; None means all.
        find_unused_parameters: as torch's.
        communication: where to note when collectives ran. Its waits are hidden in backward: the time from the
            last bucket's launch to its end stands for them.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        communication: CommunicationLog | None = None,
    ) -> None:
        super().__init__()
        self.ddp = DistributedDataParallel(
            module,
            bucket_cap_mb=bucket_size_mb * 1e6 / 2**20,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
        )
        self.communication = communication
        self._group = group
        if communication is not None:
            self.ddp.register_comm_hook(None, self._tracked_all_reduce)

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self.ddp.module

    def _tracked_all_reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP does without a hook (divide, then sum), with a note in the log."""
        assert self.communication is not None
        flat = bucket.buffer().div_(dist.get_world_size(self._group))
        work = self.communication.track(lambda: dist.all_reduce(flat, group=self._group, async_op=True))
        return work.get_future().then(lambda future: future.value()[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate gradients; as torch's, forward belongs inside too."""
        return self.ddp.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: backward has waited."""
        if self.communication is not None:
            self.communication.wait_from_last_launch()
