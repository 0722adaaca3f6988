"""The one place that knows which device this process trains on."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

ACCELERATOR = torch.device("cuda")
"""What a run is planned for, whatever this machine has."""


def is_started() -> bool:
    """Tell whether this process has used CUDA, which no fork of it can then use."""
    return torch.cuda.is_initialized()


def use_cuda() -> bool:
    """Tell whether this process trains on CUDA; `DIT_DEVICE=cpu` keeps it on CPU beside a GPU."""
    return os.environ.get("DIT_DEVICE", "") != "cpu" and torch.cuda.is_available()


def local_device() -> torch.device:
    """Return the device of this process; each local rank has its own GPU."""
    if not use_cuda():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def describe() -> str:
    """Name the device for log lines and benchmark records."""
    return torch.cuda.get_device_name() if use_cuda() else "CPU"


def accelerator_versions() -> dict[str, Any]:
    """Return the versions of the driver, CUDA, cuDNN and NCCL; None for what this process does not use."""
    if not use_cuda():
        return dict.fromkeys(("driver", "cuda", "cudnn", "nccl"))
    driver = Path("/sys/module/nvidia/version")
    return {
        "driver": driver.read_text().strip() if driver.is_file() else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
    }


def synchronize() -> None:
    """Wait until the device has finished its queue."""
    if use_cuda():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Return the most memory this process has held: allocated on the GPU, or resident on CPU."""
    if use_cuda():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
