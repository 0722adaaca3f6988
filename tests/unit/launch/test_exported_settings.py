"""`launch.export` states the objective, the clean parts and the scale of latents of a run."""

from pathlib import Path
from typing import Any

import pytest

from dit.convert.diffusers_sampling import how_to_sample
from dit.data_api import NoData
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.dit.config import DiTConfig
from dit.models.wan.config import WanConfig
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from energon_data.dataset import EnergonData
from launch import export_weights


def test_the_note_on_an_objective_has_the_differing_settings_only() -> None:
    (of_settings,) = export_weights.note_objective(FlowMatching(), FlowMatching(time_shift=3.0))
    (of_kinds,) = export_weights.note_objective(EDM(), FlowMatching())
    assert "other settings: time_shift=1.0 (published: 3.0); " in of_settings
    assert "other settings: objective=edm (published: flow_matching); " in of_kinds


def test_an_exported_objective_has_the_shift_of_the_training_size() -> None:
    """Other code bases have no shift that depends on the dimension; run folders have it (`launch.average`)."""
    objective = FlowMatching(time_shift=1.5, shift_dimension=64)
    config = RunConfig(model=DiTConfig(in_channels=4), data=NoData(), objective=objective)
    trained = export_weights.trained_model(config, {"latent_size": [1, 8, 8], "class_names": None})
    assert trained.objective == objective
    assert export_weights.with_one_shift(trained).objective == FlowMatching(time_shift=3.0)


def test_the_clean_parts_of_a_run_are_those_of_its_data() -> None:
    data = {"none": {}, "reference": {"references": True}, "first_frame": {"clean_first_frame": 0.5}}
    for part, settings in data.items():
        config = RunConfig(model=WanConfig(), data=EnergonData(path="data", **settings), objective=FlowMatching())
        trained = export_weights.trained_model(config, {"latent_size": [1, 8, 8], "class_names": None})
        assert trained.clean_parts == [name for name in (part,) if settings]


def test_the_page_of_an_export_says_how_references_were_cropped() -> None:
    """Pipelines of diffusers do not crop them."""
    for aspect, words in (("square", "references were cropped as by `prepare --aspect square`"), ("keep", None)):
        config = RunConfig(model=WanConfig(), data=EnergonData(path="data", references=True), objective=FlowMatching())
        metadata = {"latent_size": [1, 8, 8], "class_names": None, "reference_aspect": aspect}
        lines = how_to_sample(export_weights.trained_model(config, metadata))
        assert [line for line in lines if "cropped" in line] == ([] if words is None else [words])


@pytest.mark.parametrize(("stated", "shift"), [(None, 3.0), (0.25, 0.25)])
def test_a_stated_shift_of_latents_is_exported(monkeypatch: pytest.MonkeyPatch, stated: Any, shift: float) -> None:
    """Here with a measured mean of 3 and deviation of 2; the scale is measured."""
    monkeypatch.setattr("launch.export_weights.load_generator", lambda folder, weights: None)
    monkeypatch.setattr("launch.export_weights.measure_latents", lambda autoencoder: (3.0, 2.0))
    found: Any = export_weights.with_latent_scale(
        AutoencoderConfig(shift_factor=stated), Path("run"), raw_weights=False
    )
    assert (found.scaling_factor, found.shift_factor) == (0.5, shift)
