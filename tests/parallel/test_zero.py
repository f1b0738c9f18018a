"""Sharded optimizer state and gradients: the unsharded optimizer's result, with a share of its memory."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    Single,
    Toy,
    Uneven,
    batch_of,
    bit_equal,
    build,
    clip_reference,
    fingerprint,
    loss_of,
    reference_step,
    values_of,
)
from torch import nn
from training_budget import Path, norms_outside_budget, outside_budget

from trainstep.parallel import agreement
from trainstep.parallel.data.flat import Flat
from trainstep.parallel.launch import rank_device
from trainstep.parallel.zero.stage1 import ShardedOptimizer, merge_state_dicts
from trainstep.parallel.zero.stage2 import ShardedGradients

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "foreach": False}),
}

MODELS = {"toy": Toy, "uneven": Uneven, "single": Single}


def groups_of(model):
    """Two groups (if there are two parameters) interleaved over ranks; the first given as a generator."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": (p for p in trainable[::2]), "lr": 0.1, "weight_decay": 0.1},
        {"params": trainable[1::2], "lr": 0.01, "weight_decay": 0.0},
    ]
    return groups if len(trainable) > 1 else groups[:1]


def halving(optimizer):
    """A schedule that halves the rate each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def hand_edit(optimizer, step):
    """Change hyper-parameters in the middle of a run."""
    if step == 2:
        for group in optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (0.8, 0.95)
            if "momentum" in group:
                group["momentum"] = 0.5


def sharded(stage, model, kind):
    """A wrapped model and its sharded optimizer."""
    optimizer_cls, options = KINDS[kind]
    optimizer = ShardedOptimizer(groups_of(model), optimizer_cls, **options)
    return (Flat(model) if stage == 1 else ShardedGradients(model, optimizer)), optimizer


def backward(wrapper, step, micro_batches, mode):
    """One step's backwards: the syncs of micro-batches by mode."""
    for micro in range(micro_batches):
        inside = {
            "no_sync": micro < micro_batches - 1,
            "sync": False,
            "mixed": micro == 1,
            "all_inside": True,
        }[mode]
        with wrapper.no_sync() if inside else contextlib.nullcontext():
            loss_of(wrapper, batch_of(dist.get_rank(), step, micro)).backward()
    wrapper.finish_gradient_synchronization()


STEPS = 5


def train_alone(dtype, stage, model, kind, micro_batches, mode, clip):
    """One process: the path, the norms, the optimizer."""
    model = build(make=MODELS[model]).to(dtype)
    optimizer_cls, options = KINDS[kind]
    optimizer = optimizer_cls(groups_of(model), **options)
    schedule, path, norms = halving(optimizer), Path(model), []
    for step in range(STEPS):
        hand_edit(optimizer, step)
        reference_step(model, step, micro_batches, each_reduced=mode == "sync" and stage == 2)
        if clip is not None:
            norms.append(clip_reference(model.parameters(), clip).item())
        optimizer.step()
        schedule.step()
        path.advance()
    return path, norms, optimizer


def train(stage, model, kind, micro_batches, mode, clip):
    """Sharded: the model, the norms, the optimizer."""
    wrapper, optimizer = sharded(stage, build(seed=dist.get_rank(), make=MODELS[model]), kind)
    schedule, norms = halving(optimizer), []
    for step in range(STEPS):
        hand_edit(optimizer, step)
        optimizer.zero_grad()
        backward(wrapper, step, micro_batches, mode)
        if clip is not None and stage == 1:
            norms.append(clip_reference(wrapper.module.parameters(), clip).item())
        elif clip is not None:
            norms.append(wrapper.clip_grad_norm(clip).item())
        optimizer.step()
        schedule.step()
    return wrapper.module, norms, optimizer


def elements_of_state(optimizer):
    """Elements of each parameter's state."""
    return [sum(t.numel() for t in kept.values() if torch.is_tensor(t)) for kept in optimizer.state.values()]


