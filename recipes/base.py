"""Parts that recipes have in common: the start of all of them, and the defaults of small and of tiny models."""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import nemo_run as run

from dit.data_api import DataConfig
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Constant, Cosine
from dit.parallel.dims import ParallelConfig
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain

Kind = TypeVar("Kind")


def part(
    target: type, name: str, kind: type[Kind] | Callable[[], run.Config[Kind]], **settings: Any
) -> Callable[[], run.Config[Kind]]:
    """Return a factory of a part, under a name for overrides of a setting of type `target`.

    Args:
        kind: class of the part, or a factory of a part whose other settings are kept.
        settings: settings of the part.

    `recipes.registry` reads its description from the string after the assignment: `NAME = part(TARGET, "NAME", KIND)`,
    or `NAME = helper("NAME", KIND)` after `helper = partial(part, TARGET)`.
    """

    def factory() -> run.Config[Kind]:
        config = run.Config(kind) if isinstance(kind, type) else kind()
        for setting, value in copy.deepcopy(settings).items():
            setattr(config, setting, value)
        return config

    factory.__name__ = name  # for messages
    return run.cli.factory(factory, target=target, name=name)


def named_recipe(name: str, recipe: Callable[..., run.Partial]) -> Callable[..., run.Partial]:
    """Register a recipe under a name and return it; its description is the string after the assignment."""
    recipe.__name__ = name
    return run.cli.factory(recipe, target=pretrain, name=name)


def variant(name: str, base: Callable[..., run.Partial], /, **changes: Any) -> Callable[..., run.Partial]:
    """Register the recipe `base` with the folder `runs/NAME` and other settings; see `named_recipe`.

    Args:
        changes: by name of a part, a dictionary of its settings that differ, a new part, or a factory of a new part.
    """

    @wraps(base, assigned=())  # keeps the arguments of `base`, for `--factory "NAME(argument=value)"`
    def factory(*args: Any, **options: Any) -> run.Partial:
        recipe = base(*args, **options)
        recipe.training.run_dir = f"runs/{name}"
        for key, change in changes.items():
            change = change() if callable(change) else copy.deepcopy(change)
            if isinstance(change, dict):
                for setting, value in change.items():
                    setattr(getattr(recipe, key), setting, value)
            else:
                setattr(recipe, key, change)
        return recipe

    return named_recipe(name, factory)


def registered(function: Callable[..., run.Partial]) -> Callable[..., run.Partial]:
    """Register a function as a recipe under its name, and set its `training.run_dir` to `runs/NAME`."""
    recipe = variant(function.__name__, function)
    recipe.__doc__ = function.__doc__
    return recipe


def base_run(
    model: run.Config[ModelConfig],
    data: run.Config[DataConfig],
    objective: run.Config[Objective],
    sampling: run.Config[SamplingConfig],
) -> run.Partial:
    """Return a run by AdamW at a constant 1e-4 without weight decay, in bf16, with an average of decay 0.9999."""
    return run.Partial(
        pretrain,
        model=model,
        data=data,
        objective=objective,
        optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.0),
        schedule=run.Config(Constant),
        parallel=run.Config(ParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
        training=run.Config(TrainingConfig, precision="bf16", ema_decay=0.9999),
        checkpoint=run.Config(CheckpointConfig),
        logging=run.Config(LoggingConfig),
        sampling=sampling,
    )


def small_run(run_dir: str, model: run.Config[ModelConfig], data: run.Config[DataConfig]) -> run.Partial:
    """Return a run of a model of a few million parameters, on CPU cores or one GPU: flow matching, AdamW.

    * `optimizer.lr` is ten times that of the large recipes, because small models with small batches stay stable there.
    * `training.ema_decay` averages about the last 200 steps. The default 0.9999 averages 10,000 steps, and these
      runs are shorter.
    * `training.precision` is fp32, which every device supports.
    """
    sampling = run.Config(SamplingConfig, solver="euler", num_steps=30, guidance_scale=2.0)
    recipe = base_run(model, data, run.Config(FlowMatching), sampling)
    recipe.optimizer.lr = 1e-3
    recipe.schedule = run.Config(Cosine, warmup_steps=100, min_lr=1e-5)
    recipe.parallel = run.Config(ParallelConfig)
    training = recipe.training
    training.run_dir, training.num_steps, training.micro_batch_size, training.global_batch_size = run_dir, 2000, 1, 2
    training.precision, training.ema_decay = "fp32", 0.995
    recipe.checkpoint.interval = 250
    return recipe


def short_run(recipe: run.Partial) -> run.Partial:
    """Give a recipe of a tiny model 20 steps of 8 samples in fp32."""
    training = recipe.training
    training.num_steps, training.log_interval = 20, 1
    training.micro_batch_size, training.global_batch_size, training.precision = 4, 8, "fp32"
    training.validation_interval = training.sample_interval = 0
    recipe.checkpoint.interval = 10
    return recipe
