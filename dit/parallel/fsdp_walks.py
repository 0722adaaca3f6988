"""A patch of Megatron-FSDP: wrapping a model takes time linear in the number of its modules.

To find out in which unit a module lies, it walks over the units, module by module; and it walks over all parameters of
the model for every module (megatron-core 0.16.1). For thousands of experts these walks take minutes. Modules and
parameters stay what they are while the hooks are registered, so each walk is made once.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
from torch import nn


@contextmanager
def each_walk_once() -> Iterator[None]:
    """Let Megatron-FSDP remember its walks over a model that is wrapped meanwhile."""
    below: dict[nn.Module, set[nn.Module]] = {}
    hooks = megatron_fsdp.MegatronFSDP._register_fsdp_hooks
    searches = {module: module.is_submodule for module in (megatron_fsdp, param_and_grad_buffer)}

    def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
        if parent_module not in below:
            below[parent_module] = set(parent_module.modules())
        return module in below[parent_module] and not (strict and module is parent_module)

    def register_hooks(fsdp: nn.Module, root: nn.Module) -> None:
        walk, listed = root.parameters, list(root.parameters())
        root.parameters = lambda recurse=True: iter(listed) if recurse else walk(recurse)  # type: ignore[method-assign]
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
