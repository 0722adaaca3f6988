"""Selection of the diffusers pipeline for a model; settings with which it would draw other samples are refused.

A folder for `diffusers.DiffusionPipeline.from_pretrained` has one folder for each part and an index:

    model_index.json    classes of the pipeline and of every part
    transformer/        or unet/: the trained model
    scheduler/          for its objective
    vae/                autoencoder of its latents
    text_encoder/       and tokenizer/, for a model that reads texts
    processor/          of pictures that the text encoder reads

Source: diffusers 0.38, `pipelines/`: arguments of the constructors, and the steps of `__call__`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional

from dit.condition_table import SIZE_AND_CROP, size_and_crop
from dit.convert.diffusers_format import NULLS, VERSION, DiffusersFormat, TrainedModel
from dit.convert.diffusers_sampling import num_steps_of, scheduler_config
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.noise_levels import REFERENCE_STEPS
from dit.pipeline_folder import TEXT_ENCODERS

FLUX2_SHIFT = (1.62160747, 2.02335116, 256, 4096)
"""`compute_empirical_mu` for 50 steps: mu at 256 and at 4096 tokens; it is linear up to 4300 tokens."""
GUIDER = "ClassifierFreeGuidance"
"""Class of the part `guider`."""
WAN_FPS = 16
"""Frames per second of Wan's clips."""
RESCALED = ("guidance_rescale={rescale}",)
"""`Pipeline.arguments` of pipelines that rescale guided predictions."""
OWN_SIZES = "takes references at their own size, unless they have more than 1,048,576 pixels"
"""`Pipeline.references` of FLUX.2."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline class of diffusers for a model class of diffusers.

    Attributes:
        texts: supported kinds of each text encoder, separated by `|`, see `dit.encoders.text_config`;
            `dit.pipeline_folder` has their entries and options.
        cuts_texts: the longest text is that of the tokenizer; otherwise it is an argument of the call, except for CLIP.
        flow: it runs flow matching and adds the `shift_factor` of an `AutoencoderKL`; otherwise it runs DDPM of
            `REFERENCE_STEPS` steps and ignores this factor.
        guided_by_texts: guidance uses the embedding of the empty text as unconditional.
        scale: argument of the call for the scale of guidance; None for a part `guider` that has it.
        scale_of_none: value of this argument without guidance.
        keeps_norm: guidance keeps the norm of predictions, as `sampling.guidance_norm` does.
        compression: pixels per side, per position of a latent; None for those of the autoencoder.
        times: which times of flow matching its call passes to the scheduler: n evenly spaced ones (`even`), these if
            they are an argument of the call (`argument`), n - 1 of them and the clean end (`end`), or none (`none`).
        shift_by_tokens: how the shift mu of the times depends on the number of tokens: `scheduler` if the call reads it
            from the scheduler; four numbers as in `FLUX2_SHIFT` if it computes mu itself; None for no such shift.
        reads_control: takes a control picture, which the autoencoder encodes.
        references: how it scales pictures to edit, which `launch.sample` scales and crops as training data; None if it
            takes none.
        reads_adapters: its `load_lora_weights` exists and reads adapters of the model; that of PRX is for UNets.
        arguments: further arguments of the call; `{area}` is that of a picture in pixels, `{rescale}` the setting
            `sampling.guidance_rescale`.
        setup: lines of Python between opening the folder and the call; `{area}` as in `arguments`.
        note: difference to our sampler, printed if an encoder of the run changes no prompts (`prompt=plain`), which a
            pipeline with its own prompts accepts only with a note.
        index: further entries of `model_index.json` by name, as functions of a `TrainedModel`.
        setting: setting that a model of this pipeline has; None for all models of the class.
    """

    model_class: str
    class_name: str
    texts: tuple[str, ...] = ()
    cuts_texts: bool = False
    flow: bool = True
    guided_by_texts: bool = True
    scale: Optional[str] = "guidance_scale"
    scale_of_none: float = 1.0
    keeps_norm: bool = False
    vae: str = "AutoencoderKL"
    compression: Optional[int] = None
    times: Literal["even", "argument", "end", "none"] = "even"
    shift_by_tokens: Optional[Literal["scheduler"] | tuple[float, float, float, float]] = None
    draws_clips: bool = False
    reads_control: bool = False
    references: Optional[str] = None
    reads_adapters: bool = True
    arguments: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    note: Optional[str] = None
    index: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    setting: Optional[str] = None

    @property
    def text_folders(self) -> dict[str, str]:
        """The supported kinds of each text encoder by its folder."""
        return {f"text_encoder_{i}" if i > 1 else "text_encoder": kinds for i, kinds in enumerate(self.texts, 1)}

    def cuts(self, folder: str) -> bool:
        """Return whether the tokenizer of a text encoder has the length of the longest text."""
        return self.cuts_texts or self.text_folders[folder].startswith("clip")


