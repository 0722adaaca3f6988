"""Write the weights of a run in each format of `launch.export`."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from torch import Tensor

from dit.checkpoint.full_weights import read_full_weights
from dit.convert import original_dit
from dit.convert.diffusers_format import LatentSize, TrainedModel, format_of_model
from dit.convert.diffusers_pipeline import GUIDER, Pipeline, loading_lines, model_index, pipeline_of, spacing_notes
from dit.convert.diffusers_sampling import (
    PAGE,
    SCHEDULER_CONFIG,
    how_to_sample,
    loop,
    num_steps_of,
    page,
    scheduler_config,
    spaced_scheduler,
    steps_notes,
)
from dit.convert.lora import comfyui_tensors, to_external_layers, write_adapter_folder
from dit.convert.original_dit import trained_objective
from dit.convert.rules import RuleBook
from dit.convert.run_record import CONFIG_KEY, METADATA_KEY, name_of, to_record
from dit.convert.state_files import to_json, write_diffusers, write_tensors
from dit.encoders.text import TextEncoder
from dit.encoders.text_config import TextEncoderConfig, check_text_encoder
from dit.encoders.vae import VAE, Geometry
from dit.errors import ConfigError
from dit.inference.generator import load_generator
from dit.inference.latents import measure_latents
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.pipeline_folder import TEXT_ENCODERS
from dit.run_config import RunConfig
from dit.settings import SamplingConfig
from dit.terminal import counted

EXACT = {"DDIMScheduler": "ddim", "FlowMatchEulerDiscreteScheduler": "euler"}
"""Our solver that a scheduler of diffusers computes."""


def trained_model(config: RunConfig, metadata: dict[str, Any]) -> TrainedModel:
    """Return the model with the metadata that are written with its weights."""
    frames, height, width = metadata["latent_size"]
    clean = {
        "reference": config.data.references_setting(),
        "first_frame": getattr(config.data, "clean_first_frame", 0.0),
    }
    return TrainedModel(
        model=config.model.without_adapters(),
        objective=config.objective,
        latent_size=(frames, height, width),
        sampling=asdict(replace(config.sampling, vae=None)),  # it is the `autoencoder`
        # A data set may have classes that the model does not use.
        class_names=None if config.model.condition("label") is None else metadata["class_names"],
        text_encoder=metadata.get("text_encoder"),
        autoencoder=metadata.get("autoencoder") or config.sampling.vae,
        max_text_tokens=config.data.longest_text or metadata.get("max_text_tokens"),
        attributions=metadata.get("attributions", []),
        fps=metadata.get("fps"),
        clean_parts=metadata.get("clean_parts") or [name for name, setting in clean.items() if setting],
        reference_aspect=metadata.get("reference_aspect"),
    )


def with_one_shift(trained: TrainedModel) -> TrainedModel:
    """Return a model with the time shift of its latent size; other code bases have none that depends on the size."""
    objective = trained.objective
    if getattr(objective, "shift_dimension", None) is None:
        return trained
    return replace(trained, objective=objective.at_size(math.prod(trained.latent_size), trained.model.in_channels))


def with_latent_scale(model: ModelConfig, folder: Path, *, raw_weights: bool) -> ModelConfig:
    """Return an autoencoder's settings with scale and shift of its latents, measured unless it states them."""
    assert isinstance(model, AutoencoderConfig)
    if model.scaling_factor is not None:
        return model
    mean, deviation = measure_latents(load_generator(folder, weights="raw" if raw_weights else "ema"))
    shift = None if model.quantizes else mean if model.shift_factor is None else model.shift_factor
    return replace(model, scaling_factor=1 / deviation, shift_factor=shift)


