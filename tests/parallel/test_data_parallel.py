"""Data-parallel variants: one protocol, one result, whatever the ranks' batches used."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from parallel_models import (
    ALL,
    OURS,
    adamw,
    batch_of,
    bit_equal,
    build,
    fingerprint,
    loss_of,
    momentum,
    one_by_one,
    reference_training,
    values_of,
    wrap,
)
from torch import nn
from training_budget import outside_budget

from trainstep.parallel.communication import CommunicationLog, union_seconds
from trainstep.parallel.launch import rank_device
from trainstep.parallel.registry import get_data_parallel


def rank():
    """This rank."""
    return dist.get_rank()


# Training equals the one-process reference.


def train(name, make_optimizer=momentum, steps=3, micro_batches=1, set_to_none=True, **options):
    """Train a wrapped model."""
    if name == "torch-ddp":
        options["find_unused_parameters"] = True
    wrapper = wrap(name, build(seed=rank()), **options)
    optimizer = make_optimizer(wrapper.module)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if last else wrapper.no_sync():
                loss_of(wrapper, batch_of(rank(), step, micro)).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
    return wrapper.module


def train_all(make_optimizer, micro_batches, set_to_none, times=1):
    """Every variant, and buckets of several sizes, each some times: whether it ends bit-equal to one process, what
    is outside the error budget, and the end's bytes."""
    plain = reference_training(build(), make_optimizer, 3, micro_batches)
    exact = reference_training(build().double(), make_optimizer, 3, micro_batches)
    results = {}
    variants = [(name, {}) for name in ALL]
    variants += [("bucketed", {"bucket_size_mb": size}) for size in (0.0001, 0.0002, 1000)]
    for name, options in variants:
        runs = [
            train(name, make_optimizer, micro_batches=micro_batches, set_to_none=set_to_none, **options)
            for _ in range(times)
        ]
        results[" ".join([name, *map(str, options.values())])] = (
            bit_equal(values_of(runs[0]), plain.values),
            outside_budget(values_of(runs[0]), plain, exact),
            [fingerprint(run) for run in runs],
        )
    return results


@pytest.mark.parametrize(
    ("make_optimizer", "micro_batches", "set_to_none"),
    [(momentum, 1, True), (momentum, 1, False), (adamw, 1, True), (momentum, 3, True)],
)
def test_two_ranks_train_bit_equal_to_one_process(ranks, make_optimizer, micro_batches, set_to_none):
    first, second = ranks.run(train_all, make_optimizer, micro_batches, set_to_none)
    for name in first:
        assert first[name][0], name
        assert first[name][2] == second[name][2], name


@pytest.mark.parametrize("make_optimizer", [momentum, adamw])
def test_three_ranks_end_bit_identical_from_run_to_run_and_within_budget(pools, make_optimizer):
    results = pools(3).run(train_all, make_optimizer, 2, True, 3)
    for name, (_, outside, runs) in results[0].items():
        assert outside == [], name
        assert runs[0] == runs[1] == runs[2], name
        assert runs == results[1][name][2] == results[2][name][2], name


# D1: a gradient missing on some ranks, and on all.


