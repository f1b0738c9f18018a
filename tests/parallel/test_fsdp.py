"""Fully sharded: one process's result, whole weights only in use, state that reloads anywhere."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    Toy,
    batch_of,
    build,
    clip_reference,
    loss_of,
    reference_step,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

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


class Uneven(nn.Module):
    """Case F1: no size divides by the ranks; one weight of one element; a scalar; a layer used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(101, 7)
        self.twice = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.down = nn.Linear(7, 1)
        self.tiny = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(7, 101)

    def forward(self, tokens):
        """Logits of the next token."""
        x = self.embedding(tokens)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) * self.scale
        return self.head(x + self.tiny(self.down(x)))


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


def train(model_name, kind, micro_batches=1, mode="sync", clip=None, steps=3, shape=None):
    """Train sharded beside one process; the distance, the whole parameters as bytes, elements of state."""
    make = MODELS[model_name]
    expected = build(make=make)
    plain = optimizer_of(expected, kind)
    mesh = replicate_and_shard(*shape, rank_device().type) if shape else None
    fsdp = FSDP(build(seed=dist.get_rank(), make=make), mesh=mesh)
    optimizer = optimizer_of(fsdp, kind)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in (plain, optimizer)]
    norms = []
    for step in range(steps):
        reference_step(expected, step, micro_batches)
        if mode == "sync":  # sharded gradients are reduced in each backward, replicated ones in finish
            replicated = {n: p.grad for n, p in expected.named_parameters()}
            reference_step(expected, step, micro_batches, each_reduced=True)
            for name, parameter in expected.named_parameters():
                if name not in {weight.name for weight in fsdp.weights}:
                    parameter.grad = replicated[name]
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
                if shape is None:
                    assert only_shards(fsdp)
                loss.backward()
        fsdp.finish_gradient_synchronization()
        if clip is not None:
            norms.append(
                (clip_reference(expected.parameters(), clip).item(), fsdp.clip_grad_norm(clip).item())
            )
        plain.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    whole = fsdp.gather_full_params()
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    assert whole.keys() == wanted.keys()
    elements = [t.numel() for v in optimizer.state.values() for t in v.values() if t.dim()]
    unsharded = [t.numel() for v in plain.state.values() for t in v.values() if t.dim()]
    return {
        "difference": max((whole[n] - p).abs().max().item() for n, p in wanted.items()),
        "bytes": [t.detach().cpu().contiguous().numpy().tobytes() for t in whole.values()],
        "elements": sum(elements),
        "unsharded": sum(unsharded),
        "norms": norms,
    }


def train_five_times(*arguments):
    """The same run five times: its outcome, and whether all were alike."""
    first, *others = [train(*arguments) for _ in range(5)]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("model", "kind", "micro_batches", "mode", "clip"),
    [
        ("toy", "sgd", 1, "sync", None),
        ("toy", "adamw", 2, "no_sync", None),
        ("toy", "sgd", 2, "sync", None),
        ("toy", "adamw", 3, "all_inside", None),
        ("toy", "sgd", 1, "sync", 0.05),
        ("uneven", "sgd", 1, "sync", None),
        ("uneven", "adamw", 1, "sync", None),
        ("checkpointed", "sgd", 1, "sync", None),
        ("transformer", "adamw", 1, "sync", None),
    ],
)
def test_two_ranks_end_bit_equal_to_one_process(ranks, model, kind, micro_batches, mode, clip):
    results = ranks.run(train_five_times, model, kind, micro_batches, mode, clip)
    assert results[0]["difference"] == results[1]["difference"] == 0
    assert results[0]["bytes"] == results[1]["bytes"]
    for wanted, got in results[0]["norms"]:
        assert wanted == got > 0.05


def test_optimizer_state_is_sharded(pools):
    for size in (2, 3):
        results = pools(size).run(train, "uneven", "adamw")
        # What is replicated (two biases, two moments each; the scalar's are 0-d) is on every rank.
        replicated = 2 * (1 + 101)
        total = sum(r["elements"] - replicated for r in results)
        assert total == results[0]["unsharded"] - replicated


def test_accumulation_in_mixed_order_is_near(ranks):
    assert all(r["difference"] < 1e-6 for r in ranks.run(train, "uneven", "sgd", 3, "mixed"))


def test_three_ranks_end_near_one_process_and_alike(pools):
    for model in ("toy", "uneven"):
        results = pools(3).run(train_five_times, model, "sgd")
        assert results[0]["bytes"] == results[1]["bytes"] == results[2]["bytes"]
        assert all(r["difference"] < 1e-6 for r in results)


def test_a_mesh_of_replicas_and_shards(pools):
    for ranks, shape in ((2, (2, 1)), (2, (1, 2)), (4, (2, 2))):
        results = pools(ranks).run(train, "uneven", "sgd", 1, "sync", 0.05, 3, shape)
        assert all(r["bytes"] == results[0]["bytes"] for r in results)
        assert all(r["difference"] < 1e-6 for r in results)
        for wanted, got in results[0]["norms"]:
            assert wanted == pytest.approx(got, rel=1e-6)


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
    for weight, expected in zip(fsdp.weights, fsdp.weights, strict=True):
        name = expected.name
        gradient = plain.get_parameter(name).grad
        if gradient is not None:
            assert torch.allclose(weight.shard.grad, weight.cut(2 * gradient))


def test_only_shards_are_left_after_every_pass(ranks):
    ranks.run(returns_to_shards)


