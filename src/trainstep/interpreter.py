"""Whether Triton kernels run in Triton's interpreter, on a CPU, and what it cannot hold."""

import os

import torch
from torch import Tensor


def interpreted() -> bool:
    """True when this process runs Triton kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def holds_bare_bits(x: Tensor) -> bool:
    """Triton 3.6's interpreter holds bfloat16 as bare bits: it multiplies these and cuts where a GPU rounds. There
    kernels get float32 instead."""
    return x.dtype == torch.bfloat16 and interpreted()
