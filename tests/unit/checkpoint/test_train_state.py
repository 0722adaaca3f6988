"""What a state says of itself."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.train_state import TrainState, build_state
from dit.data_api import DataConfig
from energon_data.mock import MockData
from tests.unit.training.test_rates import tiny_config


@pytest.mark.parametrize(("held_out", "validated"), [(None, False), (HeldOut(0.5, 3), False), (HeldOut(0.5, 6), True)])
def test_a_held_out_loss_is_that_of_its_step_alone(held_out: HeldOut | None, validated: bool) -> None:
    """A run that resumes at step 6 with the loss of step 3 must validate first."""
    names = "wrapped", "chunks", "optimizer", "shards", "ema", "stream", "groups", "update"
    parts: dict[str, Any] = dict.fromkeys(names)
    assert TrainState(**parts, step=6, held_out=held_out).is_validated is validated


@pytest.mark.parametrize("identity", [None, {}, {"": {"Pictures": "digest a"}}], ids=["none", "settings", "samples"])
def test_data_without_an_identity_are_reported_once(
    tmp_path: Path, one_rank_world: ProcessGroups, caplog: pytest.LogCaptureFixture, identity: Optional[dict]
) -> None:
    """A resumed run does not notice other samples of theirs."""

    class Pictures(MockData):
        def identity(self) -> Any:
            return DataConfig.identity(self) if identity is None else identity

    config = replace(tiny_config(tmp_path), data=Pictures(num_streams=1))
    _, spec = config.check_here()
    with caplog.at_level(logging.INFO, "dit.checkpoint"):
        state = build_state(config, spec, one_rank_world)
    state.stream.close()
    assert state.data == identity
    line = "Pictures.identity returns None, so other samples will not be noticed when the run resumes"
    assert [record.getMessage() for record in caplog.records] == ([line] if identity is None else [])
