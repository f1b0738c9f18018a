"""How autograd, torch.compile and autocast see the Triton implementation."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from tests.attention.problems import make_inputs, solve
from trainstep.attention import get_attention, load_attention
from trainstep.attention.tiled import FlashAttention2 as TiledFunction
from trainstep.attention.tiled import attention as tiled
from trainstep.attention.triton.function import (
    FlashAttention2 as TritonFunction,
)
from trainstep.attention.triton.function import (
    attention as triton,
)
from trainstep.attention.triton.function import (
    flash_attention_backward,
    flash_attention_forward,
)
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import ModelConfig

FUNCTIONS = [TiledFunction, TritonFunction]


def small(device, **options):
    return make_inputs(queries=9, keys=12, width=16, heads=(1, 2, 1), device=device, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "heads-inside"])
def test_opcheck(device, layout, dtype):
    q, k, v, d_out, d_lse = small(device, layout=layout, dtype=dtype)
    rule = (True, None, 0.25, 3, False)
    arguments = tuple(x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(flash_attention_forward, (*arguments, *rule))
    out, lse = flash_attention_forward(q, k, v, *rule)
    for gradient in (d_lse, None):
        torch.library.opcheck(flash_attention_backward, (q, k, v, out, lse, d_out, gradient, *rule))


def test_the_gradient_of_the_log_sum_exp_alone(device):
    q, k, v, _, d_lse = small(device)
    grads = []
    for function in (triton, tiled, load_attention(get_attention("reference"))):
        x = [t.detach().requires_grad_() for t in (q, k, v)]
        _, lse = function(*x, causal=True, return_lse=True)
        grads.append(torch.autograd.grad(lse, x, d_lse, allow_unused=True))
    for dq, dk, dv in grads[:2]:
        assert (dq - grads[2][0]).abs().max() < 1e-5 and dq.abs().max() > 0.01
        assert (dk - grads[2][1]).abs().max() < 1e-5 and dk.abs().max() > 0.01
        assert dv.abs().max() == 0


def test_tiled_passes_gradcheck(device):
    inputs = small(device).to(torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    assert gradcheck(lambda *x: tiled(*x, causal=True, return_lse=True, tile=5), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", ["tiled", "triton", "tiled-class", "triton-class"])
def test_double_backward_is_refused(name, device):
    # Also where the upstream gradient is a constant, and where another term of the penalty has a derivative.
    functions = {"tiled": tiled, "triton": triton}
    functions |= {"tiled-class": TiledFunction.apply, "triton-class": TritonFunction.apply}
    q, k, v = (x.detach()[:, 0].requires_grad_() for x in small(device)[:3])
    (dq,) = torch.autograd.grad(functions[name](q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no double backward"):
        torch.autograd.grad(dq.square().sum() + k.square().sum(), k)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [triton, tiled], ids=["triton", "tiled"])
def test_autocast(function, device, low):
    q, k, v = (x.detach().requires_grad_() for x in small(device)[:3])
    leaves = q, k, v.detach().to(low).requires_grad_()
    with torch.autocast(device.type, dtype=low):
        out, lse = function(*leaves, causal=True, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert out.dtype == low and lse.dtype == torch.float32
    assert grads[0].dtype == grads[1].dtype == torch.float32
    # The same as with inputs that the caller cast, to the bit: sums stay in float32.
    cast = [x.detach().to(low).requires_grad_() for x in leaves]
    expected, expected_lse = function(*cast, causal=True, return_lse=True)
    wanted = torch.autograd.grad(expected.sum() + expected_lse.sum(), cast)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert all(torch.equal(one, another.to(one.dtype)) for one, another in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["single", "mixed"])
@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["tiled", "triton"])
def test_autocast_of_the_autograd_function(function, backward_inside, mixed, low, device):
    q, k, v = (x[:, 0].detach() for x in small(device)[:3])
    leaves = [x.requires_grad_() for x in (q, k.to(low) if mixed else k, v)]
    with torch.autocast(device.type, dtype=low):
        out = function.apply(*leaves, True)
    assert out.dtype == low
    with torch.autocast(device.type, dtype=low, enabled=backward_inside):
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    cast = [x.detach().to(low).requires_grad_() for x in leaves]
    expected = function.apply(*cast, True)
    wanted = torch.autograd.grad(expected, cast, torch.ones_like(expected))
    assert torch.equal(out, expected)
    for leaf, one, another in zip(leaves, grads, wanted, strict=True):
        assert one.dtype == leaf.dtype and torch.equal(one, another.to(leaf.dtype))


@pytest.mark.parametrize("function", FUNCTIONS, ids=["tiled", "triton"])
def test_the_autograd_function_under_a_checkpoint(function, device):
    # torch lets a backward pass unpack what was saved once.
    leaves = [x[:, 0].detach().requires_grad_() for x in small(device)[:3]]
    plain = torch.autograd.grad(function.apply(*leaves, True).sum(), leaves)
    out = checkpoint(lambda q, k, v: function.apply(q, k, v, True), *leaves, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), plain))


@pytest.mark.parametrize("function", FUNCTIONS, ids=["tiled", "triton"])
def test_double_backward_is_refused_under_autocast(function, device):
    q, k, v = (x[:, 0].detach().requires_grad_() for x in small(device)[:3])
    with torch.autocast(device.type, dtype=torch.float16):
        out = function.apply(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no double backward"):
        torch.autograd.grad(dq.square().sum() + k.square().sum(), k)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_block_compiles_to_one_graph(device, backend):
    torch.compiler.reset()
    torch.manual_seed(0)
    config = ModelConfig(
        name="tiny", d_model=32, d_ff=32, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=16,
        context_length=20, attention="triton",
    )  # fmt: skip
    block = TransformerLM(config, device=device).blocks[0]
    x = torch.randn(1, 20, 32, device=device)

    def run(function):
        y = x.clone().requires_grad_()
        out = function(y)
        return out, *torch.autograd.grad(out.square().sum(), [y, *block.parameters()])

    expected = run(block)
    for one, another in zip(
        expected, run(torch.compile(block, fullgraph=True, backend=backend)), strict=True
    ):
        assert (one - another).abs().max() < 1e-4 * one.abs().max()


@pytest.mark.parametrize("name", ["tiled", "triton", "tiled-class", "triton-class"])
def test_forward_and_backward_compile_to_one_graph(name, device):
    torch.compiler.reset()
    functions = {"tiled": tiled, "triton": triton}
    functions |= {"tiled-class": TiledFunction.apply, "triton-class": TritonFunction.apply}
    function = functions[name]
    leaves = [x[:, 0].detach().requires_grad_() for x in small(device)[:3]]
    plain = torch.autograd.grad(function(*leaves).sum(), leaves)
    compiled = torch.compile(lambda *x: function(*x).sum(), fullgraph=True, backend="aot_eager")
    for one, another in zip(plain, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["tiled", "triton"])
def test_autograd_function_class(function, is_causal, device):
    inputs = make_inputs(queries=20, keys=20, width=16, heads=(2, 1, 1), device=device, use_lse=False)
    expected = solve(load_attention(get_attention("reference")), inputs, causal=is_causal)
    q, k, v = (x[:, 0].detach().requires_grad_() for x in inputs[:3])
    out = function.apply(q, k, v, is_causal)
    saved = out.grad_fn.saved_tensors
    assert sorted(x.shape for x in saved) == sorted([(2, 20), *[(2, 20, 16)] * 4])
    (lse,) = (x for x in saved if x.shape == (2, 20))
    assert (lse - expected.lse[:, 0]).abs().max() < 1e-5
    grads = torch.autograd.grad(out, (q, k, v), inputs.d_out[:, 0])
    for actual, wanted in zip((out, *grads), (expected.out, *expected[2:]), strict=True):
        assert (actual - wanted[:, 0]).abs().max() < 1e-5


@pytest.mark.parametrize("function", FUNCTIONS, ids=["tiled", "triton"])
def test_autograd_function_class_is_not_causal_by_default(function, device):
    q = torch.randn(1, 8, 16, device=device)
    assert torch.equal(function.apply(q, q, q), function.apply(q, q, q, False))
