"""Selection of the diffusers pipeline for a model, and checks that it draws the same samples as our sampler.

A folder for `diffusers.DiffusionPipeline.from_pretrained` has one folder for each part and an index:

    model_index.json    classes of the pipeline and of every part
    transformer/        or unet/: the trained model
    scheduler/          for its objective
    vae/                autoencoder of its latents
    text_encoder/       and tokenizer/, for a model that reads texts

Source: diffusers 0.38, `pipelines/`: arguments of the constructors, and the steps of `__call__`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Optional

from dit.convert.diffusers_format import NULLS, VERSION, DiffusersFormat, TrainedModel
from dit.convert.diffusers_sampling import scheduler_config
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.noise_levels import REFERENCE_STEPS

CLIP = ("clip",)
T5_LIKE = ("t5", "umt5", "sentence")
"""Kinds of `dit.encoders.text_config` with a class that returns tokens first and takes an attention mask."""


@dataclass(frozen=True)
class TextPart:
    """A text encoder of a pipeline.

    Attributes:
        makes: entry of the text, as in `dit.encoders.text_config`.
        kinds: kinds of encoders that the pipeline supports.
        known: name of these for messages.
        suffix: of its folders, `text_encoder` and `tokenizer`.
        padded: the model attends to padding. None for a pooled vector, which does not depend on padding.
        cut: the pipeline uses the longest text of the tokenizer; otherwise it is an argument of the call.
    """

    makes: str
    kinds: tuple[str, ...]
    known: str
    suffix: str = ""
    padded: Optional[bool] = None
    cut: bool = False


@dataclass(frozen=True)
class Pipeline:
    """A pipeline class of diffusers for a model class of diffusers.

    Attributes:
        texts: its text encoders.
        flow: runs flow matching, otherwise DDPM of `REFERENCE_STEPS` steps.
        shift: adds the `shift_factor` of the autoencoder; the others ignore it.
        guided_by_texts: leads away from the embedding of the empty text.
        arguments: further arguments of its call.
        note: what it does with a prompt that we do not.
        index: further entries of `model_index.json`.
    """

    class_name: str
    texts: tuple[TextPart, ...] = ()
    flow: bool = False
    shift: bool = False
    guided_by_texts: bool = False
    arguments: tuple[str, ...] = ()
    note: Optional[str] = None
    index: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


PIPELINES = {
    "DiTTransformer2DModel": Pipeline("DiTPipeline"),
    "PixArtTransformer2DModel": Pipeline(
        "PixArtAlphaPipeline",
        (TextPart("text", T5_LIKE, "a T5 or a BERT", padded=False),),
        guided_by_texts=True,
        arguments=("clean_caption=False", "use_resolution_binning=False"),
        note="PixArtAlphaPipeline converts prompts to lower case; prepare captions in lower case for it",
    ),
    "UNet2DConditionModel": Pipeline(
        "StableDiffusionPipeline",
        (TextPart("text", CLIP, "a CLIP text model", padded=True, cut=True),),
        guided_by_texts=True,
        index=MappingProxyType(
            {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
        ),
    ),
    "FluxTransformer2DModel": Pipeline(
        "FluxPipeline",
        (
            TextPart("pooled", CLIP, "a CLIP text model", cut=True),
            TextPart("text", ("t5",), "a T5", suffix="_2", padded=True),
        ),
        flow=True,
        shift=True,
    ),
}
"""By the class of the model."""

NONE: Mapping[str, str] = {
    "WanTransformer3DModel": "WanPipeline pads texts with zeros to 512 tokens and attends to them, but the model was "
    "trained without padding",
    "AutoencoderKL": "an autoencoder is a part of the pipelines of other models",
}
"""Reasons why a model class has no pipeline."""


def pipeline_of(form: DiffusersFormat[ModelConfig], trained: TrainedModel) -> Pipeline:
    """Return the pipeline that draws the same samples from a model as our sampler.

    Raises:
        ConfigError: there is none, or it would draw other samples.
    """
    pipeline = PIPELINES.get(form.class_name)
    faults = [] if pipeline is None else [*_objective_faults(pipeline, trained), *_model_faults(pipeline, trained)]
    if pipeline is None or faults:
        why = NONE[form.class_name] if pipeline is None else f"{pipeline.class_name} {'; '.join(faults)}"
        raise ConfigError(f"--format pipeline: {why}; export {form.class_name} with --format diffusers")
    return pipeline


def _objective_faults(pipeline: Pipeline, trained: TrainedModel) -> list[str]:
    objective = trained.objective
    if pipeline.flow:
        runs = isinstance(objective, FlowMatching) and objective.prediction == "velocity"
        needed = "flow matching of the velocity"
    else:
        # The pipeline passes the scheduler's steps to the network unchanged.
        runs = isinstance(objective, DDPM) and objective.discrete_steps == REFERENCE_STEPS
        needed = f"DDPM of {REFERENCE_STEPS} steps (objective.discrete_steps={REFERENCE_STEPS})"
    return [] if runs else [f"runs {needed}, but this model was trained with {objective}"]


def _model_faults(pipeline: Pipeline, trained: TrainedModel) -> list[str]:
    model = trained.model
    names = {condition.name for condition in model.conditions()}
    faults = []
    if extra := sorted(names & {"control", "size_and_crop", "context_2"}):
        faults.append(f"has no {', '.join(extra)}, which this model takes")
    text = next((condition for condition in model.conditions() if condition.name == "context"), None)
    if pipeline.guided_by_texts and text is not None and text.null != "empty text":
        faults.append(
            f"uses the embedding of the empty text as unconditional, but this model learned {NULLS[0]} instead; train "
            "with model.null_text=empty"
        )
    return faults


def model_index(
    pipeline: Pipeline, form: DiffusersFormat[ModelConfig], trained: TrainedModel, classes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of `model_index.json`.

    Args:
        classes: of text encoders and tokenizers, all of transformers, by their folders.
    """
    scheduler = scheduler_config(trained.objective)
    assert scheduler is not None  # `pipeline_of`
    index: dict[str, Any] = {"_class_name": pipeline.class_name, "_diffusers_version": VERSION, **pipeline.index}
    if trained.class_names is not None:
        index["id2label"] = {str(i): name for i, name in enumerate(trained.class_names)}
    return {
        **index,
        "scheduler": ["diffusers", scheduler["_class_name"]],
        form.part: ["diffusers", form.class_name],
        "vae": ["diffusers", "AutoencoderKL"],
        **{name: ["transformers", class_name] for name, class_name in classes.items()},
    }


