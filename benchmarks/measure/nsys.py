"""The right `nsys profile` command for a measured range, and a clear word where Nsight Systems is missing."""

import shutil
from collections.abc import Sequence
from pathlib import Path


def find_nsys() -> str:
    """Path of `nsys`.

    Raises:
        ValueError: it is not installed.
    """
    found = shutil.which("nsys")
    if found is None:
        raise ValueError(
            "nsys is not installed (NVIDIA Nsight Systems, not part of the CUDA toolkit's minimal packages); "
            "without --nsys the same questions are answered from torch.profiler"
        )
    return found


def nsys_command(command: Sequence[str], out: Path, nsys: str = "nsys") -> list[str]:
    """`command` under nsys, recording only between cudaProfilerStart and cudaProfilerStop.

    Traced: CUDA, cuBLAS, cuDNN, the operating system's calls and NVTX ranges; PyTorch's autograd operations
    become NVTX ranges with the shapes of their inputs. Recording stops with the measured range, and the
    command goes on to its own end. The report is `out` with the suffix .nsys-rep; one of that name is
    replaced.

    Args:
        command: what to run; it must bracket what it measures (`measured_range`).
        out: report, with or without suffix.
        nsys: the program.

    Raises:
        ValueError: there is no command.
    """
    if not command:
        raise ValueError("nsys needs a command to run")
    return [
        nsys,
        "profile",
        "--trace=cuda,cublas,cudnn,osrt,nvtx",
        "--pytorch=autograd-shapes-nvtx",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={out.with_suffix('')}",
        *command,
    ]
