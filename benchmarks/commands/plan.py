"""`plan`: predict how long a training step takes on many devices, before buying or booking them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainstep.accounting.layout import Plan, Question

TABLE_SUFFIXES = (".csv", ".json")


MAX_DEVICES = 100_000


def plan(
    model: Annotated[str, typer.Option(help="A preset, 70b or 405b.")] = "xl",
    device: Annotated[str, typer.Option(help="A device of the table, such as h200, h100, b200, a100, l4.")] = "h200",
    devices: Annotated[int, typer.Option(help="How many are at hand.")] = 1,
    batch: Annotated[int | None, typer.Option(help="Sequences a step, over all devices; the preset's batch on each by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, tf32, fp16, bf16, fp64, amp-bf16 or amp-fp16; the preset's by default.")] = None,
    state: Annotated[str | None, typer.Option(help="fp32 (16 bytes a parameter), mixed (18) or bf16 (8).")] = None,
    execution: Annotated[str, typer.Option(help="plain, plain-compiled or fused.")] = "fused",
    context: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Residual width.")] = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens in the vocabulary.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Fix the devices that share every layer.")] = None,
    context_ranks: Annotated[int | None, typer.Option(help="Fix the devices that share every sequence.")] = None,
    data: Annotated[int | None, typer.Option(help="Fix the data-parallel groups.")] = None,
    shard: Annotated[int | None, typer.Option(help="Fix the devices that share parameters (FSDP); 1 is plain DP.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Fix the pipeline stages.")] = None,
    microbatch: Annotated[int | None, typer.Option(help="Fix the sequences in one pass.")] = None,
    per_node: Annotated[int, typer.Option(help="Devices in a node.")] = 8,
    between: Annotated[str, typer.Option(help="Bytes a second of a device's port between nodes.")] = "50GB",
    keep: Annotated[int, typer.Option(help="Layouts to show, best first.")] = 5,
    validation: Annotated[bool, typer.Option("--validation", help="Also show measured figures beside predicted ones.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the plans as .csv or .json.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw them as .png or .svg.")] = None,
) -> int:  # fmt: skip
    """Search the ways of cutting a model over devices: step time, MFU, memory and what binds, with all assumptions."""
    from benchmarks.report.plots import IMAGE_FORMATS
    from trainstep.accounting.large_models import find_model
    from trainstep.accounting.question import ask
    from trainstep.accounting.search import search
    from trainstep.accounting.sizes import parse_bytes

    _check_file(out, TABLE_SUFFIXES)
    _check_file(figure, tuple(f".{name}" for name in IMAGE_FORMATS))
    if keep < 1:
        raise ValueError(f"--keep must be at least 1, got {keep}")
    shape = {
        "context_length": context, "n_layers": layers, "d_model": d_model, "d_ff": d_ff, "n_heads": heads,
        "n_kv_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip
    axes = {
        "tensor": tensor, "context": context_ranks, "data": data, "shard": shard, "pipeline": pipeline,
        "microbatch": microbatch,
    }  # fmt: skip
    for name, size in axes.items():
        if size is not None and size < 1:
            raise ValueError(
                f"--{'context-ranks' if name == 'context' else name} must be at least 1, got {size}"
            )
    try:
        between_bytes_per_second = parse_bytes(between)
    except ValueError as error:
        raise ValueError(f"--between: {error}") from None
    question = ask(
        find_model(model, **shape),
        devices=devices,
        device=device,
        batch=batch,
        dtype=dtype,
        state=state,
        execution=execution,
        per_node=per_node,
        between_bytes_per_second=between_bytes_per_second,
    )
    fixed = {name: size for name, size in axes.items() if size is not None}
    if devices > MAX_DEVICES:
        raise ValueError(f"devices must be at most {MAX_DEVICES}, got {devices}")
    plans = search(question, devices, fixed=fixed, keep=keep)
    _print(question, plans, devices, validation)
    if out is not None:
        write_plans(out, question, plans)
        print(f"{len(plans)} plans in {out}")
    if figure is not None:
        draw_plans(figure, question, plans)
        print(f"picture in {figure}")
    return 0


def _check_file(path: Path | None, known: tuple[str, ...]) -> None:
    """Refuse before anything is computed what could not be written after it."""
    from benchmarks.commands.measuring import writable
    from benchmarks.measure.record import file_at

    if path is None:
        return
    if path.suffix not in known:
        raise ValueError(f"{str(path)!r} must end in {' or '.join(known)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {str(path.absolute().parent)!r} to write {path.name!r} in")
    writable(file_at(path).parent)


def _print(question: "Question", plans: list["Plan"], devices: int, validation: bool) -> None:
    import pandas

    from benchmarks.commands import plan_tables
    from benchmarks.commands.printing import print_frame
    from trainstep.accounting import params

    config = question.config
    print(
        f"{config.name}: {params.count(config) / 1e9:.4g} billion parameters, {question.dtype} computation, "
        f"{question.state} state, {question.execution.says}; {question.batch} sequences of "
        f"{config.context_length} tokens a step on up to {devices} {question.device.name}"
    )
    best = plans[0]
    print(
        f"Best: {best.layout}, {best.seconds * 1e3:.4g} ms a step, bound by {best.bound} "
        f"({best.parts[best.bound] / best.seconds:.0%} of it), MFU {best.mfu:.1%}, "
        f"{best.memory_bytes / 2**30:.1f} GiB a device"
    )
    print_frame("Plans", pandas.DataFrame(plan_tables.plan_rows(question, plans)))
    print_frame("Where the time goes", pandas.DataFrame(_present(plan_tables.part_rows(plans))))
    print_frame("Where the memory goes", pandas.DataFrame(_present(plan_tables.memory_rows(plans))))
    print_frame("Assumed", pandas.DataFrame(plan_tables.assumption_rows(question)))
    for note in question.rates.notes:
        print(f"note: {note}")
    if validation:
        print_frame("Measured beside predicted", pandas.DataFrame(plan_tables.validation_rows()))
        print(
            "note: measured before this package had records, with a plain model whose softmax and AdamW are written out, "
            "operation by operation; this package's own `plain` is faster, see `report`"
        )


def _present(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the columns that are zero in all of them."""
    used = [name for name in rows[0] if any(row[name] for row in rows)]
    return [{name: row[name] for name in used} for row in rows]


