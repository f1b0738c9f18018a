"""The covering arrays that choose the test cases really cover."""

from itertools import combinations

from tests.attention.covering import pairwise


def test_every_pair_of_values_occurs():
    factors = {"a": [1, 2, 3], "b": "xyz", "c": [True, False], "d": range(4)}
    rows = pairwise(factors)
    for one, other in combinations(factors, 2):
        seen = {(row[one], row[other]) for row in rows}
        assert seen == {(x, y) for x in factors[one] for y in factors[other]}


def test_far_fewer_rows_than_the_product():
    rows = pairwise({name: range(9) for name in "abcd"})
    assert len(rows) < 150  # the product has 6561, no array has fewer than 81


def test_the_same_rows_every_time():
    factors = {"a": range(5), "b": range(4), "c": range(3)}
    assert pairwise(factors) == pairwise(factors)
