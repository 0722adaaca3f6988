"""Runs for a laptop: real letters in minutes, made-up data in seconds."""

import nemo_run as run

from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.training.pretrain import pretrain
from dit.training.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainingConfig,
)
from energon_data.dataset import EnergonData
from energon_data.mock import MockData


@run.cli.factory(target=pretrain)
def letters_dit() -> run.Partial:
    """Capital letters A-Z, 16 x 16 pixels, class-conditional DiT (1.9 M): two CPU cores, about 5 minutes.

    The data are rendered from the fonts of this machine by `python -m energon_data.prepare letters`. After 2,100 steps
    a classifier that has only seen real letters reads nine of ten samples correctly (`python -m launch.evaluate
    --checkpoint runs/letters_dit`). Runs the same on one rank, on two, or on a GPU.
    """
    return run.Partial(
        pretrain,
        model=run.Config(
            DiTConfig,
            hidden_size=128,
            num_layers=6,
            num_attention_heads=4,
            in_channels=1,
            patch_spatial=4,
            num_classes=26,
            class_dropout=0.1,
        ),
        data=run.Config(EnergonData, path="data/letters", num_streams=2),
        objective=run.Config(FlowMatching),
        optimizer=run.Config(OptimizerConfig, lr=1e-3),
        schedule=run.Config(ScheduleConfig, kind="cosine", warmup_steps=100, min_lr=1e-5),
        parallel=run.Config(ParallelConfig),
        training=run.Config(
            TrainingConfig,
            run_dir="runs/letters_dit",
            num_steps=2100,
            micro_batch_size=32,
            global_batch_size=64,
            precision="fp32",
            ema_decay=0.995,
            log_interval=50,
            validation_interval=300,
            sample_interval=700,
        ),
        checkpoint=run.Config(CheckpointConfig, interval=300),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(SamplingConfig, solver="euler", num_steps=30, guidance_scale=2.0),
    )


@run.cli.factory(target=pretrain)
def tiny_dit() -> run.Partial:
    """Made-up data, a 2-layer DiT of width 64: proves in seconds that an installation trains, on any machine.

    There is nothing to learn in it; the loss falls from about 1 because the made-up latents have structure.
    """
    recipe = letters_dit()
    recipe.model.hidden_size = 64
    recipe.model.num_layers = 2
    recipe.model.num_classes = 10
    recipe.data = run.Config(MockData, num_streams=2)  # so that one rank and two can take turns
    recipe.schedule.warmup_steps = 5
    recipe.training.run_dir = "runs/tiny_dit"
    recipe.training.num_steps = 20
    recipe.training.micro_batch_size = 4
    recipe.training.global_batch_size = 8
    recipe.training.log_interval = 1
    recipe.training.validation_interval = 0
    recipe.training.sample_interval = 0
    recipe.checkpoint.interval = 10
    return recipe
