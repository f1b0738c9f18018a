"""`step`: time a language model's training step, phase by phase."""

from typing import Annotated, Any

import typer

from benchmarks.commands.measuring import Device, Machine, Out, Samples


def step(
    preset: Annotated[str, typer.Argument(help="Model preset, or 'all'.")] = "toy",
    target: Annotated[str, typer.Option(help="Way of running the step, or 'all'.")] = "all",
    mode: Annotated[str, typer.Option(help="forward, forward_backward, train_step, or 'all'.")] = "all",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, fp64, amp-bf16 or amp-fp16.")] = "fp32",
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Residual width.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens in the vocabulary.")] = None,
    window: Annotated[int | None, typer.Option(help="Sliding window in keys.")] = None,
    device: Device = "auto",
    steps: Samples = None,
    warmup: Annotated[str, typer.Option(help="Untimed steps; a list such as 0,1,2,5 is a warm-up study.")] = "2",
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark the phases as NVTX ranges.")] = False,
    machine: Machine = None,
    out: Out = None,
) -> int:  # fmt: skip
    """Forward, backward and optimizer of each way of running the step, with tokens/s, MFU and peak memory."""
    from benchmarks.cases import step as table
    from benchmarks.commands.measuring import (
        check_head_width,
        choose_device,
        choose_policy,
        counts,
        measure_cases,
        pick,
        status_of,
    )
    from benchmarks.commands.printing import print_rows, print_warmup_study
    from benchmarks.measure.record import file_at
    from trainstep import ranges
    from trainstep.specs.dtype import get_dtype
    from trainstep.specs.model import MODELS, get_model

    get_dtype(dtype)
    presets = list(MODELS) if preset == "all" else [get_model(preset).name]
    shape = {
        "B": batch, "S": context, "L": layers, "D": d_model, "F": d_ff, "N": heads, "K": kv_heads, "V": vocabulary,
        "window": window,
    }  # fmt: skip
    named: dict[str, Any] = {key: value for key, value in shape.items() if value is not None}
    warmups = counts(warmup, "warmup", least=0)
    places = [
        out if out is None or len(warmups) == 1 else out.with_stem(f"{out.stem}-w{count}")
        for count in warmups
    ]
    for name in filter(None, places):
        file_at(name)
    device = choose_device(device)
    targets = pick(target, list(table.ROWS), "target")
    here = [name for name in targets if device in table.ROWS[name].devices]
    if not here:
        raise ValueError(f"target {target!r} does not run on {device}")
    cases = [
        table.case(row, phase, name, dtype=dtype, **named)
        for name in presets
        for row in here
        for phase in pick(mode, list(table.PHASES), "mode")
    ]
    for case in cases:
        check_head_width(table.config_of(case).head_dim)
    if nvtx:
        ranges.enable()
    rows = []
    for count, place in zip(warmups, places, strict=True):
        measured, path = measure_cases(
            cases,
            device=device,
            policy=choose_policy(device, steps, count, what="steps"),
            machine=machine,
            out=place,
        )
        rows += measured
        if len(warmups) == 1:
            print_rows(measured)
        print(f"{len(measured)} rows in {path}")
    if len(warmups) > 1:
        print_warmup_study(rows)
    return status_of(rows)
