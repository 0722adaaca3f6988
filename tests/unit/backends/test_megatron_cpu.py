"""The redirections that let Megatron-Core run on CPU; `tests/laws` and `tests/parallel` train with them."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dit.backends import megatron_cpu
from dit.backends.process_groups import ProcessGroups

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


@pytest.mark.parametrize("device", CUDA_NAMES, ids=str)
def test_moving_a_tensor_to_cuda_returns_the_cpu_tensor(device: object):
    """`to` returns the CPU tensor, still changes the dtype if requested, and passes gradients."""
    x = torch.ones(2, requires_grad=True)
    assert x.to(device).device.type == "cpu"
    assert x.to(device=device).device.type == "cpu"
    assert x.to(device, torch.float64).dtype == torch.float64
    x.to(device, torch.float64).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_tensor_and_module_shortcuts_stay_on_cpu():
    x, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert x.cuda() is x
    assert x.cuda(0, non_blocking=True) is x
    assert x.pin_memory() is x
    assert x.record_stream(torch.cuda.current_stream()) is None
    assert module.cuda() is module


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
