"""The choice of tiles: complete table, bounded search, a cache that survives damage."""

import pytest

from trainstep.attention.triton import tuning
from trainstep.attention.triton.tuning import CANDIDATES, TABLE, Tile, candidates, padded_width, search

ONE, TWO, THREE = (Tile(queries=size, keys=16, warps=4, stages=1) for size in (16, 32, 64))


def test_the_search_takes_the_fastest_and_skips_what_does_not_fit():
    ran = []

    def run(tile):
        ran.append(tile)
        if tile == TWO:
            raise RuntimeError("out of resource: shared memory")

    def seconds(call):
        call()
        return {ONE: 2.0, THREE: 1.0}[ran[-1]]

    assert search((ONE, TWO, THREE), run, seconds) == THREE
    assert ran == [ONE, TWO, THREE]


def test_the_search_stops_when_its_time_is_up():
    ran = []
    assert search((ONE, TWO), ran.append, lambda call: call() or 1.0, limit_seconds=0.0) == ONE
    assert ran == [ONE]


def test_a_search_without_a_result_says_why():
    def run(tile):
        raise RuntimeError("out of resource: shared memory")

    with pytest.raises(RuntimeError, match=r"no tile shape could be launched: out of resource"):
        search((ONE, TWO), run, lambda call: call())


def test_winners_are_kept_and_a_damaged_cache_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTEP_CACHE_DIR", str(tmp_path / "new"))
    assert tuning._read_cache() == {}
    tuning._write_cache("forward A", ONE)
    tuning._write_cache("dq A", TWO)
    assert tuning._read_cache() == {"forward A": ONE, "dq A": TWO}
    for damage in ("{", "[1]", '{"forward A": {"queries": 1}}', '{"forward A": 3}'):
        tuning.cache_file().write_text(damage)
        assert tuning._read_cache() == {}
    tuning._write_cache("dq A", TWO)
    assert tuning._read_cache() == {"dq A": TWO}


@pytest.mark.parametrize("width", [8, 16, 24, 64, 80, 128, 200, 256])
def test_tiles_hold_every_width(width):
    assert padded_width(width) >= max(width, 16)
    assert padded_width(width) < 2 * max(width, 9)
    for kind in tuning.HALF, tuning.TF32, tuning.FLOAT32:
        assert candidates(width, kind)


def test_tiles_can_be_compiled():
    for tile in [*TABLE.values(), *(tile for tiles in CANDIDATES.values() for tile in tiles)]:
        # tl.dot takes powers of two from 16 up; the interpreter takes anything.
        for size in (tile.queries, tile.keys):
            assert size >= 16 and size & (size - 1) == 0


def test_a_shipped_device_has_every_width_and_kernel():
    shipped = {key[1] for key in TABLE}
    expected = {
        (kernel, capability, width, kind)
        for capability in shipped
        for kernel in ("forward", "dq", "dkdv")
        for width in (16, 32, 64, 128, 256)
        for kind in (tuning.HALF, tuning.TF32, tuning.FLOAT32)
    }
    assert set(TABLE) == expected
