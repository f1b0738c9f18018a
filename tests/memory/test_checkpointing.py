"""Every checkpointing policy computes what plain blocks compute, bit for bit, and keeps what it promises."""

import math
import random

import pytest
import torch
from torch import nn

from tests.memory.plain_block import plain_blocks
from trainstep.memory import checkpointing
from trainstep.memory.live import LiveBytes
from trainstep.memory.policy import Policy, parse_policy
from trainstep.memory.residuals import record_residuals

POLICIES = ("every-block", "groups-2", "groups-100", "recursive", "selective", "offload")


class Model(nn.Module):
    """Embedding, blocks under a policy, dropout after them, projection: random numbers on both sides of the
    blocks."""

    def __init__(self, n_blocks=5, dropout=0.5, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 32).requires_grad_(not frozen)
        self.blocks, self.positions = plain_blocks(n_blocks, dropout=dropout)
        self.after = nn.Dropout(dropout)
        self.head = nn.Linear(32, 11)

    def forward(self, tokens, policy):
        x = checkpointing.run(self.blocks, self.embedding(tokens), self.positions, policy=policy)
        return self.head(self.after(x))


def step(policy, **options):
    """Loss, gradients and the random state after one step."""
    model = Model(**options)
    tokens = torch.arange(32).reshape(2, 16) % 11
    torch.manual_seed(1)
    loss = model(tokens, policy).square().mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, torch.get_rng_state()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_bit_equal_with_dropout_and_a_frozen_embedding(policy, frozen):
    loss, gradients, state = step("none", frozen=frozen)
    loss_again, gradients_again, state_again = step(policy, frozen=frozen)
    assert torch.equal(loss, loss_again)
    assert torch.equal(state, state_again)
    for name, gradient in gradients.items():
        if frozen and name.startswith("embedding"):
            assert gradient is None and gradients_again[name] is None
        else:
            assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_bit_equal_under_autocast(policy):
    def gradients(policy):
        model = Model(n_blocks=3)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.zeros(2, 16, dtype=torch.long), policy).float().square().mean()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients("none"), gradients(policy), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_linear_and_dropout_draw_the_same_mask(policy):
    def run(policy):
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        x = torch.randn(8, 64)
        y = checkpointing.run([block], x, policy=policy)
        (y * torch.rand(8, 64)).sum().backward()
        return block[0].weight.grad, torch.get_rng_state()

    for plain, again in zip(run("none"), run(policy), strict=True):
        assert torch.equal(plain, again)


class Drawing(nn.Module):
    """Multiplies by random numbers of one source; `after` draws once more outside of the blocks."""

    def __init__(self, source):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.source = source
        if source == "generator":
            self.own = torch.Generator().manual_seed(3)

    def draw(self):
        if self.source == "generator":
            return torch.rand(4, generator=self.own)
        return torch.tensor([random.random() for _ in range(4)])

    def forward(self, x):
        return (x * self.weight * self.draw()).sin()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", ["generator", "random"])
