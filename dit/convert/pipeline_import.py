"""Import text encoders, autoencoder and noise schedule from a pipeline, of Stable Diffusion also the null text.

    PIPELINE/model_index.json             class of the pipeline; force_zeros_for_empty_prompt of XL, is_distilled of
                                          FLUX.2 klein, expand_timesteps of Wan
    PIPELINE/transformer/ or unet/        the imported network
    PIPELINE/text_encoder[_2]/, vae/      their folders are recorded
    PIPELINE/scheduler/                   betas and prediction type, or the shift of flow matching

Source: diffusers 0.38, `pipelines/stable_diffusion`, `pipelines/stable_diffusion_xl` and `schedulers`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dit.convert.diffusers_format import TrainedModel, format_of_model
from dit.convert.diffusers_pipeline import EDITS, pipeline_class
from dit.convert.diffusers_sampling import BETA_SCHEDULES, PREDICTIONS, SCHEDULER_CONFIG, SHIFT_BY_TOKENS
from dit.convert.state_files import CONFIG, read_json
from dit.errors import ConfigError
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.noise_levels import PUBLISHED_BETAS, REFERENCE_STEPS
from dit.pipeline_folder import PIPELINE_INDEX, TEXT_ENCODERS, text_encoders_of

PARTS = ("transformer", "unet")
"""Folders of the trained network in a pipeline."""
LOW_NOISE = "transformer_2"
"""Folder of the second network of Wan 2.2 A14B, for times below `boundary_ratio`."""
BETA_SCHEDULERS = (
    *("DDIM", "DDIMInverse", "DDIMParallel", "DDPM", "DDPMParallel", "DEISMultistep", "DPMSolverMultistep"),
    *("DPMSolverMultistepInverse", "DPMSolverSDE", "DPMSolverSinglestep", "EulerAncestralDiscrete", "EulerDiscrete"),
    *("HeunDiscrete", "KDPM2AncestralDiscrete", "KDPM2Discrete", "LCM", "LMSDiscrete", "PNDM", "SASolver", "TCD"),
    "UniPCMultistep",
)
"""Schedulers of diffusers with a table of betas, without the suffix `Scheduler`."""
SCHEDULE = ("schedule", "prediction", "discrete_steps", "betas", "zero_terminal_snr")
"""Settings of DDPM that a scheduler has."""
DDIM = {"timestep_spacing": "trailing", "set_alpha_to_one": True, "clip_sample": False, "thresholding": False}
"""Settings of diffusers' DDIMScheduler that give the steps of our sampler `ddim`."""
DDIM_DEFAULTS = {"timestep_spacing": "leading", "set_alpha_to_one": True, "clip_sample": True, "thresholding": False}
"""Values of these settings if `scheduler_config.json` does not have them."""
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "stochastic_sampling", "invert_sigmas")
"""Settings of a scheduler of flow matching that change its steps, not the network."""


def network_folder(source: Path) -> Path:
    """Return the folder of the network in a pipeline's folder; any other folder unchanged."""
    if not (source / PIPELINE_INDEX).exists():
        return source
    return next((source / part for part in PARTS if (source / part / CONFIG).exists()), source)


def check_single(source: Path) -> None:
    """Refuse a pipeline with two networks, each for some of the times."""
    index = read_json(source / PIPELINE_INDEX) if (source / PIPELINE_INDEX).exists() else {}
    if index.get(LOW_NOISE) not in (None, [None, None]):
        raise ConfigError(
            f"{source} has two networks, for times above and below boundary_ratio={index.get('boundary_ratio')}; give "
            f"the folder of one, {source / PARTS[0]} or {source / LOW_NOISE}"
        )


def complete(trained: TrainedModel, folder: Path) -> TrainedModel:
    """Add the settings of the pipeline around a network's folder, if its parent has a `model_index.json`."""
    root, model = folder.resolve().parent, trained.model
    if folder.resolve().name not in (*PARTS, LOW_NOISE) or not (root / PIPELINE_INDEX).exists():
        return trained
    index, vae = read_json(root / PIPELINE_INDEX), root / "vae"
    is_edit = index.get("_class_name") in {edit.class_name for edit in EDITS}
    clean = {"reference": is_edit, "first_frame": index.get("expand_timesteps")}
    trained = replace(
        trained,
        clean_parts=[name for name, is_clean in clean.items() if is_clean],
        autoencoder=str(vae) if (vae / CONFIG).exists() else trained.autoencoder,
    )
    if index.get("is_distilled"):  # FLUX.2 klein
        trained = replace(trained, sampling={**trained.sampling, "num_steps": 4, "guidance_scale": 1.0})
    folders = TEXT_ENCODERS.get(str(index.get("_class_name")))
    if folders is None:
        note = f"the text encoders of {index.get('_class_name')!r} in {root / PIPELINE_INDEX} are unknown"
        return replace(trained, notes=[*trained.notes, note])
    if folders and all((root / name / CONFIG).exists() for name in folders):
        trained = replace(trained, text_encoder=",".join(text_encoders_of(root)))
    path, notes = root / "scheduler" / SCHEDULER_CONFIG, list(trained.notes)
    if isinstance(trained.objective, FlowMatching) and path.exists():
        settings = read_json(path)
        objective = read_shift(settings, trained, str(path))
        if isinstance(boundary := index.get("boundary_ratio"), float):
            is_low = folder.resolve().name == LOW_NOISE
            objective = replace(objective, max_time=boundary) if is_low else replace(objective, min_time=boundary)
        if (name := settings.get("_class_name")) != (euler := "FlowMatchEulerDiscreteScheduler"):
            notes.append(f"the steps of our sampler are those of {euler}, not of {name} in {path}; the shift is read")
        if spacings := [f"{name}=True" for name in SPACINGS if settings.get(name)]:
            notes.append(f"the steps of our sampler are those without {', '.join(spacings)} in {path}")
        return replace(trained, objective=objective, recorded=True, notes=notes)
    zeros = index.get("force_zeros_for_empty_prompt", True)
    if isinstance(model, LDMUNetConfig) and model.pooled_size is not None and not zeros:
        trained = replace(trained, model=replace(model, null_text="empty"))
    if isinstance(trained.objective, DDPM) and path.exists():
        settings = read_json(path)
        ddpm = read_schedule(settings, str(path))
        read: dict[str, Any] = {name: getattr(ddpm, name) for name in SCHEDULE}
        trained = replace(trained, objective=replace(trained.objective, **read), recorded=True)
        scheduler, same_steps = settings.get("_class_name"), DDIM.items() <= {**DDIM_DEFAULTS, **settings}.items()
        if scheduler != "DDIMScheduler" or not same_steps:
            changes = ", ".join(f"{name}={value!r}" for name, value in DDIM.items())
            notes.append(
                f"the steps of our sampler differ from those of {scheduler} in {path}; the pipeline "
                "draws the same pictures from the same noise with pipeline.scheduler = "
                f"DDIMScheduler.from_config(pipeline.scheduler.config, {changes}), in a number of steps that divides "
                f"{ddpm.discrete_steps}"
            )
    return replace(trained, notes=notes)


