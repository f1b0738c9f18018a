"""What a process that measures a CPU does once, so that its times are the code's and not the first call's."""

import ctypes
from functools import cache

# <malloc.h>: parameters of glibc's mallopt, and the largest threshold that it accepts on 64 bits.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD_BYTES = 32 * 2**20


@cache
def settle() -> None:
    """Keep freed memory, and call the vectorised functions once."""
    keep_freed_memory()
    settle_vector_math()


def keep_freed_memory() -> None:
    """Let malloc reuse what was freed, as a GPU's caching allocator does; elsewhere than on glibc nothing changes.

    By default a tensor of 128 KiB and more may go back to the system when it is freed, and the next one is made of
    pages that the kernel zeroes one by one. Materialised attention of 4 heads and 1024 tokens took 12,256 page
    faults a call and half of its processor time in the kernel, which scattered by a factor of 4 between processes;
    so it takes 205.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def settle_vector_math() -> None:
    """Call the vectorised functions once from one thread.

    A first call from several threads at once now and then gave less accurate values on a CPU (seen in processes that
    asv forks: 2 of 14 checks red, always by the same error), and never after a first call of one thread.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        for function in (torch.exp, torch.exp2, torch.log):
            function(torch.ones(1, dtype=dtype))
