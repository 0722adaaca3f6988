"""Device constants of the time model: one set per GPU type, for all models and layouts."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.backends.device import PEAK_FLOPS
from dit.settings import Fp8


@dataclass(frozen=True)
class Device:
    """Rates of one GPU and its links that training achieves.

    Attributes:
        name: value of `--device`.
        memory_bytes: memory of the device; tensors can use `MEMORY_SHARE` of it.
        peak_flops: dense bf16 operations per second according to the data sheet, the denominator of MFU.
        matmul_flops: operations per second of matrix products, except narrow ones.
        attention_flops: operations per second of attention's forward pass; the backward rate is `ATTENTION_BACKWARD`
            times this.
        memory_bandwidth: bytes read and written per second by an element-wise kernel.
        nvlink, nic: bytes per second that a GPU sends inside its node, and to other nodes.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    nvlink: float
    nic: float


MEMORY_SHARE = 0.92
"""Share of the memory that tensors can fill: CUDA's context, workspaces and fragmentation take the rest."""
ATTENTION_BACKWARD = 0.85
"""Backward over forward rate: 0.84 to 0.87 for cuDNN and FlashAttention 3 at 4k to 16k tokens, head size 128."""
LATENCY_S = 12e-6
"""Latency of a collective of two ranks; it grows with the logarithm of the number of ranks."""
LAUNCH_S = 6e-6
"""Time that the host takes to launch one operation of an eager program."""
FIXED_FACTOR = 1.05
"""Ratio of a step's time to the sum of its parts: jitter between ranks, clocks under load, data loading."""

H100 = Device(
    "h100",
    memory_bytes=80e9,
    peak_flops=PEAK_FLOPS["H100"],
    matmul_flops=707e12,
    attention_flops=535e12,
    memory_bandwidth=2.9e12,
    nvlink=340e9,
    nic=45e9,
)
H200 = Device(
    "h200",
    memory_bytes=141e9,
    peak_flops=PEAK_FLOPS["H200"],
    matmul_flops=H100.matmul_flops,
    attention_flops=H100.attention_flops,
    memory_bandwidth=4.3e12,
    nvlink=H100.nvlink,
    nic=H100.nic,
)
B200 = Device(
    "b200",
    memory_bytes=180e9,
    peak_flops=PEAK_FLOPS["B200"],
    matmul_flops=H100.matmul_flops * 2250 / 989,
    attention_flops=H100.attention_flops * 2250 / 989,
    memory_bandwidth=6.9e12,
    nvlink=2 * H100.nvlink,
    nic=H100.nic,
)
DATA_SHEETS = {
    # dense bf16 operations per second, bytes, bytes per second of the memory, of NVLink in one direction
    "h100": (989e12, 80e9, 3.35e12, 450e9),
    "h200": (989e12, 141e9, 4.8e12, 450e9),
    "b200": (2250e12, 180e9, 8.0e12, 900e9),
}
"""Data sheet values of one GPU in a node of eight.

Sources: NVIDIA's data sheets of H100 SXM, of H200 SXM, and of DGX B200 (1,440 GB, 64 TB/s and 14.4 TB/s for eight).
"""
DEVICES = {device.name: device for device in (H100, H200, B200)}
"""The constants of H100 are fitted and checked (`benchmarks.planned`); H200 and B200 are scaled by data sheets."""

FP8_GAINS: dict[tuple[str, Fp8], float] = {
    ("h100", "tensorwise"): 1.28,
    ("h200", "tensorwise"): 1.28,
    ("b200", "mxfp8"): 1.28,
}
"""Rate of matrix products with `training.fp8`, quantisation included, divided by that of bf16.

These are published ratios of training speed, and a step has other parts, so products gain more. H100: torchtitan's
benchmarks, Llama 3 8B on 8 GPUs, compiled, 6,667 and 8,532 tokens/s per GPU; H200 has the same cores. B200: PyTorch's
blog, Llama 3 70B on 1,856 GPUs with MXFP8, 1.22 to 1.28.
"""


def with_fp8(device: Device, fp8: Optional[Fp8]) -> Device:
    """Return a device with the rate of quantised products, which its name states."""
    if fp8 is None:
        return device
    gain = FP8_GAINS.get((device.name, fp8))
    rate = "planned as bf16: no published rate" if gain is None else f"products {gain} times as fast"
    return replace(device, name=f"{device.name} (fp8 {fp8}, {rate})", matmul_flops=(gain or 1.0) * device.matmul_flops)
