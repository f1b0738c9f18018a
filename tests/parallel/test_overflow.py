"""A gradient that is not finite on one rank: every rank skips the step and lowers the scale alike."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from trainstep.parallel.launch import rank_device
from trainstep.parallel.overflow import spread_overflow
from trainstep.parallel.registry import SHARDED, get_sharded, load_sharded

OURS = [row.name for row in SHARDED if not row.peer]
SCALERS = {"plain": torch.amp.GradScaler, "sharded": ShardedGradScaler}


class Side(nn.Module):
    """Two products side by side; by rows, or by weights, half of the gradient is each of two ranks'."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        """[batch, 8]."""
        return torch.cat([self.first(x), self.second(x)], dim=-1)


def scales(name, scaler, fused):
    """Four steps, the second and third with an overflow in one column of one rank's loss: scales and weights."""
    device = rank_device()
    training = load_sharded(get_sharded(name))(Side().to(device), torch.optim.SGD, lr=0.5, fused=fused)
    scaler = SCALERS[scaler](device.type, init_scale=4.0)
    found = []
    for step, column in enumerate((None, 7, 0, None)):
        factors = torch.ones(8, device=device)
        if column is not None and dist.get_rank() == step % 2:
            factors[column] = torch.inf
        training.optimizer.zero_grad()
        loss = (training.model(torch.ones(1, 4, device=device)) * factors).sum()
        scaler.scale(loss).backward()
        training.finish()
        if step == 3:
            scaler.unscale_(training.optimizer)
            assert training.clip(100.0).item() == pytest.approx(32**0.5)
        scaler.step(training.optimizer)
        scaler.update()
        weights = training.full_parameters().values()
        found.append((scaler.get_scale(), [weight.unique().tolist() for weight in weights]))
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", OURS)
def test_every_rank_skips_the_step_and_lowers_the_scale(ranks, name, scaler, fused):
    once, twice = [[-0.5], [-0.5]], [[-1.0], [-1.0]]
    for found in ranks.run(scales, name, scaler, fused, timeout_seconds=60):
        assert found == [(4.0, once), (2.0, once), (1.0, once), (1.0, twice)]


def spread(wrong):
    """What becomes of one rank's gradients; `wrong` is put into the last one of rank 1."""
    device = rank_device()

    def maximum(tensor):
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)

    own = [
        torch.tensor([[-0.0, 1.0]], device=device),
        torch.zeros(0, device=device),
        torch.full((), 1e30, dtype=torch.float64, device=device),
        torch.full((3,), 3e38, device=device),
        torch.full((2,), 65504.0, dtype=torch.float16, device=device),
    ]
    if wrong is not None and dist.get_rank() == 1:
        own[-1][1] = wrong
    before = [gradient.clone() for gradient in own]
    spread_overflow(own, [], device, maximum)
    whole = [torch.zeros(0, device=device), torch.full((), 2.0, device=device)]
    alone = [torch.full((), wrong or 0.0, device=device)] if dist.get_rank() == 1 else []
    spread_overflow(alone, whole, device, maximum)
    spread_overflow([], [], device, maximum)
    kept = all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(own[1:], before[1:], strict=True)
        if a.dim()
    )
    return kept, own[0].tolist(), torch.signbit(own[0]).tolist(), whole[1].item()


def test_nothing_changes_where_all_is_finite_and_one_element_where_not(ranks):
    for kept, values, signs, whole in ranks.run(spread, None):
        assert (kept, values, signs, whole) == (True, [[0.0, 1.0]], [[True, False]], 2.0)
    for wrong in (float("inf"), float("-inf"), float("nan")):
        first, second = ranks.run(spread, wrong)
        for kept, values, _, _ in (first, second):
            assert kept and math.isnan(values[0][0]) and values[0][1] == 1.0
        assert math.isnan(first[3]) and second[3] == 2.0
