"""`parallel`: time data-parallel variants and sharded training beside torch's."""

from typing import Annotated

import typer

from benchmarks.commands.measuring import Device, Machine, Out, Samples, Warmup


def parallel(
    variant: Annotated[str, typer.Option(help="naive, bucketed, zero1, fsdp, ...; 'all', or 'sharding' for the sharded ones.")] = "all",
    preset: Annotated[str, typer.Option(help="Model preset.")] = "toy",
    ranks: Annotated[int, typer.Option(help="Ranks.")] = 2,
    batch: Annotated[int | None, typer.Option(help="Global batch, spread over the ranks.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    bucket: Annotated[int | None, typer.Option(help="Bucket size in MB, for variants that have buckets.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, fp64, amp-bf16 or amp-fp16.")] = "fp32",
    device: Device = "auto",
    samples: Samples = None,
    warmup: Warmup = None,
    machine: Machine = None,
    out: Out = None,
) -> int:  # fmt: skip
    """Step time, communication time, hidden share and bytes by component of each variant."""
    from benchmarks.cases import data_parallel, sharding
    from benchmarks.commands.measuring import choose_device, choose_policy, measure_cases, pick, status_of
    from benchmarks.commands.printing import print_rows
    from trainstep.parallel.launch import check_ranks
    from trainstep.specs.dtype import get_dtype

    get_dtype(dtype)
    device = choose_device(device)
    check_ranks(ranks, device)
    if bucket is not None and bucket < 1:
        raise ValueError(f"bucket must be at least 1 MB, got {bucket}")
    everything = list(data_parallel.ROWS) + list(sharding.ROWS)
    names = list(sharding.ROWS) if variant == "sharding" else pick(variant, everything, "variant")
    cases = [
        sharding.case(name, preset, ranks, dtype=dtype, batch=batch, context=context)
        if name in sharding.ROWS
        else data_parallel.case(
            name, preset, ranks, dtype=dtype, batch=batch, context=context, bucket_mb=bucket
        )
        for name in names
    ]
    policy = choose_policy(device, samples, warmup)
    rows, path = measure_cases(cases, device=device, policy=policy, machine=machine, out=out)
    print_rows(rows)
    print(f"{len(rows)} rows in {path}")
    return status_of(rows)
