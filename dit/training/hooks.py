"""Code of a user's own that the training loop calls: `training.hooks=['package.module.Class']`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Optional

from dit.checkpoint.train_state import TrainState
from dit.config_record import TRUST_VARIABLE, trusted_packages
from dit.errors import ConfigError


class Hook:
    """What the loop calls on every rank, in the order of the steps; a subclass overrides what it wants.

    A hook may read the state. It does not write to it: training with hooks has the numbers of training without.
    """

    def on_step(self, state: TrainState, grad_norm: float) -> None:
        """Act after an optimizer step that was applied.

        Args:
            state: `state.step` is the number of the step, counted from 1.
            grad_norm: the global gradient norm before clipping.
        """

    def on_validation(self, state: TrainState, losses: Mapping[str, float]) -> None:
        """Act after the held-out losses of a step were measured; `losses["loss"]` is their total."""


def load_hooks(names: Optional[Sequence[str]]) -> list[Hook]:
    """Import the hooks of `training.hooks` and make one of each.

    Raises:
        ConfigError: a name is not that of a subclass of `Hook`, or is of a package that is not trusted.
    """
    return [_load(name)() for name in names or ()]


def _load(name: str) -> type[Hook]:
    module, _, attribute = name.rpartition(".")
    package = module.partition(".")[0]
    if package not in trusted_packages():
        raise ConfigError(
            f"training.hooks: {name!r} is not imported, for its package is none of {', '.join(trusted_packages())}; "
            f"{TRUST_VARIABLE}={package or 'PACKAGE'} in the environment trusts a package of your own"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"training.hooks: there is no {name!r} ({error}); write package.module.Class") from error
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ConfigError(f"training.hooks: {name!r} is no subclass of {Hook.__module__}.Hook; derive it")
    return found
