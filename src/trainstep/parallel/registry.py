"""The tables of data-parallel variants, of sharded training, and of their peers.

Standard library only: the ruler loads this file by path from its own checkout, also when an older trainstep
is installed. A variant is added with a row here and its class in a file under `data/`; tests, sweeps, tables
and plots follow.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DataParallelRow:
    """One wrapper: `wrapper = Wrapper(module, **options)`, `.module`, `finish_gradient_synchronization()`,
    `no_sync()`.

    Attributes:
        name: the name in case ids and on the command line.
        target: "module:class", imported when first used.
        options: keyword arguments bound to the class.
        peer: shipped by somebody else; never our own work.
        devices: device types it runs on.
        buckets: takes `bucket_size_mb`.
        unused_parameters: a gradient may be missing on some ranks or on all without any option.
        overlaps: starts to communicate before backward ends.
    """

    name: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    buckets: bool = False
    unused_parameters: bool = True
    overlaps: bool = False


DATA_PARALLEL: tuple[DataParallelRow, ...] = (
    DataParallelRow(name="naive", target="trainstep.parallel.data.naive:Naive"),
    DataParallelRow(name="flat", target="trainstep.parallel.data.flat:Flat"),
    DataParallelRow(name="overlap", target="trainstep.parallel.data.overlap:Overlap", overlaps=True),
    DataParallelRow(
        name="bucketed", target="trainstep.parallel.data.bucketed:Bucketed", buckets=True, overlaps=True
    ),
    DataParallelRow(
        name="torch-ddp",
        target="trainstep.parallel.data.torch_ddp:TorchDDP",
        peer=True,
        buckets=True,
        unused_parameters=False,
        overlaps=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class ShardedRow:
    """One way of spreading training state over ranks: a builder of `parallel.training.Training`.

    Attributes:
        name: the name in case ids and on the command line.
        target: "module:function", imported when first used.
        stage: what is sharded (ZeRO): 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        peer: shipped by somebody else; never our own work.
        devices: device types it runs on.
        compute_dtype: takes one.
    """

    name: str
    target: str
    stage: int
    peer: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    compute_dtype: bool = False


SHARDED: tuple[ShardedRow, ...] = (
    ShardedRow(name="replicated", target="trainstep.parallel.training:replicated", stage=0),
    ShardedRow(name="zero1", target="trainstep.parallel.training:zero1", stage=1),
    ShardedRow(name="zero2", target="trainstep.parallel.training:zero2", stage=2),
    ShardedRow(name="fsdp", target="trainstep.parallel.training:fsdp", stage=3, compute_dtype=True),
    ShardedRow(name="torch-zero1", target="trainstep.parallel.torch_sharded:torch_zero1", stage=1, peer=True),
    ShardedRow(
        name="torch-fsdp",
        target="trainstep.parallel.torch_sharded:torch_fsdp",
        stage=3,
        peer=True,
        compute_dtype=True,
    ),
)


def get_data_parallel(name: str) -> DataParallelRow:
    """Look a row up.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    for row in DATA_PARALLEL:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in DATA_PARALLEL)
    raise ValueError(f"unknown data-parallel variant {name!r}; known: {known}")


def load_data_parallel(row: DataParallelRow) -> Any:
    """Import a row's class and bind its options.

    Raises:
        ImportError, AttributeError: this trainstep does not have it.
    """
    module, _, name = row.target.partition(":")
    wrapper = getattr(importlib.import_module(module), name)
    if row.options:
        from functools import partial

        return partial(wrapper, **row.options)
    return wrapper


def get_sharded(name: str) -> ShardedRow:
    """Look a row up.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    for row in SHARDED:
        if row.name == name:
            return row
    raise ValueError(f"unknown sharding {name!r}; known: {', '.join(row.name for row in SHARDED)}")


def load_sharded(row: ShardedRow) -> Any:
    """Import a row's builder.

    Raises:
        ImportError, AttributeError: this trainstep does not have it.
    """
    module, _, name = row.target.partition(":")
    return getattr(importlib.import_module(module), name)
