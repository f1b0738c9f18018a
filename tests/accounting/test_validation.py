"""The model of a step against the measured ones; the tolerance is what the planner promises."""

import math

import pytest

from trainstep.accounting.calibration import MEASUREMENTS, attention_seconds, fitted, rates
from trainstep.accounting.validation import PREDICTIONS, comparisons
from trainstep.specs.device import get_device

COMPARED = {c.measured.name: c for c in comparisons()}


@pytest.mark.parametrize("name", COMPARED)
def test_predictions_are_within_15_percent(name):
    assert abs(COMPARED[name].error) < 0.15


def test_no_prediction_is_of_a_figure_that_was_fitted():
    assert not [name for name in PREDICTIONS if MEASUREMENTS[name].fits]
    assert {row.fits for row in MEASUREMENTS.values() if row.fits} == {
        "bf16 products",
        "fp32 products",
        "attention",
        "fused kernels",
        "eager kernels",
        "host, forward",
        "host, backward",
        "host, optimizer",
        "host, compiled",
        "collective call",
        "bus bandwidth",
    }


def test_error_is_to_the_nearer_end_of_a_range():
    ranged = COMPARED["xl amp-bf16 plain step"]
    assert ranged.error == pytest.approx(ranged.predicted / 0.342 - 1)


def test_attention_rates_return_the_measured_times():
    given, pairs = fitted(), 16 * 16384**2 / 2
    both = [attention_seconds(given, pairs, 128, phase, "bf16") for phase in ("forward", "backward")]
    assert both[0] == pytest.approx(1.92e-3)
    assert sum(both) == pytest.approx((7.16e-3 + 7.45e-3) / 2)
    narrow = sum(attention_seconds(given, pairs, 64, phase, "bf16") for phase in ("forward", "backward"))
    assert narrow == pytest.approx(4.515e-3)


def test_all_reduce_returns_the_measured_ends():
    given = fitted()
    link = given.link_share * get_device("h200").links_bytes_per_second["nvlink"]
    assert given.collective_seconds + 1e9 / link == pytest.approx(3.11e-3)
    assert given.collective_seconds + 1e6 / link == pytest.approx(0.059e-3)


def test_rates_stay_below_what_the_device_promises():
    given, h200 = fitted(), get_device("h200")
    for dtype, rate in given.products_flops_per_second.items():
        assert 0 < rate < h200.peak_flops[dtype]
    assert given.eager_bytes_per_second < given.fused_bytes_per_second < h200.memory_bytes_per_second
    assert 0 < given.link_share < 1
    assert all(math.isfinite(s) and 0 < s < 1e-3 for s in given.host_kernel_seconds.values())
    assert given.host_compiled_seconds > 0


def test_another_device_keeps_the_shares_and_says_so():
    a100 = rates(get_device("a100"), "bf16")
    assert a100.products_flops_per_second["bf16"] == pytest.approx(312e12 * 700 / 989)
    assert "assumed" in a100.notes[0]
    assert not rates(get_device("h200"), "bf16").notes
    tf32 = rates(get_device("h200"), "tf32")
    assert tf32.products_flops_per_second["tf32"] == pytest.approx(494.5e12 * 700 / 989)
    assert "tf32" in tf32.notes[0]


def test_no_peak_no_prediction():
    with pytest.raises(ValueError, match=r"v100.*no peak for bf16"):
        rates(get_device("v100"), "amp-bf16")
