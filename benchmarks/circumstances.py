"""Under what a row was measured, and when two rows can be compared at all."""

from typing import Any

from benchmarks.measure.record import Row

# Results that differ in one of these do not compare, also when one side does not know it.
_CIRCUMSTANCES = ("device", "gpu", "driver", "cuda", "torch", "triton", "python", "world_size", "nodes")
# How samples are taken decides what one is: with no warm-up the first call is a sample.
_METHOD = ("warmup", "inner")
_CPU_CIRCUMSTANCES = ("cpu", "cpu_count", "cpu_threads")
# The tools decide what a sample is only where both sides went through them.
_TOOLS = ("asv", "asv_runner", "pytest_benchmark")


def circumstances(row: Row) -> dict[str, Any]:
    """What must be equal for two rows of a case to be compared."""
    names = _CIRCUMSTANCES if row.env.get("device") == "cuda" else (*_CIRCUMSTANCES, *_CPU_CIRCUMSTANCES)
    return {
        "state": declared_state(row),
        "machine": row.machine,
        "suite": row.suite,
        "version": row.version,
        **{name: row.env.get(name) for name in (*names, *_METHOD)},
    }


def declared_state(row: Row) -> str:
    """Whether every sample of a row started from the same state ("same") or the samples moved it on ("advances").

    asv has no place for it: there it is what the tables of cases declare for the phase.
    """
    _, _, phase, *_ = [*row.case.split("/"), "", ""]
    return str(row.env.get("state") or state_of_phase(phase))


def state_of_phase(phase: str) -> str:
    """A training step moves the parameters on; nothing else does."""
    return "advances" if phase == "train_step" else "same"


def differences(one: Row, other: Row) -> list[str]:
    """Why two rows of a case cannot be compared, one text a reason; empty when they can."""
    before, after = circumstances(one), circumstances(other)
    found = [
        f"{name} {before.get(name)} -> {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    for tool in _TOOLS:
        versions = one.env.get(tool), other.env.get(tool)
        if None not in versions and versions[0] != versions[1]:
            found.append(f"{tool} {versions[0]} -> {versions[1]}")
    return found


def other_host(one: Row, other: Row) -> bool:
    """Whether the times of two rows of a case are of different hosts, or may be, and the host takes part in them.

    A GPU machine of one name may be leased anew each time, and its eager steps follow the host: the same step took 197
    ms on one and 301 ms on the next. Equal times on two hosts still say that nothing changed, but of different ones
    nobody can tell whether the program or the host made them; so this is no circumstance that keeps rows from being
    compared, but a change of time counts only once both sides were measured on one host. What device events time is the
    device's alone, and bytes are nobody's.

    Rows of a GPU without a mark are older than the mark: of unknown hosts. Rows of a CPU without one (asv's) are told
    apart by the processor.
    """
    if "events" in (_clock(one), _clock(other)):
        return False
    marks = one.env.get("host"), other.env.get("host")
    if marks == (None, None):
        return other.env.get("device") == "cuda"
    return marks[0] != marks[1]


def pools(one: Row, other: Row) -> bool:
    """Whether two rows of a case at one commit are observations of the same thing."""
    return not differences(one, other) and (
        _clock(other) == "events" or one.env.get("host") == other.env.get("host")
    )


def breaks(one: Row, other: Row) -> list[str]:
    """Why a line over commits must not join two rows, one text a reason: `differences`, and another host."""
    known = None not in (one.env.get("host"), other.env.get("host"))
    return differences(one, other) + (
        ["other host" if known else "host unknown"] if other_host(one, other) else []
    )


def _clock(row: Row) -> str | None:
    """What took the samples: "events" of a GPU or the "host"; older rows do not say."""
    older = "events" if row.env.get("device") == "cuda" and row.case.startswith("attention/") else None
    return row.env.get("clock") or older
