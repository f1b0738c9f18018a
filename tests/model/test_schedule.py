"""The cosine schedule at its corners and between them."""

import math

import pytest

from trainstep.model.schedule import cosine_with_warmup

RATES = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 7, "cosine_steps": 21}


def test_corners():
    assert cosine_with_warmup(0, **RATES) == 0.0
    assert cosine_with_warmup(7, **RATES) == 1.0
    assert cosine_with_warmup(14, **RATES) == pytest.approx(0.55)  # half way down
    assert cosine_with_warmup(21, **RATES) == 0.1
    assert cosine_with_warmup(10**6, **RATES) == 0.1


def test_linear_then_cosine():
    rates = [cosine_with_warmup(step, **RATES) for step in range(25)]
    assert rates[:8] == pytest.approx([step / 7 for step in range(8)])
    # (1 + cos x) / 2 = cos^2(x / 2), one and two sevenths of the way down.
    assert rates[9] == pytest.approx(0.1 + 0.9 * math.cos(math.pi / 14) ** 2)
    assert rates[11] == pytest.approx(0.1 + 0.9 * math.cos(math.pi / 7) ** 2)
    assert rates[:7] == sorted(rates[:7]) and rates[7:] == sorted(rates[7:], reverse=True)
    assert rates[21:] == [0.1] * 4


def test_without_warm_up_and_without_cosine():
    assert cosine_with_warmup(0, max_lr=1.0, min_lr=0.0, warmup_steps=0, cosine_steps=10) == 1.0
    ends = [cosine_with_warmup(s, max_lr=1.0, min_lr=0.2, warmup_steps=2, cosine_steps=2) for s in range(4)]
    assert ends == [0.0, 0.5, 0.2, 0.2]


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (-1, {}, "step must be at least 0"),
        (0, {"warmup_steps": -1}, "need 0 <= warmup_steps <= cosine_steps"),
        (0, {"cosine_steps": 6}, "need 0 <= warmup_steps <= cosine_steps"),
    ],
)
def test_bad_input(step, changes, message):
    with pytest.raises(ValueError, match=message):
        cosine_with_warmup(step, **(RATES | changes))