def write_adapters(
    form_name: str, folder: Path, slot: str, config: RunConfig, trained: TrainedModel, out: Path
) -> list[str]:
    """Write the adapters of a run, without the base's weights; return the notes."""
    if config.model.adapters is None:
        raise ConfigError(
            f"--format {form_name}: {folder} has a full model and no adapters (LoRA); use diffusers or dit"
        )
    form = format_of_model(trained.model)
    rules = form.rules(trained.model, parameter_shapes(trained.model), trained.latent_size)
    layers = to_external_layers(rules, read_full_weights(folder, slot), config.model.adapters.scale)
    if form_name == "diffusers-lora":
        write_adapter_folder(layers, form, trained.model, out)
    elif out.suffix != ".safetensors":
        raise ConfigError(f"--out {out} must end in .safetensors")
    else:
        write_tensors(comfyui_tensors(layers, form.comfyui_name), out)
    return [f"{len(layers)} layers of {form.class_name}; alpha is their rank, so that their scale is 1"]


def original_rules(model: ModelConfig, latent_size: LatentSize) -> RuleBook:
    """Return the rules between facebookresearch/DiT and one of our models."""
    if type(model) is not DiTConfig:
        raise ConfigError(
            f"--format dit is for the class-conditional DiT (DiTConfig), not {type(model).__name__}; "
            "try --format diffusers"
        )
    return original_dit.rules(model, parameter_shapes(model), latent_size)


def write_original(trained: TrainedModel, weights: Callable[[], dict[str, Tensor]], out: Path) -> list[str]:
    """Write a state dict of facebookresearch/DiT; return the notes."""
    rules = original_rules(trained.model, trained.latent_size)
    write_tensors(rules.to_external(weights()), out, {METADATA_KEY: json.dumps(to_record(trained))})
    notes = note_objective(trained.objective, trained_objective(trained.model))
    if notes:
        notes += how_to_sample(trained)
    if out.suffix == ".pt":
        notes.append(
            "a .pt file cannot store objective, class names and sampling defaults: give its importer --objective, "
            "or write a .safetensors"
        )
    return notes


def write_diffusers_folder(trained: TrainedModel, weights: Callable[[], dict[str, Tensor]], out: Path) -> list[str]:
    """Write a folder in the diffusers layout, scheduler and page included; return the notes."""
    form = format_of_model(trained.model)
    settings, notes = form.write_settings(trained.model, trained.latent_size)
    published = form.read_settings(settings).objective
    rules = form.rules(trained.model, parameter_shapes(trained.model), trained.latent_size)
    notes += [*rules.export_notes(), *steps_notes(trained), *spacing_notes(form, trained)]
    texts, code = {}, None
    if (scheduler := scheduler_config(trained.objective, num_steps_of(trained))) is not None:
        texts[SCHEDULER_CONFIG] = to_json(scheduler)
        code = loop(trained, scheduler["_class_name"]) if isinstance(trained.model, DiTConfig) else None
    texts[PAGE] = page(trained, form.class_name, notes=notes, code=code)
    record = {CONFIG_KEY: to_record(trained)}
    tensors = rules.to_external(weights())
    write_diffusers({**settings, **record}, tensors, out, texts=texts)
    use = "encode and decode" if isinstance(trained.model, AutoencoderConfig) else "sample"
    return [*notes, *note_objective(trained.objective, published), f"{out / PAGE} says how to {use} with diffusers"]


def note_objective(objective: Objective, published: Objective) -> list[str]:
    """Return a note if the weights need another scheduler than the published ones of the same class."""
    if objective == published or objective.reconstructs:
        return []
    ours, theirs = ({"objective": name_of(part), **asdict(part)} for part in (objective, published))  # type: ignore[call-overload]
    names = [name for name in ours if ours[name] != theirs.get(name)]
    if "objective" in names:
        names = ["objective"]
    differences = ", ".join(f"{name}={ours[name]} (published: {theirs[name]})" for name in names)
    return [f"published weights of this class were trained with other settings: {differences}; sample with ours"]


