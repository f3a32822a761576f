"""Devices by their names."""

import pytest

from paceline import ConfigError
from paceline_lens.forecast.device import GIB, TABLE, device_of


def test_devices_by_name_by_beginning_and_by_memory():
    assert device_of("H200").name == "h200-141GB"
    assert device_of("a100-24GB").memory == 24 * GIB
    assert device_of("h100-96GB").half == TABLE["h100-80GB"].half
    assert device_of("cpu-2GB").usable == int(2 * GIB * 0.95)
    assert device_of("A100_80GB") is TABLE["a100-80GB"]
    with pytest.raises(ConfigError) as caught:
        device_of("h2000")
    assert caught.value.code == "plan-device"
