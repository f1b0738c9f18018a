"""What a caller can get wrong is refused in one sentence, by every implementation alike."""

import re

import numpy as np
import pytest
import torch

from tests.attention.problems import make_inputs, solve
from trainstep.attention import ATTENTION, get_attention, load_attention
from trainstep.attention.contract import prepare

OURS = ["reference", "tiled", "triton"]


@pytest.fixture(params=OURS)
def attention(request):
    return load_attention(get_attention(request.param))


@pytest.fixture
def qkv(device):
    return make_inputs(queries=8, keys=8, width=16, heads=(1, 4, 2), device=device)[:3]


def test_mixed_dtypes_are_named(attention, qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match=r"torch.float32, torch.float16 and torch.float32"):
        attention(q, k.half(), v)


def test_integers_are_refused(attention, qkv):
    with pytest.raises(ValueError, match=r"got torch.int64"):
        attention(*(x.long() for x in qkv))


def test_a_window_needs_causal(attention, qkv):
    with pytest.raises(ValueError, match="window needs causal"):
        attention(*qkv, window=4)


@pytest.mark.parametrize("window", [0, -3])
def test_an_empty_window_is_refused(attention, qkv, window):
    with pytest.raises(ValueError, match=f"at least 1, got {window}"):
        attention(*qkv, causal=True, window=window)


@pytest.mark.parametrize("window", [2.5, True, "3", [4], float("nan")], ids=repr)
def test_a_window_is_a_whole_number(attention, qkv, window):
    with pytest.raises(ValueError, match=re.escape(f"window must be a whole number, got {window!r}")):
        attention(*qkv, causal=True, window=window)


def test_a_window_may_be_of_numpy(attention, qkv):
    assert torch.equal(
        attention(*qkv, causal=True, window=np.int64(3)), attention(*qkv, causal=True, window=3)
    )


@pytest.mark.parametrize("window", [20, 2**31 - 1, 2**31, 2**70])
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
def test_a_window_past_every_key_hides_nothing(attention, alignment, window, device):
    # 2^31 - 1 is what "no limit" often is; sums with it pass 31 bits.
    inputs = make_inputs(queries=9, keys=7, width=16, heads=(1, 2, 1), device=device)
    rule = {"causal": True, "alignment": alignment}
    expected = solve(attention, inputs, **rule)
    for one, another in zip(expected, solve(attention, inputs, window=window, **rule), strict=True):
        torch.testing.assert_close(one, another)


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize(("queries", "keys"), [(2**30 + 9, 5), (5, 2**30 + 9)])
def test_a_windows_start_never_passes_31_bits(alignment, queries, keys):
    # The kernels take first query + offset - window, and last key - offset + window.
    q, k = (torch.empty(1, 1, length, 8, device="meta") for length in (queries, keys))
    problem = prepare(q, k, k, causal=True, window=2**31 - 1, scale=None, alignment=alignment, name="triton")
    assert problem.offset - problem.window >= -(2**31)
    assert keys - 1 - problem.offset + problem.window < 2**31
    assert problem.window > queries - 1 + problem.offset, "a key that the last query saw is hidden"


@pytest.mark.parametrize("causal", ["no", None, 2])
def test_causal_is_a_truth_value(attention, qkv, causal):
    with pytest.raises(ValueError, match=f"causal must be True or False, got {causal!r}"):
        attention(*qkv, causal=causal)


def test_heads_must_divide(attention, qkv, device):
    q = torch.zeros(1, 3, 8, 16, device=device)
    with pytest.raises(ValueError, match="2 key/value heads do not divide 3 query heads"):
        attention(q, *qkv[1:])


def test_unknown_alignment(attention, qkv):
    with pytest.raises(ValueError, match="unknown alignment 'middle'; known: bottom-right, top-left"):
        attention(*qkv, causal=True, alignment="middle")


@pytest.mark.parametrize("width", [4, 257])
def test_head_width_out_of_range_is_named(attention, device, width):
    x = torch.zeros(1, 1, 8, width, device=device)
    with pytest.raises(ValueError, match=f"from 8 to 256, got {width}"):
        attention(x, x, x)


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, float("nan"), float("inf"), "x", True, 1j, [1.0], torch.tensor(0.5)], ids=repr
)
def test_scale_must_be_positive(attention, qkv, scale):
    with pytest.raises(ValueError, match=re.escape(f"scale must be a positive number, got {scale!r}")):
        attention(*qkv, scale=scale)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 8, 16), (1, 4, 0, 16), (1, 4, 0, 16)), "at least one element"),
        (((1, 4, 8, 16), (1, 4, 9, 16), (1, 4, 8, 16)), "k and v must have one shape"),
        (((1, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)), "agree in batch and head width"),
        (((1, 4, 8, 16), (1, 4, 8, 32), (1, 4, 8, 32)), "agree in batch and head width"),
        (((1, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)), r"all be \[B, heads, S, H\] or all \[B, S, H\]"),
        (((8, 16), (8, 16), (8, 16)), r"all be \[B, heads, S, H\] or all \[B, S, H\]"),
    ],
)
def test_shapes_that_do_not_fit(attention, device, shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape, device=device) for shape in shapes))


def test_triton_says_which_device_it_needs(monkeypatch, device):
    if device.type == "cuda":
        pytest.skip("the device is the right one")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    x = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu"):
        load_attention(get_attention("triton"))(x, x, x)


def test_tf32_is_for_float32(device):
    x = torch.zeros(1, 1, 8, 16, device=device, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"tf32 is a way to multiply float32, got torch.float16"):
        load_attention(get_attention("triton-tf32"))(x, x, x)


def test_peers_refuse_what_they_cannot_express(device):
    x = torch.zeros(1, 1, 8, 16, device=device)
    with pytest.raises(ValueError, match="sdpa-flash takes no window"):
        load_attention(get_attention("sdpa-flash"))(x, x, x, causal=True, window=3)
    with pytest.raises(ValueError, match="sdpa-math returns no log-sum-exp"):
        load_attention(get_attention("sdpa-math"))(x, x, x, return_lse=True)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="unknown attention implementation 'flash3'; known: reference, "):
        get_attention("flash3")


def test_names_are_distinct_and_targets_exist():
    assert len({row.name for row in ATTENTION}) == len(ATTENTION)
    for row in ATTENTION:
        if row.capabilities is None:
            assert callable(load_attention(row))


def test_refusals_name_what_is_missing():
    flash = get_attention("sdpa-flash")
    assert flash.refusal(device="cpu", dtype="fp32") is None
    assert flash.refusal(device="cuda", dtype="fp32") == "sdpa-flash does not take fp32 on cuda"
    assert (
        flash.refusal(device="cuda", dtype="bf16", window=True)
        == "sdpa-flash does not offer a sliding window"
    )
    assert get_attention("triton").refusal(device="cpu", dtype="fp32") == "triton does not run on cpu"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_autocast_casts_mixed_inputs_and_returns_gradients_in_their_dtypes(name, low, device):
    attention = load_attention(get_attention(name))
    q, k, v = (x.requires_grad_() for x in make_inputs(queries=8, keys=8, width=16, device=device)[:3])
    with torch.autocast(device.type, dtype=low):
        out, lse = attention(q, k.to(low).detach().requires_grad_(), v, causal=True, return_lse=True)
    assert out.dtype == low and lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.dtype == v.grad.dtype == torch.float32
