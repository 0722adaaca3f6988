"""Fine-tuning: continue the training of a model on the user's pictures.

A recipe reads model, objective and sampling defaults from a run folder or a folder of diffusers, and starts from its
weights. Its argument `base` names the folder (`--factory "finetune(base='runs/pixart')"`), or else
`checkpoint.start_from`. `gpus` and `gpu_memory` select the first of `WAYS` in which weights, gradients, optimizer and
average fit. Recipes of `PUBLISHED` models read their default folder if it exists; `--dryrun` needs none.
docs/fine-tuning.md has the commands, and the planned memory and time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import fiddle
import nemo_run as run

from dit.checkpoint.diffusers_folder import is_network, local_path, read_network
from dit.checkpoint.reading import candidates, no_checkpoint, read_settings
from dit.convert.diffusers_pipeline import FLUX2_SHIFT
from dit.convert.run_record import build
from dit.errors import ConfigError
from dit.models.lora_config import LoRAConfig
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.base import named_recipe
from recipes.components import ddpm_latent
from recipes.dit import text_conditional
from recipes.flux import chroma_9b
from recipes.hunyuan_video import hunyuan_video_8b
from recipes.models import (
    dit_cross_s,
    flux2_klein_4b,
    flux2_klein_9b,
    lumina2_2b,
    prx_1_2b,
    qwen_image_20b,
    qwen_image_edit_20b,
    sana_1_6b,
    sd3_5_large,
    sd3_5_medium,
    sdxl_unet,
    wan_2_2_ti2v_5b,
    z_image_6b,
)

WEIGHTS, ADAM, MOMENTS, AVERAGE, FROZEN = 6, 4, 8, 4, 2
"""Bytes per parameter: bf16 weight and float32 gradient; float32 weight and moments of Adam; average; frozen weight."""
SHARE = 0.88
"""Share of a GPU's memory for these; activations, of which layers keep only their inputs, take the rest."""


