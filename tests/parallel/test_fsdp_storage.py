"""Fully sharded: when a weight is whole, in which order weights come, and that only shards are left."""

import os
import time

import pytest
import torch
from fsdp_models import Checkpointed, only_shards
from parallel_models import Toy, batch_of, build, loss_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainstep.parallel.fsdp import FSDP
from trainstep.parallel.launch import rank_device


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
