"""The four accumulation experiments: what a sum of many small numbers loses to its accumulator's dtype."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One way to add the same number again and again.

    Attributes:
        name: what is done, as it would be written.
        accumulator: dtype of the running sum.
        addend: dtype in which the number is stored.
        upcast: the addend is converted to the accumulator's dtype before each addition. The conversion is
            exact and comes after the rounding to the addend's dtype, so it cannot bring anything back.
        lesson: what the result shows.
    """

    name: str
    accumulator: torch.dtype
    addend: torch.dtype
    upcast: bool = False
    lesson: str


EXPERIMENTS = (
    Experiment(
        name="float32 += float32",
        accumulator=torch.float32,
        addend=torch.float32,
        lesson="0.01 and each sum are rounded to 24 bits: the error stays in the fourth decimal",
    ),
    Experiment(
        name="float16 += float16",
        accumulator=torch.float16,
        addend=torch.float16,
        lesson="near 10 neighbouring float16 numbers are 2^-7 apart, so every addition is rounded to that",
    ),
    Experiment(
        name="float32 += float16",
        accumulator=torch.float32,
        addend=torch.float16,
        lesson="only the addend is rounded to 11 bits, always the same way: 1000 times that one error",
    ),
    Experiment(
        name="float32 += float16 upcast to float32",
        accumulator=torch.float32,
        addend=torch.float16,
        upcast=True,
        lesson="the conversion is what PyTorch's mixed addition does anyway: no digit differs",
    ),
)


def accumulate(experiment: Experiment, value: float = 0.01, additions: int = 1000) -> float:
    """Run one experiment: start at zero and add `value` `additions` times, one addition at a time.

    Returns:
        The accumulator at the end, as a Python float (exact).

    Raises:
        ValueError: `additions` is negative.
    """
    if additions < 0:
        raise ValueError(f"additions must not be negative, got {additions}")
    total = torch.tensor(0.0, dtype=experiment.accumulator)
    for _ in range(additions):
        addend = torch.tensor(value, dtype=experiment.addend)
        if experiment.upcast:
            addend = addend.to(experiment.accumulator)
        total += addend
    return total.item()