def read_shift(settings: Mapping[str, Any], trained: TrainedModel, where: str) -> FlowMatching:
    """Return the objective of a trained model with the shift of a scheduler of flow matching."""
    objective, points = trained.objective, None
    assert isinstance(objective, FlowMatching)
    if settings.get("use_dynamic_shifting"):
        pipeline = pipeline_class(format_of_model(trained.model), trained.model)
        points = None if pipeline is None else pipeline.shift_by_tokens
        if points == "scheduler":
            points = tuple(settings.get(name, value) for name, value in zip(SHIFT_BY_TOKENS, (0.5, 1.15, 256, 4096)))
    shift = 1.0 if points is not None else settings.get("flow_shift", settings.get("shift", 1.0))
    last, kind = settings.get("shift_terminal"), settings.get("time_shift_type", "exponential")
    steps = settings.get("num_train_timesteps", REFERENCE_STEPS)
    odd = kind != "exponential" or steps != REFERENCE_STEPS or (points is None and settings.get("use_dynamic_shifting"))
    if odd or any(type(value) not in (int, float) for value in (shift, last or 0, *(points or ()))):
        raise ConfigError(
            f"{where}: shift={shift!r:.20}, shift by tokens {points!r:.60}, shift_terminal={last!r:.20}, "
            f"time_shift_type={kind!r:.20}, num_train_timesteps={steps!r:.20} and use_dynamic_shifting="
            f"{settings.get('use_dynamic_shifting')!r:.20} have no counterpart; copy the network to another folder, "
            "import it from there and give --objective"
        )
    by_tokens = list(points) if isinstance(points, tuple) else None
    return replace(objective, time_shift=shift, shift_by_tokens=by_tokens, last_time=last)


def read_schedule(settings: Mapping[str, Any], where: str) -> DDPM:
    """Return the objective that corresponds to a scheduler."""
    steps, name = settings.get("num_train_timesteps", 1000), str(settings.get("beta_schedule", "linear"))
    schedules = {diffusers_name: schedule for schedule, diffusers_name in BETA_SCHEDULES.items()}
    predictions = {diffusers_name: prediction for prediction, diffusers_name in PREDICTIONS.items()}
    predicted = str(settings.get("prediction_type", "epsilon"))
    betas = [settings.get(key, default) for key, default in (("beta_start", 1e-4), ("beta_end", 0.02))]
    scheduler, flow = str(settings.get("_class_name")), settings.get("use_flow_sigmas")
    odd = scheduler.removesuffix("Scheduler") not in BETA_SCHEDULERS or flow
    odd = odd or settings.get("trained_betas") is not None or name not in schedules or predicted not in predictions
    if odd or type(steps) is not int or not all(isinstance(beta, float) for beta in betas):
        raise ConfigError(
            f"{where}: {scheduler:.60} with use_flow_sigmas={flow!r:.20}, num_train_timesteps={steps!r:.20}, "
            f"beta_schedule={name!r:.40}, beta_start and beta_end {betas!r:.60}, prediction_type={predicted!r:.40}, "
            f"trained_betas={settings.get('trained_betas')!r:.40} have no counterpart; copy the network to another "
            "folder, import it from there and give --objective"
        )
    options: dict[str, Any] = {"schedule": schedules[name], "prediction": predictions[predicted]}
    if (published := PUBLISHED_BETAS.get(schedules[name])) is not None:
        scaled = [beta * steps / REFERENCE_STEPS for beta in betas]
        ends = [usual if abs(beta / usual - 1) < 1e-9 else beta for beta, usual in zip(scaled, published)]
        options["betas"] = None if ends == list(published) else ends
    return DDPM(discrete_steps=steps, zero_terminal_snr=bool(settings.get("rescale_betas_zero_snr", False)), **options)
