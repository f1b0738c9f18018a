"""The guard: every row of every registry is benchmarked, and checked against the reference where it can run."""

import pytest
import torch

from benchmarks.cases import AREAS, every_case, prepare, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(area, target) for area, module in AREAS.items() for target in module.ROWS]


@pytest.mark.parametrize(("area", "target"), ROWS)
def test_every_row_has_cases_in_every_suite(area, target):
    cases = [case for case in every_case() if (case.area, case.target) == (area, target)]
    assert cases, f"{area}/{target} is in the registry and never measured"
    # The asv suite and `pytest benchmarks --tier standard` take these tiers.
    assert {case.tier for case in cases} & {"smoke", "standard"}


@pytest.mark.parametrize(("area", "target"), ROWS)
def test_every_row_agrees_with_the_reference_or_says_why_it_cannot_run(area, target):
    """The very check that the ruler makes before it reports a speed, on the smallest case of the row."""
    cases = [case for case in select(area=area) if case.target == target]
    refusals = []
    # The last phase of the smallest shape checks outputs and gradients alike.
    for case in sorted(cases, key=lambda case: (size(case), case.phase != "forward_backward")):
        try:
            made = prepare(case, DEVICE)
        except NotImplementedError as reason:
            refusals.append(str(reason))
            continue
        try:
            check = made.check()
            assert check.green, f"{case.id}: error {check.error:.3g}, allowed {check.budget:.3g}"
        finally:
            made.close()
        return
    assert refusals and all(refusals)
    pytest.skip(refusals[0])


def size(case):
    """Rough work of a case, for choosing the smallest."""
    return case.world_size * case.shape.get("S", 1) * case.shape.get("bytes", 1) * case.shape.get("H", 1)