@dataclass(frozen=True)
class Way:
    """A way to store the state of a training, from the fastest to the smallest in `WAYS`.

    Attributes:
        fsdp: shard weights and gradients over the GPUs, too.
        average: keep the average of the weights in host memory.
        moments: keep Adam's moments in host memory.
    """

    fsdp: bool = False
    average: bool = False
    moments: bool = False

    def bytes_per_gpu(self, parameters: int, gpus: int, *, adapters: bool) -> float:
        """Return the bytes of weights, gradients, optimizer and average on each GPU; adapters count as nothing."""
        if adapters:
            return FROZEN * parameters / (gpus if self.fsdp else 1)
        sharded = ADAM + MOMENTS * (not self.moments) + AVERAGE * (not self.average)
        return parameters * (WEIGHTS / (gpus if self.fsdp else 1) + sharded / gpus)


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        folder: of its diffusers pipeline, if none is given.
        model: component of its sizes.
        objective: settings of its flow matching, or the objective.
        sampling: settings of its sampling.
        data: settings of the data that it needs.
        fsdp: on several GPUs, all weights are always trained with FSDP, whose memory the activations need.
    """

    folder: str
    model: Callable[[], run.Config[Any]]
    objective: Mapping[str, Any] | Callable[[], run.Config[Objective]] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    fsdp: bool = False


_KLEIN: dict[str, Any] = {
    "objective": {"shift_by_tokens": list(FLUX2_SHIFT)},
    "sampling": {"guidance_scale": 4.0},
}
_SD35: dict[str, Any] = {"objective": {"time_shift": 3.0}, "sampling": {"num_steps": 28, "guidance_scale": 4.5}}
_QWEN_IMAGE: dict[str, Any] = {
    "objective": {"shift_by_tokens": [0.5, 0.9, 256, 8192], "last_time": 0.02},
    "sampling": {"guidance_scale": 4.0, "guidance_norm": True},
}
PUBLISHED = {
    "chroma": Published("models/chroma", chroma_9b, {"time_shift": 3.0}),
    "flux2_klein_4b": Published("models/flux2-klein", flux2_klein_4b, **_KLEIN),
    "flux2_klein_9b": Published("models/flux2-klein-9b", flux2_klein_9b, **_KLEIN),
    "hunyuan_video": Published("models/hunyuan-video", hunyuan_video_8b, {"time_shift": 5.0}, fsdp=True),
    "lumina2": Published("models/lumina2", lumina2_2b, {"time_shift": 6.0}),
    "prx": Published("models/prx", prx_1_2b, {"time_shift": 3.0}),
    "qwen_image": Published("models/qwen-image", qwen_image_20b, **_QWEN_IMAGE),
    "qwen_image_edit": Published(
        "models/qwen-image-edit", qwen_image_edit_20b, **_QWEN_IMAGE, data={"references": True}
    ),
    "sana": Published("models/sana", sana_1_6b, {"time_shift": 3.0}, {"num_steps": 20, "guidance_scale": 4.5}),
    "sd35_large": Published("models/sd35", sd3_5_large, **_SD35),
    "sd35_medium": Published("models/sd35-medium", sd3_5_medium, **_SD35),
    "sdxl": Published("models/sdxl", sdxl_unet, ddpm_latent, {"solver": "ddim"}, {"bucket_by_shape": True}),
    "wan22_ti2v": Published("models/wan22-ti2v", wan_2_2_ti2v_5b, {"time_shift": 5.0}, data={"clean_first_frame": 0.5}),
    "z_image": Published("models/z-image", z_image_6b, {"time_shift": 3.0}),
}
"""By name; shift and steps are those of the published schedulers and pipelines."""
WAYS = (Way(), Way(average=True), Way(fsdp=True), Way(fsdp=True, average=True, moments=True))
ON_ONE_GPU = (Way(), Way(average=True), Way(average=True, moments=True))


def _fit(recipe: run.Partial, gpus: Optional[int], gpu_memory: int) -> run.Partial:
    """Select the way to store the state of a training on `gpus` GPUs of `gpu_memory` GB; None changes nothing."""
    if gpus is None:
        return recipe
    if gpus < 1 or gpu_memory < 1:
        raise ConfigError(f"gpus={gpus} and gpu_memory={gpu_memory} must be at least 1")
    shapes = parameter_shapes(fiddle.build(recipe.model))
    parameters, available = sum(map(math.prod, shapes.values())), SHARE * gpu_memory * 1e9
    adapters = getattr(recipe.model, "lora", None) is not None
    ways = ON_ONE_GPU if gpus == 1 else WAYS
    way = next((w for w in ways if w.bytes_per_gpu(parameters, gpus, adapters=adapters) <= available), None)
    if way is None:
        smallest = WAYS[-1].bytes_per_gpu(parameters, 1, adapters=adapters)
        cure = f"use gpus={max(2, math.ceil(smallest / available))}"
        raise ConfigError(
            f"{parameters / 1e9:.1f} B parameters need {smallest / 1e9:.1f} GB, and activations leave "
            f"{gpus * available / 1e9:.1f} GB in {gpus} x {gpu_memory} GB; {cure}"
            f"{'' if adapters else ', or train adapters (finetune_lora; recipes of published models: lora=True)'}"
        )
    if way.fsdp:
        recipe.parallel.data_parallel = "fsdp"
    recipe.training.ema_offload, recipe.optimizer.offload = way.average, way.moments
    recipe.training.recompute = "full"
    recipe.training.global_batch_size += -recipe.training.global_batch_size % gpus
    return recipe


def _as_config(part: Any) -> Any:
    """Return the configuration that builds a settings object."""
    if not is_dataclass(part):
        return part
    return run.Config(type(part), **{field.name: _as_config(getattr(part, field.name)) for field in fields(part)})


def _settings(base: str, *, published: bool = False) -> dict[str, Any]:
    """Return model, objective and sampling defaults of a run, or of a folder or a hub name of diffusers.

    Args:
        published: leave out the sampling of a folder of diffusers, and the objective if the folder does not have it.
    """
    folder = local_path(base)
    if is_network(folder):
        network = read_network(folder)
        trained = network.trained
        settings: dict[str, Any] = {"model": trained.model}
        if trained.recorded or not published:
            settings["objective"] = trained.objective
        if not published:
            settings["sampling"] = build(SamplingConfig, trained.sampling, "the record's sampling")
        return settings
    newest = candidates(folder)
    if not newest:
        raise ConfigError(f"base={base!r}: {no_checkpoint(folder, starts=True)}")
    config, _ = read_settings(newest[0])
    return {part: getattr(config, part) for part in ("model", "objective", "sampling")}


def _on_base(name: str, base: Optional[str], published: Optional[Published] = None) -> run.Partial:
    """Return a training on `data/mine` from the weights of `base`; of `published` or `pretrain` if none is given."""
    recipe = text_conditional(dit_cross_s())
    recipe.data = run.Config(EnergonData, path="data/mine")
    if published is not None:
        recipe.model = published.model()
        if getattr(recipe.model, "null_text", "learned") == "learned":
            recipe.model.null_text = "empty"
        recipe.objective = (
            published.objective()
            if callable(published.objective)
            else run.Config(FlowMatching, time_distribution="logit_normal", **published.objective)
        )
        sampling = {"solver": "euler", "num_steps": 50, "guidance_scale": 5.0, **published.sampling}
        recipe.sampling = run.Config(SamplingConfig, **sampling)
        recipe.data = run.Config(EnergonData, path="data/mine", **published.data)
        if base is None and is_network(Path(published.folder)):
            base = published.folder
    if base is not None:
        for part, settings in _settings(base, published=published is not None).items():
            setattr(recipe, part, _as_config(settings))
    recipe.checkpoint.start_from = base or ("runs/pretrain" if published is None else published.folder)
    recipe.checkpoint.interval = 250
    recipe.optimizer.lr = 1e-5
    training = recipe.training
    training.run_dir, training.num_steps, training.global_batch_size = f"runs/{name}", 2000, 4
    # An average over so few steps must be short: it starts at the base's weights.
    training.ema_decay, training.validation_interval = 0.99, 0
    return recipe


def _all_weights(recipe: run.Partial) -> run.Partial:
    """Check that the base has no adapters, which would be trained instead of all weights."""
    if getattr(recipe.model, "lora", None) is not None:
        base = recipe.checkpoint.start_from
        raise ConfigError(
            f"base={base!r} has adapters (LoRA), but this recipe trains all weights; train the adapters with "
            "finetune_lora or lora=True, or merge them (python -m launch.export --checkpoint "
            f"{base} --format diffusers --out merged) and give base='merged'"
        )
    return recipe


def _with_lora(recipe: run.Partial, rank: int) -> run.Partial:
    """Train only adapters, at the learning rate that they take."""
    model = recipe.model.__fn_or_cls__
    if "lora" not in {field.name for field in fields(model)}:
        raise ConfigError(f"{model.__name__} has no adapters (LoRA); train all its weights with the recipe finetune")
    if getattr(recipe.model, "lora", None) is None:  # otherwise those of the base, which are trained further
        recipe.model.lora = run.Config(LoRAConfig, rank=rank)
    recipe.optimizer.lr = 1e-4
    return recipe


@run.cli.factory(target=pretrain)
def finetune(base: Optional[str] = None, gpus: Optional[int] = None, gpu_memory: int = 80) -> run.Partial:
    """All weights of the model in a run folder or of diffusers: 2000 steps, lr 1e-5, batch 4, 1 GPU or more.

    `--factory finetune checkpoint.start_from=models/flux data.path=data/mine`, or `"finetune(base='models/flux')"`:
    model, objective and sampling are those of the folder, which is of a training, of `launch.import_weights`, or of
    diffusers. Without either: the model of `pretrain` (51 M), from `runs/pretrain`. The optimizer state is new, except
    if this run itself is resumed. `gpus=8, gpu_memory=80` selects FSDP and offload for large models, and recomputes
    layers.
    """
    return _fit(_all_weights(_on_base("finetune", base)), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_lora(base: Optional[str] = None, gpus: Optional[int] = None, gpu_memory: int = 80) -> run.Partial:
    """LoRA adapters of rank 16 on the model in a run folder or of diffusers: lr 1e-4, 1 GPU or more.

    As finetune, but the weights of the base are frozen: optimizer state and checkpoints are those of the adapters. Runs
    under every layout. Adapters in the base, trained here or imported by `launch.import_weights --format lora`, are
    trained further. `launch.export --format diffusers-lora` or `comfyui-lora` exports the adapters.
    """
    return _fit(_with_lora(_on_base("finetune_lora", base), rank=16), gpus, gpu_memory)


def _published(name: str, base: Optional[str], lora: bool, gpus: Optional[int], gpu_memory: int) -> run.Partial:
    """Return the training of a published model: of all weights, or of adapters of rank 16."""
    published = PUBLISHED[name]
    recipe = _on_base(f"finetune_{name}{'_lora' * lora}", base, published)
    recipe = _fit(_with_lora(recipe, rank=16) if lora else _all_weights(recipe), gpus, gpu_memory)
    if published.fsdp and not lora and gpus is not None and gpus > 1:
        recipe.parallel.data_parallel = "fsdp"
    return recipe


def _recipe_of(name: str, gpus: int, gpu_memory: int = 80) -> Callable[..., run.Partial]:
    """Return the recipe of a published model, by default on the GPUs that a training of all weights needs."""

    def recipe(
        base: Optional[str] = None, lora: bool = False, gpus: Optional[int] = gpus, gpu_memory: int = gpu_memory
    ) -> run.Partial:
        return _published(name, base, lora, gpus, gpu_memory)

    return recipe


@run.cli.factory(target=pretrain)
def finetune_flux2_klein(
    base: Optional[str] = None,
    lora: bool = False,
    gpus: Optional[int] = 1,
    gpu_memory: int = 80,
    size: Literal["4b", "9b"] = "4b",
) -> run.Partial:
    """FLUX.2 klein (3.88 B) in the pipeline `models/flux2-klein`, all weights: one 80 GB GPU.

    `lora=True`: adapters of rank 16, also on one 24 GB GPU (`gpu_memory=24`), as all recipes of published models.
    `size="9b"`: the model of 9.08 B in `models/flux2-klein-9b`, of which 8 GPUs train all weights.
    """
    return _published(f"flux2_klein_{size}", base, lora, gpus, gpu_memory)


finetune_qwen_image = named_recipe("finetune_qwen_image", _recipe_of("qwen_image", gpus=8))
"""Qwen-Image (20.43 B) in the pipeline `models/qwen-image`, all weights: 8 x 80 GB.

