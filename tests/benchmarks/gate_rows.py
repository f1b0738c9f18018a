"""Rows that the gate compares, and a stand-in for measuring again."""

from tests.benchmarks.rows import CPU, A, row

ONE, TWO, THREE = (f"area/{name}/forward/S1,fp32,w1" for name in ("one", "two", "three"))
COMMITS = [c * 40 for c in "0123456789"]


def side(values, commit=A, env=CPU, processes=5, **fields):
    """A commit measured in five processes; `values` is case -> seconds, or a status."""
    rows = []
    for case, value in values.items():
        if isinstance(value, str):
            rows.append(row(case, status=value, commit=commit, env=env, **fields))
            continue
        for process in range(processes):
            taken = [value * (1 + 0.001 * (process + i)) for i in range(10)]
            rows.append(row(case, taken, commit=commit, env=env, process=process, **fields))
    return rows


class Remeasure:
    """Answers with the rows it was given, the new ones for all commits but the first, and remembers what it was
    asked."""

    def __init__(self, old, new):
        self.old, self.new, self.asked = old, new, []

    def __call__(self, cases, commits):
        self.asked.append((cases, commits))
        return [side(self.new if place else self.old, commit=c) for place, c in enumerate(commits)]


def shaky(level, commit=A):
    """Five processes of which no two agree, the best of them at `level`."""
    return [row(ONE, (level * 1.2**i,), process=i, commit=commit) for i in range(5)]
