"""What a state says of itself."""

from typing import Any

import pytest

from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.train_state import TrainState


@pytest.mark.parametrize(("held_out", "validated"), [(None, False), (HeldOut(0.5, 3), False), (HeldOut(0.5, 6), True)])
def test_a_held_out_loss_is_that_of_its_step_alone(held_out: HeldOut | None, validated: bool) -> None:
    """A run that resumes at step 6 with the loss of step 3 must validate first."""
    names = "wrapped", "chunks", "optimizer", "shards", "ema", "stream", "groups", "update"
    parts: dict[str, Any] = dict.fromkeys(names)
    assert TrainState(**parts, step=6, held_out=held_out).is_validated is validated
