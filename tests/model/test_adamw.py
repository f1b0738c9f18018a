"""AdamW against torch.optim.AdamW, and as an optimizer like any other."""

import copy

import pytest
import torch
from torch import nn

from trainstep.model.adamw import AdamW


def problem(dtype=torch.float32):
    """Two parameter lists with equal values, of odd shapes; one is never given a gradient."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((7, 5), (3,), (), (2, 2, 2), (4,))]
    return ours, copy.deepcopy(ours)


def groups(parameters):
    return [
        {"params": parameters[:2], "lr": 0.1, "weight_decay": 0.3},
        {"params": parameters[2:4], "betas": (0.5, 0.9), "eps": 1e-3},
        {"params": parameters[4:], "weight_decay": 1.0},
    ]


def give_gradients(step, *lists):
    torch.manual_seed(100 + step)
    for index in range(4):  # the last parameter stays without
        gradient = torch.randn(lists[0][index].shape) * 10.0 ** (index - 2)
        for parameters in lists:
            parameters[index].grad = gradient.to(parameters[index].dtype)


@pytest.mark.parametrize("foreach", [False, True])
def test_many_steps_with_groups_and_a_schedule(foreach):
    ours, theirs = problem()
    mine = AdamW(groups(ours), lr=0.01, weight_decay=0.05)
    torchs = torch.optim.AdamW(groups(theirs), lr=0.01, weight_decay=0.05, foreach=foreach)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98) for optimizer in (mine, torchs)]
    for step in range(80):
        give_gradients(step, ours, theirs)
        mine.step()
        torchs.step()
        for schedule in schedules:
            schedule.step()
        if step == 30:  # hand edits reach the update
            for optimizer in (mine, torchs):
                optimizer.param_groups[0]["betas"] = (0.7, 0.95)
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[4], problem()[0][4])  # no gradient: not even decayed
    assert ours[4] not in mine.state


def test_against_the_published_equations_in_float64():
    ours, _ = problem(torch.float64)
    lr, beta1, beta2, eps, decay = 0.02, 0.8, 0.95, 1e-6, 0.1
    optimizer = AdamW(ours[:1], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    p = ours[0].detach().clone()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 30):
        give_gradients(t, ours)
        g = ours[0].grad
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        p = p - lr * decay * p - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        optimizer.step()
    torch.testing.assert_close(ours[0].detach(), p, rtol=1e-12, atol=1e-12)


def test_one_step_by_hand():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    parameter.grad = torch.tensor([0.5, -1e-3])
    AdamW([parameter], lr=0.1, weight_decay=0.1).step()
    # At t = 1 the corrected moments are g and g^2: each element moves by lr against its sign, after the
    # decay.
    torch.testing.assert_close(
        parameter.detach(), torch.tensor([1 - 0.01 - 0.1, -2 + 0.02 + 0.1]), rtol=0, atol=2e-6
    )


def test_bfloat16_state_as_in_torch():
    ours, theirs = problem(torch.bfloat16)
    mine, torchs = AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    for step in range(5):
        give_gradients(step, ours, theirs)
        mine.step()
        torchs.step()
    assert mine.state[ours[0]]["exp_avg"].dtype == torch.bfloat16
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("first", "second"), [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
def test_state_dicts_are_interchangeable(first, second):
    ours, theirs = problem()
    a = first(groups(ours), lr=0.01)
    for step in range(3):
        give_gradients(step, ours)
        a.step()
    with torch.no_grad():
        for parameter, value in zip(theirs, ours, strict=True):
            parameter.copy_(value)
    b = second(groups(theirs), lr=5.0)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for step in range(3, 6):
        give_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert b.state[theirs[0]]["step"] == 6 and b.state[theirs[0]]["step"].dim() == 0
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)


def test_closure_runs_with_gradients_on():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert (parameter < 1).all()
    assert optimizer.step() is None


def test_groups_from_a_generator_and_added_later():
    ours, _ = problem()
    optimizer = AdamW(parameter for parameter in ours[:2])
    optimizer.add_param_group({"params": ours[2:], "lr": 1.0})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1.0]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-8, 1e-8]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"eps": -1e-8}, "eps must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (1.0, 0.9)}, "betas must be in"),
        ({"betas": (0.9, -0.1)}, "betas must be in"),
    ],
)
def test_ranges_are_checked(option, message):
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **option)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(table.parameters()).step()
