"""Fully sharded: one process's result, whole weights only in use, state that reloads anywhere."""

import contextlib
import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    Toy,
    Uneven,
    batch_of,
    bit_equal,
    build,
    clip_reference,
    loss_of,
    reference_step,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from training_budget import Path, norms_outside_budget, outside_budget

from trainstep.model.transformer import TransformerLM
from trainstep.parallel import agreement
from trainstep.parallel.fsdp import FSDP, state
from trainstep.parallel.launch import rank_device
from trainstep.parallel.mesh import replicate_and_shard
from trainstep.specs.model import get_model

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "foreach": False}),
}


class Checkpointed(nn.Module):
    """Blocks recomputed in backward."""

    def __init__(self, recompute=True):
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        """Logits of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x)


def toy_transformer():
    """The toy preset, tied and with a small vocabulary."""
    return TransformerLM(get_model("toy", vocab_size=11, context_length=6, tie_embeddings=True))


MODELS = {"toy": Toy, "uneven": Uneven, "checkpointed": Checkpointed, "transformer": toy_transformer}


def groups_of(named):
    """Two groups with parameters interleaved."""
    trainable = [p for _, p in named if p.requires_grad]
    return [
        {"params": trainable[::2], "weight_decay": 0.1},
        {"params": trainable[1::2], "weight_decay": 0.0},
    ]


def optimizer_of(model, kind):
    """An optimizer over a model, wrapped or not, with the same groups."""
    optimizer_cls, options = KINDS[kind]
    module = model.module if isinstance(model, FSDP) else model
    return optimizer_cls(groups_of(module.named_parameters()), **options)


def only_shards(fsdp):
    """Whether nothing but shards is left: every weight's memory is this rank's share."""
    for weight in fsdp.weights:
        size = dist.get_world_size()
        assert weight.shard.numel() <= -(-weight.numel // size)
        assert weight.shard.untyped_storage().nbytes() == weight.shard.numel() * weight.shard.element_size()
        assert weight._full is None and weight._arriving is None
        for layer in weight.layers:
            assert "weight" not in layer.__dict__ and layer.weight is weight.shard
    return not fsdp._whole


STEPS = 3


def halving(optimizer):
    """A schedule that halves the rate each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def whole_step(model, step, micro_batches, mode):
    """One process's gradients of a step: in each backward sharded ones are reduced, replicated ones in finish."""
    reference_step(model, step, micro_batches)
    if mode == "sync":
        replicated = {name: p.grad for name, p in model.named_parameters()}
        sharded = {m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        reference_step(model, step, micro_batches, each_reduced=True)
        for name, parameter in model.named_parameters():
            if parameter not in sharded:
                parameter.grad = replicated[name]


def train_alone(dtype, model, kind, micro_batches, mode, clip):
    """One process: the path, the norms, the optimizer."""
    model = build(make=MODELS[model]).to(dtype)
    optimizer = optimizer_of(model, kind)
    schedule, path, norms = halving(optimizer), Path(model), []
    for step in range(STEPS):
        whole_step(model, step, micro_batches, mode)
        if clip is not None:
            norms.append(clip_reference(model.parameters(), clip).item())
        optimizer.step()
        schedule.step()
        path.advance()
    return path, norms, optimizer


def train(model, kind, micro_batches, mode, clip, shape=None):
    """Sharded: the whole parameters, the norms, the optimizer."""
    mesh = replicate_and_shard(*shape, rank_device().type) if shape else None
    fsdp = FSDP(build(seed=dist.get_rank(), make=MODELS[model]), mesh=mesh)
    optimizer = optimizer_of(fsdp, kind)
    schedule, norms = halving(optimizer), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inside = {
                "no_sync": micro < micro_batches - 1,
                "sync": False,
                "mixed": micro == 1,
                "all_inside": True,
            }[mode]
            with fsdp.no_sync() if inside else contextlib.nullcontext():
                loss = loss_of(fsdp, batch_of(dist.get_rank(), step, micro))
                assert shape or only_shards(fsdp)
                loss.backward()
        fsdp.finish_gradient_synchronization()
        if clip is not None:
            norms.append(fsdp.clip_grad_norm(clip).item())
        optimizer.step()
        schedule.step()
        assert shape or state_of_shards(fsdp, optimizer)
    return fsdp.gather_full_params(), norms, optimizer


def state_of_shards(fsdp, optimizer):
    """Whether gradients and state of sharded weights are of this rank's share, at most ceil(n/w) elements."""
    for weight in fsdp.weights:
        tensors = [*optimizer.state.get(weight.shard, {}).values(), weight.shard.grad]
        for tensor in tensors:
            if tensor is not None and tensor.dim():
                assert tensor.numel() <= -(-weight.numel // dist.get_world_size())
                assert tensor.untyped_storage().nbytes() <= tensor.element_size() * weight.chunk
    return True


def five_times(model, kind, micro_batches=1, mode="sync", clip=None, shape=None):
    """The same training five times beside one process, in float32 and float64."""
    arguments = model, kind, micro_batches, mode, clip
    plain, plain_norms, unsharded = train_alone(torch.float32, *arguments)
    exact, exact_norms, _ = train_alone(torch.float64, *arguments)
    runs = [train(*arguments, shape) for _ in range(5)]
    whole, norms, optimizer = runs[0]
    return {
        "bit_equal": bit_equal(whole, plain.values) and norms == plain_norms,
        "outside": outside_budget(whole, plain, exact)
        + norms_outside_budget(norms, plain_norms, exact_norms),
        "runs": [([t.cpu().numpy().tobytes() for t in run[0].values()], run[1]) for run in runs],
        "norms": norms,
        "elements": elements_of_state(optimizer),
        "unsharded": elements_of_state(unsharded),
    }


def elements_of_state(optimizer):
    """Elements of the optimizer's moments; its 0-d steps do not count."""
    return sum(t.numel() for kept in optimizer.state.values() for t in kept.values() if t.dim())


def check_runs(results):
    """All ranks and runs end alike."""
    assert all(run == results[0]["runs"][0] for result in results for run in result["runs"])


CASES = [
    ("toy", "sgd", 1, "sync", None),
    ("toy", "adamw", 2, "no_sync", None),
    ("toy", "sgd", 2, "sync", None),
    ("toy", "adamw", 3, "all_inside", None),
    ("toy", "sgd", 1, "sync", 0.05),
    ("uneven", "sgd", 1, "sync", None),
    ("uneven", "adamw", 1, "sync", None),
    ("uneven", "adamw", 2, "no_sync", 0.05),
    ("checkpointed", "sgd", 1, "sync", None),
    ("transformer", "adamw", 1, "sync", None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_end_bit_equal_to_one_process(ranks, case):
    results = ranks.run(five_times, *case)
    check_runs(results)
    for result in results:
        assert result["bit_equal"]
        assert all(norm > 0.05 for norm in result["norms"])  # it was clipped


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: "-".join(map(str, case)))
def test_three_ranks_end_within_budget_and_bit_equal_from_run_to_run(pools, case):
    results = pools(3).run(five_times, *case)
    check_runs(results)
    for result in results:
        assert result["outside"] == []


def test_optimizer_state_is_sharded(pools):
    for size in (2, 3):
        results = pools(size).run(five_times, "uneven", "adamw")
        # What is replicated (two biases, two moments each; the scalar's are 0-d) is on every rank.
        replicated = 2 * (1 + 101)
        total = sum(result["elements"] - replicated for result in results)
        assert total == results[0]["unsharded"] - replicated


def test_accumulation_in_mixed_order_is_within_budget(ranks):
    results = ranks.run(five_times, "uneven", "sgd", 3, "mixed")
    check_runs(results)
    assert all(result["outside"] == [] for result in results)


@pytest.mark.parametrize(("size", "shape"), [(2, (2, 1)), (2, (1, 2)), (4, (2, 2))])
def test_a_mesh_of_replicas_and_shards(pools, size, shape):
    results = pools(size).run(five_times, "uneven", "sgd", 1, "sync", 0.05, shape)
    check_runs(results)
    for result in results:
        assert result["bit_equal"] or size > 2
        assert result["outside"] == []


# What is whole, and when.


class Failing(Toy):
    """Raises between its layers when told to."""

    fail = False

    def forward(self, tokens):
        """Logits, or an exception after the first layers."""
        x = self.first(self.embedding(tokens))
        if self.fail:
            raise ArithmeticError("in the middle")
        return self.head(self.second(x))


def returns_to_shards():
    """After no-grad passes, after exceptions, after backward; and it still trains."""
    fsdp = FSDP(build(make=Failing))
    tokens = batch_of(0, 0)
    with torch.no_grad():
        fsdp(tokens)
    assert only_shards(fsdp)
    for _ in range(2):
        fsdp.module.fail = True
        with pytest.raises(ArithmeticError):
            fsdp(tokens)
        assert only_shards(fsdp)
        fsdp.module.fail = False
        loss = loss_of(fsdp, tokens)
        assert only_shards(fsdp)
        loss.backward()
        fsdp.finish_gradient_synchronization()
        assert only_shards(fsdp)
    plain = build(make=Failing)
    loss_of(plain, tokens).backward()
    # Two backwards without zero_grad, of the same batch on every rank.
    used = 0
    for weight in fsdp.weights:
        gradient = plain.get_parameter(weight.name).grad
        if gradient is not None:
            used += 1
            assert torch.equal(weight.shard.grad, weight.cut(2 * gradient))
    assert used == 3


def test_only_shards_are_left_after_every_pass(ranks):
    ranks.run(returns_to_shards)


def remember_gathers(fsdp):
    """A list to which each later gather adds its storage, as a reference that keeps nothing alive."""
    storages = []
    for weight in fsdp.weights:
        gather = weight._all_gather

        def remembering(part, gather=gather):
            whole, work = gather(part)
            storages.append(StorageWeakRef(whole.untyped_storage()))
            return whole, work

        weight._all_gather = remembering
    return storages


def alive(storages):
    """How many there were, and how many still are.

    A thread of gloo lets go of a collective's tensors shortly after the collective is done: it gets a second.
    """
    end = time.monotonic() + 1.0
    while (left := sum(not storage.expired() for storage in storages)) and time.monotonic() < end:
        os.sched_yield()
    return len(storages), left


def gathered_memory_dies():
    """Storages of gathered weights that outlive forward (with its graph) and backward."""
    model = build(make=Checkpointed)
    model.recompute = False
    fsdp = FSDP(model)
    storages = remember_gathers(fsdp)
    loss = loss_of(fsdp, batch_of(0, 0))
    after_forward = alive(storages)
    loss.backward()
    fsdp.finish_gradient_synchronization()
    return after_forward, alive(storages)


def test_autograd_does_not_keep_gathered_weights(ranks):
    # Embedding, six linears and the head; all but the embedding again for backward.
    assert ranks.run(gathered_memory_dies) == [((8, 0), (15, 0))] * 2


def gathered_memory_dies_without_backward():
    """Storages of gathered weights that outlive a pass without gradients, and one that raises."""
    fsdp = FSDP(build(make=Failing))
    storages = remember_gathers(fsdp)
    with torch.no_grad():
        logits = fsdp(batch_of(0, 0))
    after_no_grad = alive(storages)
    assert torch.isfinite(logits).all()  # the result outlives the weights
    storages.clear()
    fsdp.module.fail = True
    with pytest.raises(ArithmeticError):
        fsdp(batch_of(0, 0))
    return after_no_grad, alive(storages)


def test_no_grad_passes_and_exceptions_leave_no_gathered_memory(pools):
    for size in (2, 3):
        for (all_of_pass, after_pass), (before_raising, after_raising) in pools(size).run(
            gathered_memory_dies_without_backward
        ):
            assert all_of_pass >= 3 and before_raising >= 2  # embedding (the head too) and two linears
            assert (after_pass, after_raising) == (0, 0)


def peak_of_whole_weights():
    """The order of events over two steps, and the most weights that were whole at once."""
    torch.manual_seed(0)
    fsdp = FSDP(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))).to(rank_device()))
    most = 0
    gather = fsdp._gather

    def counting(weight):
        nonlocal most
        gather(weight)
        most = max(most, len(fsdp._whole))

    fsdp._gather = counting
    orders = []
    for _ in range(2):
        fsdp.events = []
        fsdp(torch.randn(4, 8, device=rank_device())).square().sum().backward()
        fsdp.finish_gradient_synchronization()
        orders.append([(what, int(name.split(".")[0])) for _, what, name in fsdp.events])
    return orders, most


