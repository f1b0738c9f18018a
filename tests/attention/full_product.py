"""Every combination of lengths, head counts and masks for one dtype and head width, on the GPU."""

from itertools import product

import torch

from tests.attention.problems import MASKS, check, make_inputs
from trainstep.attention.triton.function import attention as triton

LENGTHS = (1, 7, 16, 17, 40, 127, 128, 129, 300)
WIDTHS = (8, 16, 24, 32, 64, 80, 96, 128, 256)
# Batch, query heads, key/value heads. The error allowed is a multiple of plain PyTorch's largest error. With one query or
# one key and two heads that is the largest of a few roundings, which are lucky in one of some thousand problems: of
# 52,488 sixteen failed then, by up to 1.8 times, none of them with 32 sequences.
HEADS = ((32, 1, 1), (16, 2, 1), (16, 4, 2), (8, 8, 1))


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