class Branches(nn.Module):
    """Three parameters of one shape; a batch says which are used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, used):
        """Sum of the used parameters, each times its factor."""
        return sum(factor * getattr(self, name).sum() for name, factor in used.items())


def branches(name):
    """Rank 0 uses only a, rank 1 only b, nobody c."""
    wrapper = wrap(name, Branches().to(rank_device()))
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.1, weight_decay=0.1)
    wrapper({"a": 10.0} if rank() == 0 else {"b": 2.0}).backward()
    wrapper.finish_gradient_synchronization()
    a, b, c = (p.grad for p in wrapper.module.parameters())
    optimizer.step()
    return a.tolist(), b.tolist(), c, wrapper.module.c.tolist()


def test_missing_on_one_rank_is_zero_and_missing_on_all_is_none(ranks):
    for answers in ranks.run(one_by_one, branches, OURS):
        for name, answer in answers.items():
            assert answer == ([5.0, 5.0], [1.0, 1.0], None, [1.0, 1.0]), name


def branches_in_micro_batches(name):
    """The last micro-batch of rank 0 does not use what an earlier one did."""
    wrapper = wrap(name, Branches().to(rank_device()))
    with wrapper.no_sync():
        wrapper({"a": 2.0, "b": 4.0}).backward()
        wrapper.finish_gradient_synchronization()
        assert wrapper.module.a.grad.tolist() == [2.0, 2.0]
    wrapper({"a": 2.0} if rank() == 0 else {"b": 4.0}).backward()
    wrapper.finish_gradient_synchronization()
    return [None if p.grad is None else p.grad.tolist() for p in wrapper.module.parameters()]


def test_what_only_an_earlier_micro_batch_used_is_reduced(ranks):
    for answers in ranks.run(one_by_one, branches_in_micro_batches, OURS):
        for name, answer in answers.items():
            assert answer == [[3.0, 3.0], [6.0, 6.0], None], name


# D2: buckets that could never complete.


class LastFrozen(nn.Module):
    """A parameter larger than a small bucket; the last one frozen and float64."""

    def __init__(self):
        super().__init__()
        self.big = nn.Parameter(torch.zeros(100))
        self.small = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)

    def forward(self, factor):
        """A loss whose gradients are `factor`."""
        return factor * (self.big.sum() + self.small.sum()) + self.frozen.sum()


def last_frozen():
    """Gradients and collectives for each bucket size."""
    answers = []
    for size in (0.0001, 1000):
        wrapper = wrap("bucketed", LastFrozen().to(rank_device()), bucket_size_mb=size)
        wrapper(float(rank() + 1)).backward()
        wrapper.finish_gradient_synchronization()
        grads = [p.grad for p in wrapper.module.parameters()]
        answers.append((grads[0].unique().tolist(), grads[1].tolist(), grads[2], len(wrapper._buckets)))
    return answers


def test_any_bucket_size_finishes(ranks):
    for small, large in ranks.run(last_frozen):
        assert small == ([1.5], [1.5, 1.5], None, 2)
        assert large == ([1.5], [1.5, 1.5], None, 1)


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_bucket_size_must_be_positive(size):
    with pytest.raises(ValueError, match="bucket_size_mb must be positive"):
        wrap("bucketed", nn.Linear(1, 1), bucket_size_mb=size)


# D5: dtypes.


class Mixed(nn.Module):
    """One parameter of each dtype, in one bucket's reach."""

    def __init__(self):
        super().__init__()
        self.weight32 = nn.Parameter(torch.zeros(3))
        self.weight_bf16 = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.weight16 = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        self.more = nn.Parameter(torch.zeros(2, 2))

    def forward(self):
        """A loss with gradients near the edges of the dtypes."""
        near_one = 1 + 2**-20
        return ((self.weight32 * near_one).sum() + (self.more * near_one).sum()) + self.halves()

    def halves(self):
        """A bfloat16 loss of gradient 1, a float16 loss of gradient 40000."""
        return self.weight_bf16.sum() + (self.weight16 * 40000).sum()


def mixed(name):
    """Dtypes and values of reduced gradients."""
    wrapper = wrap(name, Mixed().to(rank_device()))
    wrapper().backward()
    wrapper.finish_gradient_synchronization()
    return [(str(p.grad.dtype), p.grad.double().unique().tolist()) for p in wrapper.module.parameters()]


def test_gradients_keep_dtype_and_value(ranks):
    for answers in ranks.run(one_by_one, mixed, OURS):
        for name, answer in answers.items():
            near_one = [1 + 2**-20]
            assert answer == [
                ("torch.float32", near_one),
                ("torch.bfloat16", [1.0]),
                ("torch.float16", [40000.0]),
                ("torch.float32", near_one),
            ], name


# D6: initial state and buffers.


