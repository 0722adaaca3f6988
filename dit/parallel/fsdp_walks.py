"""A patch of Megatron-FSDP that makes the time to wrap a model linear in the number of its modules.

To find the unit of a module, Megatron-FSDP walks over the modules of all units, and for every module it walks over all
parameters of the model (megatron-core 0.16.1). For thousands of experts, these walks take minutes. Modules and
parameters do not change while the hooks are registered, so the patch caches each walk.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
from torch import nn


@contextmanager
def memoise_module_walks() -> Iterator[None]:
    """Cache Megatron-FSDP's walks over a model that is wrapped in this context."""
    submodules: dict[nn.Module, set[nn.Module]] = {}
    hooks = megatron_fsdp.MegatronFSDP._register_fsdp_hooks
    searches = {module: module.is_submodule for module in (megatron_fsdp, param_and_grad_buffer)}

    def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
        if parent_module not in submodules:
            submodules[parent_module] = set(parent_module.modules())
        return module in submodules[parent_module] and not (strict and module is parent_module)

    def register_hooks(fsdp: nn.Module, root: nn.Module) -> None:
        walk, cached = root.parameters, list(root.parameters())
        root.parameters = lambda recurse=True: iter(cached) if recurse else walk(recurse)  # type: ignore[method-assign]
        try:
            hooks(fsdp, root)
        finally:
            del root.parameters

    megatron_fsdp.MegatronFSDP._register_fsdp_hooks = register_hooks
    for module in searches:
        module.is_submodule = is_submodule
    try:
        yield
    finally:
        megatron_fsdp.MegatronFSDP._register_fsdp_hooks = hooks
        for module, search in searches.items():
            module.is_submodule = search
