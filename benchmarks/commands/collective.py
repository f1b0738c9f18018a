"""`collective`: time collectives over ranks against payload."""

from typing import Annotated

import typer

from benchmarks.commands.measuring import Device, Machine, Out, Samples


def collective(
    operation: Annotated[str, typer.Option(help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, or 'all'.")] = "all_reduce",
    target: Annotated[str, typer.Option(help="torch, ring, whole-tensor, or 'all'.")] = "all",
    sizes: Annotated[str, typer.Option(help="Total payloads: 1MB and 1M are 10^6 bytes, 1MiB is 2^20; 1MB:1GB:10 is a range with a factor.")] = "1MB,10MB,100MB",
    ranks: Annotated[str, typer.Option(help="Ranks, or a list such as 2,4.")] = "2",
    device: Device = "auto",
    samples: Samples = None,
    warmup: Annotated[int, typer.Option(help="Untimed calls before the first sample.")] = 5,
    machine: Machine = None,
    out: Out = None,
) -> int:  # fmt: skip
    """Time, algorithm and bus bandwidth of each collective, the result checked; the slowest rank counts."""
    from benchmarks.cases import collectives as table
    from benchmarks.commands.measuring import (
        choose_device,
        choose_policy,
        counts,
        measure_cases,
        pick,
        status_of,
    )
    from benchmarks.commands.printing import print_rows
    from trainstep.parallel.launch import check_ranks

    operations = pick(operation, list(table.ROWS["torch"].collectives), "operation")
    try:
        payloads = list(dict.fromkeys(size for part in sizes.split(",") for size in _payloads(part.strip())))
    except ValueError as error:
        raise ValueError(f"--sizes: {error}") from None
    device = choose_device(device)
    world_sizes = counts(ranks, "ranks")
    for world_size in world_sizes:
        check_ranks(world_size, device)
    cases = [
        table.case(name, one, size, world_size)
        for world_size in world_sizes
        for name in pick(target, list(table.ROWS), "target")
        for one in operations
        if one in table.ROWS[name].collectives
        for size in payloads
    ]
    policy = choose_policy(device, samples, warmup)
    rows, path = measure_cases(cases, device=device, policy=policy, machine=machine, out=out)
    print_rows(rows)
    print(f"{len(rows)} rows in {path}")
    return status_of(rows)


def _payloads(text: str) -> list[int]:
    """One size, or a range MIN:MAX:FACTOR.

    Raises:
        ValueError: not a size, or a range that would be empty or never end.
    """
    from trainstep.accounting.sizes import parse_bytes, sizes

    if ":" not in text:
        return [parse_bytes(text)]
    try:
        least, most, factor = text.split(":")
        step = float(factor)
    except ValueError:
        raise ValueError(f"not a range of sizes: {text!r} (example: 1MB:1GB:10)") from None
    return list(sizes(parse_bytes(least), parse_bytes(most), step))
