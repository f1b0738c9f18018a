"""Making sure that every rank takes part before a collective that users may call on one rank by mistake."""

from datetime import timedelta

import torch.distributed as dist

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
