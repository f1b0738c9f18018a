"""FlashAttention-4 as a peer: refused with the reason where it is missing, called in its own layout where not."""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest
import torch

from tests.attention.problems import make_inputs
from trainstep.attention import fa4, get_attention, load_attention, registry
from trainstep.attention.reference import attention as reference

ROW = get_attention("flash-attention-4")
CAN = {"device": "cuda", "dtype": "bf16", "capability": (9, 0), "head_dim": 64, "grouped_query": True}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(registry, "version", lambda name: "4.0")


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for the package that computes the same with the reference and notes how it was called."""
    noted = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        noted.append((tuple(q.shape), tuple(k.shape), causal))
        out = reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=softmax_scale)
        return out.transpose(1, 2), None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return noted


def test_a_missing_package_is_the_reason(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(registry, "version", missing)
    assert ROW.refusal(**CAN) == "flash-attention-4 needs the package flash-attn-4, which is not installed"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"device": "cpu"}, "does not run on cpu"),
        ({"capability": (8, 0)}, "needs compute capability 9.0 or 10.0 or 10.3"),
        ({"dtype": "fp32"}, "does not take fp32"),
        ({"head_dim": 80}, "head widths 64, 96, 128, not 80"),
        ({"window": True}, "a sliding window"),
        ({"lse": True}, "a log-sum-exp"),
    ],
)
def test_what_it_refuses(installed, other, words):
    assert ROW.refusal(**CAN, backward=True) is None
    assert words in ROW.refusal(**{**CAN, **other})


def test_the_table_is_made_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention = load_attention(ROW)
    x = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match="flash-attention-4 needs the package flash-attn-4"):
        attention(x, x, x)


@pytest.mark.parametrize("causal", [False, True])
def test_layout_scale_and_gradients(calls, causal):
    inputs = make_inputs(
        queries=9, keys=12, width=64, heads=(2, 4, 2), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    results = []
    for function in (fa4.attention, reference):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out = function(*leaves, causal=causal, scale=0.3)
        results.append([out, *torch.autograd.grad(out, leaves, inputs.d_out)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert calls == [((2, 9, 4, 64), (2, 12, 2, 64), causal)]


def test_what_it_cannot_express_is_refused(calls):
    q, k = torch.zeros(1, 1, 8, 64, dtype=torch.float16), torch.zeros(1, 1, 9, 64, dtype=torch.float16)
    for options, words in (
        ({"causal": True, "alignment": "top-left"}, "bottom right only"),
        ({"causal": True, "window": 3}, "takes no window"),
        ({"return_lse": True}, "returns no log-sum-exp"),
    ):
        with pytest.raises(ValueError, match=words):
            fa4.attention(q, k, k, **options)
    assert not calls