`lora=True`: adapters of rank 16, also on one 80 GB GPU. Guided samples keep the norm of the conditional ones.
"""


@run.cli.factory(target=pretrain)
def finetune_qwen_image_edit(
    base: Optional[str] = None, lora: bool = False, gpus: Optional[int] = 8, gpu_memory: int = 80
) -> run.Partial:
    """Qwen-Image-Edit-2511 (20.43 B) in the pipeline `models/qwen-image-edit`, all weights: 8 x 80 GB.

    `lora=True`: adapters of rank 16, also on one 80 GB GPU. Data of `prepare --reference`; texts are read with the
    picture to edit and never dropped. Qwen-Image-Edit and -2509: `base`, or `model.clean_reference_time=False`.
    """
    recipe = _published("qwen_image_edit", base, lora, gpus, gpu_memory)
    # The unconditional text is read with the picture, too, and the data do not have it.
    recipe.model.context_dropout = 0.0
    return recipe


finetune_wan22_ti2v = named_recipe("finetune_wan22_ti2v", _recipe_of("wan22_ti2v", gpus=8))
"""Wan 2.2 TI2V 5B (5.00 B) in the pipeline `models/wan22-ti2v`, all weights: 8 x 80 GB.

`lora=True`: adapters of rank 16, also on one 24 GB GPU. The first frame of half of the clips is clean: one model
draws clips from a text, and from a text and a picture.
"""

finetune_sdxl = named_recipe("finetune_sdxl", _recipe_of("sdxl", gpus=1))
"""Stable Diffusion XL (2.57 B) in the pipeline `models/sdxl`, all weights: one 80 GB GPU.

