"""Fully sharded: state that is saved at one number of ranks goes on at another."""

import torch
import torch.distributed as dist
from fsdp_models import optimizer_of
from parallel_models import Toy, Uneven, batch_of, bit_equal, build, loss_of
from training_budget import Path, outside_budget

from trainstep.parallel import agreement
from trainstep.parallel.fsdp import FSDP, state


def go_on(fsdp, optimizer, start, stop):
    """Train, every rank with the same batch, so that the number of ranks does not matter."""
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(fsdp, batch_of(0, step, vocabulary=101)).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()


def save(steps=3):
    """Train and save in full and in parts."""
    fsdp = FSDP(build(make=Uneven))
    optimizer = optimizer_of(fsdp, "adamw")
    go_on(fsdp, optimizer, 0, steps)
    return {
        "model": fsdp.state_dict(),
        "optimizer": state.full_optimizer_state_dict(fsdp, optimizer),
        "model_part": state.sharded_state_dict(fsdp),
        "optimizer_part": state.sharded_optimizer_state_dict(fsdp, optimizer),
    }


def resume(saved, start=3, stop=6):
    """Load what was saved in full and go on."""
    fsdp = FSDP(build(seed=9, make=Uneven))
    optimizer = optimizer_of(fsdp, "adamw")
    missing = fsdp.load_state_dict(saved["model"])
    assert not missing.missing_keys and not missing.unexpected_keys
    state.load_full_optimizer_state_dict(fsdp, optimizer, saved["optimizer"])
    go_on(fsdp, optimizer, start, stop)
    return {"model": fsdp.state_dict(), "optimizer": state.full_optimizer_state_dict(fsdp, optimizer)}


def save_alone(dtype, steps=6):
    """One process unwrapped: the states, and the path with the optimizer's state."""
    model = build(make=Uneven).to(dtype)
    optimizer = optimizer_of(model, "adamw")
    path = Path(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, step, vocabulary=101)).backward()
        optimizer.step()
        path.advance()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.finish()


def shapes_of(saved):
    """Names and shapes of everything in a saved pair of states."""
    model = {name: tuple(value.shape) for name, value in saved["model"].items()}
    optimizer = {
        (index, key): tuple(value.shape)
        for index, values in saved["optimizer"]["state"].items()
        for key, value in values.items()
    }
    return model, optimizer


def flat(saved):
    """A saved pair of states by name, and by (parameter's index, key)."""
    values = dict(saved["model"])
    for index, kept in saved["optimizer"]["state"].items():
        values |= {(index, key): value for key, value in kept.items()}
    return values


def test_saved_at_two_ranks_goes_on_at_one_and_three_and_back(pools):
    saved = pools(2).run(save)
    (alone, plain), (_, exact) = (pools(1).run(save_alone, d)[0] for d in (torch.float32, torch.float64))
    assert shapes_of(saved[0]) == shapes_of(alone)
    assert bit_equal(flat(saved[0]), flat(saved[1]))
    uninterrupted = flat(pools(2).run(save, 6)[0])
    assert bit_equal(uninterrupted, plain.values)
    # With the same batch everywhere the mean over two ranks is exact; over three it may round.
    for size in (1, 2):
        assert bit_equal(flat(pools(size).run(resume, saved[0])[0]), uninterrupted)
    for resumed in pools(3).run(resume, saved[0]):
        assert outside_budget(flat(resumed), plain, exact) == []
    at_one = pools(1).run(resume, saved[0], 3, 5)[0]
    assert bit_equal(flat(pools(2).run(resume, at_one, 5, 6)[0]), uninterrupted)


def test_parts_of_all_ranks_merge_into_the_full_state(pools):
    for size in (2, 3):
        saved = pools(size).run(save)
        merged = {
            "model": state.merge_state_dicts([s["model_part"] for s in saved]),
            "optimizer": state.merge_optimizer_state_dicts([s["optimizer_part"] for s in saved]),
        }
        assert shapes_of(merged) == shapes_of(saved[0])
        assert bit_equal(flat(merged), flat(saved[0]))


def alone():
    """Rank 0 asks for each whole state, the others do not; then all do."""
    agreement.TIMEOUT_SECONDS = 0.5
    fsdp = FSDP(build())
    optimizer = optimizer_of(fsdp, "sgd")
    calls = (
        fsdp.state_dict,
        fsdp.gather_full_params,
        lambda: state.full_optimizer_state_dict(fsdp, optimizer),
    )
    messages = []
    if dist.get_rank() == 0:
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error))
        state.sharded_state_dict(fsdp)  # needs nobody else
    dist.barrier()
    agreement.TIMEOUT_SECONDS = 60.0
    return messages, [sorted(call(), key=str) for call in calls]


def test_a_state_dict_on_one_rank_alone_raises(ranks):
    (messages, first), (_, second) = ranks.run(alone)
    for what, message in zip(
        ("FSDP.state_dict", "FSDP.gather_full_params", "full_optimizer_state_dict"), messages, strict=True
    ):
        assert message == f"{what} needs every rank, but after 0.5 s these had not called it: 1"
    assert first == second == [sorted(Toy().state_dict())] * 2 + [["param_groups", "state"]]
