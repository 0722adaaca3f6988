"""User code that the training loop calls: `training.hooks=['package.module.Class']`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Optional

from dit.checkpoint.train_state import TrainState
from dit.config_record import TRUST_VARIABLE, trusted_packages
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
    module, _, attribute = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in trusted_packages():
        raise ConfigError(
            f"training.hooks: {name!r} is refused: its package is not trusted ({', '.join(trusted_packages())} are); "
            f"set {TRUST_VARIABLE}={package or 'PACKAGE'} in the environment to trust it"
        )
    try:
        hook = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"training.hooks: there is no {name!r} ({error}); write package.module.Class") from error
    if not (isinstance(hook, type) and issubclass(hook, Hook)):
        raise ConfigError(f"training.hooks: {name!r} is not a subclass of {Hook.__module__}.Hook; derive it")
    return hook