def write_pipeline(
    trained: TrainedModel, weights: Callable[[], dict[str, Tensor]], out: Path, *, autoencoder: Optional[str]
) -> list[str]:
    """Write a folder that `diffusers.DiffusionPipeline.from_pretrained` opens; return the notes."""
    form = format_of_model(trained.model)
    pipeline = pipeline_of(form, trained)
    geometry = check_autoencoder(pipeline, trained, autoencoder)
    encoders = check_encoders(pipeline, trained.text_encoder)
    assert autoencoder is not None
    trained, tensors = form.for_pipeline(trained, weights())
    settings, notes = form.write_settings(trained.model, trained.latent_size)
    objective = trained.objective
    if isinstance(objective, FlowMatching) and objective.shift_by_tokens and pipeline.shift_by_tokens != "scheduler":
        tokens = math.prod(trained.latent_size) // (trained.model.patch_temporal * trained.model.patch_spatial**2)
        objective = objective.at_size(tokens, trained.model.token_channels)
        notes.append(f"the scheduler has the shift of samples of {tokens} tokens, the training size, at any size")
    scheduler = scheduler_config(objective, num_steps_of(trained))
    assert scheduler is not None  # `pipeline_of`
    if pipeline.times == "none":
        assert isinstance(objective, FlowMatching)  # `pipeline_of`
        scheduler = spaced_scheduler(objective, num_steps_of(trained))
        notes.append(f"the scheduler takes the noise levels of launch.sample in {num_steps_of(trained)} steps only")
    notes += steps_notes(trained)
    if pipeline.note is not None and any(encoder.prompt == "plain" for encoder in encoders.values()):
        notes.append(pipeline.note)
    notes += sampling_notes(pipeline, trained)
    solver, run_solver = EXACT[scheduler["_class_name"]], trained.sampling.get("solver")
    if run_solver not in (None, solver):
        notes.append(
            f"the scheduler is that of solver={solver}; the run samples by {run_solver}, which differs slightly"
        )

    def write_parts(folder: Path) -> dict[str, str]:
        VAE(autoencoder).save(folder / "vae", shift=pipeline.flow)
        classes: dict[str, str] = {}
        for name, encoder in encoders.items():
            classes |= TextEncoder(encoder).save(folder, name, cut=pipeline.cuts(name))
        return {"model_index.json": to_json(model_index(pipeline, form, trained, classes))}

    token_limits = {name: encoder.geometry().max_tokens for name, encoder in encoders.items()}
    pixels = geometry.pixel_shape(*trained.latent_size)
    area = math.prod(pixels)
    if "reference" in trained.clean_parts:
        ours = f"launch.sample scales references to about {area:,} pixels and crops them, as prepare --enlarge does"
        notes.append(f"{ours}; {pipeline.class_name} {pipeline.references}")
    code = loading_lines(pipeline, trained, pixels=pixels, most_tokens=token_limits)
    guider = {"_class_name": GUIDER, "guidance_scale": trained.sampling.get("guidance_scale", 1.0)}
    rules = form.rules(trained.model, parameter_shapes(trained.model), trained.latent_size)
    write_diffusers(
        {**settings, CONFIG_KEY: to_record(trained)},
        rules.to_external(tensors),
        out,
        subfolder=form.part,
        texts={
            PAGE: page(trained, pipeline.class_name, notes=notes, folder=form.part, code=code),
            f"scheduler/{SCHEDULER_CONFIG}": to_json(scheduler),
            **({"guider/guider_config.json": to_json(guider)} if pipeline.scale is None else {}),
        },
        others=write_parts,
    )
    return [*notes, f"{out / PAGE} has the lines that load the {pipeline.class_name}"]


