"""What the time model assumes of a device: one set of constants each, for all models and layouts."""

from dataclasses import dataclass

from dit.backends.device import PEAK_FLOPS


@dataclass(frozen=True)
class Device:
    """Rates of one GPU and of its links, as training reaches them.

    Attributes:
        name: as `--device` takes it.
        memory_bytes: of the device; what the allocator and the libraries leave of it is `MEMORY_SHARE`.
        peak_flops: dense bf16 operations per second of the data sheet, the denominator of MFU.
        matmul_flops: operations per second of matrix products that are not narrow.
        attention_flops: those of attention's forward pass; of its backward pass, `ATTENTION_BACKWARD` of it.
        memory_bandwidth: bytes read and written per second by an element-wise kernel.
        nvlink, nic: bytes that a GPU sends per second to its node, and to other nodes.
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
"""Share of the memory that tensors can fill: the rest is CUDA's context, workspaces and gaps of the allocator."""
ATTENTION_BACKWARD = 0.85
"""Backward over forward rate: 0.84 to 0.87 for cuDNN and FlashAttention 3 at 4k to 16k tokens, head size 128."""
LATENCY_S = 12e-6
"""Seconds of a collective of two ranks without bytes; it grows with the logarithm of the ranks."""
LAUNCH_S = 6e-6
"""Seconds that the host needs to issue one operation of an eager program."""
FIXED_FACTOR = 1.05
"""What a step takes over the sum of its parts: jitter between ranks, clocks under load, the input."""

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
"""What the maker states of one GPU in a node of eight.

Sources: NVIDIA's data sheets of H100 SXM, of H200 SXM, and of DGX B200 (1,440 GB, 64 TB/s and 14.4 TB/s for eight).
"""
DEVICES = {device.name: device for device in (H100, H200, B200)}
"""Constants of H100 are fitted and checked (`benchmarks.planned`); those of H200 and B200 follow from data sheets."""