ZEROS = "force_zeros_for_empty_prompt"
"""Entry of `model_index.json` that, if true, replaces the embedding of the empty text by zeros."""


def _has_times_per_token(trained: TrainedModel) -> bool:
    """Return whether each token has its own time: that of every second latent position, for patches of 1 x 2 x 2."""
    patch = (trained.model.patch_temporal, trained.model.patch_spatial)
    return "first_frame" in trained.clean_parts and patch == (1, 2)


TOKEN_TYPES = (
    "# transformers 5 needs the types of tokens, which diffusers 0.38 omits (huggingface/diffusers issue 14194)",
    "mark = pipeline.text_encoder.config.image_token_id",
    "pipeline.text_encoder.register_forward_pre_hook(",
    '    lambda module, inputs, named: (inputs, dict(named, mm_token_type_ids=(named["input_ids"] == mark).int())),',
    "    with_kwargs=True,",
    ")",
)
"""Lines that give tokens of a picture their positions in Qwen2.5-VL."""
FLUX = Pipeline(
    "FluxTransformer2DModel", "FluxPipeline", ("clip", "t5"), guided_by_texts=False, shift_by_tokens="scheduler"
)
FLUX2 = Pipeline(
    "Flux2Transformer2DModel",
    "Flux2KleinPipeline",
    ("qwen3",),
    vae="AutoencoderKLFlux2",
    shift_by_tokens=FLUX2_SHIFT,
    references=OWN_SIZES,
    index={"is_distilled": lambda trained: trained.sampling.get("guidance_scale") == 1},  # then it never guides
)
QWEN_IMAGE = Pipeline(
    "QwenImageTransformer2DModel",
    "QwenImagePipeline",
    ("qwen2_5_vl",),
    scale="true_cfg_scale",
    keeps_norm=True,
    shift_by_tokens="scheduler",
    vae="AutoencoderKLQwenImage",
    arguments=('negative_prompt=""',),
)
PIPELINES = (
    Pipeline("DiTTransformer2DModel", "DiTPipeline", flow=False, guided_by_texts=False, reads_adapters=False),
    Pipeline(
        "PixArtTransformer2DModel",
        "PixArtAlphaPipeline",
        ("t5|umt5|sentence",),
        flow=False,
        reads_adapters=False,
        arguments=("clean_caption=False", "use_resolution_binning=False"),
        note="PixArtAlphaPipeline converts prompts to lower case; prepare captions in lower case for it",
    ),
    Pipeline(
        "UNet2DConditionModel",
        "StableDiffusionXLPipeline",
        ("clip", "clip_projected"),
        setting="pooled_size",
        flow=False,
        arguments=RESCALED,
        index={"add_watermarker": lambda _: False, ZEROS: lambda trained: trained.model.null_text == "zeros"},
    ),
    Pipeline(
        "UNet2DConditionModel",
        "StableDiffusionPipeline",
        ("clip",),
        flow=False,
        arguments=RESCALED,
        index={"requires_safety_checker": lambda _: False},
    ),
    replace(
        FLUX,
        class_name="FluxControlPipeline",
        setting="control_channels",
        reads_control=True,
        note="FluxControlPipeline draws the latent of a control picture from the autoencoder's distribution; our "
        "data and sampler use its mean",
    ),
    FLUX,
    Pipeline(
        "ChromaTransformer2DModel",
        "ChromaPipeline",
        ("t5",),
        shift_by_tokens="scheduler",
        note="ChromaPipeline of diffusers 0.38 adds its mask of numbers to scores of attention, so tokens attend to "
        "padding (huggingface/diffusers issue 13619); our sampler masks padding, as the published training",
    ),
    replace(
        FLUX2, class_name="Flux2Pipeline", texts=("mistral3",), setting="guidance", guided_by_texts=False, index={}
    ),
    FLUX2,
    QWEN_IMAGE,
    Pipeline(
        "SD3Transformer2DModel",
        "StableDiffusion3Pipeline",
        ("clip_projected", "clip_projected", "t5"),
        times="argument",
        shift_by_tokens="scheduler",
    ),
    Pipeline(
        "Lumina2Transformer2DModel",
        "Lumina2Pipeline",
        ("gemma2",),
        compression=8,
        arguments=("cfg_normalization=False",),
    ),
    Pipeline(
        "ZImageTransformer2DModel",
        "ZImagePipeline",
        ("qwen3",),
        scale_of_none=0.0,
        times="end",
        shift_by_tokens="scheduler",
    ),
    Pipeline(
        "PRXTransformer2DModel",
        "PRXPipeline",
        ("t5gemma",),
        cuts_texts=True,
        times="none",
        reads_adapters=False,
        arguments=("use_resolution_binning=False",),
        note="PRXPipeline also removes URLs, brackets and some words from prompts; see its `TextPreprocessor`",
    ),
    Pipeline(
        "SanaTransformer2DModel",
        "SanaPipeline",
        ("gemma2",),
        vae="AutoencoderDC",
        times="argument",
        arguments=("use_resolution_binning=False",),
    ),
    Pipeline(
        "HunyuanVideo15Transformer3DModel",
        "HunyuanVideo15Pipeline",
        ("qwen2_5_vl_text|qwen2_5_vl", "t5"),
        cuts_texts=True,
        scale=None,
        vae="AutoencoderKLHunyuanVideo15",
        draws_clips=True,
        reads_adapters=False,
    ),
    Pipeline(
        "WanTransformer3DModel",
        "WanPipeline",
        ("umt5|t5",),
        vae="AutoencoderKLWan",
        times="none",
        draws_clips=True,
        index={"expand_timesteps": _has_times_per_token},
        note="WanPipeline joins the white space of a prompt and replaces HTML entities",
    ),
)
"""The first entry that fits a model is used, so a pipeline with a `setting` precedes the other one of its class."""

