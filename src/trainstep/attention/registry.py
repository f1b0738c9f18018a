"""The table of attention implementations and their peers.

Standard library only: the ruler loads this file by path from its own checkout, also when an older trainstep
is installed. A row is added here and its function in a file beside this one; tests, sweeps, tables and plots
follow.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
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
        grouped_query: takes k and v with fewer heads than q.
        window: takes a sliding window.
        backward: differentiable.
        lse: returns the log-sum-exp.
        capability: the exact CUDA compute capability it is written for, None for any.
    """

    name: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    grouped_query: bool = True
    window: bool = True
    backward: bool = True
    lse: bool = True
    capability: tuple[int, int] | None = None


ATTENTION: tuple[AttentionRow, ...] = (
    AttentionRow(name="reference", target="trainstep.attention.reference:attention"),
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
