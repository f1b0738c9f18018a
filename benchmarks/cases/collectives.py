"""Collectives over ranks against payload: torch's, and the rings on send and receive (SPEC 8.2)."""

from dataclasses import dataclass
from typing import Any

from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.measure.clock import slowest_rank
from benchmarks.measure.ranks import drop, keep, kept, on_ranks, started_ranks

AREA = "collective"
SIZES = (10**6, 10**7, 10**8, 10**9)
WORLD_SIZES = (2, 4, 6)


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One way of running collectives: the name that `parallel.collectives.make_buffers` knows for each one."""

    name: str
    collectives: dict[str, str]
    peer: bool


_ALL = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ROWS = {
    row.name: row
    for row in (
        CollectiveRow(name="torch", collectives={op: op for op in _ALL}, peer=True),
        CollectiveRow(name="ring", collectives={op: f"ring_{op}" for op in _ALL[:3]}, peer=False),
        CollectiveRow(name="whole-tensor", collectives={"all_reduce": "whole_tensor_all_reduce"}, peer=False),
    )
}


def case(target: str, collective: str, size_bytes: int, world_size: int, *, tier: str = "standard") -> Case:
    """One collective of `size_bytes` (the total: NCCL's meaning of size) over float32.

    Raises:
        ValueError: fewer bytes than one element, or than one a rank where ranks hold parts.
    """
    least = 4 if collective in ("all_reduce", "broadcast") else 4 * world_size
    if size_bytes < least:
        raise ValueError(
            f"{collective} of float32 on {world_size} ranks needs at least {least} bytes, got {size_bytes}"
        )
    return Case(
        area=AREA,
        target=target,
        phase=collective,
        shape={"bytes": size_bytes},
        dtype="fp32",
        world_size=world_size,
        tier=tier,
        peer=ROWS[target].peer,
    )


def cases() -> list[Case]:
    """Every collective case."""
    found = []
    for world_size in WORLD_SIZES:
        for row in ROWS.values():
            for collective in row.collectives:
                for size in SIZES:
                    small = world_size == 2 and collective == "all_reduce" and size <= 10**8
                    tier = "smoke" if small else "standard" if world_size == 2 else "full"
                    found.append(case(row.name, collective, size, world_size, tier=tier))
    return found


def runs_here(target: str, device: str) -> None:
    """Raises NotImplementedError, with the reason, where two ranks cannot run."""
    import torch

    import trainstep.parallel.collectives  # noqa: F401

    if device == "cuda" and torch.cuda.device_count() < 2:
        raise NotImplementedError(f"two ranks need two CUDA devices, there is {torch.cuda.device_count()}")


def enough_devices(world_size: int, device: str) -> None:
    """Raises NotImplementedError where there are fewer CUDA devices than ranks."""
    if device == "cuda" and started_ranks() is None:  # else other nodes hold their share
        import torch

        if torch.cuda.device_count() < world_size:
            raise NotImplementedError(
                f"{world_size} ranks need {world_size} CUDA devices, there are {torch.cuda.device_count()}"
            )


def prepare(one: Case, device: str) -> Prepared:
    """Buffers on every rank; a repetition is timed on each of them between barriers, and the slowest counts."""
    import trainstep.parallel.collectives  # noqa: F401  (an older trainstep has none)

    enough_devices(one.world_size, device)
    name = ROWS[one.target].collectives[one.phase]

    def ranks(function: Any, *arguments: Any) -> list[Any]:
        return on_ranks(one.world_size, device, function, *arguments, name=one.id)

    payload = ranks(_make, one.id, name, one.shape["bytes"], device)[0]

    def check() -> Check:
        wrong = ranks(_check, one.id)
        return Check(error=float(sum(wrong)), budget=0.0)

    def metrics() -> dict[str, dict[str, Any]]:
        found = {"payload": {"value": payload, "unit": "byte", "better": None}}
        sent = ranks(_sent, one.id)
        if sent[0] is not None:
            found["bytes_sent"] = {"value": max(sent), "unit": "byte", "better": None}
        return found

    return Prepared(
        run=lambda: ranks(_repetition, one.id, device),
        clock=slowest_rank,
        close=lambda: _close(one, device),
        work=Work(),
        check=check,
        metrics=metrics,
    )


def _close(one: Case, device: str) -> None:
    on_ranks(one.world_size, device, drop)


# What follows runs on the ranks.


def _make(case_id: str, name: str, size_bytes: int, device: str) -> int:
    import torch

    from trainstep.parallel.collectives import make_buffers

    buffers = make_buffers(name, size_bytes, torch.float32, device)
    keep(case_id, {"buffers": buffers, "sent": None})
    return buffers.payload_bytes


def _repetition(case_id: str, device: str) -> float:
    import torch.distributed as dist

    from benchmarks.measure.clock import host_clock

    state = kept(case_id)
    state["buffers"].refill()  # repeated sums would grow without bound
    clock = host_clock(device)
    clock.synchronize()
    dist.barrier()

    def run() -> None:
        state["sent"] = state["buffers"].run()

    return clock(run)


def _check(case_id: str) -> int:
    buffers = kept(case_id)["buffers"]
    buffers.refill()
    buffers.run()
    return 0 if buffers.check() else 1


def _sent(case_id: str) -> int | None:
    return kept(case_id)["sent"]
