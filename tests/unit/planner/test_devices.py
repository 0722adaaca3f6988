"""Device constants: within the data sheets, and the fitted ones."""

from dataclasses import replace

import pytest

from dit.planner.devices import DATA_SHEETS, DEVICES, H100, NVLINK_SHARE, Fitted, devices, with_fp8


@pytest.mark.parametrize("name", DEVICES)
def test_fitted_rates_are_fractions_of_the_data_sheet(name):
    device, (flops, memory, bandwidth, nvlink) = DEVICES[name], DATA_SHEETS[name]
    assert (device.peak_flops, device.memory_bytes) == (flops, memory)
    assert 0.5 < device.matmul_flops / flops < 1
    assert 0.4 < device.attention_flops / flops < 0.65
    assert 0.86 < device.memory_bandwidth / bandwidth < 0.9
    assert device.nvlink / nvlink == NVLINK_SHARE


def test_fitted_constants_are_those_of_their_generation():
    changed = devices(replace(Fitted(), blackwell_matmul=1e15, b300=1.5, hopper_attention=3e14))
    assert changed["b200"].matmul_flops == 1e15
    assert changed["gb200"].matmul_flops == pytest.approx(1e15 * 2500 / 2250)
    assert changed["gb300"].matmul_flops == pytest.approx(1.5e15 * 2500 / 2250)
    assert changed["h200"].attention_flops == 3e14
    assert changed["h100"].matmul_flops == H100.matmul_flops


@pytest.mark.parametrize(
    ("device", "kind", "rate"), [("gb300", "mxfp8", ""), ("h100", "mxfp8", "x"), ("b200", "tensorwise", "x")]
)
def test_a_device_with_fp8_names_the_source_of_its_rate(device, kind, rate):
    quantised = with_fp8(DEVICES[device], kind)
    assert quantised.quantises
    assert (
        quantised.name == f"{device} (fp8 {kind} by Transformer Engine{rate and ', at the rate of mxfp8 on Blackwell'})"
    )
    assert with_fp8(H100, None) == H100
