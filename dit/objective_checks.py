"""Checks of an objective against the model and the other settings of a run."""

from dit.condition_table import AUGMENTATION
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig, TrainingConfig


def check_outputs(objective: Objective, model: ModelConfig) -> None:
    """Check that the model has the number of outputs that the objective needs."""
    if (objective.reconstructs, objective.quantizes) != (model.posterior_features > 0, model.quantizes):
        raise ConfigError(
            f"objective {objective} and model {type(model).__name__} do not go together: objective=autoencoding trains "
            "an autoencoder without model.codebook_size, objective=vq_autoencoding one with it, and no other objective "
            "trains autoencoders; select a pair"
        )
    if not objective.augments and any(condition.name == AUGMENTATION.name for condition in model.conditions()):
        raise ConfigError(
            f"objective {objective} does not add noise to low-resolution pictures, which model.noise_augmentation=True "
            "needs; select objective=edm, or set model.noise_augmentation=False"
        )
    predicted, expected = model.output_features - model.posterior_features, objective.num_outputs * model.token_channels
    if predicted != expected:
        raise ConfigError(
            f"the model predicts {predicted} numbers for a token of {model.token_channels} "
            f"(model.in_channels={model.in_channels}), but the objective trains {expected}; "
            f"set model.out_channels={objective.num_outputs * model.in_channels}, or select an objective with that "
            "number of outputs (objective=ddpm_learned_variance has two, the others have one)"
        )
    weight, size = getattr(objective, "teacher_token_weight", None), getattr(model, "teacher_token_size", None)
    if (weight is None) != (size is None):
        raise ConfigError(
            f"objective.teacher_token_weight={weight} and model.teacher_token_size={size} do not go together; set both "
            "(0.03 and 768 in REG, with flow matching), or set both to null"
        )


def check_alignment(objective: Objective, model: ModelConfig) -> None:
    """Check that the model has the layer whose hidden states the objective aligns, and that it sees all tokens."""
    projection = objective.auxiliary.projection
    if projection is None:
        return
    setting = f"objective.alignment.layer={projection.layer}"
    cure = "model=dit_xl or another model with one stream and without model.class_tokens, or objective.alignment=none"
    model.check_supports("aligned", setting, cure)
    layers = model.megatron_sizes().num_layers
    if projection.layer > layers:
        raise ConfigError(f"{setting} is above model.num_layers={layers}; use the layer after a third of them")
    token = getattr(model, "teacher_token_size", None)
    if token not in (None, projection.features):
        raise ConfigError(
            f"model.teacher_token_size={token} and objective.alignment.features={projection.features} must be equal, "
            "because the class token is aligned, too; use the width of the teacher for both"
        )
    middle: range = getattr(model, "middle_layers", range(0))
    if projection.layer - 1 in middle:
        raise ConfigError(
            f"{setting} sees only some of the tokens, because model.routing skips layers {middle.start + 1} to "
            f"{middle.stop}; use a layer up to {middle.start} or above {middle.stop}"
        )


def check_intervals(
    objective: Objective,
    model: ModelConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    sampling: SamplingConfig,
) -> None:
    """Check that an objective of time intervals has a model that receives their length, and can take differences."""
    takes, conditioned = objective.takes_intervals, getattr(model, "interval_conditioning", False)
    if takes != conditioned:
        raise ConfigError(
            f"objective={type(objective).__name__} and model.interval_conditioning={conditioned} do not go together: "
            "objective=mean_flow needs a DiT with True, other objectives a model with False"
        )
    step, scale = getattr(objective, "difference", 0.0), getattr(model, "time_scale", 1.0)
    guided, dropped = getattr(objective, "guidance_scale", 1.0) > 1, any(c.dropout for c in model.conditions())
    required = {
        "sampling.guidance_scale=1 (targets are guided)": not guided or sampling.guidance_scale == 1,
        "a positive model.class_dropout or context_dropout": not guided or dropped,
        f"an objective.difference below {1 / scale:g} (1 / model.time_scale)": step * scale < 1,
        "parallel.pipeline_model_parallel_size=1": parallel.pipeline_model_parallel_size == 1,
        "training.precision=fp32": training.precision == "fp32",
        "training.fp8=null": training.fp8 is None,
        "model.num_experts=null": model.megatron_sizes().num_moe_experts is None,
        "training.cuda_graph=False": not training.cuda_graph,
    }
    if takes and (cures := ", ".join(setting for setting, is_set in required.items() if not is_set)):
        raise ConfigError(f"objective=mean_flow takes differences of predictions in further passes; use {cures}")
