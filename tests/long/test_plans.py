"""The planner's step of every published row and of one recipe of each class fits the GPUs that the pages name."""

import re

import pytest

from launch import dry_run
from launch.config_file import built
from launch.train import call_recipe
from recipes import registry
from tests.support.fine_tuning_table import PAGE, ROWS, row
from tests.unit.recipes.test_registry import RANKS, stated_ranks

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_tracer")]

SIZES = ("each", "one", "of")
AXES = ("tensor_model", "pipeline_model", "context", "expert_model")
NEARLY_FULL = 0.9
"""Share of a GPU's memory, in units of 1e9 bytes, above which a recipe's line has to state how much it needs."""
ON_GPUS = [entry for entry in registry.recipes() if (match := RANKS.search(entry.line)) and any(match.group(*SIZES))]


def test_recipes_fit_the_gpus_that_their_lines_name():
    """One recipe of each class of model and layout is planned: the step fits, or the line states how much it needs."""
    kinds = {}
    for entry in ON_GPUS:
        config = built(call_recipe(entry.name))
        layout = (
            config.parallel.data_parallel,
            *(getattr(config.parallel, f"{axis}_parallel_size") > 1 for axis in AXES),
        )
        kinds.setdefault((type(config.model), config.model.adapters is None, layout, config.training.recompute), entry)
    wrong = {}
    for entry in kinds.values():
        match = RANKS.search(entry.line)
        report = dry_run.report(call_recipe(entry.name), stated_ranks(entry.line))
        (memory,) = (group for group in match.group(*SIZES) if group)
        need, room = float(re.search(r"total +([\d.]+) GiB", report)[1]), int(memory) * 1e9 / dry_run.GIB
        if need > (room if match["need"] else NEARLY_FULL * room) or int(match["need"] or round(need)) != round(need):
            wrong[entry.name] = f"needs {need:.1f} of {room:.1f} GiB: {entry.line}"
    assert wrong == {}


@pytest.mark.parametrize("title", ROWS)
def test_the_planned_rows_of_the_page_equal_the_planner(title: str) -> None:
    """Write them with `python -m tests.support.fine_tuning_table --write`."""
    assert row(title) in PAGE.read_text(encoding="utf-8").splitlines()
