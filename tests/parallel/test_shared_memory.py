"""Buffers and gradients whose elements share memory: expanded, or windows over one another."""

import torch
import torch.distributed as dist
from parallel_models import OURS, build, fingerprint, one_by_one, wrap
from torch import nn

from trainstep.parallel.launch import rank_device


class SharedMemory(nn.Module):
    """Buffers whose elements share memory: expanded, in two dimensions, sliding windows; rank 1 expands one anew."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rows", torch.randn(3).expand(4, 3))
        self.register_buffer("columns", torch.randn(4, 1, 1).expand(4, 2, 3))
        self.register_buffer("windows", torch.randn(6).unfold(0, 3, 1))
        self.register_buffer("count", torch.tensor(7).expand(2))
        self.register_buffer("mask", (torch.rand(1, 3) > 0.5).expand(3, 3))
        self.register_buffer("later", torch.randn(2, 3), persistent=False)

    def forward(self, x):
        """Use and reassign."""
        if dist.get_rank() == 1:
            self.later = torch.randn(3, device=x.device).expand(2, 3)
        return self.linear(x).sum()


def shared_memory(name):
    """Buffers after wrapping and after a step, and that the expanded ones still are."""
    wrapper = wrap(name, build(seed=dist.get_rank(), make=SharedMemory))
    wrapped = fingerprint(wrapper.module)
    wrapper.module.rows[0, 0] = float(dist.get_rank())
    wrapper(torch.ones(1, 3, device=rank_device())).backward()
    wrapper.finish_gradient_synchronization()
    if rank_device().type == "cpu":  # a copy to another device is not expanded
        assert wrapper.module.rows.stride() == (0, 1) and wrapper.module.windows.stride() == (1, 1)
        assert wrapper.module.rows[:, 0].tolist() == [0.0] * 4
    return wrapped, fingerprint(wrapper.module)


def test_buffers_whose_elements_share_memory(ranks):
    first, second = ranks.run(one_by_one, shared_memory, OURS)
    for name in OURS:
        assert first[name] == second[name], name


def expanded_gradient(name):
    """A gradient that somebody assigned expanded."""
    wrapper = wrap(name, nn.Linear(2, 1, bias=False).to(rank_device()))
    weight = wrapper.module.weight
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2, device=rank_device())).sum().backward()
    weight.grad = torch.full((), dist.get_rank() + 1.0, device=weight.device).expand(1, 2)
    wrapper.finish_gradient_synchronization()
    return weight.grad.tolist()


def test_an_expanded_gradient_is_reduced(ranks):
    for answers in ranks.run(one_by_one, expanded_gradient, OURS):
        assert answers == {name: [[1.5, 1.5]] for name in OURS}
