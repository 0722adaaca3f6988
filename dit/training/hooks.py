"""User code that the training loop calls: `training.hooks=['package.module.Class']`."""

from collections.abc import Mapping, Sequence
from typing import Optional

from dit.checkpoint.train_state import TrainState
from dit.config_record import import_trusted
from dit.errors import ConfigError


class Hook:
    """Callbacks that the loop calls on every rank; a subclass overrides some of them.

    A hook may read the state but must not change it: hooks do not affect the numbers of training.
    """

    def on_step(self, state: TrainState, grad_norm: float) -> None:
        """Act after an optimizer step with an update.

        Args:
            state: `state.step` is the number of the step, counted from 1.
            grad_norm: the global gradient norm before clipping.
        """

    def on_validation(self, state: TrainState, losses: Mapping[str, float]) -> None:
        """Act after the held-out losses of a step were measured; `losses["loss"]` is their total."""


def load_hooks(names: Optional[Sequence[str]]) -> list[Hook]:
    """Import the classes of `training.hooks` and create one object of each."""
    return [_load(name)() for name in names or ()]


def _load(name: str) -> type[Hook]:
    hook = import_trusted(name, "training.hooks")
    if not (isinstance(hook, type) and issubclass(hook, Hook)):
        raise ConfigError(f"training.hooks: {name!r} is not a subclass of {Hook.__module__}.Hook; derive it")
    return hook
