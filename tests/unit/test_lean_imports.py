"""Starting imports no compiler, and what Megatron-Core compiles is compiled when it is called."""

import subprocess
import sys

import torch

from dit.lean_imports import compiled_when_called


def test_training_starts_without_the_compiler():
    """Nor wandb and nemo-run, which a run imports when it uses them."""
    program = (
        "import sys, dit.training.pretrain, torch; "
        "assert torch.compile.__module__ == 'torch', torch.compile; "
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'wandb', 'nemo_run') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch):
    calls = []

    def compiler(function, **options):
        calls.append(options)
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", compiler)

    @compiled_when_called
    def double(x):
        return 2 * x

    @compiled_when_called(dynamic=True)
    def triple(x):
        """Three times."""
        return 3 * x

    assert calls == []
    assert [double(1), double(2), triple(1)] == [3, 5, 4]
    assert calls == [{}, {"dynamic": True}]
    assert triple.__doc__ == "Three times."
