"""Optional parts of objectives: a learned variance, and learned weights of the noise levels."""

import json

import pytest

from dit.config_record import from_record, to_record
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.losses import UncertaintyWeighting
from tests.unit.objectives.packs import run_config


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        (["objective=edm", "objective.weighting=uncertainty"], EDM(weighting=UncertaintyWeighting())),
        (["objective=edm_uncertainty"], EDM(p_mean=-0.4, p_std=1.0, weighting=UncertaintyWeighting())),
        (["objective=edm_uncertainty", "objective.weighting=none"], EDM(p_mean=-0.4, p_std=1.0)),
        (["objective=ddpm(variance=learned_variance)"], DDPM(discrete_steps=1000, variance=LearnedVariance())),
        (
            ["objective=ddpm_learned_variance", "objective.variance.vlb_weight=0.5"],
            DDPM(discrete_steps=1000, variance=LearnedVariance(vlb_weight=0.5)),
        ),
    ],
)
def test_parts_are_set_on_the_command_line_and_rebuilt_from_records(settings, objective):
    """The record is the one that a run writes."""
    assert run_config("tiny_dit", *settings).objective == objective
    assert from_record(json.loads(json.dumps(to_record(objective)))) == objective
