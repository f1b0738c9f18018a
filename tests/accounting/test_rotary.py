import pytest

from trainstep.accounting.rotary import slowest_period
from trainstep.model.rope import rotary_tables


def test_the_slowest_pair_of_a_common_head():
    assert round(slowest_period(128)) == 54_410
    assert round(slowest_period(2**20)) == 62_831
    assert slowest_period(2**30) == pytest.approx(62_832, abs=1)


def test_the_tables_of_the_model_turn_in_that_time():
    period = slowest_period(8, theta=100.0)
    _, sin = rotary_tables(8, 400, 100.0)
    slow = sin[:, -1]
    first_return = next(m for m in range(2, 400) if slow[m - 1] < 0 <= slow[m])
    assert first_return - 1 < period <= first_return


@pytest.mark.parametrize("width", [0, 1, 7])
def test_odd_heads_are_refused(width):
    with pytest.raises(ValueError, match="even"):
        slowest_period(width)