EDITS = (
    replace(
        FLUX,
        class_name="FluxKontextPipeline",
        references="takes references at their own size",
        arguments=("max_area={area}", "_auto_resize=False"),
    ),
    replace(
        QWEN_IMAGE,
        class_name="QwenImageEditPlusPipeline",
        setup=(
            "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus",
            "pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = {area}  # pixels to which it scales references",
            *TOKEN_TYPES,
        ),
        references="scales references to this area with sides that are multiples of 32 pixels, without a crop",
    ),
    replace(
        QWEN_IMAGE,
        class_name="QwenImageEditPipeline",
        references="scales references to 1,048,576 pixels, without a crop",
        setup=TOKEN_TYPES,
    ),
)
"""Pipelines of models that were trained with a picture to edit, and whose class has another pipeline without one."""


def pipeline_class(form: DiffusersFormat[ModelConfig], model: ModelConfig) -> Optional[Pipeline]:
    """Return the pipeline of a model; None for an autoencoder."""
    fitting = (p for p in PIPELINES if p.model_class == form.class_name)
    return next((p for p in fitting if p.setting is None or getattr(model, p.setting) is not None), None)


def spacing_notes(form: DiffusersFormat[ModelConfig], trained: TrainedModel) -> list[str]:
    """Return a note on a pipeline whose scheduler spaces the steps of flow matching."""
    pipeline = pipeline_class(form, trained.model)
    if pipeline is None or pipeline.times != "none" or not isinstance(trained.objective, FlowMatching):
        return []
    return [
        f"{pipeline.class_name} lets its scheduler space the steps, and launch.sample spaces them evenly; "
        "launch.export --format pipeline writes a scheduler with the steps of launch.sample"
    ]


