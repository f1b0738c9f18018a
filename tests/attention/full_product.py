"""Every combination of lengths, head counts and masks for one dtype and head width, on the GPU."""

from collections.abc import Iterator
from itertools import product

import torch

from tests.attention.problems import MASKS, Inputs, check, make_inputs, solve
from trainstep.attention.triton.function import attention as triton

LENGTHS = (1, 7, 16, 17, 40, 127, 128, 129, 300)
WIDTHS = (8, 16, 24, 32, 64, 80, 96, 128, 256)
# Batch, query heads, key/value heads. The error allowed is a multiple of plain PyTorch's largest error. With one query or
# one key and two heads that is the largest of a few roundings, which are lucky in one of some thousand problems: of
# 52,488 on an H200 sixteen failed then, by up to 1.8 times.
HEADS = ((16, 1, 1), (8, 2, 1), (8, 4, 2), (8, 8, 1))


def problems(
    dtype: torch.dtype, width: int, device: str, lengths: tuple[int, ...], batch: int | None = None
) -> Iterator[tuple[str, Inputs]]:
    """Every combination of lengths and heads, with its name; `batch` in place of that of `HEADS`."""
    for queries, keys, heads in product(lengths, lengths, HEADS):
        named = f"{queries=} {keys=} {heads=}"
        shape = heads if batch is None else (batch, *heads[1:])
        yield (
            named,
            make_inputs(
                queries=queries, keys=keys, width=width, heads=shape, dtype=dtype, device=torch.device(device)
            ),
        )


def compile_batch(
    dtype: torch.dtype, width: int, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS
) -> None:
    """Launch what `check_batch` will launch, so that Triton's cache has it; runs in a worker process.

    Compiling is what takes the time and needs many processes. Checking needs one: many take turns on the GPU.
    """
    for _, inputs in problems(dtype, width, device, lengths, batch=2):
        for mask in MASKS.values():
            solve(triton, inputs, **mask)


def check_batch(
    dtype: torch.dtype, width: int, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS
) -> tuple[int, list[str]]:
    """Number of combinations checked, and the failures in words."""
    checked, failures = 0, []
    for named, inputs in problems(dtype, width, device, lengths):
        for name, mask in MASKS.items():
            checked += 1
            try:
                check(triton, inputs, **mask)
            except AssertionError as error:
                failures.append(f"{named} {name}: {error}")
    return checked, failures
