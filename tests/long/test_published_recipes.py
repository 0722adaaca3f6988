"""Small pipelines of the families that tests/integration/test_published_recipes.py leaves out."""

from pathlib import Path

import pytest

from tests.conftest import BuildModel
from tests.integration.test_published_recipes import IN_SHORT, RECIPES
from tests.integration.test_published_recipes import (
    test_a_small_pipeline_is_trained_and_drawn_in_diffusers as of_recipe,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in IN_SHORT])
def test_a_pipeline_of_another_family_is_trained_and_drawn_in_diffusers(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    of_recipe(build_model, tmp_path, monkeypatch, recipe)
