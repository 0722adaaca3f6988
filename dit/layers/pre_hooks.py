"""Forward pre-hooks of modules whose weights another module reads."""

from torch import nn


def run_pre_hooks(*modules: nn.Module) -> None:
    """Run the forward pre-hooks of modules whose weights the caller reads instead of calling the modules.

    Megatron-Core's hooks wait for the gather of the updated weights (`parallel.overlap_param_gather`), so weights read
    without them could be old. Results of the hooks are ignored.
    """
    for module in modules:
        if module._forward_pre_hooks:
            for key, hook in module._forward_pre_hooks.items():
                hook(module, (), *([{}] if key in module._forward_pre_hooks_with_kwargs else []))
