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
