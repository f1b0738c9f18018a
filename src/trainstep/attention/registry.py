"""The table of attention implementations and their peers.

Standard library only: the ruler loads this file by path from its own checkout, also when an older trainstep
is installed. A row is added here and its function in a file beside this one; tests, sweeps, tables and plots
follow.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """One implementation of `attention(q, k, v, *, causal, window, scale, alignment, return_lse)`.

    Attributes:
        name: the name in case ids, on the command line and in `ModelConfig.attention`.
        target: "module:function", imported when first used.
        options: keyword arguments bound to the function; `compile=True` wraps it in torch.compile instead.
        peer: shipped by somebody else; never our own work.
        devices: device types it runs on.
        dtypes: short names, see `specs.dtype`.
        cuda_dtypes: where CUDA's kernel takes other dtypes than `dtypes`; None where it takes the same.
        grouped_query: takes k and v with fewer heads than q.
        window: takes a sliding window.
        backward: differentiable.
        lse: returns the log-sum-exp.
        capabilities: the exact CUDA compute capabilities it is written for, None for any.
        head_dims: the head widths it is written for, None for any.
        triton_versions: the exact Triton versions it was tested with, None for any or no Triton.
        package: the distribution that it comes from, None for torch and ourselves.
        compiles: torch.compile makes code for each shape, and gives up after eight: reset it between shapes.
    """

    name: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    cuda_dtypes: tuple[str, ...] | None = None
    grouped_query: bool = True
    window: bool = True
    backward: bool = True
    lse: bool = True
    capabilities: tuple[tuple[int, int], ...] | None = None
    head_dims: tuple[int, ...] | None = None
    triton_versions: tuple[str, ...] | None = None
    package: str | None = None
    compiles: bool = False

    def refusal(
        self,
        *,
        device: str,
        dtype: str,
        grouped_query: bool = False,
        window: bool = False,
        backward: bool = False,
        lse: bool = False,
        capability: tuple[int, int] | None = None,
        head_dim: int | None = None,
    ) -> str | None:
        """One line that says why the row cannot do this, None when it can.

        Args:
            device: device type, "cpu" or "cuda".
            capability: of the CUDA device; needed only by rows that are written for some.
        """
        dtypes = self.cuda_dtypes if device == "cuda" and self.cuda_dtypes is not None else self.dtypes
        if device not in self.devices:
            return f"{self.name} does not run on {device}"
        if self.capabilities is not None and capability not in self.capabilities:
            known = " or ".join(f"{major}.{minor}" for major, minor in self.capabilities)
            return f"{self.name} needs compute capability {known}"
        if dtype not in dtypes:
            return f"{self.name} does not take {dtype} on {device}"
        if self.head_dims is not None and head_dim is not None and head_dim not in self.head_dims:
            return f"{self.name} takes head widths {', '.join(map(str, self.head_dims))}, not {head_dim}"
        if self.triton_versions is not None and (found := _version("triton")) not in self.triton_versions:
            return f"{self.name} was tested with Triton {', '.join(self.triton_versions)}, not {found}"
        if self.package is not None and _version(self.package) is None:
            return f"{self.name} needs the package {self.package}, which is not installed"
        for wanted, able, what in (
            (grouped_query, self.grouped_query, "grouped-query heads"),
            (window, self.window, "a sliding window"),
            (backward, self.backward, "gradients"),
            (lse, self.lse, "a log-sum-exp"),
        ):
            if wanted and not able:
                return f"{self.name} does not offer {what}"
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_SDPA = "trainstep.attention.sdpa:attention"
_TRITON = "trainstep.attention.triton.function:attention"

ATTENTION: tuple[AttentionRow, ...] = (
    AttentionRow(
        name="reference",
        target="trainstep.attention.reference:attention",
        dtypes=("fp32", "tf32", "fp16", "bf16", "fp64"),
    ),
    AttentionRow(
        name="reference-compiled",
        target="trainstep.attention.reference:attention",
        options={"compile": True},
        compiles=True,
        dtypes=("fp32", "tf32", "fp16", "bf16", "fp64"),
    ),
    AttentionRow(
        name="tiled", target="trainstep.attention.tiled:attention", dtypes=("fp32", "fp16", "bf16", "fp64")
    ),
    # On a CPU these two run in Triton's interpreter only, which is for tests.
    AttentionRow(name="triton", target=_TRITON, devices=("cuda",)),
    AttentionRow(
        name="triton-tf32", target=_TRITON, options={"tf32": True}, devices=("cuda",), dtypes=("tf32",)
    ),
    AttentionRow(
        name="hopper",
        target="trainstep.attention.hopper.function:attention",
        devices=("cuda",),
        dtypes=("fp16", "bf16"),
        window=False,
        capabilities=((9, 0),),
        head_dims=(64, 128),
        triton_versions=("3.6.0",),
    ),
    # What a user gets who forces nothing.
    AttentionRow(
        name="sdpa", target=_SDPA, peer=True, dtypes=("fp32", "tf32", "fp16", "bf16", "fp64"), lse=False
    ),
    AttentionRow(
        name="sdpa-flash",
        target=_SDPA,
        options={"backend": "flash"},
        peer=True,
        dtypes=("fp32", "fp16", "bf16", "fp64"),
        cuda_dtypes=("fp16", "bf16"),
        window=False,
        lse=False,
    ),
    AttentionRow(
        name="sdpa-cudnn",
        target=_SDPA,
        options={"backend": "cudnn"},
        peer=True,
        devices=("cuda",),
        dtypes=("fp16", "bf16"),
        window=False,
        lse=False,
    ),
    AttentionRow(
        name="sdpa-efficient",
        target=_SDPA,
        options={"backend": "efficient"},
        peer=True,
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        grouped_query=False,
        window=False,
        lse=False,
    ),
    AttentionRow(
        name="sdpa-math",
        target=_SDPA,
        options={"backend": "math"},
        peer=True,
        dtypes=("fp32", "tf32", "fp16", "bf16", "fp64"),
        lse=False,
    ),
    # On a CPU FlexAttention has no backward pass and no log-sum-exp.
    AttentionRow(
        name="flex", target="trainstep.attention.flex:attention", peer=True, devices=("cuda",), compiles=True
    ),
    AttentionRow(
        name="flash-attention-4",
        target="trainstep.attention.fa4:attention",
        peer=True,
        devices=("cuda",),
        dtypes=("fp16", "bf16"),
        window=False,
        lse=False,
        capabilities=((9, 0), (10, 0), (10, 3)),
        head_dims=(64, 96, 128),
        package="flash-attn-4",
    ),
)


def get_attention(name: str) -> AttentionRow:
    """Look a row up.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    for row in ATTENTION:
        if row.name == name:
            return row
    raise ValueError(
        f"unknown attention implementation {name!r}; known: {', '.join(r.name for r in ATTENTION)}"
    )


def load_attention(row: AttentionRow) -> Callable[..., Any]:
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
