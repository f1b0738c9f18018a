"""The kernels pass Triton's compiler for a Hopper GPU; the interpreter proves neither types nor sizes."""

import os
import subprocess
import sys

import pytest

# Through the same `launch` code that runs on a GPU, with a driver that only says which GPU it would be.
_COMPILE = """
import sys
import torch
from tests.compile_only import CompileOnly, for_hopper
from trainstep.attention.triton import launch, tuning
from trainstep.attention.triton import backward as kernels

def report(kernel, built):
    print(kernel.fn.__name__, built.metadata.shared, "wgmma" in built.asm["ptx"], sep=",")

for_hopper()
launch._check_device = lambda q: None
launch.forward_kernel = CompileOnly(launch.forward_kernel, report)
for name in ("delta_kernel", "dq_kernel", "dkdv_kernel"):
    setattr(kernels, name, CompileOnly(getattr(kernels, name), report))
tuning.interpreted = lambda: False
torch.cuda.get_device_capability = lambda: (9, 0)

dtype, width, group, window = sys.argv[1], *map(int, sys.argv[2:])
q = torch.empty(2, 4, 256, width, dtype=getattr(torch, dtype)).transpose(1, 2).contiguous().transpose(1, 2)
k = torch.empty(2, 4 // group, 256, width, dtype=q.dtype)
rule = dict(causal=True, window=window or None, scale=0.1, offset=0)
out, lse = launch.forward(q, k, k, **rule)
launch.backward(q, k, k, out, lse, out, lse, **rule)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "group", "window"), [("bfloat16", 128, 1, 0), ("float16", 80, 2, 100)]
)
def test_kernels_compile_for_hopper(dtype, width, group, window, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, dtype, str(width), str(group), str(window)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = {}
    for line in done.stdout.splitlines():
        name, shared_bytes, tensor_cores = line.split(",")
        built[name] = (int(shared_bytes), tensor_cores == "True")
    assert set(built) == {"forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel"}
    assert all(shared_bytes <= 227 * 1024 for shared_bytes, _ in built.values())
    assert all(built[name][1] for name in ("forward_kernel", "dq_kernel", "dkdv_kernel"))
