"""Patches that run Megatron-Core 0.16 on CPU with gloo.

Megatron-Core assumes CUDA in five ways: it reads the current CUDA device, it creates tensors with `device="cuda"`, it
distinguishes parameters by `tensor.type()`, it orders asynchronous collectives by CUDA streams, and its FSDP builds
meshes of CUDA devices. `install` redirects each of these to CPU. It replaces process-wide functions of torch, so it
runs only in processes that train on CPU.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from dit.backends import device
from dit.patches import patches

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_strided", "as_tensor")
_NEW_LIKE = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
_BOUND_AT_IMPORT = {
    "dist_all_gather_func": "all_gather_into_tensor",
    "dist_reduce_scatter_func": "reduce_scatter_tensor",
}
_IDENTITY_ON_ONE_RANK = {
    "all_reduce": (0, 0),
    "broadcast": (0, 0),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter_tensor": (0, 1),
}
"""Collectives that copy input to output on one rank, with the argument positions of the output and the input."""
_MODULES_THAT_BIND = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.distributed.param_and_grad_buffer",
)
_MODULES_THAT_COALESCE = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
)


class _FinishedWork:
    """Handle of a completed collective."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _NoStream:
    """Replaces a CUDA stream or event; on CPU, work is synchronous."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, *_: object) -> "_NoStream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_NoStream") -> float:
        return 0.0


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, int) and not isinstance(device, bool)
    )


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = device.SUBSTITUTE
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _address(tensor: torch.Tensor) -> tuple[object, object]:
    """Return the storage and offset of a tensor; works for fake tensors too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def _waiting(name: str, collective: Callable[..., Work | None]) -> Callable[..., _FinishedWork | None]:
    """Return a synchronous form of a collective, even with `async_op=True`; on one rank it is at most a copy.

    The streams that order asynchronous collectives on CUDA are no-ops here, so gloo could read a reused buffer. On one
    rank, gloo itself would copy the gradient buffer three times.
    """

    @functools.wraps(collective)
    def run(*args: object, **kwargs: object) -> _FinishedWork | None:
        group = kwargs.get("group")
        if name in _IDENTITY_ON_ONE_RANK and isinstance(group, ProcessGroup) and group.size() == 1:
            output, source = (args[i] if i < len(args) else None for i in _IDENTITY_ON_ONE_RANK[name])
            if isinstance(output, torch.Tensor) and isinstance(source, torch.Tensor):
                if _address(output) != _address(source):
                    output.copy_(source.view_as(output))
                return _FinishedWork() if kwargs.get("async_op") else None
        work = collective(*args, **kwargs)
        if work is None:
            return None
        work.wait()
        return _FinishedWork()

    return run


@contextmanager
def _run_at_once(*_: object, **__: object) -> Iterator[_FinishedWork]:
    """Replace `_coalescing_manager`: the collectives inside are synchronous."""
    yield _FinishedWork()


def _always(value: object) -> Callable[..., object]:
    """Return a new function that always returns `value`; torch.compile identifies functions by identity."""
    return lambda *_, **__: value


def _replace(owner: object, **replacements: object) -> None:
    """Replace functions or classes of a module, or methods of a class, for this process."""
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


