"""`memory`: where the bytes of a training step go, and what checkpointing makes of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.measuring import Device, Machine, Out

# Fewer say little about a time, and a published row has none then: what it publishes is bytes.
LEAST_TIMED_STEPS = 5
STUDIES = ("residuals", "plan", "checkpoint", "peak", "timeline")


def memory(
    preset: Annotated[str, typer.Argument(help="Model preset.")] = "toy",
    study: Annotated[str, typer.Option(help="Of residuals, plan, checkpoint, peak, timeline, separated by commas, or 'all'.")] = "all",
    dtype: Annotated[str, typer.Option(help="Of fp32, tf32, fp16, bf16, fp64, amp-bf16 and amp-fp16, separated by commas.")] = "fp32",
    context: Annotated[str | None, typer.Option(help="Tokens a sequence; a list for the peak study.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    policy: Annotated[str, typer.Option(help="Policies separated by commas, or 'all'.")] = "all",
    device: Device = "auto",
    steps: Annotated[int, typer.Option(help="Steps a cell. The peak is the same in each; only from 5 on a time is kept besides.")] = 1,
    machine: Machine = None,
    out: Out = None,
    pictures: Annotated[Path, typer.Option(help="Directory of pictures and snapshots.")] = Path("results/local/memory"),
) -> int:  # fmt: skip
    """Residuals of a block, the planner's table, every checkpointing policy measured, peaks and timelines.

    residuals: what a block saves for backward, eager and compiled. plan: predicted peaks and recomputation of
    every policy; runs nothing. checkpoint: the same measured. peak: inference, forward and full step at each
    context.
    timeline: allocations of an inference and a full step, as snapshot files for PyTorch's memory viewer and
    pictures.
    """
    from benchmarks.cases import memory as table
    from benchmarks.commands.measuring import (
        choose_device,
        choose_policy,
        counts,
        measure_cases,
        pick,
        status_of,
        writable,
    )
    from benchmarks.commands.memory_studies import cells_of, rows_so_far
    from benchmarks.measure.record import check_machine, file_at
    from trainstep.memory.policy import parse_policy
    from trainstep.specs.dtype import get_dtype
    from trainstep.specs.model import get_model

    base = get_model(preset, batch_size=batch)
    dtypes = [get_dtype(name.strip()).name for name in dtype.split(",")]
    contexts = [base.context_length] if context is None else counts(context, "context")
    studies = [one for word in study.split(",") for one in pick(word.strip(), STUDIES, "study")]
    policies = (
        table.policies(base.n_layers) if policy == "all" else [name.strip() for name in policy.split(",")]
    )
    for name in policies:
        parse_policy(name)
    device = choose_device(device)
    if policy != "all" and "checkpoint" in studies:
        for name in policies:
            if device not in table.ROWS[parse_policy(name).kind].devices:
                raise ValueError(f"policy {name!r} does not run on {device}")
    timed = steps >= LEAST_TIMED_STEPS
    sampling = replace(choose_policy(device, steps, 1 if timed else 0, what="steps"), timed=timed)
    if machine is not None:
        check_machine(machine)
    several = {"checkpoint", "peak"} <= set(studies)
    places = {
        part: out.with_stem(f"{out.stem}-{part}") if out is not None and several else out
        for part in ("checkpoint", "peak")
    }
    for place in filter(None, places.values()):
        writable(file_at(place).parent)
    if "timeline" in studies:
        writable(pictures)
    rows = []

    def measured(cases: list[table.Case], part: str, show: Callable[[list], None]) -> None:
        place = places[part]
        try:
            found, path = measure_cases(cases, device=device, policy=sampling, machine=machine, out=place)
        except KeyboardInterrupt:
            found = rows_so_far(cases, device, sampling, machine, place)
            show(cells_of(found, device))
            raise
        print(f"{len(found)} rows in {path}")
        rows.extend(found)
        show(cells_of(found, device))

    for name in studies:
        if name == "residuals":
            for one in dtypes:
                _residuals(base.with_overrides(context_length=contexts[-1]), one, device)
        elif name == "plan":
            _plan(base.with_overrides(context_length=contexts[-1]), dtypes, policies, device)
        elif name == "checkpoint":
            config = base.with_overrides(context_length=contexts[-1])
            cases = [
                table.case(one, "forward_backward", preset, dtype=kind, batch=batch, context=contexts[-1])
                for kind in dtypes
                for one in (
                    table.with_neighbours(policies, config, kind, device) if policy == "all" else policies
                )
                if device in table.ROWS[parse_policy(one).kind].devices
            ]
            # What may want more of the host than it has comes after everything else.
            cases.sort(key=lambda one: one.target == "offload")
            measured(cases, name, lambda cells: _checkpoint(cells, device))
        elif name == "peak":
            cases = [
                table.case("none", phase, preset, dtype=kind, batch=batch, context=length)
                for kind in dtypes
                for length in contexts
                for phase in ("inference", "forward", "train_step")
            ]
            measured(cases, name, lambda cells: _peak(base, dtypes, cells))
        else:
            for kind in dtypes:
                for phase in ("inference", "train_step"):
                    case = table.case("none", phase, preset, dtype=kind, batch=batch, context=contexts[-1])
                    _timeline(case, device, pictures)
    return status_of(rows)


def _residuals(config, dtype: str, device: str) -> None:  # type: ignore[no-untyped-def]
    from benchmarks.commands.memory_studies import MIB, residual_frames, residuals_of_block
    from benchmarks.commands.printing import print_frame

    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        found = residuals_of_block(config, dtype, device, compiled)
        each, largest = residual_frames(found)
        where = f"one {config.name} block, batch {config.batch_size}, context {config.context_length}, {dtype}, {how}"
        print_frame(f"Saved for backward: {where}", each)
        print_frame(f"Largest operations: {where}", largest)
        print(
            f"{len(found.saves)} saves, {len(found.storages)} storages besides parameters, "
            f"{found.total_bytes / MIB:.2f} MiB a block ({found.buffer_bytes / MIB:.2f} MiB of it buffers); "
            f"{config.n_layers} blocks: {config.n_layers * found.activation_bytes / MIB:.0f} MiB"
        )


def _plan(config, dtypes: list[str], policies: list[str], device: str) -> None:  # type: ignore[no-untyped-def]
    import pandas

    from benchmarks.cases import memory as table
    from benchmarks.commands.memory_studies import GIB, MIB
    from benchmarks.commands.printing import print_frame
    from trainstep.memory.planner import best_group_size, textbook_group_size

    for dtype in dtypes:
        lines = []
        for name in policies:
            expected = table.predict(config, dtype, name, "forward_backward", device)
            lines.append(
                {
                    "policy": name,
                    "peak GiB": expected.peak_bytes / GIB,
                    "besides parameters GiB": (expected.peak_bytes - expected.static_bytes) / GIB,
                    "host GiB": expected.host_bytes / GIB,
                    "recomputed TFLOP": expected.recomputed_flops / 1e12,
                }
            )
        title = (
            f"Predicted: {config.name}, batch {config.batch_size}, context {config.context_length}, {dtype}"
        )
        print_frame(title, pandas.DataFrame(lines))
        cost = table.model_cost(config, dtype, device)
        best, _ = best_group_size(config.n_layers, cost.block, [cost.embedding], [cost.head])
        print(
            f"A block saves {cost.block.plain.kept_bytes / MIB:.1f} MiB, its boundary is "
            f"{cost.block.boundary_bytes / MIB:.1f} MiB: sqrt(L*boundary/residual) = "
            f"{textbook_group_size(config.n_layers, cost.block):.2f}; best group size of 1..{config.n_layers}: {best}"
        )


def _checkpoint(cells: list, device: str) -> None:
    from benchmarks.commands.memory_studies import capacity_bytes, cell_frame, verdicts
    from benchmarks.commands.printing import print_frame

    print_frame("Checkpointing: predicted and measured peak", cell_frame(cells))
    print("\n".join(verdicts(cells, capacity_bytes(device))))


def _peak(config, dtypes: list[str], cells: list) -> None:  # type: ignore[no-untyped-def]
    from benchmarks.commands.memory_studies import cell_frame, gradient_line
    from benchmarks.commands.printing import print_frame

    print_frame("Peak memory by phase, context and precision", cell_frame(cells))
    for dtype in dtypes:
        print(gradient_line(config, dtype, [cell for cell in cells if cell.dtype == dtype]))


def _timeline(case, device: str, folder: Path) -> None:  # type: ignore[no-untyped-def]
    from benchmarks.commands.memory_studies import MIB, allocation_frame, record_step
    from benchmarks.commands.printing import print_frame
    from benchmarks.measure.memory import describe_out_of_memory, is_out_of_memory, release

    try:
        picture = record_step(case, device, folder)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"{case.id}: {describe_out_of_memory(error)}")
        return
    finally:
        release(device)
    print_frame(f"Largest allocations: {case.id}, {picture.policy}", allocation_frame(picture.timeline))
    peaks = ", ".join(f"{name} {peak / MIB:.1f} MiB" for name, peak in picture.timeline.phase_peaks().items())
    print(f"Peak by phase: {peaks}. Files: {', '.join(map(str, picture.files))}")
