"""Every combination of lengths, head counts and masks for one dtype and head width, on the GPU."""

from itertools import product

import torch

from tests.attention.problems import MASKS, check, make_inputs
from trainstep.attention.triton.function import attention as triton

LENGTHS = (1, 7, 16, 17, 40, 127, 128, 129, 300)
WIDTHS = (8, 16, 24, 32, 64, 80, 96, 128, 256)
HEADS = ((2, 1, 1), (1, 2, 1), (1, 4, 2), (1, 8, 1))  # batch, query heads, key/value heads


def check_batch(
    dtype: torch.dtype, width: int, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS
) -> tuple[int, list[str]]:
    """Number of combinations checked, and the failures in words; runs in a worker process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checked, failures = 0, []
    for queries, keys, heads in product(lengths, lengths, HEADS):
        inputs = make_inputs(
            queries=queries, keys=keys, width=width, heads=heads, dtype=dtype, device=torch.device(device)
        )
        for name, mask in MASKS.items():
            checked += 1
            try:
                check(triton, inputs, **mask)
            except AssertionError as error:
                failures.append(f"{queries=} {keys=} {heads=} {name}: {error}")
    return checked, failures