def write_plans(path: Path, question: "Question", plans: list["Plan"]) -> None:
    """Write plans as CSV (a row each) or JSON (with the assumptions), whole or not at all.

    Raises:
        ValueError: the name ends in neither.
    """
    from benchmarks.commands import plan_tables
    from benchmarks.measure.record import write_atomically

    _check_file(path, TABLE_SUFFIXES)
    rows = [
        first | second | third
        for first, second, third in zip(
            plan_tables.plan_rows(question, plans),
            plan_tables.part_rows(plans),
            plan_tables.memory_rows(plans),
            strict=True,
        )
    ]
    if path.suffix == ".json":
        content = {
            "model": question.config.name,
            "batch": question.batch,
            "device": question.device.name,
            "dtype": question.dtype,
            "state": question.state,
            "execution": question.execution.name,
            "assumptions": plan_tables.assumption_rows(question),
            "notes": list(question.rates.notes),
            "plans": rows,
        }
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    else:
        import pandas

        from benchmarks.report.formats import comma_separated

        text = comma_separated(pandas.DataFrame(rows))
    write_atomically(path, text)


def draw_plans(path: Path, question: "Question", plans: list["Plan"]) -> None:
    """Draw plans as PNG or SVG, whole or not at all.

    Raises:
        ValueError: the name ends in neither, or the place cannot be written.
    """
    from benchmarks.commands.plan_charts import plan_chart
    from benchmarks.measure.record import write_atomically
    from benchmarks.report.plots import render

    write_atomically(path, render(plan_chart(question, plans), path.suffix.removeprefix(".")))
