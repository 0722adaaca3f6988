"""The redirections that let Megatron-Core run on CPU, one test for each kind of call."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dit.backends import megatron_cpu
from dit.backends.process_groups import ProcessGroups
from dit.backends.provider import LayerProvider

pytestmark = pytest.mark.usefixtures("one_rank_world")

CUDA_NAMES = ["cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0]
FACTORY_ARGUMENTS = {
    "empty": (2,),
    "zeros": (2,),
    "ones": (2,),
    "full": ((2,), 3.0),
    "tensor": ([1.0, 2.0],),
    "arange": (2,),
    "rand": (2,),
    "randn": (2,),
    "empty_strided": ((2,), (1,)),
    "as_tensor": ([1.0, 2.0],),
}


def test_importing_redirects_no_function():
    """Only `install` changes torch: a GPU process may import the module."""
    program = (
        "import torch, dit.backends.megatron_cpu; x = torch.ones(1);"
        "assert x.type() == 'torch.FloatTensor'; assert torch.Tensor.to.__class__.__name__ == 'method_descriptor'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_expert_dispatch_gets_its_split_sizes_as_numbers():
    """Megatron-Core does not convert tensors that are already on the host, but gloo requires numbers."""
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.tensor([3, 0, 2])
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 0, 2]
    assert not torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_groups_of_the_same_ranks_are_shared(one_rank_world: ProcessGroups):
    """Each gloo group costs threads and connections, so a job of one rank has one group in addition to the world."""
    from torch.distributed.distributed_c10d import _world

    assert one_rank_world.tp is one_rank_world.cp is one_rank_world.dp
    assert len(_world.pg_map) == 2


def test_installing_twice_wraps_functions_once():
    before = torch.empty, torch.Tensor.to, dist.all_reduce
    megatron_cpu.install()
    assert (torch.empty, torch.Tensor.to, dist.all_reduce) == before


@pytest.mark.parametrize("name", megatron_cpu._FACTORIES)
def test_factories_put_cuda_tensors_on_cpu(name: str):
    """Pinned memory needs a CUDA driver; on CPU the request is dropped."""
    for device in CUDA_NAMES:
        made = getattr(torch, name)(*FACTORY_ARGUMENTS[name], device=device)
        assert (made.device.type, made.shape) == ("cpu", (2,))
    if name != "as_tensor":
        assert not getattr(torch, name)(*FACTORY_ARGUMENTS[name], pin_memory=True).is_pinned()


@pytest.mark.parametrize("name", megatron_cpu._NEW_LIKE)
def test_tensors_make_new_cuda_tensors_on_cpu(name: str):
    arguments = {"new_full": ((2,), 3.0), "new_tensor": ([1.0, 2.0],)}.get(name, ((2,),))
    x = torch.ones(3, dtype=torch.float64)
    for device in CUDA_NAMES:
        made = getattr(x, name)(*arguments, device=device)
        assert (made.device.type, made.shape, made.dtype) == ("cpu", (2,), torch.float64)
    assert getattr(x, name)(*arguments, dtype=torch.int32).dtype == torch.int32


def test_factories_do_not_change_other_devices():
    assert torch.empty(2, device="meta").is_meta
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
    assert torch.ones(2, dtype=torch.int32).dtype == torch.int32


@pytest.mark.parametrize("device", CUDA_NAMES, ids=str)
def test_moving_a_tensor_to_cuda_returns_the_cpu_tensor(device: object):
    """`to` returns the CPU tensor, still changes the dtype if requested, and passes gradients."""
    x = torch.ones(2, requires_grad=True)
    assert x.to(device).device.type == "cpu"
    assert x.to(device=device).device.type == "cpu"
    assert x.to(device, torch.float64).dtype == torch.float64
    x.to(device, torch.float64).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_to_keeps_its_other_meanings():
    x = torch.ones(2)
    assert x.to(torch.float16).dtype == torch.float16
    assert x.to(torch.zeros(1, dtype=torch.int64)).dtype == torch.int64
    assert x.to("meta").is_meta
    assert x.to(x.device) is x


def test_tensor_and_module_shortcuts_stay_on_cpu():
    x, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert x.cuda() is x
    assert x.cuda(0, non_blocking=True) is x
    assert x.pin_memory() is x
    assert x.record_stream(torch.cuda.current_stream()) is None
    assert module.cuda() is module


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "FloatTensor"), (torch.bfloat16, "BFloat16Tensor"), (torch.float16, "HalfTensor")],
)
def test_parameters_report_their_cuda_type(dtype: torch.dtype, name: str):
    """Megatron-Core's optimizers sort parameters by this string."""
    assert torch.ones(1, dtype=dtype).type() == f"torch.cuda.{name}"
    assert torch.ones(1).type(dtype).dtype == dtype


def test_current_device_is_the_cpu():
    """Tensors on the device that Megatron-Core passes are created on CPU."""
    torch.cuda.set_device(3)
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(1, device=torch.device(f"cuda:{torch.cuda.current_device()}")).device.type == "cpu"


