"""The constants of a device are within its data sheet, and as near to it as those of the one that was fitted."""

import pytest

from dit.planner.devices import DATA_SHEETS, DEVICES, FP8_GAINS, H100, with_fp8


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_reaches_the_share_of_its_data_sheet_that_was_fitted(name):
    device, (flops, memory, bandwidth, nvlink) = DEVICES[name], DATA_SHEETS[name]
    assert (device.peak_flops, device.memory_bytes) == (flops, memory)
    fitted = [rate / H100.peak_flops for rate in (H100.matmul_flops, H100.attention_flops)]
    assert [rate / flops for rate in (device.matmul_flops, device.attention_flops)] == pytest.approx(fitted)
    assert 0.86 < device.memory_bandwidth / bandwidth < 0.9
    assert device.nvlink / nvlink == pytest.approx(H100.nvlink / DATA_SHEETS["h100"][3])


def test_quantised_products_are_faster_where_a_rate_is_published():
    """Not faster than their own peak, twice that of bf16; the name tells the reader of a plan."""
    for (name, kind), gain in FP8_GAINS.items():
        device, quantised = DEVICES[name], with_fp8(DEVICES[name], kind)
        assert 1 < gain < 2
        assert quantised.matmul_flops == pytest.approx(gain * device.matmul_flops)
        assert quantised.name == f"{name} (fp8 {kind}, products {gain} times as fast)"
        assert (quantised.attention_flops, quantised.peak_flops) == (device.attention_flops, device.peak_flops)
    unknown = with_fp8(H100, "blockwise")
    assert unknown.matmul_flops == H100.matmul_flops
    assert unknown.name == "h100 (fp8 blockwise, planned as bf16: no published rate)"
    assert with_fp8(H100, None) == H100
