"""Import Megatron-Core without torch's compiler and wandb: two of the five seconds that training needs to start.

Megatron-Core decorates a dozen functions by `torch.compile` when it is imported, which imports the compiler. While
`megatron.core` is imported, a decorator stands in that compiles a function when it is first called. wandb, for the
records of its inference server, it does without where it is not installed; to that import it is not.
"""

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, Optional

PACKAGE = "megatron.core"


def compiled_when_called(function: Optional[Callable[..., Any]] = None, **options: Any) -> Callable[..., Any]:
    """Decorate as `torch.compile`, which is called when the function is."""
    if function is None:
        return functools.partial(compiled_when_called, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        if not compiled:
            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call


class _Finder(MetaPathFinder):
    """Finds the package once, and executes it with that decorator."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_execute, execute)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    import torch

    compiler, wandb = torch.compile, sys.modules.get("wandb")
    torch.compile = compiled_when_called  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        execute(module)
    finally:
        torch.compile = compiler
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


def install() -> None:
    """Prepare the import, unless the package is imported already."""
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())
