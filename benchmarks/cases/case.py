"""What a case is: one row of a table, its identity, and what preparing it gives back."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Fixed order of the keys in an id, so that one case has one id everywhere. Keys whose value is a word (preset,
# flags) are written bare; the others as key and number.
SHAPE_KEYS = (
    "preset",  # model preset
    "B",  # batch
    "N",  # query heads
    "K",  # key/value heads
    "S",  # queries
    "T",  # keys
    "H",  # head width
    "D",  # model width
    "F",  # feed-forward width
    "V",  # vocabulary
    "L",  # layers
    "bytes",  # collective payload
    "bucket",  # bucket size in MB
    "group",  # checkpoint group size
    "window",  # sliding window
    "mask",  # "causal" or "full"
)
_WORDS = {"preset", "mask"}
TIERS = ("smoke", "standard", "full")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one repetition must do at least; rates and roofline shares are computed from it in the report.

    Attributes:
        flops: floating-point operations (multiply and add counted apart), without recomputation.
        bytes: bytes moved through device memory, or sent by a rank for collectives.
        tokens: tokens processed.
    """

    flops: float | None = None
    bytes: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outcome of the comparison with the reference: the largest error beside what is allowed, same norm."""

    error: float
    budget: float

    @property
    def green(self) -> bool:
        """True when within budget; a NaN error never is."""
        return self.error <= self.budget


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case ready to be timed.

    Attributes:
        run: does the work once.
        clock: times one `run` in seconds and returns only when the device, or the slowest rank, is done;
            see `measure.clock`.
        before: runs before each sample outside the timed window (cache flush, gradient reset).
        close: releases memory and ranks.
        work: what one run must do.
        check: compares with the reference, None when the case has no output to check.
        metrics: reads further metrics after the samples were taken, name -> {value, unit, better[, samples]}.
        state: "same" when every sample starts from the same state; "advances" declares that it does not
            (a training step moves the parameters; the work stays the same).
    """

    run: Callable[[], Any]
    clock: Callable[[Callable[[], Any]], float]
    before: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    work: Work = field(default_factory=Work)
    check: Callable[[], Check] | None = None
    metrics: Callable[[], dict[str, dict[str, Any]]] | None = None
    state: str = "same"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is measured.

    Attributes:
        area: family, e.g. "attention".
        target: implementation, a registry row's name.
        phase: "forward", "backward", "forward_backward", "train_step", "all_reduce", ...
        shape: values by the keys of SHAPE_KEYS.
        dtype: short name, see trainstep.specs.dtype.
        world_size: ranks.
        tier: smallest tier that includes it.
        version: raised by hand when the work or the method changes; results of different versions never compare.
        was: ids this case had before it was renamed.
        peer: not our own work.
    """

    area: str
    target: str
    phase: str
    shape: Mapping[str, Any]
    dtype: str
    world_size: int = 1
    tier: str = "standard"
    version: int = 1
    was: tuple[str, ...] = ()
    peer: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.shape) - set(SHAPE_KEYS)
        assert not unknown, f"shape keys {unknown} have no place in SHAPE_KEYS"
        assert self.tier in TIERS, self.tier

    @property
    def parameters(self) -> str:
        """The last part of the id: shape in fixed order, dtype, ranks."""
        parts = []
        for key in SHAPE_KEYS:
            if key in self.shape:
                value = self.shape[key]
                parts.append(str(value) if key in _WORDS else f"{key}{value}")
        return ",".join([*parts, self.dtype, f"w{self.world_size}"])

    @property
    def id(self) -> str:
        """`area/target/phase/parameters`: the same string in pytest, records, gate and page."""
        return f"{self.area}/{self.target}/{self.phase}/{self.parameters}"


def parse_id(case_id: str) -> dict[str, Any]:
    """Take an id apart: area, target, phase, dtype, world_size and the shape's keys.

    Raises:
        ValueError: the text is not a case id.
    """
    try:
        area, target, phase, parameters = case_id.split("/")
        *shape, dtype, ranks = parameters.split(",")
        if not re.fullmatch(r"w\d+", ranks):
            raise ValueError
    except ValueError:
        raise ValueError(f"not a case id: {case_id!r} (area/target/phase/shape,dtype,wN)") from None
    parsed: dict[str, Any] = {"area": area, "target": target, "phase": phase, "dtype": dtype}
    parsed["world_size"] = int(ranks[1:])
    for part in shape:
        numbered = re.fullmatch(r"([A-Za-z]+)(\d+)", part)
        if numbered and numbered[1] in SHAPE_KEYS and numbered[1] not in _WORDS:
            parsed[numbered[1]] = int(numbered[2])
        elif part in ("causal", "full"):
            parsed["mask"] = part
        else:
            parsed["preset"] = part
    return parsed
