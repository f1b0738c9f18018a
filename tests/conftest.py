"""Settings that must stand before any test module imports torch or triton."""

import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which reads this when `triton` is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
