import pytest

from trainstep.accounting.collectives import ring_seconds
from trainstep.accounting.network import Level, Network, build
from trainstep.specs.device import get_device

TWO = Network(
    levels=(
        Level(name="node", devices=8, bytes_per_second=100.0),
        Level(name="cluster", devices=64, bytes_per_second=10.0, hop_seconds=0.25),
    )
)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_within_a_node_it_is_the_ring(op):
    for ranks in (2, 4, 8):
        assert TWO.seconds(op, 840.0, ranks) == pytest.approx(ring_seconds(op, 840.0, ranks, 100.0))


def test_across_nodes_only_an_inner_share_leaves_the_node():
    # 8 in the node gather 7/8 of 800 at 100 B/s; across 4 nodes each device passes 3/4 of its 100 at 10 B/s.
    assert TWO.seconds("all_gather", 800.0, 32) == pytest.approx(7.0 + 7.5 + 2 * 0.25)
    assert TWO.seconds("all_reduce", 800.0, 32) == pytest.approx(2 * (7.0 + 7.5 + 2 * 0.25))


def test_a_group_with_one_member_a_node_stays_outside():
    assert TWO.seconds("all_gather", 800.0, 8, stride=8) == pytest.approx(7 / 8 * 800 / 10 + 3 * 0.25)


def test_a_group_that_does_not_fill_a_level_takes_what_divides():
    assert [(level.name, n) for level, n in TWO.split(6, 2)] == [("node", 3), ("cluster", 2)]
    assert [(level.name, n) for level, n in TWO.split(5, 4)] == [("cluster", 5)]


def test_one_rank_or_nothing_to_send_takes_no_time():
    network = Network(levels=TWO.levels, call_seconds=9.0)
    assert network.seconds("all_reduce", 800.0, 1) == 0.0
    assert network.seconds("all_reduce", 0.0, 8) == 0.0
    assert network.seconds("all_reduce", 800.0, 2) == pytest.approx(9.0 + 8.0)


def test_hops_are_as_slow_as_the_widest_level_that_the_group_crosses():
    assert TWO.hop(100.0, 8) == pytest.approx(1.0)
    assert TWO.hop(100.0, 16) == pytest.approx(10.25)
    assert TWO.hop(100.0, 2, stride=8) == pytest.approx(10.25)
    assert TWO.hop(100.0, 1) == 0.0


def test_nodes_are_built_from_the_device():
    network = build(get_device("h200"), 1024)
    assert [(level.devices, level.bytes_per_second) for level in network.levels] == [(8, 450e9), (1024, 50e9)]
    assert len(build(get_device("l4"), 2).levels) == 1
    assert build(get_device("l4"), 2).levels[0].bytes_per_second == 32e9


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((), "at least one level"),
        ((TWO.levels[0], Level(name="odd", devices=12, bytes_per_second=1.0)), "does not hold 8"),
        ((Level(name="dead", devices=2, bytes_per_second=0.0),), "positive bandwidth"),
    ],
)
def test_bad_networks_are_refused(levels, message):
    with pytest.raises(ValueError, match=message):
        Network(levels=levels)
