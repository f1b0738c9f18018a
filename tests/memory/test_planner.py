"""The planner's predictions against counted bytes, closed forms and brute force."""

import math
from functools import cache

import pytest
import torch

from tests.memory.plain_block import PlainBlock, plain_blocks
from trainstep.memory import checkpointing
from trainstep.memory.live import INSIDE, LiveBytes
from trainstep.memory.measure import measure_block, measure_unit
from trainstep.memory.offload import count_host_bytes
from trainstep.memory.planner import (
    assume_offload,
    best_group_size,
    block_cost,
    chain,
    predict,
    textbook_group_size,
)

MIB = 2**20


def counted_peak(blocks, x, *args, policy):
    """Most bytes alive in a forward and backward over the blocks, the input included."""
    for block in blocks:
        block.zero_grad()
    x = x.detach().requires_grad_()
    with LiveBytes() as live:
        live.ignore(x)
        # Doubled, so that the gradient that arrives is a tensor of its own and not an expanded scalar; nobody
        # holds it after the last block is done with it.
        (checkpointing.run(blocks, x, *args, policy=policy) * 2).sum().backward()
    return live.peak_bytes + x.nbytes


@cache
def measured(n_heads):
    """Seven blocks on the meta device, their input and positions, and what one of them costs."""
    blocks, positions = plain_blocks(7, d_model=128, n_heads=n_heads, length=128, device="meta")
    x = torch.empty(2, 128, 128, device="meta")
    return blocks, x, positions, measure_block(blocks[0], x, positions)


@pytest.mark.parametrize("policy", ["none", "every-block", "groups-3", "groups-4", "recursive", "selective"])
@pytest.mark.parametrize("n_heads", [2, 64])
def test_predictions_are_what_is_counted(policy, n_heads):
    blocks, x, positions, cost = measured(n_heads)
    prediction = predict(policy, len(blocks), cost)
    assert prediction.peak_bytes == pytest.approx(counted_peak(blocks, x, positions, policy=policy), rel=0.01)


def test_host_bytes_of_an_offloaded_model():
    blocks, x, positions, cost = measured(2)
    with count_host_bytes([t for b in blocks for t in (*b.parameters(), *b.buffers())]) as host:
        y = checkpointing.run(blocks, x.detach().requires_grad_(), positions)
    del y
    assert host.bytes > 0
    assert predict("offload", len(blocks), assume_offload(cost)).host_bytes == host.bytes
    for policy in ("none", "every-block", "recursive", "selective"):
        assert predict(policy, len(blocks), cost).host_bytes == 0


def test_what_a_kernel_takes_inside_counts(monkeypatch):
    """CUDA's softmax backward has a product of its own beside gradient, output and result."""
    operation = torch.ops.aten._softmax_backward_data.default
    scores = torch.empty(4, 100, device="meta", requires_grad=True)

    def peak():
        y = scores.softmax(-1)
        with LiveBytes("meta") as live:
            y.backward(torch.empty_like(y))
        return live.peak_bytes

    assert peak() == 2 * 1600  # the gradients of output and input; the output is older
    monkeypatch.setitem(INSIDE, ("meta", operation), INSIDE["cuda", operation])
    assert peak() == 3 * 1600


def test_xl_on_paper():
    """What no card of 141 GB holds: 32 blocks, batch 4, context 2048, float32, counted in a second."""
    block = PlainBlock(2560, 10240, 32, 2048, "meta")
    cost = measure_block(block, torch.empty(4, 2048, 2560, device="meta"), torch.arange(2048, device="meta"))
    assert cost.boundary_bytes == 80 * MIB
    assert cost.plain.gradient_bytes == (4 * 2560**2 + 3 * 2560 * 10240 + 2 * 2560) * 4
    assert predict("none", 32, cost).peak_bytes > 200 * 2**30
    best, _ = best_group_size(32, cost)
    assert best == 1
    assert predict("every-block", 32, cost).peak_bytes < 40 * 2**30


def test_flops_recomputed():
    block, positions = plain_blocks(1, device="meta")
    cost = measure_block(block[0], torch.empty(2, 16, 32, device="meta"), positions)
    tokens, products = 2 * 16, 4 * 32**2 + 3 * 32 * 128 + 2 * 32 * 16
    assert cost.plain.forward_flops == 2 * tokens * products
    for policy, blocks in [
        ("none", 0),
        ("every-block", 8),
        ("groups-3", 8),
        ("recursive", 12),
        ("selective", 0),
    ]:
        assert predict(policy, 8, cost).recomputed_flops == blocks * cost.plain.forward_flops, policy


