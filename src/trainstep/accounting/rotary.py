"""What rotary frequencies imply."""

from math import pi


def slowest_period(head_dim: int, theta: float = 10_000.0) -> float:
    """Positions in which the slowest pair of a head turns once: 2 pi theta^((H-2)/H).

    The last pair, i = H/2 - 1, turns by theta^(-2i/H) a position (Su et al. 2021). At theta = 10,000 that is
    54,410 positions at H = 128, and tends to 62,832 as H grows.

    Raises:
        ValueError: the head width is odd or below 2, or theta is not positive.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head width must be even and at least 2, got {head_dim}")
    if not theta > 0:
        raise ValueError(f"theta must be positive, got {theta!r}")
    return 2 * pi * theta ** ((head_dim - 2) / head_dim)
