"""The constants of a device are within its data sheet, and as near to it as those of the one that was fitted."""

import pytest

from dit.planner.devices import DATA_SHEETS, DEVICES, H100


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_reaches_the_share_of_its_data_sheet_that_was_fitted(name):
    device, (flops, memory, bandwidth, nvlink) = DEVICES[name], DATA_SHEETS[name]
    assert (device.peak_flops, device.memory_bytes) == (flops, memory)
    fitted = [rate / H100.peak_flops for rate in (H100.matmul_flops, H100.attention_flops)]
    assert [rate / flops for rate in (device.matmul_flops, device.attention_flops)] == pytest.approx(fitted)
    assert 0.86 < device.memory_bandwidth / bandwidth < 0.9
    assert device.nvlink / nvlink == pytest.approx(H100.nvlink / DATA_SHEETS["h100"][3])
