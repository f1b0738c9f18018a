"""Data parallelism, bucketed: gradients travel in buckets that start while backward still works.

Between `overlap` (many small all-reduces) and `flat` (one, too late to hide). Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.data.order import OrderedUnits
from trainstep.parallel.data.protocol import DataParallel, pack, unpack


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Fill buckets of one dtype and device from the last parameter to the first.

    A parameter larger than a bucket gets one of its own and closes no other: small ones that lie between large ones
    share a bucket. Buckets come in the order in which backward completes them.
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[object, tuple[list[nn.Parameter], int]] = {}
    place = {}
    for position, parameter in enumerate(reversed(parameters)):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        place[parameter] = position
        if size > bucket_bytes:
            buckets.append([parameter])
            continue
        bucket, filled = filling.get(kind, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, filled + size
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])


class Bucketed(DataParallel):
    """Copies gradients into flat buckets, all-reduces these and copies back; a bucket of one is reduced in place.

    Args:
        module: see `DataParallel`, as for the other options.
        bucket_size_mb: megabytes (10^6 bytes) of a bucket.

    Raises:
        ValueError: the bucket size is not positive.
    """

    _order: OrderedUnits | None = None

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0, **options: Any) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be positive, got {bucket_size_mb}")
        self._bucket_bytes = bucket_size_mb * 1e6
        super().__init__(module, **options)

    def _prepare(self) -> None:
        if self._order is not None:
            self._order.remove()
        self._buckets = make_buckets(self._trainable, self._bucket_bytes)
        self._flying: list[tuple[Tensor, dist.Work]] = []
        self._order = OrderedUnits(self._buckets, self._launch, lambda: self._synchronizing)

    def _launch(self, index: int) -> None:
        gradients = [self._take(parameter) for parameter in self._buckets[index]]
        flat = pack(gradients) if len(gradients) > 1 else gradients[0]
        self._flying.append((flat, self._all_reduce(flat)))

    def _reduce_gradients(self) -> None:
        assert self._order is not None
        self._order.launch_rest()
        with self._waiting():
            for _, work in self._flying:
                work.wait()
        for bucket, (flat, _) in zip(self._buckets, self._flying, strict=True):
            pieces = unpack(flat, bucket) if len(bucket) > 1 else [flat]
            for parameter, reduced in zip(bucket, pieces, strict=True):
                self._give(parameter, reduced)
        self._flying.clear()