`lora=True`: adapters of rank 16, also on one 24 GB GPU. The network predicts the noise, and reads sizes and crop
of every picture. Batches have pictures of one shape.
"""


@run.cli.factory(target=pretrain)
def finetune_sd35(
    base: Optional[str] = None,
    lora: bool = False,
    gpus: Optional[int] = 8,
    gpu_memory: int = 80,
    size: Literal["large", "medium"] = "large",
) -> run.Partial:
    """Stable Diffusion 3.5 large (8.06 B) in the pipeline `models/sd35`, all weights: 8 x 80 GB.

    `lora=True`: adapters of rank 16, also on one 24 GB GPU. `size="medium"`: the model of 2.24 B in
    `models/sd35-medium`.
    """
    return _published(f"sd35_{size}", base, lora, gpus, gpu_memory)


finetune_z_image = named_recipe("finetune_z_image", _recipe_of("z_image", gpus=8))
"""Z-Image (6.15 B) in the pipeline `models/z-image`, all weights: 8 x 80 GB.

`lora=True`: adapters of rank 16, also on one 24 GB GPU. Text and image of a sample are extended to multiples of 32
tokens inside the network.
"""

finetune_lumina2 = named_recipe("finetune_lumina2", _recipe_of("lumina2", gpus=1))
"""Lumina-Image 2.0 (2.61 B) in the pipeline `models/lumina2`, all weights: one 80 GB GPU.