def pipeline_of(form: DiffusersFormat[ModelConfig], trained: TrainedModel) -> Pipeline:
    """Return the pipeline that draws the same samples from a model as our sampler."""
    pipeline = pipeline_class(form, trained.model)
    if pipeline is not None and pipeline.setting is None and "reference" in trained.clean_parts:
        # Use the pipeline of EDITS whose text encoder has the `prompt` of the run, or the first one of this class.
        options = re.split("[:,]", trained.text_encoder or "")
        edits = [edit for edit in EDITS if edit.model_class == form.class_name]
        prompts = [TEXT_ENCODERS[edit.class_name]["text_encoder"].removeprefix("{}:") for edit in edits]
        selected = [edit for edit, prompt in zip(edits, prompts) if prompt in options]
        pipeline = (selected or edits or [pipeline])[0]
    faults = [] if pipeline is None else [*_objective_faults(pipeline, trained), *_model_faults(pipeline, trained)]
    if pipeline is None or faults:
        none = "no complete pipeline of this class is written"
        why = none if pipeline is None else f"{pipeline.class_name} {'; '.join(faults)}"
        raise ConfigError(f"--format pipeline: {why}; export {form.class_name} with --format diffusers")
    return pipeline


def _objective_faults(pipeline: Pipeline, trained: TrainedModel) -> list[str]:
    objective = trained.objective
    if pipeline.flow:
        runs = isinstance(objective, FlowMatching) and objective.prediction == "velocity"
        runs = runs and objective.trained_times == (0, 1)
        runs = runs and not (pipeline.times == "end" and getattr(objective, "last_time", None) is not None)
        needed = "flow matching of the velocity at all times" + " without a last time" * (pipeline.times == "end")
    else:
        # The pipeline passes the scheduler's steps to the network unchanged.
        runs = isinstance(objective, DDPM) and objective.discrete_steps == REFERENCE_STEPS
        runs = runs and getattr(objective, "network_time", None) == "time"
        needed = f"DDPM of {REFERENCE_STEPS} steps (objective.discrete_steps={REFERENCE_STEPS}, network_time=time)"
    return [] if runs else [f"runs {needed}, but this model was trained with {objective}"]


def _model_faults(pipeline: Pipeline, trained: TrainedModel) -> list[str]:
    model = trained.model
    names = {condition.name for condition in model.conditions()}
    faults = []
    reads_second = any("text_2" in line for line in TEXT_ENCODERS[pipeline.class_name].values())
    without = {
        "control" * (not pipeline.reads_control),
        "first_frames",
        "context_2" * (not reads_second),
    }
    if extra := sorted(names & without):
        faults.append(f"has no {', '.join(extra)}, which this model takes")
    edits = [
        *["data.references=True"] * ("reference" in trained.clean_parts),
        *["model.clean_reference_time=True"] * getattr(model, "clean_reference_time", False),
    ]
    if edits and pipeline.references is None:
        faults.append(f"takes no picture to edit, which this model takes ({' and '.join(edits)})")
    text = next((condition for condition in model.conditions() if condition.name == "context"), None)
    nulls, zeros = (("empty text", 0.0), " or zeros") if ZEROS in pipeline.index else (("empty text",), "")
    if pipeline.guided_by_texts and text is not None and text.null not in nulls:
        faults.append(
            f"uses the embedding of the empty text{zeros} as unconditional, but this model learned {NULLS[0]} instead; "
            f"train with model.null_text=empty{zeros}"
        )
    return faults


