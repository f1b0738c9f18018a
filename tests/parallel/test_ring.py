"""Ring collectives equal the library's, and send exactly the bytes of the formulas."""

import pytest
import torch
import torch.distributed as dist

from trainstep.parallel import ring
from trainstep.parallel.collectives import COLLECTIVES, RING_COLLECTIVES, make_buffers
from trainstep.parallel.launch import rank_device

SHAPES = [(8,), (3, 4), (7,), (1,), (0,), (5, 3, 2), ()]


def integers(shape, device):
    """A tensor of this rank's own, whole numbers so that sums are exact."""
    generator = torch.Generator().manual_seed(dist.get_rank() * 1000 + len(shape))
    return torch.randint(-50, 50, shape, generator=generator).float().to(device)


def compare(shape, transposed):
    """Every ring collective beside the library's on one shape; the bytes sent by this rank."""
    device = rank_device()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = integers(shape, device)
    if transposed:
        mine = mine.t()
        assert not mine.is_contiguous()
    before = mine.clone()
    expected = mine.clone(memory_format=torch.contiguous_format)
    if expected.numel():
        dist.all_reduce(expected)

    total, all_reduced = ring.all_reduce(mine)
    whole, went_round = ring.whole_tensor_all_reduce(mine)
    chunk, scattered = ring.reduce_scatter(mine)
    joined, gathered = ring.all_gather(chunk, mine.numel())
    assert torch.equal(total, expected) and torch.equal(whole, expected) and total.shape == mine.shape
    assert torch.equal(chunk, torch.tensor_split(expected.reshape(-1), size)[rank])
    assert torch.equal(joined, expected.reshape(-1))
    assert torch.equal(mine, before)
    return all_reduced, went_round, scattered, gathered


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ring_collectives_equal_the_library_and_the_formulas(pools, size):
    for shape in SHAPES:
        for transposed in [False, True] if len(shape) == 2 else [False]:
            counts = pools(size).run(compare, shape, transposed)
            elements = torch.Size(shape).numel()
            all_reduced, went_round, scattered, gathered = (sum(c) for c in zip(*counts, strict=True))
            # Over all ranks: N times (N-1)/N * S.
            assert scattered == gathered == (size - 1) * elements * 4
            assert all_reduced == 2 * (size - 1) * elements * 4
            assert went_round == size * (size - 1) * elements * 4
            if elements % size == 0:
                assert {c[2] for c in counts} == {(size - 1) * elements * 4 // size}
                assert len(set(counts)) == 1


def identical(elements):
    """Sums of real numbers that round: every rank's result."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return ring.all_reduce(torch.randn(elements, generator=generator).to(rank_device()))[0].cpu()


def test_ring_all_reduce_is_bit_identical_on_every_rank(pools):
    results = pools(3).run(identical, 1001)
    assert all(torch.equal(results[0], other) for other in results)


def wrong_length():
    """A chunk that is not this rank's share."""
    try:
        ring.all_gather(torch.zeros(3, device=rank_device()), 100)
    except ValueError as error:
        return str(error)
    return None


def test_a_chunk_of_the_wrong_length_is_refused(ranks):
    assert "share of 100 elements is 50, got 3" in ranks.run(wrong_length)[0]


def sweep(size_bytes, dtype):
    """Every collective three times with refills; then once without, which must not pass by accident."""
    rows = {}
    for name in COLLECTIVES + RING_COLLECTIVES:
        buffers = make_buffers(name, size_bytes, getattr(torch, dtype), rank_device())
        before = buffers.check()
        good = []
        for _ in range(3):
            buffers.refill()
            sent = buffers.run()
            good.append(buffers.check())
        rows[name] = (before, all(good), buffers.payload_bytes, sent)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_collective_is_checked_and_its_payload_counted(pools, dtype):
    width = 4 if dtype == "float32" else 2
    for size in (2, 3):
        for rank, rows in enumerate(pools(size).run(sweep, 1001, dtype)):
            for name, (before, after, payload_bytes, sent) in rows.items():
                assert after, name
                assert not before or (name == "broadcast" and rank == 0), name
                assert 1001 - size * width < payload_bytes <= 1001, name
                assert payload_bytes % width == 0
                if name == "whole_tensor_all_reduce":
                    assert sent == (size - 1) * payload_bytes
                elif name in ("ring_all_gather", "ring_reduce_scatter"):
                    assert sent == (size - 1) * payload_bytes // size


def unknown():
    """Names and sizes that do not exist."""
    messages = []
    for name, size_bytes in [("all_reuce", 8), ("all_reduce", 0), ("broadcast", 3), ("ring_all_gather", 7)]:
        try:
            make_buffers(name, size_bytes, torch.float32, "cpu")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_unknown_collectives_and_sizes_are_named(ranks):
    messages = ranks.run(unknown)[0]
    assert "'all_reuce'; known: all_reduce" in messages[0] and "got 0" in messages[1]
    assert messages[2] == "broadcast on 2 ranks needs at least 4 bytes of torch.float32, got 3"
    assert messages[3] == "ring_all_gather on 2 ranks needs at least 8 bytes of torch.float32, got 7"