class Buffers(nn.Module):
    """BatchNorm, a frozen parameter, a bool buffer, and a non-persistent buffer that forward reassigns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("seen", torch.randn(4), persistent=False)

    def forward(self, x):
        """Use and change everything."""
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        return (self.linear(self.norm(x)) * self.frozen + self.seen).square().mean()


def buffers(name):
    """Fingerprints after wrapping and after three steps."""
    wrapper = wrap(name, build(seed=rank(), make=Buffers))
    wrapped = fingerprint(wrapper.module)
    optimizer = momentum(wrapper.module)
    for _ in range(3):
        optimizer.zero_grad()
        wrapper(torch.randn(8, 4, device=rank_device())).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
    after = fingerprint(wrapper.module)
    assert wrapper.module.norm.num_batches_tracked == 3
    assert all(one != other for one, other in zip(wrapped[1:5], after[1:5], strict=True))
    return wrapped, after


def test_parameters_and_buffers_are_equal_after_wrapping_and_after_steps(ranks):
    first, second = ranks.run(one_by_one, buffers, OURS)
    for name in OURS:
        assert first[name] == second[name], name


# Parameters that change after wrapping.


def changes(name):
    """Unfreeze one layer, replace a parameter, freeze another; each step equals the mean over ranks."""
    wrapper = wrap(name, build(seed=rank()))
    model = wrapper.module

    def step():
        model.zero_grad()
        loss_of(wrapper, batch_of(rank(), 0)).backward()
        own = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        wrapper.finish_gradient_synchronization()
        return own, {n: p.grad for n, p in model.named_parameters()}

    step()
    model.frozen.requires_grad_(True)
    _, reduced = step()
    assert reduced["frozen.weight"] is not None
    unfrozen = reduced["frozen.weight"].cpu().clone()
    model.second.weight = nn.Parameter(torch.full_like(model.second.weight, 0.1 * (rank() + 1)))
    model.first.requires_grad_(False)
    _, reduced = step()
    assert reduced["first.weight"] is None
    return unfrozen, reduced["second.weight"].cpu().clone(), fingerprint(model)


def test_unfrozen_and_replaced_parameters_are_reduced(ranks):
    first, second = ranks.run(one_by_one, changes, OURS)
    for name in OURS:
        for one, other in zip(first[name][:2], second[name][:2], strict=True):
            assert torch.equal(one, other), name
        assert first[name][2] == second[name][2], name


def changed_too_late(name):
    """Unfreeze between forward and finish."""
    wrapper = wrap(name, build())
    loss_of(wrapper, batch_of(rank(), 0)).backward()
    wrapper.module.frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="between forward and finish"):
        wrapper.finish_gradient_synchronization()


# Unequal counts of tokens.


def weighted(name):
    """Rank r has a different number of tokens; the last rank has none and a NaN for a gradient."""
    wrapper = wrap(name, Branches().to(rank_device()))
    tokens = [3, 1, 0][rank()]
    wrapper.set_token_count(tokens)
    wrapper({"a": float("nan") if tokens == 0 else float(rank() + 1)}).backward()
    wrapper.finish_gradient_synchronization()
    by_tokens = wrapper.module.a.grad.tolist()
    wrapper.zero_grad()
    wrapper({"a": float(rank())}).backward()
    wrapper.finish_gradient_synchronization()
    return by_tokens, [round(v, 6) for v in wrapper.module.a.grad.tolist()]


def test_gradients_are_weighted_by_tokens_for_one_step(pools):
    for answers in pools(3).run(one_by_one, weighted, OURS):
        for name, answer in answers.items():
            assert answer == ([1.25, 1.25], [1.0, 1.0]), name


def no_tokens():
    """Wrong counts are refused on every rank."""
    wrapper = wrap("naive", Branches().to(rank_device()))
    with pytest.raises(ValueError, match="cannot hold -1"):
        wrapper.set_token_count(-1)
    with pytest.raises(ValueError, match="no rank holds a token"):
        wrapper.set_token_count(0)


def test_wrong_token_counts_are_refused(ranks):
    ranks.run(no_tokens)


# Layouts.


class Transposed(nn.Module):
    """A parameter, and so a gradient, that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x):
        """A plain product."""
        return (x @ self.weight).square().sum()


