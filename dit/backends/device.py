"""The device of this process."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

ACCELERATOR = torch.device("cuda")
"""The device that runs are planned for, also on machines without it."""


def is_started() -> bool:
    """Return whether this process has initialised CUDA; its forks can then not use CUDA."""
    return torch.cuda.is_initialized()


def use_cuda() -> bool:
    """Return whether this process trains on CUDA; with `DIT_DEVICE=cpu` it does not, even if there is a GPU."""
    return os.environ.get("DIT_DEVICE", "") != "cpu" and torch.cuda.is_available()


def local_device() -> torch.device:
    """Return the device of this process; each local rank has its own GPU."""
    if not use_cuda():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def describe() -> str:
    """Return the name of the device, for log lines and benchmark records."""
    return torch.cuda.get_device_name() if use_cuda() else "CPU"


def accelerator_versions() -> dict[str, Any]:
    """Return the versions of the driver, CUDA, cuDNN and NCCL; None for those that this process does not use."""
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
    """Return the peak memory of this process in bytes: allocated on the GPU, or resident on CPU."""
    if use_cuda():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
