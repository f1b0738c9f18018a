"""Training batches from a file of tokens."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class TokenDataset:
    """Tokens in a file, mapped into memory and never read as a whole.

    Attributes:
        tokens: the mapped file, one dimension.
        context_length: tokens of a sequence; a crop has one more, for the last target.
    """

    def __init__(self, path: str | Path, context_length: int, dtype: npt.DTypeLike = np.uint16) -> None:
        """Map a file.

        Args:
            path: raw tokens of `dtype` (as `ndarray.tofile` writes them), or an `.npy` file, which names its
                own.
            context_length: tokens of a sequence, at least 1.
            dtype: integers of a raw file; uint16 holds vocabularies up to 65,536.

        Raises:
            ValueError: the file is no list of integers, or is shorter than a context and its last target.
            OSError: the file cannot be read.
        """
        path = Path(path)
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}")
        self.context_length = context_length
        self.tokens: npt.NDArray[np.integer]
        if path.suffix == ".npy":
            self.tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif (size_bytes := path.stat().st_size) == 0:  # an empty file cannot be mapped
            self.tokens = np.empty(0, dtype=dtype)
        elif size_bytes % np.dtype(dtype).itemsize:
            raise ValueError(
                f"{path} holds {size_bytes} bytes, which are no whole number of {np.dtype(dtype)}"
            )
        else:
            self.tokens = np.memmap(path, dtype=dtype, mode="r")
        if self.tokens.ndim != 1 or not np.issubdtype(self.tokens.dtype, np.integer):
            raise ValueError(
                f"{path}: expected one dimension of integers, got {self.tokens.ndim} of {self.tokens.dtype}"
            )
        if len(self.tokens) < context_length + 1:
            raise ValueError(
                f"{path} holds {len(self.tokens)} tokens; a context of {context_length} and its last target "
                f"need {context_length + 1}"
            )

    def __len__(self) -> int:
        """How many different crops there are."""
        return len(self.tokens) - self.context_length

    def batch(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Random crops, drawn with replacement, every start equally likely.

        Args:
            batch_size: sequences.
            generator: a CPU generator; equal states give equal batches. None draws from torch's global one.
            device: where the batch goes.

        Returns:
            inputs and targets, each [batch_size, context_length] int64; targets are the inputs one token
            later.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        starts = torch.randint(len(self), (batch_size,), generator=generator).tolist()
        crops = np.stack([self.tokens[start : start + self.context_length + 1] for start in starts])
        batch = torch.from_numpy(crops.astype(np.int64))
        if torch.device(device).type == "cuda":
            # Pinned, so that the copy overlaps with what the device is doing.
            batch = batch.pin_memory().to(device, non_blocking=True)
        else:
            batch = batch.to(device)
        return batch[:, :-1], batch[:, 1:]
