"""`run`: measure the cases of a tier and keep the rows."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.measuring import Device, Machine, Out, Samples, Warmup


def run(
    tier: Annotated[str, typer.Option(help="smoke, standard or full; larger ones include the smaller.")] = "smoke",
    only: Annotated[str | None, typer.Option(help="Only cases whose id matches this regular expression.")] = None,
    device: Device = "auto",
    machine: Machine = None,
    samples: Samples = None,
    warmup: Warmup = None,
    out: Out = None,
    source: Annotated[Path | None, typer.Option(help="Measure the trainstep in this src directory.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit that --source is, where git cannot tell.")] = None,
    process: Annotated[int | None, typer.Option(help="Number of this process, where a case is measured in several.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming an interrupted run.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Print the ids and measure nothing.")] = False,
) -> int:  # fmt: skip
    """Measure cases; a run that was interrupted is resumed by the same command."""
    from benchmarks.cases import select
    from benchmarks.commands.measuring import checked, choose_device, choose_policy, measure_cases, status_of
    from benchmarks.commands.printing import print_rows

    chosen = select(tier=tier, only=only)
    if not chosen:
        raise ValueError(f"no case of tier {tier} matches {only!r}")
    device = choose_device(device)
    policy = choose_policy(device, samples, warmup, one_of_several=process is not None)
    if list_only:
        with checked(policy, machine=machine, out=out, source=source, commit=commit, process=process):
            print("\n".join(case.id for case in chosen))
        return 0
    rows, path = measure_cases(
        chosen,
        device=device,
        policy=policy,
        machine=machine,
        out=out,
        source=source,
        commit=commit,
        process=process,
        fresh=fresh,
    )
    print_rows(rows)
    print(f"{len(rows)} rows in {path}")
    return status_of(rows)