def test_gathers_run_two_layers_ahead(ranks):
    for orders, most in ranks.run(peak_of_whole_weights):
        assert most == 3
        for order in orders:
            assert order[:3] == [("gather", 0), ("gather", 1), ("forward", 0)]
            for layer in range(4):
                done = order.index(("done", layer))
                assert order[done + 1] == ("gather", layer + 2)
                assert order.index(("forward", layer + 1)) > done + 1
        # The second backward knows the order of the first; the input needs no gradient, so layer 0 no weight.
        backward = orders[1][orders[1].index(("done", 5)) + 1 :]
        assert backward[:4] == [("gather", 5), ("gather", 4), ("gather", 3), ("backward", 5)]
        for layer in range(5, 2, -1):
            assert (
                backward.index(("gather", layer - 2)) < backward.index(("backward", layer - 1)) or layer == 3
            )
        assert [what for what in backward if what[0] == "reduce"] == [("reduce", n) for n in range(5, -1, -1)]
        assert ("gather", 0) not in backward


class Branching(nn.Module):
    """Layers in an order that the input decides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, order):
        """Apply layers by index."""
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def changing_order():
    """The order of layers changes from step to step."""
    plain = build(make=Branching)
    fsdp = FSDP(build(make=Branching))
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 2, 0, 3], [1], [2, 1, 2, 1], [0, 1, 2, 3]):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(len(order))).to(rank_device())
        plain.zero_grad()
        fsdp.zero_grad()
        plain(x, order).sum().backward()
        fsdp(x, order).sum().backward()
        fsdp.finish_gradient_synchronization()
        for weight in fsdp.weights:
            gradient = plain.get_parameter(weight.name).grad
            assert (gradient is None) == (weight.shard.grad is None), (order, weight.name)
            if gradient is not None:
                assert torch.equal(weight.shard.grad, weight.cut(gradient)), (order, weight.name)


def test_layers_may_run_in_another_order(ranks):
    ranks.run(changing_order)


# Low precision.


def half_alone(model, dtype):
    """Gradients that one process computes: whole weights cast by hand, the sum over ranks in that dtype."""
    gradients, low = {}, copy.deepcopy(model).to(dtype)
    for rank in range(dist.get_world_size()):
        low.zero_grad()
        loss_of(low, batch_of(rank, 0)).backward()
        for name, parameter in low.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad / dist.get_world_size())
    return {
        name: sum(parts).to(torch.promote_types(dtype, torch.float32)) for name, parts in gradients.items()
    }


def low_precision_alone(dtype, master_dtype, kind):
    """One process: masters that gradients of a compute dtype update."""
    model = build(make=Checkpointed).to(master_dtype)
    optimizer, path = optimizer_of(model, kind), Path(model)
    for name, gradient in half_alone(model, dtype).items():
        model.get_parameter(name).grad = gradient
    optimizer.step()
    path.advance()
    return path


def low_precision(dtype_name, kind):
    """A step with a compute dtype, five times, beside the same on whole weights cast by hand."""
    dtype = getattr(torch, dtype_name)
    plain = low_precision_alone(dtype, torch.float32, kind)
    exact = low_precision_alone(torch.float64, torch.float64, kind)
    runs = []
    for _ in range(5):
        fsdp = FSDP(build(seed=dist.get_rank(), make=Checkpointed), compute_dtype=dtype)
        optimizer = optimizer_of(fsdp, kind)
        assert fsdp(batch_of(dist.get_rank(), 0)[:, :-1]).dtype == dtype
        loss_of(fsdp, batch_of(dist.get_rank(), 0)).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()
        for tensors in optimizer.state.values():
            assert all(t.dtype == torch.float32 for t in tensors.values())
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in fsdp.parameters())
        runs.append(fsdp.gather_full_params())
    gradients = half_alone(build(make=Checkpointed), dtype)
    sharded = {weight.name: weight for weight in fsdp.weights}
    return {
        "gradients": all(torch.equal(w.shard.grad, w.cut(gradients[n])) for n, w in sharded.items()),
        "bit_equal": all(torch.equal(runs[0][name], plain.values[name]) for name in sharded),
        "outside": outside_budget(runs[0], plain, exact),
        "alike": all(bit_equal(run, runs[0]) for run in runs),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_stay_float32_under_a_compute_dtype(pools, dtype, kind):
    for size in (2, 3):
        for result in pools(size).run(low_precision, dtype, kind):
            assert result["alike"]
            assert result["outside"] == []
            if size == 2:
                assert result["gradients"] and result["bit_equal"]


def large_half_gradients():
    """float16 gradients of 40000 on every rank."""
    fsdp = FSDP(nn.Linear(2, 2, bias=False).to(rank_device()), compute_dtype=torch.float16)
    (fsdp(torch.ones(1, 2, device=rank_device())) * 40000).sum().backward()
    fsdp.finish_gradient_synchronization()
    return fsdp.weights[0].shard.grad.tolist()


def test_half_precision_gradients_do_not_overflow(ranks):
    assert ranks.run(large_half_gradients) == [[40000.0] * 2] * 2


# State dicts.


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


# Misuse.


def refused():
    """A replaced weight, a wrong shape in a state dict, a model without storage."""
    fsdp = FSDP(build())
    with pytest.raises(ValueError, match="has shape"):
        fsdp.load_state_dict({**Toy().state_dict(), "first.weight": torch.zeros(3, 3)})
    fsdp.module.first.weight = nn.Parameter(torch.zeros(7, 6, device=rank_device()))
    with pytest.raises(RuntimeError, match=r"first\.weight was replaced"):
        fsdp(batch_of(0, 0))
    with pytest.raises(ValueError, match="2 replicas of 3 shards need 6 ranks, not 2"):
        replicate_and_shard(2, 3, "cpu")
    with pytest.raises(ValueError, match="real device"):
        FSDP(nn.Linear(2, 2, device="meta"))


def test_misuse_is_refused(ranks):
    ranks.run(refused)


class Scaled(nn.Module):
    """A layer of the user's own with a 2-D weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        """A product."""
        return x @ self.weight


def further_class():
    """Which weights are sharded, with and without naming the class."""
    return [
        [
            w.name
            for w in FSDP(nn.Sequential(Scaled(), nn.Linear(5, 2)).to(rank_device()), None, classes).weights
        ]
        for classes in ((), (Scaled,))
    ]


def test_further_classes_are_sharded_when_named(ranks):
    assert ranks.run(further_class)[0] == [["1.weight"], ["0.weight", "1.weight"]]
