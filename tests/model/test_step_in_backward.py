"""Updates made during the backward pass are the ordinary optimizer's, bit for bit."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from trainstep.model.adamw import AdamW
from trainstep.model.loss import cross_entropy
from trainstep.model.step_in_backward import GROUPS_IN_FLIGHT, StepInBackward, layers
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import ModelConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Hyper-parameters that move every value visibly.
HYPER = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
OPTIMIZERS = {
    "ours": AdamW,
    "fused": lambda params, **hyper: torch.optim.AdamW(params, fused=True, **hyper),
    "foreach": lambda params, **hyper: torch.optim.AdamW(params, foreach=True, **hyper),
}


def model_of(seed=0, n_layers=3, **overrides) -> TransformerLM:
    torch.manual_seed(seed)
    shape = {"d_model": 32, "d_ff": 40, "n_heads": 4, "vocab_size": 31, "context_length": 16}
    config = ModelConfig(name="tiny", n_layers=n_layers, **(shape | overrides))
    return TransformerLM(config, device=DEVICE)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (2, 9), generator=generator).to(DEVICE)
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def ordinary(model, make, steps, batches=1):
    optimizer = make(model.parameters(), **HYPER)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in range(batches):
            losses.append(loss_of(model, step * batches + batch))
            losses[-1].backward()
        optimizer.step()
    return losses


def in_backward(model, make, steps):
    updates = StepInBackward(layers(model), lambda group: make(group, **HYPER))
    losses = []
    for step in range(steps):
        losses.append(loss_of(model, step))
        losses[-1].backward()
        updates.step()
    return losses


def assert_same(first, second):
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"checkpoint": "groups-2"}], ids=str)
def test_several_steps_bit_for_bit(make, options):
    plain = model_of(**options)
    ours, start = copy.deepcopy(plain), copy.deepcopy(plain)
    for one, other in zip(ordinary(plain, make, 4), in_backward(ours, make, 4), strict=True):
        assert torch.equal(one, other)
    assert_same(plain, ours)
    assert not torch.equal(plain.head.weight, start.head.weight)


def test_gradients_are_gone_as_soon_as_their_group_is_complete():
    """When the first block's gradients arrive, those of the blocks above are used up already."""
    model = model_of(n_layers=GROUPS_IN_FLIGHT + 3)
    updates = StepInBackward(layers(model), lambda group: AdamW(group, **HYPER))
    held = []
    weight = model.blocks[0].feed_forward.down.weight
    weight.register_post_accumulate_grad_hook(
        lambda _: held.append([p.grad is not None for b in model.blocks[1:] for p in b.parameters()])
    )
    before = weight.detach().clone()
    loss_of(model, 0).backward()
    assert held and not any(held[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert DEVICE.type == "cuda" or not torch.equal(weight, before), "updated before step()"
    updates.step()
    assert not torch.equal(weight, before)


def test_parameters_without_a_gradient_are_left_alone():
    """As by an ordinary optimizer: neither decayed nor counted; their group's others move when the step ends."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, device=DEVICE)) for _ in range(3)]
    others = copy.deepcopy(parameters)
    updates = StepInBackward([parameters[:2], parameters[2:]], lambda group: AdamW(group, **HYPER))
    optimizer = AdamW(others, **HYPER)
    for step in range(4):
        for chosen, finish in ((parameters, updates.step), (others, optimizer.step)):
            used = (chosen[0], chosen[2]) if step % 2 else chosen
            sum((p * (step + 1)).square().sum() for p in used).backward()
            finish()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_a_second_backward_pass_is_refused():
    model = model_of()
    updates = StepInBackward(layers(model), lambda group: AdamW(group, **HYPER))
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"paused\(\)"):
        loss_of(model, 1).backward()
    updates.zero_grad()
    updates.step()
    loss_of(model, 2).backward()  # the next step goes on


def test_accumulation_under_paused():
    plain = model_of()
    ours = copy.deepcopy(plain)
    ordinary(plain, AdamW, 3, batches=2)
    updates = StepInBackward(layers(ours), lambda group: AdamW(group, **HYPER))
    for step in range(3):
        with updates.paused():
            loss_of(ours, 2 * step).backward()
        loss_of(ours, 2 * step + 1).backward()
        updates.step()
    assert_same(plain, ours)


def test_paused_gradients_are_used_by_step():
    plain = model_of()
    ours = copy.deepcopy(plain)
    ordinary(plain, AdamW, 1)
    updates = StepInBackward(layers(ours), lambda group: AdamW(group, **HYPER))
    with updates.paused():
        loss_of(ours, 0).backward()
    assert all(p.grad is not None for p in ours.parameters())
    updates.step()
    assert_same(plain, ours)


def test_clipping_to_the_global_norm_is_refused():
    updates = StepInBackward(layers(model_of()), lambda group: AdamW(group))
    with pytest.raises(ValueError, match=r"1\.0.*before the norm"):
        updates.clip_grad_norm(1.0)


def test_no_parameters_and_several_devices_are_refused():
    with pytest.raises(ValueError, match="none"):
        StepInBackward([[]], AdamW)
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))]
    with pytest.raises(ValueError, match="cpu, meta"):
        StepInBackward([parameters], AdamW)


def test_a_schedule_reaches_every_group():
    model = model_of()
    updates = StepInBackward(layers(model), lambda group: AdamW(group, lr=1.0, weight_decay=0.0))
    assert len(updates.optimizers) == model.config.n_layers + 2
    for optimizer in updates.optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model)
    loss_of(model, 0).backward()
    updates.step()
    assert_same(before, model)


def test_closed_it_leaves_gradients():
    model = model_of()
    updates = StepInBackward(layers(model), lambda group: AdamW(group))
    updates.close()
    before = copy.deepcopy(model)
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_same(before, model)


def test_nothing_keeps_the_optimizers_alive():
    """A parameter's hook must not hold the optimizer, whose state is twice the model."""
    gc.disable()
    try:
        parameter = nn.Parameter(torch.ones(3, device=DEVICE))
        updates = StepInBackward([[parameter]], lambda group: AdamW(group))
        seen = weakref.ref(updates)
        del updates
        assert seen() is None
        parameter.sum().backward()  # and the hook that is left does nothing
        assert parameter.grad is not None
    finally:
        gc.enable()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="streams need a CUDA device")
def test_a_forward_pass_on_another_stream_is_refused():
    """Its gradients would be freed while the update still reads them."""
    model = model_of()
    updates = StepInBackward(layers(model), lambda group: torch.optim.AdamW(group, fused=True))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        loss = loss_of(model, 0)
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    with pytest.raises(RuntimeError, match="another stream"):
        updates.step()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs and streams need a CUDA device")
def test_captured_in_one_graph_bit_for_bit_and_in_less_memory():
    def fused(params):
        return torch.optim.AdamW(params, fused=True, capturable=True, **HYPER)

    def step_of(model, optimizer):
        tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)

        def step():
            cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()

        return step

    def captured(model, optimizer):
        step = step_of(model, optimizer)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        peak = torch.cuda.max_memory_allocated() - held
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        return peak

    wide = {"d_model": 512, "d_ff": 1024, "n_layers": 12}
    plain = model_of(**wide)
    ours, eager = copy.deepcopy(plain), copy.deepcopy(plain)
    whole = captured(plain, fused(plain.parameters()))
    overlapped = captured(ours, StepInBackward(layers(ours), fused))
    optimizer = fused(eager.parameters())
    for _ in range(7):
        optimizer.zero_grad()
        step_of(eager, optimizer)()
    assert_same(eager, plain)
    assert_same(plain, ours)
    gradients = sum(parameter.nbytes for parameter in ours.parameters())
    assert overlapped < whole - gradients / 4
