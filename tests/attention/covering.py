"""Covering arrays: few combinations in which every pair of values of any two factors occurs."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that cover every pair of values; the same rows every time.

    Greedy: each row starts from the first pair still missing; every other factor takes the (earliest) value
    that covers most missing pairs with what the row already holds.
    """
    names = list(factors)
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor in range(len(names)):
            if factor not in row:
                row[factor] = max(
                    range(len(factors[names[factor]])),
                    key=lambda value: (
                        sum(tuple(sorted(((factor, value), held))) in missing for held in row.items()),
                        -value,
                    ),
                )
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append({names[factor]: factors[names[factor]][row[factor]] for factor in range(len(names))})
    return rows
