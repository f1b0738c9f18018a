"""Roofline (Williams, Waterman, Patterson 2009): the rate that compute and memory together allow."""

from trainstep.specs.device import DeviceSpec


def ridge_point(device: DeviceSpec, dtype: str) -> float | None:
    """FLOP/byte from which compute limits instead of memory; None without a stated peak for the dtype."""
    peak = device.peak(dtype)
    return None if peak is None else peak / device.memory_bytes_per_second


def attainable(device: DeviceSpec, dtype: str, intensity: float) -> float | None:
    """FLOP/s attainable at an arithmetic intensity in FLOP/byte: min(peak, intensity * bandwidth).

    None when the device states no peak for the dtype.

    Raises:
        ValueError: the intensity is not positive.
    """
    if not intensity > 0:
        raise ValueError(f"arithmetic intensity must be positive, got {intensity!r}")
    peak = device.peak(dtype)
    return None if peak is None else min(peak, intensity * device.memory_bytes_per_second)


def bound(device: DeviceSpec, dtype: str, intensity: float) -> str | None:
    """ "memory" below the ridge point, "compute" at or above it, None without a peak."""
    ridge = ridge_point(device, dtype)
    if ridge is None:
        return None
    return "memory" if intensity < ridge else "compute"


def matmul_intensity(m: int, n: int, k: int, element_bytes: int) -> float:
    """FLOP/byte of an [m, k] x [k, n] product that reads both factors and writes the result once."""
    return 2 * m * n * k / (element_bytes * (m * k + k * n + m * n))


def minimum_seconds(device: DeviceSpec, dtype: str, *, flops: float, moved_bytes: float) -> float | None:
    """Seconds no program can beat that does these FLOPs and moves these bytes; None without a peak."""
    peak = device.peak(dtype)
    return None if peak is None else max(flops / peak, moved_bytes / device.memory_bytes_per_second)
