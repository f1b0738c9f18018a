"""The table of fused kernels and their peers.

Standard library only: the ruler loads this file by path from its own checkout. A row is added here and its
function in the kernel's room; tests, sweeps, tables and plots follow.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One implementation of one kernel; all rows of a kernel take the same arguments.

    Attributes:
        kernel: what it computes, e.g. "weighted_sum"; the module's docstring states the signature.
        name: the implementation, in case ids and on the command line.
        target: "module:function", imported when first used.
        options: keyword arguments bound to the function; `compile=True` wraps it in torch.compile instead.
        peer: shipped by somebody else, or by a compiler; never our own kernel.
        devices: device types it runs on.
        dtypes: short names, see `specs.dtype`.
        backward: differentiable.
    """

    kernel: str
    name: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    backward: bool = True


KERNELS: tuple[KernelRow, ...] = (
    KernelRow(
        kernel="weighted_sum",
        name="reference",
        target="trainstep.kernels.weighted_sum.reference:weighted_sum",
        dtypes=("fp32", "fp16", "bf16", "fp64"),
    ),
    KernelRow(
        kernel="weighted_sum",
        name="reference-compiled",
        target="trainstep.kernels.weighted_sum.reference:weighted_sum",
        options={"compile": True},
        peer=True,
    ),
    KernelRow(
        kernel="weighted_sum",
        name="torch-matmul",
        target="trainstep.kernels.weighted_sum.reference:matrix_vector",
        peer=True,
        dtypes=("fp32", "fp16", "bf16", "fp64"),
    ),
    KernelRow(
        kernel="weighted_sum",
        name="triton",
        target="trainstep.kernels.weighted_sum.function:weighted_sum",
        devices=("cuda",),
    ),
)


def get_kernel(kernel: str, name: str) -> KernelRow:
    """Look a row up.

    Raises:
        ValueError: the kernel or the implementation is unknown; the message lists the known ones.
    """
    rows = [row for row in KERNELS if row.kernel == kernel]
    if not rows:
        known = dict.fromkeys(row.kernel for row in KERNELS)
        raise ValueError(f"unknown kernel {kernel!r}; known: {', '.join(known)}")
    for row in rows:
        if row.name == name:
            return row
    raise ValueError(
        f"unknown implementation {name!r} of {kernel}; known: {', '.join(row.name for row in rows)}"
    )


def load_kernel(row: KernelRow) -> Callable[..., Any]:
    """Import a row's function and bind its options.

    Raises:
        ImportError, AttributeError: this trainstep does not have it.
    """
    module, _, name = row.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    options = dict(row.options)
    if options.pop("compile", False):
        import torch

        function = torch.compile(function, dynamic=False, fullgraph=True)
    if options:
        from functools import partial

        function = partial(function, **options)
    return function
