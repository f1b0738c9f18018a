"""The tile shape is a matter of speed: it changes no result, and neither does repeating a call."""

import pytest
import torch

from tests.attention.problems import make_inputs, solve
from trainstep.attention import get_attention, load_attention
from trainstep.attention.tiled import attention as tiled
from trainstep.attention.triton import launch
from trainstep.attention.triton.tuning import Tile

TILES = [(16, 32), (32, 16), (16, 64), (64, 16), (32, 32)]


# With a window of 8 the first and last visible tiles are entered by one row or column alone.
@pytest.mark.parametrize("window", [None, 8])
def test_every_tile_shape_gives_the_same(window, device):
    # Field case A7: a stage that compares no indices must not reach past the diagonal, whatever the tiles.
    q, k, v, d_out, d_lse = make_inputs(queries=64, keys=70, width=16, device=device)
    rule = {"causal": True, "window": window, "scale": 0.25, "offset": 6}
    results = []
    for queries, keys in TILES:
        tile = Tile(queries=queries, keys=keys, warps=4, stages=1)
        out, lse = launch.forward(q, k, v, tile=tile, **rule)
        results.append((out, lse, *launch.backward(q, k, v, out, lse, d_out, d_lse, tile=tile, **rule)))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            assert (one - another).abs().max() < 1e-5


@pytest.mark.parametrize("tile", [1, 16, 50, 128])
def test_tiled_does_not_depend_on_its_tile(tile, device):
    inputs = make_inputs(queries=64, keys=70, width=16, heads=(1, 2, 1), device=device)
    expected = solve(load_attention(get_attention("reference")), inputs, causal=True, window=20)
    actual = solve(
        lambda *args, **options: tiled(*args, tile=tile, **options), inputs, causal=True, window=20
    )
    for one, another in zip(expected, actual, strict=True):
        assert (one - another).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_the_same_call_gives_the_same_bits(name, device):
    inputs = make_inputs(queries=70, keys=70, width=32, heads=(1, 2, 1), dtype=torch.float16, device=device)
    function = load_attention(get_attention(name))
    first = solve(function, inputs, causal=True)
    for one, another in zip(first, solve(function, inputs, causal=True), strict=True):
        assert torch.equal(one, another)
