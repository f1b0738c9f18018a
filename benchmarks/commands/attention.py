"""`attention`: time attention implementations beside their peers."""

from typing import Annotated

import typer

from benchmarks.commands.measuring import Device, Machine, Out, Samples, Warmup


def attention(
    implementation: Annotated[str, typer.Option(help="Implementation, or 'all'.")] = "all",
    phase: Annotated[str, typer.Option(help="forward, backward, forward_backward, or 'all'.")] = "all",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; by default as many as query heads.")] = None,
    length: Annotated[str, typer.Option(help="Queries, or a list such as 256,1024.")] = "1024",
    keys: Annotated[int | None, typer.Option(help="Keys; by default as many as queries.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head width.")] = 64,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16 or fp64.")] = "fp32",
    causal: Annotated[bool, typer.Option(help="Mask later keys.")] = True,
    window: Annotated[int | None, typer.Option(help="Sliding window in keys; needs causal.")] = None,
    device: Device = "auto",
    samples: Samples = None,
    warmup: Warmup = None,
    machine: Machine = None,
    out: Out = None,
) -> int:  # fmt: skip
    """Forward and backward of each implementation at each length, with rates and ratios to the peers."""
    from benchmarks.cases import attention as table
    from benchmarks.commands.measuring import (
        check_head_width,
        choose_device,
        choose_policy,
        counts,
        measure_cases,
        pick,
        status_of,
    )
    from benchmarks.commands.printing import print_rows
    from trainstep.specs.dtype import get_dtype

    get_dtype(dtype)
    numbers = {
        "batch": batch,
        "heads": heads,
        "kv-heads": kv_heads,
        "keys": keys,
        "window": window,
        "head-dim": head_dim,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_head_width(head_dim)
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"kv-heads must divide heads {heads}, got {kv_heads}")
    if window is not None and not causal:
        raise ValueError(f"window {window} needs causal attention")
    device = choose_device(device)
    chosen = [table.ROWS[name] for name in pick(implementation, list(table.ROWS), "attention implementation")]
    cases = [
        table.case(
            row.name,
            one,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            queries=queries,
            keys=keys,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            window=window,
        )
        for queries in counts(length, "length")
        for row in chosen
        if dtype in row.dtypes or implementation != "all"
        for one in pick(phase, list(table.PHASES), "phase")
    ]
    rows, path = measure_cases(
        cases, device=device, policy=choose_policy(device, samples, warmup), machine=machine, out=out
    )
    print_rows(rows)
    print(f"{len(rows)} rows in {path}")
    return status_of(rows)