@pytest.mark.parametrize(("residual", "boundary"), [(1, 1), (4, 1), (7, 2), (100, 1), (3, 2)])
@pytest.mark.parametrize("n_blocks", [1, 2, 9, 16, 32, 50])
def test_best_group_size_beats_every_other_and_is_near_the_textbook(residual, boundary, n_blocks):
    block = block_cost(residual, boundary)
    best, predictions = best_group_size(n_blocks, block)

    def peak(k):
        # The last group may be short; a group's own boundary is its first block's input and not counted
        # twice.
        groups = math.ceil(n_blocks / k)
        last = (groups - 1) * boundary + (n_blocks - (groups - 1) * k) * residual
        return max(last, (groups - 2) * boundary + k * residual) if groups > 1 else last

    by_hand = [peak(k) for k in range(1, n_blocks + 1)]
    assert [prediction.peak_bytes for prediction in predictions] == by_hand
    assert by_hand[best - 1] == min(by_hand)
    near = textbook_group_size(n_blocks, block)
    neighbours = {min(max(1, k), n_blocks) for k in (math.floor(near), math.ceil(near))}
    # The curve is flat near its minimum: the integers beside the textbook's are within one block of it.
    assert min(by_hand[k - 1] for k in neighbours) - min(by_hand) <= residual


def test_sqrt_of_the_number_of_blocks_when_a_block_saves_one_boundary():
    block = block_cost(1, 1)
    best, predictions = best_group_size(64, block)
    assert textbook_group_size(64, block) == 8
    assert predictions[8 - 1].peak_bytes == predictions[best - 1].peak_bytes == 7 + 8


def test_recursive_is_logarithmic():
    block = block_cost(1, 1)
    for levels in range(8):
        prediction = predict("recursive", 2**levels, block)
        assert prediction.peak_bytes == levels + 1
        assert prediction.recomputed_flops == 0  # a block without FLOPs has none to do again
    assert predict("recursive", 256, block_cost(1, 1, forward_flops=1)).recomputed_flops == 256 / 2 * 8


def test_embedding_and_head_take_part():
    block = block_cost(5, 1)
    plain = predict("none", 4, block)
    head = chain([block_cost(100, 1).plain])
    assert predict("none", 4, block, after=[head]).peak_bytes == plain.peak_bytes + 100
    # Checkpointed blocks never coexist with the head's residuals.
    assert predict("every-block", 4, block, after=[head]).peak_bytes == 4 * 1 + 100


def test_measuring_leaves_gradients_alone():
    blocks, positions = plain_blocks(1)
    weight = blocks[0].norm1.weight
    weight.grad = torch.full_like(weight, 3.0)
    kept = weight.grad
    measure_unit(blocks[0], torch.randn(2, 16, 32), positions, parameters=blocks.parameters())
    assert weight.grad is kept
    assert weight.grad.tolist() == [3.0] * 32
    assert blocks[0].norm2.weight.grad is None


def test_an_embedding_is_a_unit():
    table = torch.nn.Embedding(100, 8)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    unit = measure_unit(table, tokens, parameters=table.parameters())
    assert unit.gradient_bytes == 100 * 8 * 4
    assert unit.kept_bytes == tokens.nbytes


def test_clear_errors():
    block = block_cost(2, 1)
    with pytest.raises(ValueError, match="at least one block"):
        predict("none", 0, block)
    with pytest.raises(ValueError, match="not measured under the selective"):
        predict("selective", 2, block)
    with pytest.raises(ValueError, match="must be positive"):
        block_cost(0, 1)
    with pytest.raises(ValueError, match="unknown checkpointing policy"):
        predict("sometimes", 2, block)


def test_live_bytes_counts_births_and_deaths():
    x = torch.empty(100, device="meta")
    with LiveBytes() as live:
        y = x + 1
        assert live.live_bytes == 400
        z = y.view(10, 10) * 2
        assert live.live_bytes == 800
        del y
        assert live.live_bytes == 400
        z.add_(1)
        x.mul_(2)
        assert (live.live_bytes, live.peak_bytes) == (400, 800)
        live.reset_peak()
        assert live.peak_bytes == 400
        del z
    assert live.live_bytes == 0


def test_live_bytes_of_one_device_leave_out_the_others():
    with LiveBytes("meta") as live:
        here, there = torch.ones(100), torch.empty(10, device="meta")
        assert live.live_bytes == there.nbytes
        del there
        assert live.live_bytes == 0
    del here
