"""`profile`: which kernels a step spends its time on, and how much communication it hides."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cases.case import Case
from benchmarks.commands.measuring import Device

if TYPE_CHECKING:
    from benchmarks.commands.studies import Study
    from benchmarks.measure.record import Row

MODES = ("forward", "forward_backward", "train_step")


def profile(
    preset: Annotated[str, typer.Argument(help="Model presets, separated by commas.")] = "toy",
    context: Annotated[str | None, typer.Option(help="Contexts, separated by commas.")] = None,
    mode: Annotated[str, typer.Option(help="forward, forward_backward or train_step.")] = "train_step",
    target: Annotated[str, typer.Option(help="Way of running the step; its kernels are told apart in eager mode.")] = "plain",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, fp64, amp-bf16 or amp-fp16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    device: Device = "auto",
    top: Annotated[int, typer.Option(help="Kernels (on a CPU: operators) a table.")] = 10,
    ranks: Annotated[int, typer.Option(help="From 2: profile data-parallel steps on this many ranks instead.")] = 1,
    variant: Annotated[str, typer.Option(help="Data-parallel variant, or 'all'.")] = "all",
    overlap: Annotated[Path | None, typer.Option(help="Read this Chrome trace instead of measuring.")] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with Nsight Systems instead.")] = False,
    out: Annotated[Path, typer.Option(help="Directory of traces, pictures and rows.")] = Path("results/local/profile"),
) -> int:  # fmt: skip
    """Kernel tables by phase, shares of matrix products, softmax against products, and what marking costs
    when off. On a CPU, where no kernels are seen, the tables are of operators.

    Every cell leaves a Chrome trace, compressed (Perfetto and chrome://tracing open it so), and a row with its
    tables and answers, which the page shows and `adopt` files. With --ranks the overlap of communication with
    computation is read from a trace of each variant; --overlap reads it from a file.
    """
    from benchmarks.cases import step as table
    from benchmarks.commands.measuring import choose_device, counts, one_of, status_of, writable
    from benchmarks.commands.studies import Study
    from benchmarks.measure.nsys import find_nsys, nsys_command
    from trainstep.specs.dtype import get_dtype
    from trainstep.specs.model import get_model

    writable(out)
    if overlap is not None:
        _print_overlap(overlap, out)
        return 0
    get_dtype(dtype)
    one_of(mode, MODES, "mode")
    one_of(target, list(table.ROWS), "target")
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
    with contextlib.closing(Study("profile", device, out)) as study:
        rows = [_profile_cell(config, target, mode, dtype, device, top, out, study) for config in configs]
    print(f"{len(rows)} rows in {study.path}")
    return status_of(rows)


def _slug(config: Any, target: str, mode: str, dtype: str) -> str:
    from benchmarks.report.chart import file_name

    return file_name(f"{config.name} B{config.batch_size} S{config.context_length} {target} {mode} {dtype}")


def _profile_cell(
    config: Any, target: str, mode: str, dtype: str, device: str, top: int, out: Path, study: "Study"
) -> "Row":
    """Profile one step, print and keep what it says, or why there is nothing to say."""

    from benchmarks.commands.printing import print_frame
    from benchmarks.measure.memory import describe_out_of_memory, is_out_of_memory, release
    from benchmarks.measure.profile import unit_of
    from benchmarks.report.facts import facts_of
    from benchmarks.report.study_tables import answers_of, kernels
    from benchmarks.runner import one_line

    shape = {"preset": config.name, "B": config.batch_size, "S": config.context_length}
    case = Case(area="profile", target=target, phase=mode, shape=shape, dtype=dtype)
    title = f"{config.name}, batch {config.batch_size}, context {config.context_length}, {dtype}, {target}"
    trace = out / f"{_slug(config, target, mode, dtype)}.trace.json.gz"
    try:
        row = study.add(case, _measure_cell(config, target, mode, dtype, device, trace))
    except NotImplementedError as error:
        row = study.add(case, status="skipped", reason=str(error) or "not implemented")
    except RuntimeError as error:
        if is_out_of_memory(error):
            row = study.add(case, status="oom", reason=describe_out_of_memory(error))
        else:
            row = study.add(case, status="error", reason=one_line(error))
            print(f"{title}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        release(device)
    if row.status == "ok":
        print_frame(f"{title}: {unit_of(device)}s by phase", kernels(facts_of(row), top))
        print("\n".join(answers_of(row)))
        print(f"Trace: {trace}")
    elif row.status != "error":
        print(f"{title}: {row.reason}")
    return row


def _measure_cell(
    config: Any, target: str, mode: str, dtype: str, device: str, trace: Path
) -> dict[str, dict[str, Any]]:
    """What a profiled step says, as metrics: each phase with its kernels, attention's parts, ranges that are off, and
    the answers in words."""
    from dataclasses import asdict

    from benchmarks.cases import step as table
    from benchmarks.measure.off_ratio import off_ratio
    from benchmarks.measure.profile import (
        answers,
        attention_flops,
        attention_ranges,
        attention_split,
        kernel_table,
        profile_parts,
    )

    def metric(value: float, unit: str, **more: Any) -> dict[str, Any]:
        return {"value": value, "unit": unit, "better": None, **more}

    step = table.Step(table.ROWS[target], config, dtype, device)
    parts = step.parts(mode)
    with attention_ranges(step.model):
        kernels = profile_parts(parts, trace, device=device, before=step.reset_gradients)
    metrics = {}
    for name, _ in parts:
        lines = kernel_table(kernels, name)
        total = sum(line.seconds for line in lines)
        metrics[name] = metric(total, "s", kernels=[asdict(line) for line in lines])
    split = attention_split(kernels)
    if split.seen:
        flops = dict(zip(("softmax_flops", "matmul_flops"), attention_flops(config), strict=True))
        ratio = split.softmax_seconds / split.matmul_seconds
        metrics["softmax_to_matmul"] = metric(ratio, "1", **asdict(split), **flops)
    off = off_ratio(parts, device=device, before=step.reset_gradients)
    metrics["ranges_off"] = metric(off.ratio, "1", noise=off.noise, rounds=off.rounds)
    said = [*answers(kernels, config, device), str(off)]
    return metrics | {"answers": metric(len(said), "1", said=said)}


def _print_overlap(trace: Path, out: Path) -> None:
    from benchmarks.measure.overlap import draw, overlap_of
    from benchmarks.measure.record import file_at
    from benchmarks.measure.trace import load_trace

    lanes = overlap_of(load_trace(file_at(trace)))
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