def five_times(*arguments):
    """The same training five times beside one process, in float32 and float64."""
    plain, plain_norms, unsharded = train_alone(torch.float32, *arguments)
    exact, exact_norms, _ = train_alone(torch.float64, *arguments)
    runs = [train(*arguments) for _ in range(5)]
    model, norms, optimizer = runs[0]
    for group, whole in zip(optimizer.param_groups, unsharded.param_groups, strict=True):
        assert len(group["params"]) == len(whole["params"])
        assert group["lr"] == whole["lr"]
    return {
        "bit_equal": bit_equal(values_of(model), plain.values) and norms == plain_norms,
        "outside": outside_budget(values_of(model), plain, exact)
        + norms_outside_budget(norms, plain_norms, exact_norms),
        "runs": [(fingerprint(run[0]), run[1]) for run in runs],
        "norms": norms,
        "elements": elements_of_state(optimizer),
        "unsharded": elements_of_state(unsharded),
    }


def check_runs_and_shares(results):
    """All ranks and runs end alike; each parameter has state on one rank, and no rank much more than its part."""
    size, unsharded = len(results), results[0]["unsharded"]
    assert all(run == results[0]["runs"][0] for result in results for run in result["runs"])
    assert sorted(n for result in results for n in result["elements"]) == sorted(unsharded)
    for result in results:
        assert sum(result["elements"]) <= sum(unsharded) / size + max(unsharded)