def loading_lines(pipeline: Pipeline, trained: TrainedModel, *, space: int, most_tokens: Mapping[str, int]) -> str:
    """Return Python code that loads a folder and draws one picture of the training size.

    Args:
        space: pixels per side of a latent position.
        most_tokens: longest text by entry of the encoder.
    """
    sampling, (_, height, width) = dict(trained.sampling), trained.latent_size
    # The guidance_scale of FLUX is an input of the distilled network.
    scale = getattr(trained.model, "guidance", None) if pipeline.flow else sampling.get("guidance_scale")
    call = [f"num_inference_steps={sampling.get('num_steps', 50)}", f"guidance_scale={scale or 1.0}"]
    if pipeline.texts:
        prompt = repr((sampling.get("prompts") or ["a red circle"])[0])
        call = [prompt, *call, f"height={height * space}", f"width={width * space}", *pipeline.arguments]
        call += [f"max_sequence_length={most_tokens[t.makes]}" for t in pipeline.texts if not t.cut]
    else:
        call = ["class_labels=[0]", *call]
    return "\n".join(
        [
            "from diffusers import DiffusionPipeline",
            "",
            'pipeline = DiffusionPipeline.from_pretrained("THIS_FOLDER")',
            f"image = pipeline({', '.join(call)}).images[0]",
            'image.save("image.png")',
        ]
    )