def gathered_memory_dies():
    """Storages of gathered weights that outlive forward (with its graph) and backward."""
    model = build(make=Checkpointed)
    model.recompute = False
    fsdp = FSDP(model)
    storages = []
    for weight in fsdp.weights:
        gather = weight._all_gather

        def remembering(part, gather=gather):
            whole, work = gather(part)
            storages.append(StorageWeakRef(whole.untyped_storage()))
            return whole, work

        weight._all_gather = remembering
    loss = loss_of(fsdp, batch_of(0, 0))
    after_forward = len(storages), sum(not s.expired() for s in storages)
    loss.backward()
    fsdp.finish_gradient_synchronization()
    return after_forward, (len(storages), sum(not s.expired() for s in storages))


def test_autograd_does_not_keep_gathered_weights(ranks):
    # Embedding, six linears and the head; all but the embedding again for backward.
    assert ranks.run(gathered_memory_dies) == [((8, 0), (15, 0))] * 2


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


def low_precision_five_times(dtype_name):
    """The same five times."""
    for _ in range(5):
        low_precision(dtype_name)


def low_precision(dtype_name):
    """Gradients with a compute dtype beside the same computed on whole weights cast by hand."""
    dtype = getattr(torch, dtype_name)
    plain = build(make=Checkpointed)
    rank, size = dist.get_rank(), dist.get_world_size()
    fsdp = FSDP(build(seed=rank, make=Checkpointed), compute_dtype=dtype)
    assert all(p.dtype == torch.float32 for p in fsdp.parameters())
    low = build(make=Checkpointed).to(dtype)
    gradients = {}
    for r in range(size):
        low.zero_grad()
        loss_of(low, batch_of(r, 0)).backward()
        for name, parameter in low.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad / size)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.5)
    logits = fsdp(batch_of(rank, 0)[:, :-1])
    assert logits.dtype == dtype
    loss_of(fsdp, batch_of(rank, 0)).backward()
    fsdp.finish_gradient_synchronization()
    for weight in fsdp.weights:
        assert weight.shard.grad.dtype == torch.float32
        expected = sum(gradients[weight.name]).float()
        assert torch.equal(weight.shard.grad, weight.cut(expected)), weight.name
    optimizer.step()
    whole = fsdp.gather_full_params()
    for weight in fsdp.weights:
        start = plain.get_parameter(weight.name).detach()
        expected = start - 0.5 * sum(gradients[weight.name]).float()
        assert torch.equal(whole[weight.name], expected), weight.name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_stay_float32_under_a_compute_dtype(ranks, dtype):
    ranks.run(low_precision_five_times, dtype)


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


def plain_states():
    """Shapes and names of the unwrapped model's and optimizer's state."""
    model = build(make=Uneven)
    optimizer = optimizer_of(model, "adamw")
    loss_of(model, batch_of(0, 0, vocabulary=101)).backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def shapes_of(saved):
    """Names and shapes of everything in a saved pair of states."""
    model = {name: tuple(value.shape) for name, value in saved["model"].items()}
    optimizer = {
        (index, key): tuple(value.shape)
        for index, values in saved["optimizer"]["state"].items()
        for key, value in values.items()
    }
    return model, optimizer


def distance(one, other):
    """Largest difference of two saved pairs of states."""
    pairs = [(one["model"][n], other["model"][n]) for n in one["model"]]
    for index, values in one["optimizer"]["state"].items():
        pairs += [(v, other["optimizer"]["state"][index][k]) for k, v in values.items()]
    return max((a.cpu() - b.cpu()).abs().max().item() for a, b in pairs)


def test_saved_at_two_ranks_goes_on_at_one_and_three_and_back(pools):
    saved = pools(2).run(save)
    assert shapes_of(saved[0]) == shapes_of(pools(2).run(plain_states)[0])
    assert distance(saved[0], saved[1]) == 0
    uninterrupted = pools(2).run(save, 6)[0]
    for size in (1, 2, 3):
        resumed = pools(size).run(resume, saved[0])[0]
        assert distance(resumed, uninterrupted) == 0 if size < 3 else distance(resumed, uninterrupted) < 1e-6
    at_one = pools(1).run(resume, saved[0], 3, 5)[0]
    assert distance(pools(2).run(resume, at_one, 5, 6)[0], uninterrupted) == 0


def test_parts_of_all_ranks_merge_into_the_full_state(pools):
    for size in (2, 3):
        saved = pools(size).run(save)
        merged = {
            "model": state.merge_state_dicts([s["model_part"] for s in saved]),
            "optimizer": state.merge_optimizer_state_dicts([s["optimizer_part"] for s in saved]),
        }
        assert shapes_of(merged) == shapes_of(saved[0])
        assert distance(merged, saved[0]) == 0


def alone():
    """Rank 0 asks for the state dict, the others do not; then all do."""
    agreement.TIMEOUT_SECONDS = 1.0
    fsdp = FSDP(build())
    message = None
    if dist.get_rank() == 0:
        try:
            fsdp.state_dict()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    agreement.TIMEOUT_SECONDS = 60.0
    return message, sorted(fsdp.state_dict()) == sorted(Toy().state_dict())


def test_a_state_dict_on_one_rank_alone_raises(ranks):
    first, second = ranks.run(alone)
    assert "FSDP.state_dict needs every rank, but after 1 s these had not called it: 1" in first[0]
    assert first[1] and second[1]


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
