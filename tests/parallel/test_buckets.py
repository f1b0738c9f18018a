"""What a data-parallel step costs the host: how many collectives, and finding the parameters."""

import torch
from parallel_models import Toy
from torch import nn

from trainstep.parallel.data.bucketed import make_buckets
from trainstep.parallel.data.members import Members


def test_small_parameters_between_large_ones_share_a_bucket():
    sizes = (2, 100, 3, 200, 4, 1, 30, 5)
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    parameters[3] = nn.Parameter(torch.zeros(200, dtype=torch.float64))
    buckets = make_buckets(parameters, 160)
    assert sorted(p.numel() for bucket in buckets for p in bucket) == sorted(sizes)
    # A launch waits for its turn, so that a bucket which stays open must not stand before those that are complete.
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[5, 30, 1, 4], [200], [100], [3, 2]]


def test_the_members_of_a_module_are_those_of_torch():
    model = Toy()
    members = Members(model)

    def same():
        parameters, buffers = members.parameters(), members.buffers()
        assert len(parameters) == len(list(model.parameters()))
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
        return len(parameters), len(buffers)

    assert same() == (8, 0)  # the tied one once
    model.second.weight = nn.Parameter(torch.zeros(6, 7))
    model.first.bias = None
    assert same() == (7, 0)
    model.norm = nn.BatchNorm1d(3)
    model.norm.running_mean = torch.ones(3)
    assert same() == (9, 3)
    model.norm.inner = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    assert same() == (13, 3)
    model.norm.inner[1][0] = nn.Linear(1, 1, bias=False)
    assert same() == (12, 3)
    del model.norm
    assert same() == (7, 0)
