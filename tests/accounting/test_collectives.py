"""Ring formulas against a ring that is walked step by step."""

import pytest

from trainstep.accounting.collectives import (
    algorithm_bandwidth,
    bus_bandwidth,
    bytes_sent,
    ring_seconds,
    steps,
)


class Ring:
    """n ranks that hold chunks as sets of contributions and send to the right neighbour in rounds."""

    def __init__(self, n, size, held):
        self.n, self.size, self.held = n, size, held
        self.sent = [0.0] * n
        self.rounds = 0

    def round(self, chunk_of_rank, bytes_each, *, add):
        outgoing = [self.held[rank][chunk_of_rank(rank)] for rank in range(self.n)]
        for rank in range(self.n):
            chunk, right = chunk_of_rank(rank), (rank + 1) % self.n
            kept = self.held[right].get(chunk, frozenset()) if add else frozenset()
            assert not (add and kept & outgoing[rank]), "a contribution was added twice"
            self.held[right][chunk] = kept | outgoing[rank]
            self.sent[rank] += bytes_each
        self.rounds += 1


def walk(op, n, size):
    everyone = frozenset(range(n))
    if op == "all_gather":
        ring = Ring(n, size, [{rank: frozenset({rank})} for rank in range(n)])
        for turn in range(n - 1):
            ring.round(lambda rank, t=turn: (rank - t) % n, size / n, add=False)
        assert all(set(held) == set(range(n)) for held in ring.held)
    elif op in ("reduce_scatter", "all_reduce"):
        ring = Ring(n, size, [{c: frozenset({rank}) for c in range(n)} for rank in range(n)])
        for turn in range(n - 1):
            ring.round(lambda rank, t=turn: (rank - t) % n, size / n, add=True)
        assert all(ring.held[rank][(rank + 1) % n] == everyone for rank in range(n))
        if op == "all_reduce":
            for turn in range(n - 1):
                ring.round(lambda rank, t=turn: (rank + 1 - t) % n, size / n, add=False)
            assert all(held[c] == everyone for held in ring.held for c in range(n))
    else:
        ring = Ring(n, size, [{rank: frozenset({rank})} for rank in range(n)])
        for turn in range(n - 1):
            ring.round(lambda rank, t=turn: (rank - t) % n, size, add=False)
        assert all(len(held) == n for held in ring.held)
    return ring


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "whole_tensor_all_reduce"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_bytes_rounds_and_seconds_equal_the_walked_ring(op, n):
    size, bandwidth, latency = 840.0, 21.0, 0.5
    ring = walk(op, n, size)
    assert ring.sent == pytest.approx([bytes_sent(op, size, n)] * n)
    assert ring.rounds == steps(op, n)
    walked = ring.sent[0] / bandwidth + ring.rounds * latency
    assert ring_seconds(op, size, n, bandwidth, latency_seconds=latency) == pytest.approx(walked)


def test_bus_bandwidth_of_the_field_case():
    size, seconds, ranks = 1e9, 0.1, (1, 2, 4, 8)
    assert algorithm_bandwidth(size, seconds) == 10e9
    rates = {
        op: [bus_bandwidth(op, size, seconds, n) / 1e9 for n in ranks]
        for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    }
    assert rates["all_reduce"] == pytest.approx([0, 10, 15, 17.5])
    assert rates["all_gather"] == rates["reduce_scatter"] == pytest.approx([0, 5, 7.5, 8.75])
    assert rates["all_to_all"] == pytest.approx([0, 5, 7.5, 8.75])
    assert rates["broadcast"] == [10, 10, 10, 10]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_perfect_ring_shows_its_link_as_bus_bandwidth(op):
    for n in (2, 3, 8):
        assert bus_bandwidth(op, 1e9, ring_seconds(op, 1e9, n, 50e9), n) == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ring_seconds("all_sum", 1, 2, 1.0), "unknown collective 'all_sum'"),
        (lambda: ring_seconds("all_reduce", 1, 0, 1.0), "at least one rank"),
        (lambda: ring_seconds("all_reduce", 1, 2, 0.0), "bandwidth must be positive"),
        (lambda: bus_bandwidth("all_reduce", 1, 0.0, 2), "positive seconds"),
    ],
)
def test_bad_questions_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