def model_index(
    pipeline: Pipeline, form: DiffusersFormat[ModelConfig], trained: TrainedModel, classes: Mapping[str, str]
) -> dict[str, Any]:
    """Return `model_index.json`; `classes` are those of text encoders and tokenizers by their folders."""
    scheduler = scheduler_config(trained.objective)
    assert scheduler is not None  # `pipeline_of`
    index: dict[str, Any] = {"_class_name": pipeline.class_name, "_diffusers_version": VERSION}
    index |= {name: value(trained) for name, value in pipeline.index.items()}
    if trained.class_names is not None:
        index["id2label"] = {str(i): name for i, name in enumerate(trained.class_names)}
    return {
        **index,
        "scheduler": ["diffusers", scheduler["_class_name"]],
        form.part: ["diffusers", form.class_name],
        "vae": ["diffusers", pipeline.vae],
        **({"guider": ["diffusers", GUIDER]} if pipeline.scale is None else {}),
        **{name: ["transformers", class_name] for name, class_name in classes.items()},
    }


def loading_lines(
    pipeline: Pipeline,
    trained: TrainedModel,
    *,
    pixels: tuple[int, int, int],
    most_tokens: Mapping[str, int],
) -> str:
    """Return Python code that loads a folder and draws one picture or clip of the training size.

    Args:
        pixels: frames, height and width.
        most_tokens: longest text by folder of the encoder.
    """
    sampling, (frames, height, width) = dict(trained.sampling), pixels
    # The scale of FLUX is an input of the network; that of Z-Image is 0 without guidance.
    is_input = pipeline.flow and not pipeline.guided_by_texts
    scale = getattr(trained.model, "guidance", None) if is_input else sampling.get("guidance_scale")
    steps = num_steps_of(trained)
    call = [f"num_inference_steps={steps + (pipeline.times == 'end')}"]
    call += [f"{pipeline.scale}={(scale or 1.0) - 1.0 + pipeline.scale_of_none}"] * (pipeline.scale is not None)
    call += [f"sigmas=[1 - i / {steps} for i in range({steps})]"] * (pipeline.times == "argument")
    pictures = ['control_image=load_image("control.png")'] * pipeline.reads_control
    pictures += ['image=load_image("reference.png")'] * ("reference" in trained.clean_parts)
    of_run = {"area": height * width, "rescale": sampling.get("guidance_rescale", 0.0)}
    if pipeline.texts:
        prompt = repr((sampling.get("prompts") or ["a red circle"])[0])
        call = [f"prompt={prompt}", *call, f"height={height}", f"width={width}"]
        call += [argument.format(**of_run) for argument in pipeline.arguments]
        call += [f"num_frames={frames}"] if pipeline.draws_clips else []
        call += pictures
        call += [f"max_sequence_length={n}" for folder, n in most_tokens.items() if not pipeline.cuts(folder)]
        if trained.model.condition(SIZE_AND_CROP.name):  # as our sampler, which takes latents of an eighth of the side
            sides = tuple(map(int, size_and_crop(*trained.latent_size[1:])[4:].tolist()))
            call += [f"original_size={sides}", f"target_size={sides}"]
    else:
        call = ["class_labels=[0]", *call]
    imports = ["from diffusers.utils import load_image"] if pictures else []
    drawn = [f"image = pipeline({', '.join(call)}).images[0]", 'image.save("image.png")']
    if pipeline.draws_clips:
        imports, fps = [*imports, "from diffusers.utils import export_to_video"], round(trained.fps or WAN_FPS)
        drawn = [f"clip = pipeline({', '.join(call)}).frames[0]", f'export_to_video(clip, "clip.mp4", {fps})']
    return "\n".join(
        [
            "from diffusers import DiffusionPipeline",
            *imports,
            "",
            'pipeline = DiffusionPipeline.from_pretrained("THIS_FOLDER")',
            *(line.format(**of_run) for line in pipeline.setup),
            *drawn,
        ]
    )
