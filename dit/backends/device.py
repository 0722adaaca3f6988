"""The device of this process."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Optional
from weakref import WeakSet

import torch
from torch.cuda import nccl

from dit.errors import DeviceMemoryError

ACCELERATOR = torch.device("cuda")
"""The device that the planner assumes, even on machines without it."""

SUBSTITUTE = torch.device("cpu")
"""Device of a process without CUDA; counters of waits replace it by the meta device."""

CACHE_BYTES = 256 << 20
"""More than the caches of any device."""

PEAK_FLOPS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "A100": 312e12,
}
"""Peak dense bf16 FLOP/s by words in the device's name, the denominator of MFU. Source: the devices' data sheets."""


def is_started() -> bool:
    """Return whether this process has initialised CUDA; processes forked from it then cannot use CUDA."""
    return torch.cuda.is_initialized()


def use_cuda() -> bool:
    """Return whether this process trains on CUDA; `DIT_DEVICE=cpu` disables CUDA."""
    return os.environ.get("DIT_DEVICE", "") != "cpu" and torch.cuda.is_available()


def local_device() -> torch.device:
    """Return the device of this process, one GPU per local rank."""
    if not use_cuda():
        return SUBSTITUTE
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def describe() -> str:
    """Return the name of the device, for log lines and benchmark records."""
    return torch.cuda.get_device_name() if use_cuda() else "CPU"


def peak_flops(device: str) -> Optional[float]:
    """Return the entry of `PEAK_FLOPS` for a device name such as "NVIDIA H100 80GB HBM3"; None for other devices."""
    words = set(device.upper().replace("-", " ").split())
    return next((peak for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)


def accelerator_versions() -> dict[str, Any]:
    """Return the versions of the driver, CUDA, cuDNN and NCCL; None without CUDA."""
    if not use_cuda():
        return dict.fromkeys(("driver", "cuda", "cudnn", "nccl"))
    driver = Path("/sys/module/nvidia/version")
    return {
        "driver": driver.read_text().strip() if driver.is_file() else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
    }


def host_zeros(numbers: int, *, pinned: bool) -> torch.Tensor:
    """Return zeros in host memory, `[numbers]`, float32, for use until the process ends.

    Args:
        pinned: page-lock the memory for direct copies by CUDA. The memory is registered at its exact size; torch's
            pinned allocator rounds up to a power of two.
    """
    zeros = torch.zeros(numbers, device="cpu")
    if pinned and numbers:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
    return zeros


def device_numbers(values: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of numbers, or of lists of them, on the device; the host does not wait for the copy."""
    numbers, device = torch.tensor(values, dtype=dtype, device="cpu"), local_device()
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def begin_copy_to_host(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start an asynchronous copy of a small tensor to the host; return a function that waits for its values."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


class StepTimer:
    """Device seconds between two points of each step, measured without synchronising the host."""

    def __init__(self) -> None:
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Mark the first point of a step."""
        self._began = self._mark()

    def stop(self) -> None:
        """Mark the second point; without a first point nothing is measured."""
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = None

    def take(self) -> list[float]:
        """Return the seconds of each step since the last call; the device must have finished these steps."""
        spans, self._spans = self._spans, []
        if use_cuda():
            return [first.elapsed_time(last) / 1000 for first, last in spans]
        return [last - first for first, last in spans]

    @staticmethod
    def _mark() -> Any:
        if not use_cuda():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Replace an out-of-memory error of CUDA, cuBLAS or NCCL by a `DeviceMemoryError` with its sizes and the cure."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in text.lower():  # cuBLAS's and NCCL's
            raise
        raise DeviceMemoryError(
            f"{text.partition(' If reserved')[0].rstrip('.')}; lower training.micro_batch_size or "
            "data.max_tokens_per_pack, set training.recompute=full or optimizer.offload=True, or split the model over "
            "more ranks (docs/parallelism.md); launch.train --dryrun prints the memory of a rank; "
            "if page-locked host memory is full, set optimizer.offload=False and training.ema_offload=False"
        ) from error


@cache
def _stream_of_graphs() -> Any:
    return torch.cuda.Stream()


@contextmanager
def graph_stream() -> Iterator[None]:
    """Use the stream on which graphs are captured in this context, if there is a GPU.

    Autograd accumulates gradients on the stream on which the wrapper of the model was built. If a graph were captured
    on another one, the memory of no gradient could be reused before the end of the capture.
    """
    if not use_cuda():
        yield
        return
    stream = _stream_of_graphs()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Stream:
    """A queue of work on the device; without a GPU, work is done at once.

    Args:
        current: queue to the current CUDA stream instead of a new one.
    """

    def __init__(self, *, current: bool = False) -> None:
        self._stream = torch.cuda.Stream() if use_cuda() and not current else None

    def queue(self, work: Optional[Callable[[], object]] = None, *, after: Any = None) -> Any:
        """Queue work that starts after an event of another stream; return the event of its end.

        The host does not wait. Without work, the event is the end of all work queued before.
        """
        with torch.cuda.stream(self._stream) if use_cuda() else nullcontext():  # None is the current stream
            if after is not None:
                torch.cuda.current_stream().wait_event(after)
            if work is not None:
                work()
            return torch.cuda.current_stream().record_event() if use_cuda() else None


_graphs = WeakSet[Any]()


@contextmanager
def capture_graph() -> Iterator[Callable[[], None]]:
    """Record the work of this context as a CUDA graph instead of doing it; yields the function that does it.

    Graphs share memory: one may overwrite the numbers of another, so copy the results of a graph before the next runs.
    """
    graph, other = torch.cuda.CUDAGraph(), next(iter(_graphs), None)
    pool = None if other is None else other.pool()
    # Other threads of the process, such as those that pin memory, may use CUDA during the capture.
    with torch.cuda.graph(graph, pool, _stream_of_graphs(), capture_error_mode="thread_local"):
        yield graph.replay
    _graphs.add(graph)


def destroy_graphs() -> None:
    """Destroy all CUDA graphs. NCCL waits for those with collectives of a group before it destroys the group."""
    for graph in _graphs:
        graph.reset()
    _graphs.clear()


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if use_cuda():
        torch.cuda.synchronize()


def device_seconds(call: Callable[[], object]) -> float:
    """Measure the GPU seconds of a call, with cold caches and without the time that the host needs to issue it."""
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=local_device())
    flush.zero_()  # overwrites the caches; the host issues the call meanwhile
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def peak_bytes(call: Callable[[], object]) -> Optional[int]:
    """Return the largest GPU memory during a call, in addition to that before it; None without a GPU."""
    if not use_cuda():
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes: `allocated` and `reserved` on the GPU, or `resident` on CPU."""
    if use_cuda():
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    import resource

    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
