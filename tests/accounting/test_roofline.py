import pytest

from trainstep.accounting.roofline import attainable, bound, matmul_intensity, minimum_seconds, ridge_point
from trainstep.specs.device import get_device

H200 = get_device("h200")


def test_the_ridge_divides_memory_from_compute():
    ridge = ridge_point(H200, "bf16")
    assert ridge == pytest.approx(989e12 / 4.8e12)
    assert attainable(H200, "bf16", ridge / 2) == pytest.approx(989e12 / 2)
    assert attainable(H200, "bf16", ridge * 9) == 989e12
    assert (bound(H200, "bf16", ridge * 0.99), bound(H200, "bf16", ridge)) == ("memory", "compute")


def test_what_a_device_does_not_state_is_absent():
    v100 = get_device("v100")
    assert ridge_point(v100, "bf16") is None
    assert attainable(v100, "bf16", 1.0) is None
    assert bound(v100, "bf16", 1.0) is None
    assert minimum_seconds(v100, "bf16", flops=1.0, moved_bytes=1.0) is None


def test_matmul_intensity_tends_to_the_small_side():
    assert matmul_intensity(1, 10**6, 10**6, 2) == pytest.approx(1, rel=1e-4)
    assert matmul_intensity(300, 300, 300, 2) == pytest.approx(100)


def test_minimum_is_the_slower_of_the_two():
    assert minimum_seconds(H200, "bf16", flops=989e12, moved_bytes=4.8e11) == 1.0
    assert minimum_seconds(H200, "bf16", flops=989e9, moved_bytes=4.8e12) == 1.0
    with pytest.raises(ValueError, match="positive"):
        attainable(H200, "bf16", 0.0)
