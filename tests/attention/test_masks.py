"""The rule of who sees whom: masks and ranges agree with the definition, entry by entry."""

from itertools import product

import pytest

from trainstep.attention.masks import Mask


def sees(i: int, j: int, mask: Mask) -> bool:
    """SPEC's definition, written out."""
    if not mask.causal:
        return True
    return j <= i + mask.offset and (mask.window is None or j > i + mask.offset - mask.window)


MASKS = [Mask(False, None, 0)] + [
    Mask(True, window, offset) for window, offset in product((None, 1, 3, 50), (-5, -1, 0, 1, 7))
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_mask_and_ranges_follow_the_definition(mask):
    for queries, keys in product((1, 4, 9), (1, 5, 12)):
        table = [[sees(i, j, mask) for j in range(keys)] for i in range(queries)]
        assert mask.visible(queries, keys).tolist() == table
        blind = any(not any(row) for row in table)
        assert mask.some_query_sees_nothing(queries, keys) == blind
        for first, last in ((0, 0), (0, queries - 1), (queries // 2, queries - 1)):
            seen = {j for i in range(first, last + 1) for j in range(keys) if table[i][j]}
            start, stop = mask.visible_keys(first, last, keys)
            assert (start, stop) == ((min(seen), max(seen) + 1) if seen else (0, 0))
            for first_key, last_key in ((0, 0), (0, keys - 1), (keys // 2, keys - 1)):
                block = [row[first_key : last_key + 1] for row in table[first : last + 1]]
                assert mask.all_visible(first, last, first_key, last_key) == all(map(all, block))


def test_a_tile_of_the_mask_is_a_part_of_it():
    mask = Mask(True, 5, 2)
    whole = mask.visible(20, 24)
    assert (mask.visible(4, 6, first_query=8, first_key=3) == whole[8:12, 3:9]).all()