def transposed(name):
    """Reduced gradient beside the mean computed here."""
    wrapper = wrap(name, build(seed=rank(), make=Transposed))
    inputs = [torch.full((2, 3), float(r + 1), device=rank_device()) for r in range(2)]
    expected = 0
    for x in inputs:
        (gradient,) = torch.autograd.grad(wrapper.module(x), wrapper.module.weight)
        expected = expected + gradient / 2
    wrapper(inputs[rank()]).backward()
    assert not wrapper.module.weight.grad.is_contiguous()
    wrapper.finish_gradient_synchronization()
    assert torch.equal(wrapper.module.weight.grad, expected)
    return fingerprint_of(wrapper.module.weight)


def fingerprint_of(tensor):
    """Bytes of any tensor."""
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def test_gradients_that_are_not_contiguous(ranks):
    first, second = ranks.run(one_by_one, transposed, OURS)
    assert first == second


# The log.


def logged(name):
    """What a log says of one step."""
    log = CommunicationLog(rank_device())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(rank_device())
    wrapper = wrap(name, model, communication=log)
    for _ in range(2):
        log.reset()
        wrapper(torch.randn(8, 64, device=rank_device())).square().mean().backward()
        wrapper.finish_gradient_synchronization()
    times = log.read()
    return len(times.spans), len(times.waits), times.total_seconds, times.exposed_seconds, times.hidden_share


def test_the_log_tells_communication_from_waiting(ranks):
    for answers in ranks.run(one_by_one, logged, ALL):
        # 8 parameters, and one collective on which of them are missing.
        assert answers["naive"][:2] == (9, 9)
        assert answers["flat"][:2] == (2, 2)
        assert answers["overlap"][:2] == (9, 2)
        assert answers["bucketed"][:2] == (2, 2)
        assert answers["torch-ddp"][0] >= 1
        for name, (_, _, total, exposed, hidden) in answers.items():
            assert 0 < total < 10 and 0 < exposed < 10 and 0 <= hidden <= 1, name
            if name in ("naive", "flat"):  # they communicate only after backward
                assert hidden < 0.05, name


def test_union_of_spans():
    assert union_seconds([]) == 0
    assert union_seconds([(5, 6), (0, 2), (1, 3), (1, 1.5)]) == 4


def test_unknown_variants_are_named():
    with pytest.raises(ValueError, match="unknown data-parallel variant 'ddp'; known: naive, flat"):
        get_data_parallel("ddp")


def second_backward(name):
    """Two backwards without finish: refused where the first is already on its way, else summed."""
    wrapper = wrap(name, Branches().to(rank_device()))
    wrapper({"a": 1.0}).backward()
    if get_data_parallel(name).overlaps:
        with pytest.raises(RuntimeError, match="no_sync"):
            wrapper({"a": 1.0}).backward()
        return None
    wrapper({"a": 1.0}).backward()
    wrapper.finish_gradient_synchronization()
    return wrapper.module.a.grad.tolist()


def test_misuse_is_refused(pools):
    ranks = pools(2)
    ranks.run(one_by_one, changed_too_late, OURS)
    for answers in ranks.run(one_by_one, second_backward, OURS):
        for name, answer in answers.items():
            assert answer == (None if get_data_parallel(name).overlaps else [2.0, 2.0]), name
    ranks.close()  # collectives of refused steps may still be under way


def memory_left(name):
    """Parameters of a wrapped and trained model that outlive it, after a garbage collection."""
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(rank_device())
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    wrapper = wrap(name, model)
    wrapper(torch.randn(2, 8, device=rank_device())).sum().backward()
    wrapper.finish_gradient_synchronization()
    del model, wrapper
    gc.collect()
    return sum(reference() is not None for reference in parameters)


def test_a_dropped_wrapper_gives_its_memory_back(ranks):
    """Hooks live in autograd, out of the garbage collector's sight: they must not hold what holds the parameters."""
    for answers in ranks.run(one_by_one, memory_left, ALL):
        assert answers == dict.fromkeys(ALL, 0)
