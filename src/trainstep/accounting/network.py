"""Networks of two or more levels and what collectives cost on them."""

from dataclasses import dataclass
from math import ceil, log2

from trainstep.accounting.collectives import bytes_sent
from trainstep.specs.device import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a network.

    Attributes:
        name: "node", "cluster", ...
        devices: devices that this level and the levels below join.
        bytes_per_second: reached by one device in one direction while all devices send.
        hop_seconds: from one device to the next, besides bytes.
    """

    name: str
    devices: int
    bytes_per_second: float
    hop_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Network:
    """Levels from the innermost out, and what every collective costs before its first byte.

    Raises:
        ValueError: no level, levels that do not grow by whole factors, or a bandwidth that is not positive.
    """

    levels: tuple[Level, ...]
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("a network needs at least one level")
        inner = 1
        for level in self.levels:
            if level.devices < inner or level.devices % inner:
                raise ValueError(
                    f"network level {level.name!r} of {level.devices} devices does not hold {inner}"
                )
            if not level.bytes_per_second > 0:
                raise ValueError(f"network level {level.name!r} needs a positive bandwidth")
            inner = level.devices

    def split(self, ranks: int, stride: int) -> list[tuple[Level, int]]:
        """A group of `ranks` devices that lie `stride` apart, as factors by level.

        Groups are laid so that each level takes as many neighbours as fit: the share that is left crosses the
        next level.
        """
        parts, left, reach = [], ranks, stride
        for level in self.levels:
            here = min(left, max(1, level.devices // reach)) if level is not self.levels[-1] else left
            while left % here:  # a group that does not fill a level evenly takes a divisor of itself
                here -= 1
            if here > 1:
                parts.append((level, here))
            left, reach = left // here, reach * here
        return parts

    def seconds(self, op: str, size_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of a collective on such a group.

        Hierarchical: reduce-scatter within the inner level, the same on what is left of the tensor across the
        outer one, and back for an all-reduce, so the outer links carry an inner share only. The hops of a
        level follow one another in a ring within a node and a tree across nodes.

        Args:
            op: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all"; sizes as in `collectives`.
        """
        if ranks == 1 or size_bytes == 0:
            return 0.0
        total, size = self.call_seconds, size_bytes
        for depth, (level, here) in enumerate(self.split(ranks, stride)):
            hops = here - 1 if depth == 0 and level is self.levels[0] else ceil(log2(here))
            twice = 2 if op == "all_reduce" else 1
            total += bytes_sent(op, size, here) / level.bytes_per_second + twice * hops * level.hop_seconds
            size /= here
        return total

    def hop(self, size_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until every device of a group has passed bytes to its neighbour: the widest level paces them."""
        slowest = max(
            (
                level.hop_seconds + size_bytes / level.bytes_per_second
                for level, _ in self.split(ranks, stride)
            ),
            default=0.0,
        )
        return self.call_seconds + slowest if ranks > 1 else 0.0


def build(
    device: DeviceSpec,
    devices: int,
    *,
    per_node: int = 8,
    between_bytes_per_second: float = 50e9,
    hop_seconds: float = 5e-6,
    link_share: float = 1.0,
    call_seconds: float = 0.0,
) -> Network:
    """A network of nodes: the device's fastest link inside, one network port a device
    between.

    Args:
        between_bytes_per_second: promised by a port in one direction; 50e9 is a 400 Gbit/s adapter.
        hop_seconds: assumed of a hop between nodes.
        link_share: reached share of promised bandwidths, inside and between.
    """
    inside = next(iter(device.links_bytes_per_second.values()))
    node = min(per_node, devices)
    levels = [Level(name="node", devices=node, bytes_per_second=inside * link_share)]
    if devices > node:
        nodes = ceil(devices / node)
        levels.append(
            Level(
                name="cluster",
                devices=node * nodes,
                bytes_per_second=between_bytes_per_second * link_share,
                hop_seconds=hop_seconds,
            )
        )
    return Network(levels=tuple(levels), call_seconds=call_seconds)
