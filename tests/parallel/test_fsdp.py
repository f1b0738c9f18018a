"""Fully sharded: one process's result, in float32 and with a compute dtype."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import KINDS, MODELS, Checkpointed, only_shards, optimizer_of
from parallel_models import (
    Toy,
    batch_of,
    bit_equal,
    build,
    clip_reference,
    loss_of,
    reference_step,
)
from torch import nn
from training_budget import Path, norms_outside_budget, outside_budget

from trainstep.parallel.data.flat import Flat
from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.launch import Ranks, RankTimeout, rank_device
from trainstep.parallel.mesh import replicate_and_shard

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
    plain, plain_norms, _ = train_alone(torch.float32, *arguments)
    exact, exact_norms, _ = train_alone(torch.float64, *arguments)
    runs = [train(*arguments, shape) for _ in range(5)]
    whole, norms, _ = runs[0]
    return {
        "bit_equal": bit_equal(whole, plain.values) and norms == plain_norms,
        "outside": outside_budget(whole, plain, exact)
        + norms_outside_budget(norms, plain_norms, exact_norms),
        "runs": [([t.cpu().numpy().tobytes() for t in run[0].values()], run[1]) for run in runs],
        "norms": norms,
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


def elements_sharded_and_not():
    """Elements of state on this rank, and of the unsharded optimizer."""
    arguments = "uneven", "adamw", 1, "sync", None
    *_, optimizer = train(*arguments)
    *_, unsharded = train_alone(torch.float32, *arguments)
    return elements_of_state(optimizer), elements_of_state(unsharded)


def test_optimizer_state_is_sharded(pools):
    for size in (2, 3):
        elements, (unsharded, *_) = zip(*pools(size).run(elements_sharded_and_not), strict=True)
        # What is replicated (two biases, two moments each; the scalar's are 0-d) is on every rank.
        replicated = 2 * (1 + 101)
        assert sum(own - replicated for own in elements) == unsharded - replicated > 0


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
        "bit_equal": bit_equal({n: runs[0][n] for n in sharded}, {n: plain.values[n] for n in sharded}),
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


# Ranks that run different layers of one shape.


def different_layers(orders):
    """Steps in which rank r runs the layers order[r]: what each raised."""
    fsdp = FSDP(build(make=Branching))
    return [raised(lambda order=order: branch(fsdp, order[dist.get_rank()])) for order in orders]


def raised(step):
    """The message of a RuntimeError, None when nothing was raised."""
    try:
        step()
    except RuntimeError as error:
        return str(error)
    return None


def other_model(widths):
    """Wrap a model whose layers have this rank's widths, fully sharded and replicated; the refusals."""
    layers = nn.Sequential(*(nn.Linear(width, 4) for width in widths[dist.get_rank()])).to(rank_device())
    refusals = []
    for wrapper in (FSDP, Flat):
        with pytest.raises(ValueError) as caught:
            wrapper(layers)
        refusals.append(str(caught.value))
    return refusals


@pytest.mark.parametrize(
    ("widths", "said"),
    [
        ([[4, 4], [4]], "rank 0 has 1.weight [4, 4] torch.float32 where rank 1 has none left"),
        (
            [[4, 3], [4, 5]],
            "rank 0 has 1.weight [4, 3] torch.float32 where rank 1 has 1.weight [4, 5] torch.float32",
        ),
    ],
)
def test_ranks_with_different_models_are_told_at_once(ranks, widths, said):
    refusals = ranks.run(other_model, widths, timeout_seconds=30)
    assert refusals == [[f"the model must be the same on every rank, but {said}"] * 2] * 2


def branch(fsdp, order):
    """Forward, backward and finish over layers by index."""
    fsdp(torch.ones(3, 5, device=rank_device()), order).sum().backward()
    fsdp.finish_gradient_synchronization()


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([[[0, 1], [0, 2]]], "gathers layers.1.weight where another gathers layers.2.weight"),
        # The step before was alike.
        ([[[0, 1]] * 2, [[0, 2], [0, 3]]], "gathers layers.2.weight where another gathers layers.3.weight"),
        # More uses than are kept one by one.
        ([[[0, 1, 2, 3] * 9 + [2], [0, 1, 2, 3] * 9 + [0]]], "after 24 alike"),
    ],
)
def test_ranks_that_run_different_layers_of_one_shape_are_told(ranks, orders, said):
    for *before, last in ranks.run(different_layers, orders, timeout_seconds=60):
        assert before == [None] * (len(orders) - 1)
        assert last is not None and "did not run the same layers" in last and said in last


def test_a_timeout_says_what_each_rank_gathers():
    """Rank 1 runs one layer more than rank 0."""
    with Ranks(2) as few, pytest.raises(RankTimeout) as caught:
        few.run(different_layers, [[[0], [0, 1, 2]]], timeout_seconds=4)
    assert "rank 1: FSDP gathers layers." in str(caught.value)


class Parallel(nn.Module):
    """Layers of one shape on the same input, which needs no gradient: backward gathers none of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        """The output of each layer."""
        return [layer(x) for layer in self.layers]


def different_losses():
    """Every rank runs both layers; the loss takes the output of the first, in the second step of rank 1 the other."""
    fsdp = FSDP(build(make=Parallel))

    def step(used):
        fsdp(torch.ones(2, 4, device=rank_device()))[used].sum().backward()
        fsdp.finish_gradient_synchronization()

    return [raised(lambda used=used: step(used)) for used in (0, dist.get_rank())]


def test_reductions_of_different_weights_are_told(ranks):
    for number, (first, second) in enumerate(ranks.run(different_losses, timeout_seconds=60)):
        assert first is None
        if number == 1 or ranks.device == "cpu":  # on CUDA a rank that goes on as before does not look
            assert "one reduces the gradient of layers.0.weight where another reduces" in second
