"""The command `megatron-dit COMMAND ...`: each is one of the modules that `python -m` starts, under a short name.

Only the module of the selected command is imported, so that help and mistakes are answered at once.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Optional

from dit import __version__, extensions
from dit.command_line import did_you_mean
from dit.errors import EXIT_CONFIG, EXIT_OK, one_line_errors
from dit.terminal import echo

COMMANDS = {
    "train": ("launch.train", "train a recipe, or resume its run; --list shows all recipes"),
    "dryrun": ("launch.train --dryrun", "a recipe's parameters, memory per rank and FLOPs, without training"),
    "plan": ("launch.plan", "search the layout that trains a recipe fastest on some number of GPUs"),
    "verify": ("launch.verify", "compare a recipe's parallel layout with one rank, in its tiny form on CPU"),
    "status": ("launch.status", "how runs are doing, in a few lines each"),
    "sample": ("launch.sample", "generate samples from a run's checkpoint"),
    "evaluate": ("launch.evaluate", "measurements of a checkpoint: held-out loss, FID, CLIP score and others"),
    "average": ("launch.average", "make a weight average of another length from saved ones"),
    "export": ("launch.export", "write a run's weights for diffusers or facebookresearch/DiT"),
    "import": ("launch.import_weights", "write a run folder of such weights"),
    "kernels": ("launch.kernels", "which implementation of each op this machine uses, and why not the others"),
    "prepare": ("energon_data.prepare.__main__", "write a data set"),
    "inspect": ("energon_data.inspect", "say what a data set holds, with a contact sheet of its samples"),
    "bench": ("benchmarks.step", "time the optimizer steps of a recipe"),
}
"""The module of each command with its first words, and the line of the help page."""
PACKAGES = ("dit", "recipes", "energon_data", "launch", "benchmarks")


def help_page() -> str:
    """Return the page of `--help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "Train diffusion transformers on Megatron-Core.",
            "",
            "usage: megatron-dit COMMAND ...",
            "       torchrun --standalone --nproc-per-node N --no-python megatron-dit train --yes --factory RECIPE ...",
            "",
            *lines,
            "",
            "megatron-dit COMMAND --help shows a command's flags; megatron-dit --version the version.",
            "",
        ]
    )


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a command and return its exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help", "help"):
        echo(help_page(), end="")
        return EXIT_OK
    if name == "--version":
        echo(f"megatron-dit {__version__}")
        return EXIT_OK
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; use one of {', '.join(COMMANDS)}, or --help"
        echo(f"error: {f'{name!r} is not a command' if name else 'no command given'}{hint}", file=sys.stderr)
        return EXIT_CONFIG
    # A user's own recipes are importable from the current folder, but a folder there never hides a package of ours.
    for package in (*PACKAGES, *sorted(extensions.own_packages())):
        importlib.import_module(package)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, *first = COMMANDS[name][0].split()
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run([*first, *words])


if __name__ == "__main__":
    sys.exit(main())