def test_other_random_numbers_are_drawn_again_too(policy, source):
    def run(policy):
        random.seed(5)
        blocks = nn.ModuleList(Drawing(source) for _ in range(5))
        y = checkpointing.run(blocks, torch.ones(4), policy=policy)
        between = blocks[0].draw()  # after the blocks, before the backward pass: its state stays in order
        (y * between).sum().backward()
        return [y, *(block.weight.grad for block in blocks), *(block.draw() for block in blocks)]

    for plain, again in zip(run("none"), run(policy), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("policy", ["every-block", "groups-2", "recursive"])
def test_a_graph_that_is_kept_is_recomputed_alike(policy):
    blocks = nn.ModuleList(Drawing("generator") for _ in range(3))
    y = checkpointing.run(blocks, torch.ones(4), policy=policy).sum()
    once, again = (torch.autograd.grad(y, list(blocks.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize("policy", ["every-block", "recursive", "selective"])
@pytest.mark.parametrize("source", ["generator", "random"])
def test_pythons_state_is_neither_read_nor_written_in_backward_unless_a_block_drew(
    policy, source, monkeypatch
):
    blocks = nn.ModuleList(Drawing(source) for _ in range(4))
    y = checkpointing.run(blocks, torch.ones(4), policy=policy).sum()
    calls = []
    for name in ("getstate", "setstate"):
        function = getattr(random, name)
        monkeypatch.setattr(random, name, lambda *a, name=name, f=function: calls.append(name) or f(*a))
    y.backward()
    assert set(calls) == (set() if source == "generator" else {"getstate", "setstate"})


@pytest.mark.parametrize("policy", ["every-block", "selective"])
def test_the_state_survives_a_block_that_fails_when_it_is_recomputed(policy):
    class Failing(Drawing):
        runs = 0

        def draw(self):
            self.runs += 1
            numbers = super().draw() * random.random()
            if self.runs == 2:
                raise KeyError("stop")
            return numbers

    block = Failing("generator")
    y = checkpointing.run([block], torch.ones(4), policy=policy)
    own, state = block.own.get_state(), random.getstate()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.equal(block.own.get_state(), own) and random.getstate() == state


@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_a_shared_layer_fires_its_hook_once(policy):
    shared = nn.Linear(4, 4)
    calls = []
    shared.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    x = torch.randn(2, 4, requires_grad=True)
    checkpointing.run(
        [nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.Tanh())], x, policy=policy
    ).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_no_blocks_and_no_gradients(policy):
    x = torch.randn(2, 16, 32)
    assert checkpointing.run([], x, policy=policy) is x
    blocks, positions = plain_blocks(2)
    with torch.no_grad():
        y = checkpointing.run(blocks, x, positions, policy=policy)
    assert torch.equal(y, checkpointing.run(blocks, x, positions))
    assert not y.requires_grad


@pytest.mark.parametrize("policy", ["groups-2", "recursive", "selective"])
def test_one_graph_for_the_compiler(policy):
    """Offload is not among them: the compiler refuses saved-tensor hooks that are made inside its graph."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: checkpointing.run(blocks, x, policy=policy), backend="aot_eager", fullgraph=True
    )
    compiled(x).sum().backward()
    gradient, x.grad = x.grad, None
    checkpointing.run(blocks, x).sum().backward()
    torch.testing.assert_close(x.grad, gradient)


def test_policy_names():
    assert parse_policy("every-block") == parse_policy("groups-1") == Policy(kind="groups", group_size=1)
    assert parse_policy("groups-16").group_size == 16
    assert parse_policy("selective").kind == "selective"


@pytest.mark.parametrize(
    "name", ["", "groups", "groups-", "groups-0", "groups--1", "groups-1.5", "Groups-2", "all"]
)
def test_unknown_policies_are_named(name):
    with pytest.raises(ValueError, match="unknown checkpointing policy") as caught:
        checkpointing.run([], torch.ones(1), policy=name)
    assert repr(name) in str(caught.value)
    assert "recursive" in str(caught.value)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 7, 8, 16, 33])
def test_recursive_halving_keeps_log_boundaries_in_forward(n_blocks):
    blocks, positions = plain_blocks(n_blocks)
    with record_residuals(blocks) as recorder:
        checkpointing.run(blocks, torch.randn(2, 16, 32, requires_grad=True), positions, policy="recursive")
    floating = [save for save in recorder.residuals().boundaries if save.dtype == torch.float32]
    assert len(floating) == (
        math.ceil(math.log2(n_blocks)) if n_blocks & (n_blocks - 1) == 0 else len(floating)
    )
    assert len(floating) <= math.ceil(math.log2(n_blocks))


@pytest.mark.parametrize("n_blocks", [4, 8, 16, 32])
def test_recursive_halving_keeps_log_boundaries_during_backward(n_blocks):
    """Boundaries that are alive at once, counted when each block runs: their storages die with the graph."""
    import weakref

    alive = set()
    most = 0

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            nonlocal most
            y = (x * self.weight).sin()  # saves x and its product
            key = object()
            alive.add(key)
            weakref.finalize(y.untyped_storage(), alive.discard, key)
            most = max(most, len(alive))
            return y

    blocks = [Watched() for _ in range(n_blocks)]
    x = torch.randn(8, requires_grad=True)
    checkpointing.run(blocks, x, policy="recursive").sum().backward()
    # log2 L boundaries, and the input and output of the block that runs.
    assert most <= math.log2(n_blocks) + 2
    most = 0
    checkpointing.run(blocks, x, policy="none").sum().backward()
    assert most == n_blocks


def test_policies_trade_memory_on_the_meta_device():
    blocks, positions = plain_blocks(8, d_model=64, length=64, device="meta")
    peaks = {}
    for policy in ("none", "every-block", "groups-3", "recursive", "selective"):
        for parameter in blocks.parameters():
            parameter.grad = torch.empty_like(parameter)
        x = torch.empty(4, 64, 64, device="meta", requires_grad=True)
        with LiveBytes() as live:
            checkpointing.run(blocks, x, positions, policy=policy).sum().backward()
        peaks[policy] = live.peak_bytes
    assert peaks["recursive"] < peaks["every-block"] < peaks["groups-3"] < peaks["none"]
    assert peaks["selective"] < peaks["none"]


def test_selective_recomputes_no_product():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(policy):
        blocks, positions = plain_blocks(2)
        x = torch.randn(2, 16, 32, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            checkpointing.run(blocks, x, positions, policy=policy).sum().backward()
        return counter.get_total_flops()

    assert flops("selective") == flops("none") < flops("every-block")


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten.bmm.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, True),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, True),
        (torch.ops.aten.mul.Tensor, False),
        (torch.ops.aten.exp.default, False),
    ],
)
def test_selective_keeps_products_and_attention(operator, kept):
    assert checkpointing.keeps(operator) is kept