def test_device_management_calls_have_no_effect():
    state = torch.get_rng_state()
    for name in ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "_lazy_init"):
        assert getattr(torch.cuda, name)() is None
    for call in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda._lazy_call):
        assert call(1) is None
    assert [torch.cuda.nvtx.range_push("x"), torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.mark("x")] == [None] * 3
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(torch.cuda, name)() == 0


def test_streams_and_events_have_no_effect():
    """Work runs in program order, so streams and events are always finished; both are still separate classes."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), stream:
        event.record(stream)
    stream.wait_event(event)
    stream.wait_stream(torch.cuda.default_stream())
    event.synchronize()
    stream.record_event().wait()
    assert event.query()
    assert event.elapsed_time(torch.cuda.Event()) == 0.0
    assert isinstance(stream, torch.cuda.Stream)
    assert not isinstance(stream, torch.cuda.Event)


def test_rng_state_is_that_of_the_cpu():
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_megatrons_tracker_forks_the_cpu_generator():
    """A fork draws from its own stream, continues where that stopped, and does not change the outer stream."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    start = tracker.get_states()
    outer = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outer)
    assert not torch.equal(first, second)
    tracker.set_states(start)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("name", megatron_cpu._COLLECTIVES)
def test_asynchronous_collectives_return_finished(one_rank_world: ProcessGroups, name: str):
    """The result is complete before `wait`, and the handle reports it; without `async_op`, there is no handle."""
    x = torch.tensor([1.0, 2.0])
    for asynchronous in (True, False):
        out = x.clone() if name in ("all_reduce", "broadcast") else torch.zeros(2)
        arguments = {"all_reduce": (out,), "broadcast": (out, 0), "all_gather": ([out], x)}.get(name, (out, x))
        handle = getattr(dist, name)(*arguments, group=one_rank_world.tp, async_op=asynchronous)
        assert torch.equal(out, x)
        assert handle.is_completed() and handle.wait() if asynchronous else handle is None


@pytest.mark.parametrize("name", megatron_cpu._IDENTITY_ON_ONE_RANK)
def test_on_one_rank_a_collective_in_place_moves_nothing(one_rank_world: ProcessGroups, name: str):
    """Gloo would copy the buffer three times; autograd's version counter counts writes to it."""
    x = torch.tensor([1.0, 2.0])
    arguments = {"broadcast": (x, 0)}.get(name, (x, x) if name.endswith("_tensor") else (x,))
    before = x._version
    assert getattr(dist, name)(*arguments, group=one_rank_world.tp, async_op=True).is_completed()
    assert x.tolist() == [1.0, 2.0]
    assert x._version == before


def test_functions_imported_by_name_are_redirected():
    """Modules that imported a collective by name before `install` also use the blocking version."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import layers, mappings

    for module in (layers, mappings, param_and_grad_buffer):
        for bound, name in megatron_cpu._BOUND_AT_IMPORT.items():
            if hasattr(module, bound):
                assert getattr(module, bound) is getattr(dist, name), (module.__name__, bound)
    assert hasattr(layers, "dist_all_gather_func")
    assert hasattr(param_and_grad_buffer, "dist_reduce_scatter_func")


def test_coalesced_collectives_run_at_once(one_rank_world: ProcessGroups):
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp_buffer

    out, x = torch.zeros(2), torch.tensor([1.0, 2.0])
    for home in (dist, param_and_grad_buffer, fsdp_buffer):
        manager = home._coalescing_manager
        out.zero_()
        with manager(one_rank_world.tp, async_ops=True) as work:
            dist.all_gather_into_tensor(out, x, group=one_rank_world.tp, async_op=True)
            assert torch.equal(out, x)
        assert work.is_completed()
        assert work.wait()


def test_meshes_of_megatron_fsdp_are_on_the_cpu(one_rank_world: ProcessGroups):
    """It requests a mesh of CUDA devices and gets one on CPU, whose DTensors work; torch's own class is unchanged."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    groups = [one_rank_world.dp_cp, one_rank_world.tp]
    mesh = mcore_fsdp_adapter.DeviceMesh.from_group(
        groups, device_type="cuda", mesh=[[0]], mesh_dim_names=("dp_cp", "tp")
    )
    assert mesh.device_type == "cpu"
    assert mesh.get_group("tp") is one_rank_world.tp
    x = torch.arange(4.0)
    assert torch.equal(DTensor.from_local(x, mesh["dp_cp"], [Shard(0)]).full_tensor(), x)
    assert DeviceMesh is not mcore_fsdp_adapter.DeviceMesh
    assert issubclass(mcore_fsdp_adapter.DeviceMesh, DeviceMesh)


def test_megatrons_linears_train_on_cpu(provider: LayerProvider):
    """With all redirections, column and row linears equal plain matrix products, forward and backward."""
    from dit.backends.init import normal

    up = provider.column_linear(8, 12, bias=True, init=normal(1.0))
    down = provider.row_linear(12, 8, bias=True, init=normal(1.0))
    generator = torch.Generator().manual_seed(0)
    parameters = [up.weight, up.bias, down.weight, down.bias]
    for parameter in parameters:
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(5, 8, generator=generator)
    expected = (x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    out = down(up(x))
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), parameters)
    theirs = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(ours, theirs)
