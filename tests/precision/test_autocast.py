"""The autocast probe sees what autocast does."""

import pytest
import torch
from torch import nn

from trainstep.precision.autocast import ToyModel, probe


def toy(device):
    torch.manual_seed(0)
    model = ToyModel(8, 5).to(device)
    x = torch.randn(4, 8, device=device)
    targets = torch.tensor([0, 1, 2, 3], device=device)
    return model, x, lambda logits: nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize(
    ("device", "layer_norm"),
    [
        ("cpu", "float16"),
        pytest.param(
            "cuda",
            "float32",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_known_dtypes(device, layer_norm):
    model, x, loss = toy(device)
    seen = probe(model, x, loss=loss, dtype=torch.float16)
    assert set(seen.parameters.values()) == {"float32"}
    assert seen.outputs["fc1"] == ("float16",)
    assert seen.outputs["ln"] == (layer_norm,)
    assert seen.outputs["fc2"] == seen.outputs[""] == ("float16",)
    assert seen.loss == "float32"
    assert seen.gradients == dict.fromkeys(seen.parameters, "float32")


def test_without_autocast_everything_is_float32():
    model, x, loss = toy("cpu")
    seen = probe(model, x, loss=loss, dtype=None)
    assert seen.autocast is None
    assert {dtype for dtypes in seen.outputs.values() for dtype in dtypes} == {"float32"}


def test_loss_outside_the_region_keeps_the_logits_dtype():
    model, x, _ = toy("cpu")
    inside = probe(model, x, loss=lambda logits: logits.exp().sum())
    outside = probe(model, x, loss=lambda logits: logits.exp().sum(), loss_in_autocast=False)
    assert outside.loss == "float16"
    assert inside.loss in ("float16", "float32")


def test_a_module_called_twice_reports_every_dtype():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.same = nn.Identity()

        def forward(self, x):
            return self.same(x * self.weight).sum() + self.same(x.double() * self.weight).sum()

    seen = probe(Twice(), torch.ones(2), loss=lambda y: y, dtype=None)
    assert seen.outputs["same"] == ("float32", "float64")


def test_leaves_gradients_and_hooks_as_they_were():
    model, x, loss = toy("cpu")
    kept = torch.full_like(model.fc1.weight, 7.0)
    model.fc1.weight.grad = kept

    def broken(_logits):
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        probe(model, x, loss=broken)
    probe(model, x, loss=loss)
    assert model.fc1.weight.grad is kept
    assert model.fc2.weight.grad is None
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


def test_unused_and_frozen_parameters_have_no_gradient():
    model, x, loss = toy("cpu")
    model.ln.weight.requires_grad_(False)
    seen = probe(model, x, loss=loss)
    assert "ln.weight" in seen.parameters
    assert "ln.weight" not in seen.gradients


def test_clear_errors():
    with pytest.raises(ValueError, match="no parameters"):
        probe(nn.ReLU(), torch.ones(1), loss=torch.sum)
    model, x, _ = toy("cpu")
    with pytest.raises(ValueError, match="must be a scalar"):
        probe(model, x, loss=lambda y: y)
