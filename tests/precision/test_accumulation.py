"""The accumulation experiments give the known sums."""

import pytest

from trainstep.precision.accumulation import EXPERIMENTS, accumulate


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("float32 += float32", "10.0001"),
        ("float16 += float16", "9.9531"),
        ("float32 += float16", "10.0021"),
        ("float32 += float16 upcast to float32", "10.0021"),
    ],
)
def test_known_sums(name, known):
    (experiment,) = [row for row in EXPERIMENTS if row.name == name]
    assert f"{accumulate(experiment):.4f}" == known


def test_upcasting_changes_no_digit():
    mixed, upcast = EXPERIMENTS[2:]
    assert accumulate(mixed) == accumulate(upcast)


def test_rejects_negative_counts():
    with pytest.raises(ValueError, match="must not be negative"):
        accumulate(EXPERIMENTS[0], additions=-1)
