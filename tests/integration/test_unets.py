"""benchmarks.unets compares equal networks, and options that change only the cost."""

import pytest

from benchmarks.unets import TEXT_WIDTH, Row, imagen_arms, latent_arms, measure, random_pictures, table
from dit.backends.process_groups import ProcessGroups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(one_rank_world: ProcessGroups) -> dict[str, Row]:
    arms = [*imagen_arms(one_rank_world, compiled=False), *latent_arms(one_rank_world)]
    return {row.name: row for row in measure(arms, random_pictures(8, 1), 1)}


def test_diffusers_builds_the_same_unet(rows: dict[str, Row]) -> None:
    """Equal operations, and equal parameters except the null token, which only ours has."""
    actual, expected = rows["latent diffusion"], rows["diffusers UNet2DConditionModel"]
    assert actual.parameters == expected.parameters + TEXT_WIDTH
    assert actual.gflop == pytest.approx(expected.gflop, rel=1e-3)


def test_options_have_the_parameters_of_the_built_network(rows: dict[str, Row]) -> None:
    """Checkpointing adds most of a forward pass."""
    own = rows["Imagen"]
    for option in ("stable attention", "checkpointed"):
        assert rows[f"Imagen, {option}"].parameters == own.parameters
    assert 1.2 < rows["Imagen, checkpointed"].gflop / own.gflop < 1.34


def test_logged_rates_match_the_logged_time(rows: dict[str, Row]) -> None:
    for row in rows.values():
        assert row.images_per_s == pytest.approx(1 / row.seconds)
    assert {row.ratio for row in rows.values() if row.name in ("Imagen", "latent diffusion")} == {1.0}
    assert len(table([*rows.values()]).splitlines()) == 2 + len(rows)
