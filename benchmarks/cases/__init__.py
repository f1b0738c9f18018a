"""Tables of cases: rows that say what is measured, and how each is prepared.

An area is a module with `AREA`, `cases()` and `prepare(case, device)`. Everything that runs cases (command line,
asv, pytest-benchmark) takes them from here.
"""

import re
from pathlib import Path
from types import ModuleType

from benchmarks.cases import attention, collectives, data_parallel, memory, sharding, step
from benchmarks.cases.case import TIERS, Case, Prepared
from benchmarks.cases.registries import ROOT
from benchmarks.measure.settle import settle

AREAS: dict[str, ModuleType] = {
    module.AREA: module for module in (attention, step, collectives, data_parallel, sharding, memory)
}


def every_case() -> list[Case]:
    """All cases of all areas, each id once."""
    found = [case for module in AREAS.values() for case in module.cases()]
    ids = [case.id for case in found]
    assert len(ids) == len(set(ids)), "two cases share an id"
    return found


def select(*, tier: str = "full", only: str | None = None, area: str | None = None) -> list[Case]:
    """Cases of a tier and of the smaller ones, whose id matches the regular expression `only`.

    Raises:
        ValueError: unknown tier or area, or not a regular expression.
    """
    if tier not in TIERS:
        raise ValueError(f"unknown tier {tier!r}; known: {', '.join(TIERS)}")
    if area is not None and area not in AREAS:
        raise ValueError(f"unknown area {area!r}; known: {', '.join(AREAS)}")
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise ValueError(f"not a regular expression: {only!r} ({error})") from None
    tiers = TIERS[: TIERS.index(tier) + 1]
    return [
        case
        for case in every_case()
        if case.tier in tiers and (area is None or case.area == area) and pattern.search(case.id)
    ]


def prepare(case: Case, device: str) -> Prepared:
    """Make the case ready to run on "cpu" or "cuda".

    Raises:
        NotImplementedError: this machine, or the installed trainstep, cannot run it; the message says why.
    """
    if device == "cpu":
        settle()
    try:
        return AREAS[case.area].prepare(case, device)
    except (ModuleNotFoundError, AttributeError) as error:
        if measures_own_tree():
            raise  # a misspelt target of one's own is an error, not something to skip
        # What an older trainstep lacks; a fault inside the measured code keeps its own name and is an error.
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and missing.split(".")[0] == "trainstep":
            raise NotImplementedError(f"this trainstep has no {missing}") from error
        owner = getattr(getattr(error, "obj", None), "__name__", "")
        if isinstance(error, AttributeError) and owner.startswith("trainstep"):
            raise NotImplementedError(f"this trainstep has no {owner}.{missing}") from error
        raise


def measures_own_tree() -> bool:
    """Whether the trainstep being measured is the one of the ruler's own checkout."""
    import trainstep

    return Path(trainstep.__file__).resolve().parents[1] == ROOT / "src"
