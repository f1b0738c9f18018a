"""Settings that must stand before any test module imports torch or triton."""

import os
from pathlib import Path

import torch

# Child processes of tests import the same tree.
_ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])

# Without a GPU the Triton kernels run in Triton's interpreter, which reads this when `triton` is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