`lora=True`: adapters of rank 16, also on one 24 GB GPU.
"""

finetune_prx = named_recipe("finetune_prx", _recipe_of("prx", gpus=1, gpu_memory=24))
"""PRX (1.17 B) in the pipeline `models/prx`, all weights: one 24 GB GPU.

`lora=True`: adapters of rank 16. Average and moments are in host memory.
"""

finetune_sana = named_recipe("finetune_sana", _recipe_of("sana", gpus=1))
"""SANA 1.6B (1.60 B) in the pipeline `models/sana`, all weights: one 80 GB GPU.

`lora=True`: adapters of rank 16, also on one 24 GB GPU.
"""

finetune_chroma = named_recipe("finetune_chroma", _recipe_of("chroma", gpus=8))
"""Chroma (8.90 B) in the pipeline `models/chroma`, all weights: 8 x 80 GB.

`lora=True`: adapters of rank 16, also on one 24 GB GPU.
"""

finetune_hunyuan_video = named_recipe("finetune_hunyuan_video", _recipe_of("hunyuan_video", gpus=8))
"""HunyuanVideo 1.5 (8.33 B) in the pipeline `models/hunyuan-video`, all weights: 8 x 80 GB.

`lora=True`: adapters of rank 16, also on one 80 GB GPU. FSDP leaves room for the activations of a clip of 121
frames of 1280 x 720. Clips may have tokens of SigLIP (`image_tokens`), too.
"""


@run.cli.factory(target=pretrain)
def dreambooth(base: Optional[str] = None) -> run.Partial:
    """DreamBooth: a model learns a subject from about five pictures: 1000 steps, lr 1e-6, batch 2.

    Each picture has the caption "a photo of sks dog": a rare word for the subject, and its class. Prior preservation is
    a blend with pictures of the class that the base draws: `data.blend=[{path: data/subject, weight: 1}, {path:
    data/class, weight: 1}]`. `model.lora=lora optimizer.lr=1e-4` trains only adapters. One GPU. The learning rate is
    that of NeMo's recipe, whose TP 8 does not divide the 6 heads of the model of `pretrain`.

    Source: Ruiz et al. 2022, arXiv:2208.12242, sections 3.2 and 3.3; the blend gives both terms the same weight if
    all pictures have the same size (`prepare --enlarge`).
    """
    recipe = _all_weights(_on_base("dreambooth", base))
    recipe.data.path = "data/subject"
    recipe.optimizer.lr = 1e-6
    recipe.training.num_steps, recipe.training.global_batch_size = 1000, 2
    recipe.checkpoint.interval = 200
    return recipe
