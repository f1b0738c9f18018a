"""Sizes in bytes: one strict way to read them, and geometric ranges of them."""

import re
from collections.abc import Iterator
from fractions import Fraction

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(I?)(B?)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Read a size.

    K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti powers of 1024; a B may follow; case does not matter.
    So "1M", "1m" and "1MB" are 10^6 (nccl-tests reads 1M as 2^20), "1MiB" is 2^20, "1.5K" is 1500, "512" is
    512 bytes.

    Raises:
        ValueError: anything else, a size below one byte, or a fraction of a byte; the message names the
            value.
    """
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"not a size: {text!r} (examples: 512, 1.5K, 10MB, 4MiB)")
    prefix = (match[2] + match[3]).upper()
    size = Fraction(match[1]) * (_DECIMAL | _BINARY)[prefix]
    if size.denominator != 1:
        raise ValueError(f"not a whole number of bytes: {text!r}")
    if size < 1:
        raise ValueError(f"a size must be at least one byte, got {text!r}")
    return int(size)


def sizes(minimum: int, maximum: int, factor: float) -> Iterator[int]:
    """Sizes minimum, minimum*factor, minimum*factor^2, ..., rounded down, never above maximum, no size twice.

    Raises:
        ValueError: at once, not at the first size: minimum below 1, minimum above maximum, or factor not
            above 1.
    """
    if minimum < 1:
        raise ValueError(f"the smallest size must be at least one byte, got {minimum}")
    if minimum > maximum:
        raise ValueError(f"the smallest size {minimum} is above the largest {maximum}")
    if not 1 < factor < float("inf"):
        raise ValueError(f"the factor between sizes must be above 1, got {factor}")
    if factor < 1.01:
        raise ValueError(f"the factor between sizes must be at least 1.01, got {factor}")

    def generate() -> Iterator[int]:
        exact, last = Fraction(minimum), 0
        while exact <= maximum:
            if int(exact) > last:
                last = int(exact)
                yield last
            exact *= Fraction(factor)

    return generate()
