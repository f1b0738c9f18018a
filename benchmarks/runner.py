"""Runs cases one after another: prepare, check, sample, release; one row each, whatever happens.

A case that fails is a row that says why and the rest go on. Memory is released between cases, so that neither
one cell's tensors nor its failure reach the next.
"""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from benchmarks import cases as tables
from benchmarks.cases.case import Case, Prepared, Work
from benchmarks.measure.clock import EventClock
from benchmarks.measure.memory import describe_out_of_memory, is_out_of_memory, release_cell
from benchmarks.measure.ranks import agreed, agreed_clock, nodes, started_ranks
from benchmarks.measure.record import Row, RunWriter, check_metrics, finite_or_absent, is_time
from benchmarks.measure.sampling import Policy, take_samples


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one case; the part of a row that measuring decides. Fields as in `Row`."""

    status: str
    reason: str | None = None
    samples_seconds: tuple[float, ...] = ()
    first_seconds: float | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    check: dict[str, float | None] | None = None
    state: str = "same"
    clock: str = "host"


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def work_metrics(work: Work) -> dict[str, dict[str, Any]]:
    """The work of one repetition as metrics without a direction."""
    units = {"flops": "FLOP", "bytes": "byte", "tokens": "token"}
    return {
        name: {"value": getattr(work, name), "unit": unit, "better": None}
        for name, unit in units.items()
        if getattr(work, name) is not None
    }


def clock_name(clock: Callable[..., float]) -> str:
    """What takes the samples: "events" of the device, in which the host has no part, or the "host"."""
    return "events" if isinstance(clock, EventClock) else "host"


def measure(
    case: Case, device: str, policy: Policy, prepare: Callable[[Case, str], Prepared] = tables.prepare
) -> Outcome:
    """Measure one case. Never raises but for an interruption: every failure is an outcome."""
    import torch

    started = started_ranks()
    if started is not None and case.world_size != started:
        reason = f"torchrun started {started} ranks, and this case takes {case.world_size}"
        return Outcome(status="skipped", reason=reason)
    made: Prepared | None = None
    try:
        release_cell(device)
        made = prepare(case, device)
        metrics = work_metrics(made.work)
        check: dict[str, float | None] | None = None
        if made.check is not None:
            result = made.check()
            check = {"error": result.error, "budget": result.budget}
            if not result.green:
                return Outcome(
                    status="red",
                    reason=f"differs from the reference: error {result.error:.3g}, allowed {result.budget:.3g}",
                    metrics=metrics,
                    check=check,
                )
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        samples = take_samples(
            made.run, clock=made.clock, before=made.before, policy=policy, now=agreed_clock(device)
        )
        if not all(map(is_time, (samples.first_seconds, *samples.seconds))):
            return Outcome(
                status="error", reason="the clock gave what is no time", metrics=metrics, check=check
            )
        if made.metrics is not None:
            metrics |= made.metrics()
        metrics = finite_or_absent(metrics)  # here, so that what cannot be stored is this case's error
        check_metrics(metrics)
        return Outcome(
            status="ok",
            samples_seconds=tuple(samples.seconds) if policy.timed else (),
            first_seconds=samples.first_seconds if policy.timed else None,
            metrics=metrics,
            check=check,
            state=made.state,
            clock=clock_name(made.clock),
        )
    except NotImplementedError as error:
        return Outcome(status="skipped", reason=str(error) or "not implemented")
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            return Outcome(status="oom", reason=describe_out_of_memory(error))
        return Outcome(status="error", reason=one_line(error))
    finally:
        # The traceback's frames would hold the failed cell's tensors until the next exception.
        _close(made)
        made = None
        release_cell(device)


def _close(made: Prepared | None) -> None:
    if made is not None:
        try:
            made.close()
        except Exception:
            traceback.print_exc()


def run_cases(
    chosen: Iterable[Case],
    *,
    device: str,
    policy: Policy,
    template: Row,
    writer: RunWriter,
    process: int | None = None,
    prepare: Callable[[Case, str], Prepared] = tables.prepare,
) -> Iterator[Row]:
    """Measure the cases that the writer does not hold yet, store and yield a row for each.

    Args:
        chosen: the cases, in order.
        device: "cpu" or "cuda".
        policy: sampling.
        template: a row with everything that does not depend on the case: run, machine, commit, hashes, env.
        writer: stores each row before the next case starts, so an interruption keeps what was measured.
        process: number of this process where a case is measured in several.
    """
    done = agreed(writer.done_ids(process), device)
    for case in chosen:
        if case.id in done:
            continue
        started = datetime.now(UTC).isoformat(timespec="seconds")
        outcome = measure(case, device, policy, prepare)
        env = template.env | {"world_size": case.world_size, "state": outcome.state, "clock": outcome.clock}
        if nodes() > 1:
            env["nodes"] = nodes()
        if device == "cpu" and case.world_size > nodes() * (os.cpu_count() or 1):
            env["oversubscribed"] = True  # says little about speed; the gate leaves it alone
        if process is not None:
            env["process"] = process
        row = replace(
            template,
            case=case.id,
            version=case.version,
            started_at=started,
            status=outcome.status,
            reason=outcome.reason,
            samples_seconds=outcome.samples_seconds,
            first_seconds=outcome.first_seconds,
            metrics=outcome.metrics,
            check=outcome.check,
            env=env,
        )
        writer.add(row)
        yield row