CASES = [
    (1, "toy", "sgd", 1, "sync", None),
    (1, "toy", "adamw", 2, "no_sync", None),
    (1, "toy", "adamw", 2, "sync", None),
    (1, "toy", "sgd", 2, "no_sync", 0.05),
    (1, "uneven", "adamw", 1, "sync", None),
    (1, "single", "adamw", 1, "sync", None),
    (2, "toy", "sgd", 1, "sync", None),
    (2, "toy", "adamw", 2, "no_sync", None),
    (2, "toy", "adamw", 2, "sync", None),
    (2, "toy", "adamw", 3, "all_inside", None),
    (2, "toy", "sgd", 2, "no_sync", 0.05),
    (2, "uneven", "adamw", 1, "sync", None),
    (2, "single", "adamw", 1, "sync", 0.05),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_end_bit_equal_to_the_unsharded_optimizer(ranks, case):
    results = ranks.run(five_times, *case)
    check_runs_and_shares(results)
    for result in results:
        assert result["bit_equal"]
        assert all(norm > 0.05 for norm in result["norms"])  # it was clipped


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_three_ranks_end_within_budget_and_bit_equal_from_run_to_run(pools, case):
    results = pools(3).run(five_times, *case)
    check_runs_and_shares(results)
    for result in results:
        assert result["outside"] == []


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_in_mixed_order_is_within_budget(ranks, stage):
    results = ranks.run(five_times, stage, "toy", "sgd", 3, "mixed", None)
    check_runs_and_shares(results)
    assert all(result["outside"] == [] for result in results)


# Z3: shares.


def shares(numels):
    """Elements each rank owns, and whether a step works."""
    parameters = [nn.Parameter(torch.ones(n, device=rank_device())) for n in numels]
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.5, weight_decay=0.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    owned = [0] * dist.get_world_size()
    for parameter in parameters:
        owned[optimizer.owners[parameter]] += parameter.numel()
    return owned, [optimizer.owners[p] for p in parameters], [p.unique().tolist() for p in parameters]


@pytest.mark.parametrize(
    ("numels", "owned"), [([5], [5, 0]), ([1000, 10, 10, 10], [1000, 30]), ([7, 7, 7, 7], [14, 14])]
)
def test_parameters_are_spread_by_size(ranks, numels, owned):
    first, second = ranks.run(shares, numels)
    assert first == second
    assert first[0] == owned
    assert all(values == pytest.approx([0.5]) for values in first[2])


def shares_of_groups(groups):
    """Elements that each rank owns of parameter groups with these sizes."""
    made = [
        {"params": [nn.Parameter(torch.ones(n, device=rank_device())) for n in numels]} for numels in groups
    ]
    optimizer = ShardedOptimizer(made, torch.optim.SGD, lr=0.5)
    owned = [0] * dist.get_world_size()
    for parameter, rank in optimizer.owners.items():
        owned[rank] += parameter.numel()
    return owned


@pytest.mark.parametrize("groups", [[[10, 10, 10], [1000]], [[10, 10], [10, 1000]], [[1000], [10, 10, 10]]])
def test_groups_are_spread_together(ranks, groups):
    for owned in ranks.run(shares_of_groups, groups):
        assert sorted(owned) == [30, 1000]


def test_no_rank_owns_more_than_its_part_and_one_parameter(pools):
    numels = [int(n) for n in torch.randint(1, 2000, (40,), generator=torch.Generator().manual_seed(0))]
    for size in (2, 3):
        owned = pools(size).run(shares, numels)[0][0]
        assert sum(owned) == sum(numels)
        assert max(owned) <= sum(numels) / size + max(numels)
        assert max(owned) <= 1.05 * sum(numels) / size  # the largest first evens out what is left


def late_group():
    """A group added after a step, a closure, and zero_grad of either kind."""
    first, second = (nn.Parameter(torch.ones(4, device=rank_device())) for _ in range(2))
    optimizer = ShardedOptimizer([first], torch.optim.SGD, lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = first.sum() + 2 * second.sum()
        loss.backward()
        return loss

    values = [optimizer.step(closure).item()]
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    values.append(optimizer.step(closure).item())
    optimizer.zero_grad(set_to_none=False)
    assert first.grad.tolist() == second.grad.tolist() == [0.0] * 4
    optimizer.zero_grad()
    assert first.grad is None and second.grad is None
    with pytest.raises(ValueError, match="at least one parameter"):
        ShardedOptimizer([], torch.optim.SGD, lr=1.0)
    return values, first.tolist(), second.tolist(), [optimizer.owners[first], optimizer.owners[second]]


def test_groups_may_come_later_and_closures_work(ranks):
    for answer in ranks.run(late_group):
        assert answer == ([12.0, 8.0], [-1.0] * 4, [0.0] * 4, [0, 1])


# State dicts.


def begin(stage, steps=3):
    """Train some steps: the model's and the optimizer's state."""
    wrapper, optimizer = sharded(stage, build(), "adamw")
    go_on(wrapper, optimizer, 0, steps)
    return state_of(wrapper.module), optimizer.state_dict(), optimizer.local_state_dict()


def state_of(model):
    """A model's state dict in host memory."""
    return {name: value.cpu() for name, value in model.state_dict().items()}


def go_on(wrapper, optimizer, start, stop):
    """Train on, every rank with the same batch, so that the number of ranks does not matter."""
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(wrapper, batch_of(0, step)).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()


def resume(stage, model_state, optimizer_state, start=3, stop=6):
    """Load and go on."""
    model = build(seed=9)
    model.load_state_dict(model_state)
    wrapper, optimizer = sharded(stage, model, "adamw")
    optimizer.load_state_dict(optimizer_state)
    go_on(wrapper, optimizer, start, stop)
    return state_of(wrapper.module), optimizer.state_dict()


def begin_alone(dtype, steps=3):
    """The unsharded optimizer after the same steps: its state dict, and the path with its state."""
    model = build().to(dtype)
    optimizer_cls, options = KINDS["adamw"]
    optimizer = optimizer_cls(groups_of(model), **options)
    path = Path(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, step)).backward()
        optimizer.step()
        path.advance()
    return optimizer.state_dict(), path.finish()


def same_state(one, other):
    """Whether two state dicts hold the same values."""
    assert one["state"].keys() == other["state"].keys()
    for index in one["state"]:
        assert one["state"][index].keys() == other["state"][index].keys()
        for key, value in one["state"][index].items():
            theirs = other["state"][index][key]
            assert torch.equal(value.cpu(), theirs.cpu()) and value.shape == theirs.shape, (index, key)
    assert [{**g, "params": list(g["params"])} for g in one["param_groups"]] == other["param_groups"]


def names_saved_and_loaded(optimizer_cls):
    """Groups with names and without: what is saved, and what the groups hold once each has loaded the other's."""
    found = []
    for kind in ("named", "unnamed"):
        layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).to(rank_device())
        one, two = (list(m.named_parameters() if kind == "named" else m.parameters()) for m in layers)
        if optimizer_cls is ShardedOptimizer:
            optimizer = ShardedOptimizer([{"params": one}], torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD([{"params": one}], lr=0.1)
        optimizer.add_param_group({"params": two, "lr": 0.2})
        found.append(optimizer)
    saved = [optimizer.state_dict() for optimizer in found]
    for optimizer, other in zip(found, reversed(saved), strict=True):
        optimizer.load_state_dict(other)
        optimizer.step()
    held = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in found]
    return saved, held


