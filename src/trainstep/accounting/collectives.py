"""What collectives cost on a ring: bytes sent, seconds, and bandwidths as nccl-tests names them.

Sizes mean the same everywhere: all-reduce and broadcast count the tensor; all-gather and reduce-scatter the
*whole* tensor (each rank holds one n-th); all-to-all the buffer one rank sends from. GB is 10^9. Times are
the slowest rank's.
"""

from trainstep.accounting.sizes import parse_bytes, sizes

__all__ = [
    "OPS",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bytes_sent",
    "parse_bytes",
    "ring_seconds",
    "sizes",
    "steps",
]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "whole_tensor_all_reduce")


def _check(op: str, n: int) -> None:
    if op not in OPS:
        raise ValueError(f"unknown collective {op!r}; known: {', '.join(OPS)}")
    if n < 1:
        raise ValueError(f"a collective needs at least one rank, got {n}")


def steps(op: str, n: int) -> int:
    """Send/receive rounds that follow one another: each pays the latency once."""
    _check(op, n)
    return 2 * (n - 1) if op == "all_reduce" else n - 1


def bytes_sent(op: str, size_bytes: float, n: int) -> float:
    """Bytes one rank sends, the mean over ranks where chunks are uneven.

    all-gather = reduce-scatter = all-to-all: (n-1)/n S; all-reduce: 2(n-1)/n S; a pipelined broadcast:
    (n-1)/n S (S for all but the last rank of the chain); all-reduce by passing whole tensors round: (n-1) S.
    """
    _check(op, n)
    factor = {"all_reduce": 2 * (n - 1) / n, "whole_tensor_all_reduce": float(n - 1)}
    return factor.get(op, (n - 1) / n) * size_bytes


def ring_seconds(
    op: str, size_bytes: float, n: int, bytes_per_second: float, *, latency_seconds: float = 0.0
) -> float:
    """Seconds of a collective over n ranks in a ring whose links carry W bytes/s in each direction.

    all-gather = reduce-scatter = (n-1)/n S/W, all-reduce twice that, whole-tensor ring (n-1) S/W. An
    all-to-all is counted as through a switch, (n-1)/n S/W; a broadcast as fully pipelined, S/W. With a
    latency each of the `steps` adds it once. One rank takes no time.
    """
    if not bytes_per_second > 0:
        raise ValueError(f"bandwidth must be positive, got {bytes_per_second!r}")
    _check(op, n)
    if n == 1:
        return 0.0
    carried = size_bytes if op == "broadcast" else bytes_sent(op, size_bytes, n)
    return carried / bytes_per_second + steps(op, n) * latency_seconds


def algorithm_bandwidth(size_bytes: float, seconds: float) -> float:
    """Bytes/s as the caller sees it: S / t."""
    if not seconds > 0:
        raise ValueError(f"bandwidth needs positive seconds, got {seconds!r}")
    return size_bytes / seconds


def bus_bandwidth(op: str, size_bytes: float, seconds: float, n: int) -> float:
    """Bytes/s over each link, comparable across rank counts: S/t times the bytes a link must carry over S.

    Factors: all-reduce 2(n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n, broadcast 1. The
    whole-tensor all-reduce does an all-reduce's job and is rated by its factor, so that waste shows as low
    bandwidth.
    """
    _check(op, n)
    factor = {"all_reduce": 2 * (n - 1) / n, "whole_tensor_all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}
    return algorithm_bandwidth(size_bytes, seconds) * factor.get(op, (n - 1) / n)
