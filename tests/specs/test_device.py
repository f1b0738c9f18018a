import re

import pytest

from trainstep.specs.device import DEVICES, find_device, get_device


def test_a_device_is_found_by_the_name_torch_gives_it():
    for device in DEVICES.values():
        for name in device.torch_names:
            assert find_device(name) is device


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100", "", "NVIDIA GeForce RTX 9090"])
def test_an_unknown_device_is_none_and_not_a_neighbour(name):
    assert find_device(name) is None


def test_unknown_short_name_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown device 'h300'.*h200"):
        get_device("h300")


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_every_row_has_a_dated_source_and_orders_its_peaks(device):
    assert re.search(r"\b20[12]\d\b", device.source)
    peaks = device.peak_flops
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp16"]) <= peaks["fp16"]
    assert device.peak("amp-bf16") == device.peak("bf16")
    assert 0 < device.memory_bytes_per_second < 1e13
    assert device.links_bytes_per_second["pcie"] <= 64e9


def test_chips_without_bfloat16_have_no_peak_for_it():
    assert get_device("v100").peak("bf16") is None
    assert get_device("t4").peak("amp-bf16") is None


def test_torch_names_are_distinct():
    names = [name for device in DEVICES.values() for name in device.torch_names]
    assert len(names) == len(set(names))


def test_the_h200_ridge_is_where_the_datasheet_puts_it():
    device = get_device("h200")
    assert (device.peak("bf16"), device.memory_bytes_per_second) == (989e12, 4.8e12)