@patches(
    "torch 2.11-2.14",
    "torch/cuda: streams, events, random state, memory statistics, nvtx",
    why="on CPU they do nothing or use torch's CPU generator",
)
def _redirect_cuda_calls() -> None:
    nothing = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "ipc_collect")
    for name in (*nothing, "reset_peak_memory_stats", "_lazy_init", "_lazy_call"):
        setattr(torch.cuda, name, _always(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, _always(0))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _always(None))
    _replace(
        torch.cuda,
        current_device=_always(0),  # an integer, because it is also used in names such as "cuda:0"
        Stream=type("Stream", (_NoStream,), {}),
        Event=type("Event", (_NoStream,), {}),
        current_stream=_always(_NoStream()),
        default_stream=_always(_NoStream()),
        stream=lambda *_, **__: nullcontext(),
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


@patches(
    "torch 2.11-2.14",
    "torch: tensor factories, Tensor.type, to, cuda, pin_memory, record_stream; Module.cuda",
    why="Megatron-Core requests tensors on CUDA; on CPU they are CPU tensors",
)
def _redirect_tensors() -> None:
    # `with torch.device(...)` caches the factories by identity. The cache must contain the original functions;
    # otherwise a model on the meta device would allocate memory.
    importlib.import_module("torch.utils._device")._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _factory_on_cpu(getattr(torch, name)))
    for name in _NEW_LIKE:
        setattr(torch.Tensor, name, _factory_on_cpu(getattr(torch.Tensor, name)))
    tensor_type = torch.Tensor.type
    tensor_to: Callable[..., torch.Tensor] = torch.Tensor.to

    def type_like_cuda(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, non_blocking: bool = False
    ) -> torch.Tensor | str:
        if dtype is not None:
            return tensor_type(self, dtype, non_blocking)
        return f"torch.cuda.{str(tensor_type(self)).rpartition('.')[2]}"

    def to_cpu(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (device.SUBSTITUTE, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = device.SUBSTITUTE
        return tensor_to(self, *args, **kwargs)

    def itself(self: object, *_: object, **__: object) -> object:
        return self

    _replace(torch.Tensor, type=type_like_cuda, to=to_cpu, cuda=itself, pin_memory=itself, record_stream=_always(None))
    _replace(torch.nn.Module, cuda=itself)


@patches(
    "torch 2.11-2.14",
    "torch/distributed/distributed_c10d.py: collectives, _coalescing_manager",
    why="on CPU asynchronous collectives run synchronously",
)
@patches(
    "megatron-core 0.16",
    "core/tensor_parallel, core/distributed: collectives and _coalescing_manager bound at import",
    why="they import torch's collectives by name",
)
def _redirect_collectives() -> None:
    dist = torch.distributed
    for name in _COLLECTIVES:
        setattr(dist, name, _waiting(name, getattr(dist, name)))
    _replace(dist, _coalescing_manager=_run_at_once)
    for module_name in _MODULES_THAT_BIND:
        module = importlib.import_module(module_name)
        for bound, name in _BOUND_AT_IMPORT.items():
            if hasattr(module, bound):
                setattr(module, bound, getattr(dist, name))
    for module_name in _MODULES_THAT_COALESCE:
        _replace(importlib.import_module(module_name), _coalescing_manager=_run_at_once)


@patches(
    "megatron-core 0.16",
    "core/tensor_parallel/random.py: _get_cuda_rng_state, _set_cuda_rng_state",
    why="on CPU it uses torch's CPU generator",
)
def _redirect_rng_tracker() -> None:
    _replace(
        importlib.import_module("megatron.core.tensor_parallel.random"),
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


@patches(
    "megatron-core 0.16",
    "core/distributed/fsdp/mcore_fsdp_adapter.py: DeviceMesh",
    why="on CPU they are CPU meshes",
)
def _redirect_device_meshes() -> None:
    adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    from_group: Callable[..., DeviceMesh] = adapter.DeviceMesh.from_group

    def on_cpu(group: object, device_type: str, *args: object, **kwargs: object) -> DeviceMesh:
        return from_group(group, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    _replace(adapter, DeviceMesh=type("DeviceMesh", (adapter.DeviceMesh,), {"from_group": staticmethod(on_cpu)}))


@patches(
    "megatron-core 0.16",
    "core/transformer/moe: moe_utils.maybe_move_tensor_to_cpu",
    why="it returns NumPy arrays only for CUDA tensors",
)
def _redirect_expert_dispatch() -> None:
    """Return the split sizes of the token dispatcher's all-to-all as NumPy arrays; Megatron-Core skips CPU tensors."""

    def to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        _replace(module, maybe_move_tensor_to_cpu=to_host)


_groups: dict[tuple[int, ...], ProcessGroup | None] = {}


@patches(
    "megatron-core 0.16",
    "core/parallel_state.py: create_group",
    why="equal groups each need connections and threads under gloo",
)
def _reuse_groups() -> None:
    """Make Megatron-Core reuse an existing group of the same ranks in the same order.

    It creates two dozen groups, many with the same ranks, and each gloo group has connections and three threads, one of
    which polls. Reuse is safe because collectives never overlap here.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    create: Callable[..., ProcessGroup | None] = state.create_group

    def create_or_reuse(
        ranks: Sequence[int] | None = None, *args: object, use_local_synchronization: bool = False, **kwargs: object
    ) -> ProcessGroup | None:
        if ranks is None or use_local_synchronization:
            return create(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)
        # Every rank requests every group in the same order, so all ranks reuse a group or none does.
        key = tuple(ranks)
        if key not in _groups:
            _groups[key] = create(ranks, *args, **kwargs)
        return _groups[key]

    _replace(state, create_group=create_or_reuse)


def forget_groups() -> None:
    """Drop the references to the groups; call this when the groups are destroyed."""
    _groups.clear()


@functools.cache
def install() -> None:
    """Redirect Megatron-Core to CPU. Runs once per process; call it before building groups, modules or optimizers."""
    _redirect_cuda_calls()
    _redirect_tensors()
    _redirect_collectives()
    _redirect_rng_tracker()
    _redirect_device_meshes()
    _redirect_expert_dispatch()
    _reuse_groups()
