"""`profile`: which kernels a step spends its time on, and how much communication it hides."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.commands.measuring import Device

MODES = ("forward", "forward_backward", "train_step")


def profile(
    preset: Annotated[str, typer.Argument(help="Model presets, separated by commas.")] = "toy",
    context: Annotated[str | None, typer.Option(help="Contexts, separated by commas.")] = None,
    mode: Annotated[str, typer.Option(help="forward, forward_backward or train_step.")] = "train_step",
    target: Annotated[str, typer.Option(help="Way of running the step; its kernels are told apart in eager mode.")] = "plain",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, bf16, amp-bf16 or amp-fp16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    device: Device = "auto",
    top: Annotated[int, typer.Option(help="Kernels (on a CPU: operators) a table.")] = 10,
    ranks: Annotated[int, typer.Option(help="From 2: profile data-parallel steps on this many ranks instead.")] = 1,
    variant: Annotated[str, typer.Option(help="Data-parallel variant, or 'all'.")] = "all",
    overlap: Annotated[Path | None, typer.Option(help="Read this Chrome trace instead of measuring.")] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with Nsight Systems instead.")] = False,
    out: Annotated[Path, typer.Option(help="Directory of traces, pictures and answers.")] = Path("results/local/profile"),
) -> int:  # fmt: skip
    """Kernel tables by phase, shares of matrix products, softmax against products, and what marking costs
    when off. On a CPU, where no kernels are seen, the tables are of operators.

    Every cell leaves a Chrome trace, compressed (Perfetto and chrome://tracing open it so), and its tables and
    answers as JSON. With --ranks the overlap of communication with computation is read from a trace of each variant; --overlap
    reads it from a file.
    """
    from benchmarks.cases import step as table
    from benchmarks.commands.measuring import FAILED, choose_device, counts, pick, writable
    from benchmarks.measure.nsys import find_nsys, nsys_command
    from trainstep.specs.dtype import get_dtype
    from trainstep.specs.model import get_model

    writable(out)
    if overlap is not None:
        _print_overlap(overlap, out)
        return 0
    get_dtype(dtype)
    (mode,) = pick(mode, MODES, "mode") if mode != "all" else ("train_step",)
    (target,) = pick(target, list(table.ROWS), "target") if target != "all" else ("plain",)
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    configs = []
    for name in preset.split(","):
        base = get_model(name.strip(), batch_size=batch)
        lengths = [base.context_length] if context is None else counts(context, "context")
        configs += [base.with_overrides(context_length=length) for length in lengths]
    device = choose_device(device)
    if nsys:
        program = find_nsys()
        for config in configs:
            arguments = [
                sys.executable,
                "-m",
                "benchmarks.commands.profile",
                config.name,
                str(config.context_length),
            ]
            command = [*arguments, str(config.batch_size), mode, target, dtype, device]
            report = out / f"{_slug(config, target, mode, dtype)}.nsys-rep"
            report.parent.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            subprocess.run(nsys_command(command, report, program), check=True, env=environment)
            print(f"report in {report}")
        return 0
    from trainstep.parallel.launch import check_ranks

    check_ranks(ranks, device)
    if ranks > 1:
        for config in configs:
            _profile_ranks(config, variant, ranks, dtype, device, out)
        return 0
    failed = [
        config.name for config in configs if not _profile_cell(config, target, mode, dtype, device, top, out)
    ]
    return FAILED if failed else 0


def _slug(config: Any, target: str, mode: str, dtype: str) -> str:
    from benchmarks.report.chart import file_name

    return file_name(f"{config.name} B{config.batch_size} S{config.context_length} {target} {mode} {dtype}")


def _profile_cell(config: Any, target: str, mode: str, dtype: str, device: str, top: int, out: Path) -> bool:
    """Profile one step, print and write what it says; False when it failed, but for lack of memory."""
    import torch

    from benchmarks.measure.memory import describe_out_of_memory, release

    title = f"{config.name}, batch {config.batch_size}, context {config.context_length}, {dtype}, {target}"
    try:
        _measure_cell(config, target, mode, dtype, device, top, out, title)
    except torch.OutOfMemoryError as error:
        print(f"{title}: {describe_out_of_memory(error)}")
    except NotImplementedError as error:
        print(f"{title}: {error}")
    except RuntimeError as error:
        print(f"{title}: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    finally:
        release(device)
    return True


def _measure_cell(
    config: Any, target: str, mode: str, dtype: str, device: str, top: int, out: Path, title: str
) -> None:
    from dataclasses import asdict

    import pandas

    from benchmarks.cases import step as table
    from benchmarks.commands.printing import print_frame
    from benchmarks.measure.profile import (
        answers,
        attention_ranges,
        kernel_table,
        off_ratio,
        profile_parts,
        unit_of,
    )
    from benchmarks.measure.record import write_atomically

    slug = _slug(config, target, mode, dtype)
    step = table.Step(table.ROWS[target], config, dtype, device)
    parts = step.parts(mode)
    trace = out / f"{slug}.trace.json.gz"
    unit = unit_of(device)
    with attention_ranges(step.model):
        kernels = profile_parts(parts, trace, device=device, before=step.reset_gradients)
    tables = {name: kernel_table(kernels, name) for name, _ in parts}
    for name, lines in tables.items():
        rows = [
            {unit: line.name[:90], "kind": line.kind, "calls": line.calls, "ms": line.seconds * 1e3,
             "share %": line.share * 100}
            for line in lines[:top]
        ]  # fmt: skip
        print_frame(f"{title}: {name}, {len(lines)} {unit}s", pandas.DataFrame(rows))
    said = answers(kernels, config, device)
    off = off_ratio(parts, device=device, before=step.reset_gradients, rounds=10)
    said.append(
        f"ranges that are switched off take {off.ratio:.3f} times the bare step; two bare series of "
        f"the same run differ by {off.noise:.3f}."
    )
    print("\n".join(said))
    written = {
        "title": title,
        "tables": {name: [asdict(line) for line in lines] for name, lines in tables.items()},
        "answers": said,
    }
    path = out / f"{slug}.json"
    write_atomically(path, json.dumps(written, indent=1, allow_nan=False))
    print(f"Files: {trace}, {path}")


def _print_overlap(trace: Path, out: Path) -> None:
    from benchmarks.measure.overlap import draw, overlap_of
    from benchmarks.measure.trace import load_trace

    lanes = overlap_of(load_trace(trace))
    picture = out / f"{trace.name.removesuffix('.gz').removesuffix('.json').removesuffix('.trace')}.lanes.png"
    draw(lanes, picture)
    share = lanes.hidden_share
    said = "nothing was communicated" if share is None else f"{share:.1%} of it hidden behind computation"
    print(
        f"{trace.name}: communication {lanes.communication_seconds * 1e3:.3f} ms, {said}. Picture: {picture}"
    )


def _profile_ranks(config: Any, variant: str, ranks: int, dtype: str, device: str, out: Path) -> None:
    """A trace of each variant's step from rank 0, and its overlap."""
    from benchmarks.cases import data_parallel as table
    from benchmarks.cases.collectives import enough_devices
    from benchmarks.commands.measuring import pick
    from benchmarks.measure.ranks import close_ranks, on_ranks

    names = pick(variant, list(table.ROWS), "variant")
    if config.batch_size % ranks:
        raise ValueError(f"a global batch of {config.batch_size} does not divide over {ranks} ranks")
    try:
        enough_devices(ranks, device)
    except NotImplementedError as error:
        raise ValueError(str(error)) from None
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name in names:
            trace = (out / f"{_slug(config, name, f'{ranks} ranks', dtype)}.trace.json.gz").resolve()
            on_ranks(
                ranks, device, _profile_rank, name, config, dtype, device, str(trace), timeout_seconds=300
            )
            _print_overlap(trace, out)
    finally:
        close_ranks()


def _profile_rank(target: str, config: Any, dtype: str, device: str, trace: str) -> None:
    """On a rank: profile one data-parallel step; rank 0's trace is the one that stays."""
    import torch.distributed as dist

    from benchmarks.cases.rank_step import Plan, RankStep
    from benchmarks.measure.profile import profile_parts

    step = RankStep(Plan(area="data_parallel", target=target, config=config, dtype=dtype, device=device))
    path = Path(trace) if dist.get_rank() == 0 else Path(trace).with_suffix(f".{dist.get_rank()}.gz")

    def before() -> None:
        step.reset_gradients()
        dist.barrier()

    try:
        profile_parts([("step", step.step)], path, device=step.device.type, before=before)
    finally:
        if dist.get_rank():
            path.unlink(missing_ok=True)


def _under_nsys(
    preset: str, context: str, batch: str, mode: str, target: str, dtype: str, device: str
) -> None:
    """What runs inside nsys: warm up, then one step in the captured range with ranges on."""
    from benchmarks.cases import step as table
    from benchmarks.measure.profile import attention_ranges, measured_range, ranges_on
    from trainstep import ranges
    from trainstep.specs.model import get_model

    config = get_model(preset, context_length=int(context), batch_size=int(batch))
    step = table.Step(table.ROWS[target], config, dtype, device)
    with attention_ranges(step.model):
        for round_number in range(3):
            step.reset_gradients()
            if round_number < 2:
                for _, part in step.parts(mode):
                    part()
                continue
            with ranges_on(), measured_range(device):
                for name, part in step.parts(mode):
                    with ranges.annotate(name):
                        part()


if __name__ == "__main__":
    _under_nsys(*sys.argv[1:])