def sampling_notes(pipeline: Pipeline, trained: TrainedModel) -> list[str]:
    """Return a note for each difference from the run's own guidance and thresholding."""
    sampling, name = {**vars(SamplingConfig()), **trained.sampling}, pipeline.class_name
    notes, lacking, guides = [], ["thresholding"], trained.sampling.get("guidance_scale", 1.0) != 1
    if guides and pipeline.flow and not pipeline.guided_by_texts:
        notes.append(f"{name} is called without guidance by texts, as launch.sample --guidance-scale 1")
    elif guides:
        settings = ("guidance_channels", "guidance_rescale", "guidance_interval")
        lacking += [key for key in settings if not any(word.startswith(key) for word in pipeline.arguments)]
    if guides and pipeline.guided_by_texts and bool(sampling["guidance_norm"]) != pipeline.keeps_norm:
        notes.append(f"{name} guides as launch.sample --{'' if pipeline.keeps_norm else 'no-'}guidance-norm")
    if dropped := [f"{key}={sampling[key]}" for key in lacking if sampling[key] != getattr(SamplingConfig, key)]:
        notes.append(f"{name} is called without sampling.{', '.join(dropped)}")
    return notes


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Add the option that names another part of the pipeline to an error of reading the recorded one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--format pipeline: {error}; if it has moved, give {option}") from error


def check_autoencoder(pipeline: Pipeline, trained: TrainedModel, name: Optional[str]) -> Geometry:
    """Return the sizes of the autoencoder of a pipeline."""
    if name is None:
        raise ConfigError(
            f"--format pipeline: {pipeline.class_name} decodes latents, and the run names no autoencoder; give --vae "
            "PATH, or train on latents (a model of pixels has no pipeline; use --format diffusers)"
        )
    with _naming("--vae PATH"):
        geometry, channels = Geometry.read(name), trained.model.in_channels
    pixels = pipeline.compression or geometry.space
    if (geometry.kind, geometry.channels, geometry.space) != (pipeline.vae, channels, pixels):
        raise ConfigError(
            f"--format pipeline: {pipeline.class_name} needs an {pipeline.vae} of {channels} channels that compresses "
            f"{pixels} x {pixels} pixels, and {name!r} is a {geometry.kind} of {geometry.channels} that compresses "
            f"{geometry.space} x {geometry.space}; give --vae PATH, or use --format diffusers for the model without a "
            "pipeline"
        )
    return geometry


def check_encoders(pipeline: Pipeline, line: Optional[str]) -> dict[str, TextEncoderConfig]:
    """Return the text encoders of a pipeline by their folders."""
    if not pipeline.texts:
        return {}
    if line is None:
        raise ConfigError(
            f"--format pipeline: {pipeline.class_name} needs {counted(len(pipeline.texts), 'text encoder')} "
            f"({'; '.join(pipeline.texts).replace('|', ' or ')}), and the run names none; give --text-encoder"
        )
    with _naming("--text-encoder"):
        available = [(encoder, encoder.geometry().kind) for encoder in check_text_encoder(line).encoders]
    encoders = {}
    for folder, kinds in pipeline.text_folders.items():
        template, or_plain = TEXT_ENCODERS[pipeline.class_name][folder], pipeline.note is not None
        required, supported = TextEncoderConfig.parse(template.format("-")), kinds.split("|")
        fitting = [e for e, kind in available if kind in supported and _fits(e, required, or_plain=or_plain)]
        if not fitting:
            raise ConfigError(
                f"--format pipeline: {pipeline.class_name} needs a text encoder of kind {kinds.replace('|', ' or ')}, "
                f"`{template.format('NAME')}`; the texts of this run are of {line!r}; prepare the data with such an "
                "encoder, or use --format diffusers for the model without a pipeline"
            )
        encoders[folder] = fitting[0]
    return encoders


def _fits(encoder: TextEncoderConfig, required: TextEncoderConfig, *, or_plain: bool) -> bool:
    """Return whether an encoder makes the entries that a pipeline requires, for texts of any length."""
    # A pooled vector does not depend on padding.
    padded = encoder.padded if "text" in required.makes else required.padded
    prompt = required.prompt if or_plain and encoder.prompt == "plain" else encoder.prompt
    free = {name: getattr(required, name) for name in ("name", "makes", "max_tokens")}
    compared = replace(encoder, padded=padded, prompt=prompt, **free)
    return set(required.makes) <= set(encoder.makes) and compared == required