def test_names_of_parameters_are_saved_and_loaded_as_torch_does(ranks):
    theirs = ranks.run(names_saved_and_loaded, torch.optim.SGD)
    assert theirs[0][0][0]["param_groups"][1]["param_names"] == ["weight", "bias"]
    assert ranks.run(names_saved_and_loaded, ShardedOptimizer) == theirs


def test_state_saved_at_two_ranks_goes_on_at_one_and_three(pools):
    model, state, _ = pools(2).run(begin, 1)[0]
    same_state(state, pools(1).run(begin_alone, torch.float32)[0][0])
    uninterrupted, uninterrupted_state, _ = pools(2).run(begin, 1, 6)[0]
    (_, plain), (_, exact) = (pools(1).run(begin_alone, d, 6)[0] for d in (torch.float32, torch.float64))
    # With the same batch everywhere the mean over two ranks is exact; over three it may round.
    for size in (1, 2, 3):
        for stage in (1, 2):
            for resumed, resumed_state in pools(size).run(resume, stage, model, state):
                if size < 3:
                    assert bit_equal(resumed, uninterrupted)
                    same_state(resumed_state, uninterrupted_state)
                    continue
                for index, kept in resumed_state["state"].items():
                    resumed |= {(index, key): value for key, value in kept.items()}
                assert outside_budget(resumed, plain, exact) == []


def test_parts_of_all_ranks_merge_into_the_full_state(pools):
    parts = pools(2).run(begin, 2)
    merged = merge_state_dicts([part[2] for part in parts])
    same_state(merged, parts[0][1])


def alone():
    """Rank 0 asks for the state dict, the others do not; then all do."""
    agreement.TIMEOUT_SECONDS = 1.0
    _, optimizer = sharded(1, Toy().to(rank_device()), "adamw")
    message = None
    if dist.get_rank() == 0:
        try:
            optimizer.state_dict()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    agreement.TIMEOUT_SECONDS = 60.0
    return message, len(optimizer.state_dict()["param_groups"])


def test_a_state_dict_on_one_rank_alone_raises(ranks):
    first, second = ranks.run(alone)
    assert "after 1 s these had not called it: 1" in first[0]
    assert first[1] == second[1] == 2


# What stage 2 keeps.


def kept():
    """Who holds gradients after finish; a second backward adds to what was not cleared."""
    model = build()
    optimizer = ShardedOptimizer([p for p in model.parameters() if p.requires_grad], torch.optim.SGD, lr=0.1)
    wrapper = ShardedGradients(model, optimizer)
    held = []
    for _ in range(2):
        loss_of(wrapper, batch_of(dist.get_rank(), 0)).backward()
        wrapper.finish_gradient_synchronization()
        held.append({n: p.grad.clone().cpu() for n, p in model.named_parameters() if p.grad is not None})
    owned = {n for n, p in model.named_parameters() if p.requires_grad and optimizer.owns(p)}
    return held, owned


def test_only_owners_keep_gradients_and_later_backwards_add_to_them(ranks):
    results = ranks.run(kept)
    for held, owned in results:
        assert set(held[0]) == set(held[1]) == owned - {"unused"}
        for name in held[0]:
            assert torch.equal(held[1][name], 2 * held[0][name])
    assert not results[0][1] & results[1][1]


def missing():
    """Rank 0 uses a, rank 1 uses b, nobody c."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abc"}).to(rank_device())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    wrapper = ShardedGradients(model, optimizer)
    for _ in range(2):  # the second on top of the first
        (model["a"].sum() * 10 if dist.get_rank() == 0 else model["b"].sum() * 2).backward()
        wrapper.finish_gradient_synchronization()
    gradients = {n: p.grad.tolist() for n, p in model.items() if p.grad is not None}
    optimizer.step()
    return gradients, model["c"].tolist()


def test_gradients_missing_somewhere_are_zero_there(ranks):
    first, second = ranks.run(missing)
    assert first[0] | second[0] == {"a": [10.0, 10.0], "b": [2.0, 2.0]}
    assert first[1] == second[1] == [1.0, 1.0]


def foreign():
    """An optimizer that does not know the model."""
    optimizer = ShardedOptimizer(Toy().to(rank_device()).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="lacks a trainable parameter"):
        ShardedGradients(build(), optimizer)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_an_optimizer_of_other_parameters_is_refused(ranks):
    ranks.run(foreign)
