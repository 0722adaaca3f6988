"""A user-defined hook of the training loop that records its arguments."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit.checkpoint.train_state import TrainState
from dit.training.hooks import Hook


class Recorder(Hook):
    """Write a line for every call to the file named by `HOOK_RECORD`."""

    def on_step(self, state: TrainState, grad_norm: float) -> None:
        self._write(step=state.step, grad_norm=grad_norm)

    def on_validation(self, state: TrainState, losses: Mapping[str, float]) -> None:
        self._write(validated=state.step, losses=dict(losses))

    def _write(self, **values: Any) -> None:
        with Path(os.environ["HOOK_RECORD"]).open("a") as file:
            print(json.dumps(values), file=file)
