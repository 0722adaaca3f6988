"""Device constants of the time model: one set per GPU type, for all models and layouts."""

from dataclasses import dataclass, replace
from typing import Optional

from dit.settings import Fp8


@dataclass(frozen=True)
class Fitted:
    """Constants fitted to published step times by `python -m benchmarks.planned`.

    Attributes:
        hopper_matmul, hopper_attention: rates of H100 and H200.
        blackwell_matmul, blackwell_attention: rates of B200; those of GB200 grow with its peak.
        b300: rates of GB300 divided by those of GB200.
        fp8_speedup: rate of matrix products in MXFP8 divided by that in bf16.
        operation_seconds: time of an operation in addition to its work: launch, start and end of its kernels.
        interference: share of a hidden exchange by which it slows down the computation.
        jitter: standard deviation of a rank's time for a step, relative to its mean; see `slowest_of`.
    """

    hopper_matmul: float = 827e12
    hopper_attention: float = 530e12
    blackwell_matmul: float = 1690e12
    blackwell_attention: float = 1020e12
    b300: float = 1.29
    fp8_speedup: float = 1.56
    operation_seconds: float = 6.33e-6
    interference: float = 0.181
    jitter: float = 0.0183


@dataclass(frozen=True)
class Device:
    """Rates of one GPU and its links that training achieves.

    Attributes:
        memory_bytes: memory of the device; tensors can use `MEMORY_SHARE` of it.
        peak_flops: dense bf16 operations per second according to the data sheet, the denominator of MFU.
        matmul_flops: operations per second of a large matrix product in bf16, see `product_seconds`.
        attention_flops: operations per second of attention's forward pass; the backward rate is `ATTENTION_BACKWARD`
            times this.
        memory_bandwidth: bytes read and written per second by an element-wise kernel.
        nvlink, nic: bytes per second that a GPU sends inside its node, and to other nodes.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    multiprocessors: int
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    nvlink: float
    nic: float
    node_size: int
    fitted: Fitted
    quantises: bool = False


MEMORY_SHARE = 0.92
"""Share of the memory that tensors can fill: CUDA's context, workspaces and fragmentation take the rest."""
ATTENTION_BACKWARD = 0.85
"""Backward over forward rate: 0.84 to 0.87 for cuDNN and FlashAttention 3 at 4k to 16k tokens, head size 128."""
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.6))
"""Rows and columns of the tiles of a matrix product, and their rate relative to the largest."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which k is split."""
K_FILL = 128
"""Length of k whose products take as long as filling and draining the pipeline of a tile."""
FP8_FLOPS_PER_BYTE = 256
"""Products with fewer operations per byte are not quantised: modulations and other products of few rows."""
NVLINK_SHARE = 0.8
"""Share of NVLink's bandwidth that collectives reach."""
LATENCY_S = 12e-6
"""Latency of a collective of two ranks; it grows with the logarithm of the number of ranks."""
DATA_SHEETS = {
    # dense bf16 operations per second, bytes, bytes per second of the memory, of NVLink in one direction
    "h100": (989e12, 80e9, 3.35e12, 450e9),
    "h200": (989e12, 141e9, 4.8e12, 450e9),
    "b200": (2250e12, 180e9, 8.0e12, 900e9),
    "gb200": (2500e12, 186e9, 8.0e12, 900e9),
    "gb300": (2500e12, 279e9, 8.0e12, 900e9),
}
"""Data sheet values of one GPU.

Sources: NVIDIA's data sheets of H100 SXM, of H200 SXM, of DGX B200 (1,440 GB, 64 TB/s and 14.4 TB/s for eight), of
GB200 NVL72 and of GB300 NVL72 (dense values; 72 GPUs).
"""


RACKS = ("gb200", "gb300")
"""Devices of which NVLink joins 72."""


def devices(fitted: Fitted) -> dict[str, Device]:
    """Return the devices by name.

    Bandwidths of memories, NVLink and network cards (45 of 50 GB/s, 90 of 100 for GB300) are not fitted.
    """
    gb200 = 2500 / 2250
    hopper = fitted.hopper_matmul, fitted.hopper_attention
    blackwell = fitted.blackwell_matmul, fitted.blackwell_attention
    by_name: dict[str, Device] = {}
    for name, multiprocessors, factor, (matmul, attention), memory_bandwidth, nic in (
        ("h100", 132, 1.0, hopper, 2.9e12, 45e9),
        ("h200", 132, 1.0, hopper, 4.3e12, 45e9),
        ("b200", 148, 1.0, blackwell, 6.9e12, 45e9),
        ("gb200", 152, gb200, blackwell, 6.9e12, 45e9),
        ("gb300", 152, gb200 * fitted.b300, blackwell, 6.9e12, 90e9),
    ):
        peak, memory, _, nvlink = DATA_SHEETS[name]
        by_name[name] = Device(
            name,
            memory_bytes=memory,
            peak_flops=peak,
            multiprocessors=multiprocessors,
            matmul_flops=factor * matmul,
            attention_flops=factor * attention,
            memory_bandwidth=memory_bandwidth,
            nvlink=NVLINK_SHARE * nvlink,
            nic=nic,
            node_size=72 if name in RACKS else 8,
            fitted=fitted,
        )
    return by_name


DEVICES = devices(Fitted())
"""Devices by name. H200 was compared with no published row."""
H100, H200, B200 = (DEVICES[name] for name in ("h100", "h200", "b200"))


def with_fp8(device: Device, fp8: Optional[Fp8]) -> Device:
    """Return a device whose matrix products are quantised by Transformer Engine, as its name says.

    Only the rate of MXFP8 on Blackwell was compared with published steps; other kinds and devices get the same.
    """
    if fp8 is None:
        return device
    compared = fp8 == "mxfp8" and device.name in ("b200", *RACKS)
    rate = "" if compared else ", at the rate of mxfp8 on Blackwell"
    return replace(device, name=f"{device.name} (fp8 {fp8} by Transformer Engine{rate})", quantises=True)
