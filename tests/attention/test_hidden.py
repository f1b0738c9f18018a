"""What a query may not see changes nothing: later keys, keys outside the window, NaN, stale memory."""

import pytest
import torch

from tests.attention.problems import make_inputs, solve
from trainstep.attention import get_attention, load_attention

FUSED = ["tiled", "triton"]


@pytest.mark.parametrize("options", [{}, {"alignment": "top-left", "window": 3}, {"window": 3}], ids=str)
@pytest.mark.parametrize("name", ["reference", *FUSED])
def test_a_query_that_sees_no_key(name, options, device):
    # Bottom-right, more queries than keys: the first 13 see nothing. Top-left with a window: the last ones.
    queries, keys = 20, 7
    inputs = make_inputs(queries=queries, keys=keys, width=16, heads=(1, 2, 1), device=device)
    answer = solve(load_attention(get_attention(name)), inputs, causal=True, **options)
    top_left = options.get("alignment") == "top-left"
    blind = torch.arange(queries, device=device)
    blind = blind - 2 > keys - 1 if top_left else blind < queries - keys
    assert blind.any() and not blind.all()
    assert (answer.out[:, :, blind] == 0).all()
    assert (answer.lse[:, :, blind] == float("-inf")).all()
    assert torch.isfinite(answer.lse[:, :, ~blind]).all()
    assert (answer.dq[:, :, blind] == 0).all()
    assert all(torch.isfinite(x).all() for x in (answer.out, answer.dq, answer.dk, answer.dv))


@pytest.mark.parametrize("value", [1e3, float("nan"), float("inf")])
@pytest.mark.parametrize("length", [40, 70])
@pytest.mark.parametrize("name", FUSED)
def test_later_keys_do_not_leak(name, length, value, device):
    # 20 lies inside a tile: a sum over the tile with p = 0 would give 0 * NaN = NaN (field case A7).
    attention = load_attention(get_attention(name))
    q, k, v, *_ = make_inputs(queries=length, keys=length, width=16, device=device)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    k, v = k.clone(), v.clone()
    k[:, :, 21:], v[:, :, 21:] = value, value
    leaky, leaky_lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out[:, :, :21], leaky[:, :, :21])
    assert torch.equal(lse[:, :, :21], leaky_lse[:, :, :21])
    if value != value:
        assert leaky[:, :, 21:].isnan().all()  # seen NaN is not hidden


@pytest.mark.parametrize("name", FUSED)
def test_a_bad_value_that_is_seen_shows(name, device):
    attention = load_attention(get_attention(name))
    q, k, v, *_ = make_inputs(queries=40, keys=40, width=16, device=device)
    v = v.clone()
    v[:, :, 20, 3] = float("nan")
    out = attention(q, k, v, causal=True)
    assert torch.isfinite(out[:, :, :20]).all()
    assert out[:, :, 20:, 3].isnan().all()


@pytest.mark.parametrize(
    ("queries", "keys", "options", "hidden"),
    [
        (20, 40, {"alignment": "top-left"}, slice(20, 40)),  # keys after every query
        (20, 40, {"window": 5}, slice(0, 16)),  # keys before every query's window
        (70, 90, {"window": 5}, slice(0, 16)),
    ],
)
@pytest.mark.parametrize("name", FUSED)
def test_nan_that_nobody_sees_changes_no_gradient(name, queries, keys, options, hidden, device):
    attention = load_attention(get_attention(name))
    inputs = make_inputs(queries=queries, keys=keys, width=16, heads=(1, 2, 1), device=device)
    clean = solve(attention, inputs, causal=True, **options)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, hidden], v[:, :, hidden] = float("nan"), float("nan")
    dirty = solve(attention, inputs._replace(k=k, v=v), causal=True, **options)
    for field, before, after in zip(clean._fields, clean, dirty, strict=True):
        assert torch.equal(before, after), field
    assert (dirty.dk[:, :, hidden] == 0).all() and (dirty.dv[:, :, hidden] == 0).all()


@pytest.mark.parametrize("name", FUSED)
def test_outputs_do_not_depend_on_what_memory_held(name, device):
    # In this mode torch.empty hands out NaN: an output element that no program writes stays NaN.
    attention = load_attention(get_attention(name))
    inputs = make_inputs(queries=70, keys=40, width=24, heads=(1, 2, 1), device=device)
    clean = solve(attention, inputs, causal=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4, device=device).isnan().all()
        poisoned = solve(attention, inputs, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for field, before, after in zip(clean._fields, clean, poisoned, strict=True):
        assert torch.equal(before, after), field
