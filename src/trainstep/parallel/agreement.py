"""Making sure, before collectives that would hang or mix, that all ranks take part and hold the same model."""

from collections.abc import Iterable
from datetime import timedelta
from itertools import zip_longest

import torch.distributed as dist
from torch import Tensor

TIMEOUT_SECONDS = 60.0
_rounds: dict[str, int] = {}


def require_all_ranks(what: str) -> None:
    """Return once every rank has called this for the same thing.

    Through the store of the default process group, not by a collective: a failure leaves nothing half done.

    Raises:
        RuntimeError: some ranks did not come within TIMEOUT_SECONDS; the message names them.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    keys = [f"trainstep/{what}/{_rounds.get(what, 0)}/{r}" for r in range(size)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timedelta(seconds=TIMEOUT_SECONDS))
    except Exception as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        store.delete_key(keys[rank])
        raise RuntimeError(
            f"{what} needs every rank, but after {TIMEOUT_SECONDS:g} s these had not called it: "
            f"{', '.join(map(str, missing))}"
        ) from error
    _rounds[what] = _rounds.get(what, 0) + 1


def require_alike_parameters(
    parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Return if every rank of the group holds parameters of the same names, shapes and dtypes in the same order.

    Raises:
        ValueError: on every rank; the message names the first difference.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    every: list[list[str]] = [[] for _ in ranks]
    mine = [f"{name} {list(p.shape)} {p.dtype}" for name, p in parameters]
    dist.all_gather_object(every, mine, group=group)
    for rank, theirs in zip(ranks, every, strict=True):
        for first, other in zip_longest(every[0], theirs, fillvalue="none left"):
            if first != other:
                raise ValueError(
                    f"the model must be the same on every rank, but rank {ranks[0]} has {first} where rank {rank} "
                    f"has {other}"
                )
