"""Whether Triton kernels run in Triton's interpreter, on a CPU, and what it cannot hold."""

import torch
import triton
from torch import Tensor


def interpreted() -> bool:
    """True when kernels run in the interpreter: what Triton makes of TRITON_INTERPRET (1, true, yes, on, ...)."""
    return triton.knobs.runtime.interpret


def holds_bare_bits(x: Tensor) -> bool:
    """Triton 3.6's interpreter holds bfloat16 as bare bits: it multiplies these and cuts where a GPU rounds. There
    kernels get float32 instead."""
    return x.dtype == torch.bfloat16 and interpreted()
