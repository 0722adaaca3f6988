"""Table of docs/fine-tuning.md: planned memory and time of the recipes of published models.

`python -m tests.support.fine_tuning_table --write` writes the page in ten minutes; without `--write` it is printed.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Optional

from dit.errors import ConfigError
from launch import dry_run
from launch.config_file import built
from recipes import finetune
from tests.support.generated_page import write_or_print
from tests.support.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "fine-tuning.md"
ROWS: dict[str, tuple[str, dict[str, str], list[int]]] = {
    "PRX": ("finetune_prx", {}, [1, 64, 64]),
    "SANA 1.6B": ("finetune_sana", {}, [1, 32, 32]),
    "SD 3.5 medium": ("finetune_sd35", {"size": "medium"}, [1, 64, 64]),
    "Stable Diffusion XL": ("finetune_sdxl", {}, [1, 128, 128]),
    "Lumina-Image 2.0": ("finetune_lumina2", {}, [1, 64, 64]),
    "FLUX.2 klein 4B": ("finetune_flux2_klein", {}, [1, 64, 64]),
    "Wan 2.2 TI2V 5B": ("finetune_wan22_ti2v", {}, [31, 22, 40]),
    "Z-Image": ("finetune_z_image", {}, [1, 64, 64]),
    "SD 3.5 large": ("finetune_sd35", {}, [1, 64, 64]),
    "HunyuanVideo 1.5": ("finetune_hunyuan_video", {}, [31, 44, 80]),
    "Chroma": ("finetune_chroma", {}, [1, 64, 64]),
    "FLUX.2 klein 9B": ("finetune_flux2_klein", {"size": "9b"}, [1, 64, 64]),
    "Qwen-Image": ("finetune_qwen_image", {}, [1, 64, 64]),
    "Qwen-Image-Edit": ("finetune_qwen_image_edit", {}, [2, 64, 64]),
}
"""By model: recipe, arguments of the recipe, and patch grid of a sample (with that of its reference)."""
MACHINES = {"24 GB": (1, 24), "80 GB": (1, 80), "8 x 80 GB": (8, 80)}
COLUMNS = [(True, "80 GB"), *((False, machine) for machine in MACHINES)]
REPORTS: dict[str, str] = {}
"""Plans by settings."""
HEAD = ["model", *(f"{'LoRA' if lora else 'all'}, {machine}" for lora, machine in COLUMNS)]


def cell(title: str, lora: bool, machine: str) -> str:
    """Return the planned GiB, the seconds of a step and the letters of FSDP and offloading."""
    name, arguments, tokens = ROWS[title]
    gpus, memory = MACHINES[machine]
    try:
        recipe = getattr(finetune, name)(lora=lora, gpus=gpus, gpu_memory=memory, **arguments)
    except ConfigError as error:
        return f"{re.search(r'use gpus=([0-9]+)', str(error))[1]} GPUs"
    text = _report(str(recipe), lambda: dry_run.report(recipe, gpus, tokens, device="h100"))
    gib = float(re.search(r"total +([\d.]+) GiB", text)[1])
    if gib * dry_run.GIB > memory * 1e9:
        return "does not fit"
    config = built(recipe)
    way = "F" * (config.parallel.data_parallel == "fsdp") + "A" * config.training.ema_offload
    way += "M" * config.optimizer.offload
    seconds = int(re.search(r"time +([\d,]+) ms", text)[1].replace(",", "")) / 1e3
    time = "" if memory < 80 else f", {seconds:.{int(seconds < 100)}f}"  # times are of H100, which has 80 GB
    return f"{gib:.1f}{time}{way and f' {way}'}"


def _report(settings: str, compute: Callable[[], str]) -> str:
    """Return the plan of a recipe; most recipes have the same settings on several machines."""
    if settings not in REPORTS:
        REPORTS[settings] = compute()
    return REPORTS[settings]


def row(title: str) -> str:
    """Return the table row of a model."""
    name, arguments, _ = ROWS[title]
    words = "".join(f"({key}='{value}')" for key, value in arguments.items())
    return f"| {title}: `{name}{words}` | {' | '.join(cell(title, *column) for column in COLUMNS)} |"


def table_of(page: str) -> list[str]:
    """Return the lines of the table in the page."""
    return [line for line in page.splitlines() if line.startswith("| ") and ": `finetune_" in line]


def page() -> str:
    """Return the page with the planned table."""
    text = PAGE.read_text(encoding="utf-8")
    start, stop = text.index(f"| {HEAD[0]} | {HEAD[1]} |"), text.rindex(table_of(text)[-1]) + len(table_of(text)[-1])
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(row, ROWS)]
    return text[:start] + "\n".join(lines) + text[stop:]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("tests.support.fine_tuning_table", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
