"""Low-precision weights beside float32 masters: the training step of autocast, without its casts."""

import copy

import pytest
import torch
from torch import nn

from trainstep.model.adamw import AdamW
from trainstep.model.loss import cross_entropy
from trainstep.model.master_weights import MasterAdamW, lower_products
from trainstep.model.step_in_backward import StepInBackward, layers
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import ModelConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HYPER = {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}
PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down", "head")


def model_of(**options) -> TransformerLM:
    torch.manual_seed(0)
    config = ModelConfig(
        name="tiny", d_model=32, d_ff=40, n_layers=2, n_heads=4, vocab_size=31, context_length=16
    )
    return TransformerLM(config.with_overrides(**options), device=DEVICE)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (2, 9), generator=generator).to(DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def masters_by_name(model, masters):
    return {name: masters.get(parameter, parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("in_backward", [False, True])
def test_every_value_is_autocasts(in_backward):
    """Loss and gradients of the first step bit for bit; weights after several to the round-off of two AdamWs."""
    plain = model_of()
    ours = copy.deepcopy(plain)
    masters = lower_products(ours, torch.bfloat16)
    optimizer = AdamW(plain.parameters(), **HYPER)
    if in_backward:
        updates = StepInBackward(layers(ours), lambda group: MasterAdamW(group, masters, **HYPER))
    else:
        updates = MasterAdamW(ours.parameters(), masters, **HYPER)
    for step in range(5):
        optimizer.zero_grad()
        updates.zero_grad()
        expected, loss = loss_of(plain, step), loss_of(ours, step)
        expected.backward()
        loss.backward()
        if step == 0:
            assert torch.equal(loss, expected)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        if step == 0 and not in_backward:
            for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad.float(), theirs.grad), name
        optimizer.step()
        updates.step()
        if step == 0:
            named = dict(plain.named_parameters())
            for name, master in masters_by_name(ours, masters).items():
                torch.testing.assert_close(master, named[name], rtol=1e-5, atol=1e-6, msg=name)
    assert all(torch.equal(copy_, master.to(torch.bfloat16)) for copy_, master in masters.items())


def test_only_products_are_lowered():
    model = model_of(qk_norm=True)
    masters = lower_products(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        lowered = name.split(".")[-2] in PRODUCTS
        assert parameter.dtype == (torch.bfloat16 if lowered else torch.float32), name
        assert (parameter in masters) == lowered
    assert {master.dtype for master in masters.values()} == {torch.float32}


def test_what_cannot_be_lowered_is_refused():
    with pytest.raises(ValueError, match=r"head\.weight is shared"):
        lower_products(model_of(tie_embeddings=True), torch.bfloat16)
    model = model_of()
    lower_products(model, torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be float32, got torch\.bfloat16"):
        lower_products(model, torch.bfloat16)
    with pytest.raises(ValueError, match="needs a float32 master"):
        MasterAdamW(model.parameters(), {})


def test_without_masters_it_is_adamw():
    """Also for parameters that get no gradient now and then."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(7, device=DEVICE)) for _ in range(2)]
    theirs = copy.deepcopy(mine)
    optimizers = MasterAdamW(mine, {}, **HYPER), AdamW(theirs, **HYPER)
    for step in range(20):
        for parameters, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            used = parameters[: 1 + step % 2]
            sum((p * (p + step)).sum() for p in used).backward()
            optimizer.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert optimizers[0].state[mine[1]]["step"] == 10


def test_closure():
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = MasterAdamW([parameter], {}, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert (parameter < 1).all()
