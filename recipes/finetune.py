"""Fine-tuning: continue the training of a model on the user's pictures.

A recipe reads model, objective and sampling defaults from a run folder or a folder of diffusers, and starts from its
weights. Its argument `base` names the folder (`--factory "finetune(base='runs/pixart')"`), or else
`checkpoint.start_from`. `gpus` and `gpu_memory` select the first of `WAYS` in which weights, gradients, optimizer and
average fit. docs/fine-tuning.md has the commands.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Optional

import fiddle
import nemo_run as run

from dit.checkpoint.diffusers_folder import is_network, local_path, read_network
from dit.checkpoint.reading import candidates, no_checkpoint, read_settings
from dit.convert.run_record import build
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from recipes.components import dit_cross_s, lumina2_2b, prx_1_2b, z_image_6b
from recipes.dit import text_conditional
from recipes.flux import chroma_9b
from recipes.hunyuan_video import hunyuan_video_8b

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
        time_shift: of the training.
    """

    folder: str
    model: run.Config[ModelConfig]
    time_shift: float


def _z_image() -> Published:
    return Published("models/z-image", z_image_6b(), time_shift=3.0)


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
            f"{parameters / 1e9:.1f} B parameters need {smallest / 1e9:.0f} GB in {gpus} x {gpu_memory} GB; {cure}"
            f"{'' if adapters else ', or train adapters: finetune_lora'}"
        )
    if way.fsdp:
        recipe.parallel.data_parallel = "fsdp"
    recipe.training.ema_offload, recipe.optimizer.offload = way.average, way.moments
    recipe.training.recompute = "full"
    recipe.training.global_batch_size = max(recipe.training.global_batch_size, gpus)
    return recipe


def _as_config(part: Any) -> Any:
    """Return the configuration that builds a settings object."""
    if not is_dataclass(part):
        return part
    return run.Config(type(part), **{field.name: _as_config(getattr(part, field.name)) for field in fields(part)})


def _settings(base: str) -> dict[str, Any]:
    """Return model, objective and sampling defaults of a run, or of a folder or a hub name of diffusers."""
    folder = local_path(base)
    if is_network(folder):
        trained = read_network(folder).trained
        sampling = build(SamplingConfig, trained.sampling, "the record's sampling")
        return {"model": trained.model, "objective": trained.objective, "sampling": sampling}
    newest = candidates(folder)
    if not newest:
        raise ConfigError(f"base={base!r}: {no_checkpoint(folder)}")
    settings, _ = read_settings(newest[0])
    return {part: getattr(settings, part) for part in ("model", "objective", "sampling")}


def _on_base(name: str, base: Optional[str], published: Optional[Published] = None) -> run.Partial:
    """Return a training on `data/mine` from the weights of `base`; of `published` or `pretrain` if none is given."""
    recipe = text_conditional(name, dit_cross_s())
    if base is not None:
        for part, settings in _settings(base).items():
            setattr(recipe, part, _as_config(settings))
    elif published is not None:
        recipe.model = published.model
        recipe.model.null_text = "empty"
        recipe.objective = run.Config(FlowMatching, time_distribution="logit_normal", time_shift=published.time_shift)
        recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=5.0)
    recipe.checkpoint.start_from = base or ("runs/pretrain" if published is None else published.folder)
    recipe.checkpoint.interval = 250
    recipe.data = run.Config(EnergonData, path="data/mine")
    recipe.optimizer.lr = 1e-5
    recipe.training.num_steps = 2000
    recipe.training.global_batch_size = 4
    # An average over so few steps must be short: it starts at the base's weights.
    recipe.training.ema_decay = 0.99
    recipe.training.validation_interval = 0
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
    return _fit(_on_base("finetune", base), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_lora(base: Optional[str] = None, gpus: Optional[int] = None, gpu_memory: int = 80) -> run.Partial:
    """LoRA adapters of rank 16 on the model of a run folder: lr 1e-4, 1 GPU or more.

    As finetune, but the weights of the base are frozen: optimizer state and checkpoints are those of the adapters. Runs
    under every layout. Adapters in the base, trained here or imported by `launch.import_weights --format lora`, are
    trained further. `launch.export --format diffusers-lora` or `comfyui-lora` exports the adapters.
    """
    return _fit(_with_lora(_on_base("finetune_lora", base), rank=16), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_z_image(base: Optional[str] = None, gpus: Optional[int] = 8, gpu_memory: int = 80) -> run.Partial:
    """All weights of Z-Image (6.15 B) in the pipeline `models/z-image` of diffusers, as finetune: 8 x 80 GB.

    Pictures: `python -m energon_data.prepare images --vae models/z-image --text-encoder models/z-image`.
    """
    return _fit(_on_base("finetune_z_image", base, _z_image()), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_z_image_lora(base: Optional[str] = None, gpus: Optional[int] = 1, gpu_memory: int = 24) -> run.Partial:
    """LoRA adapters of rank 16 on Z-Image (6.15 B) in the pipeline `models/z-image`: one 24 GB GPU.

    As finetune_lora, with the pictures of finetune_z_image.
    """
    return _fit(_with_lora(_on_base("finetune_z_image_lora", base, _z_image()), rank=16), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_lumina2(base: Optional[str] = None, gpus: Optional[int] = 1, gpu_memory: int = 80) -> run.Partial:
    """All weights of Lumina-Image 2.0 (2.61 B) in the pipeline `models/lumina2` of diffusers: one 80 GB GPU.

    As finetune. Pictures: `python -m energon_data.prepare images --vae models/lumina2 --text-encoder models/lumina2`.
    """
    return _fit(_on_base("finetune_lumina2", base, Published("models/lumina2", lumina2_2b(), 6.0)), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_prx(base: Optional[str] = None, gpus: Optional[int] = 1, gpu_memory: int = 24) -> run.Partial:
    """All weights of PRX (1.17 B) in the pipeline `models/prx` of diffusers: one 24 GB GPU.

    As finetune. Pictures: `python -m energon_data.prepare images --vae models/prx --text-encoder models/prx`.
    """
    return _fit(_on_base("finetune_prx", base, Published("models/prx", prx_1_2b(), 3.0)), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_chroma(base: Optional[str] = None, gpus: Optional[int] = 8, gpu_memory: int = 80) -> run.Partial:
    """All weights of Chroma (8.90 B) in the pipeline `models/chroma` of diffusers: 8 x 80 GB.

    As finetune. Pictures: `python -m energon_data.prepare images --vae models/chroma --text-encoder models/chroma`.
    """
    return _fit(_on_base("finetune_chroma", base, Published("models/chroma", chroma_9b(), 3.0)), gpus, gpu_memory)


@run.cli.factory(target=pretrain)
def finetune_hunyuan_video(base: Optional[str] = None, gpus: Optional[int] = 8, gpu_memory: int = 80) -> run.Partial:
    """All weights of HunyuanVideo 1.5 (8.33 B) in the pipeline `models/hunyuan-video`: 8 x 80 GB.

    As finetune; `--dryrun` estimates 65 GiB on each GPU for 121 frames of 1280 x 720. The pipeline is `--vae` and
    `--text-encoder` of the clips; they may have tokens of SigLIP (`image_tokens`), too.
    """
    published = Published("models/hunyuan-video", hunyuan_video_8b(), time_shift=5.0)
    recipe = _fit(_on_base("finetune_hunyuan_video", base, published), gpus, gpu_memory)
    if gpus is not None and gpus > 1:
        recipe.parallel.data_parallel = "fsdp"  # leaves room for the activations of a clip
    return recipe


@run.cli.factory(target=pretrain)
def dreambooth(base: Optional[str] = None) -> run.Partial:
    """DreamBooth: the model of a run folder learns a subject from about five pictures: 1000 steps, lr 1e-6, batch 2.

    Each picture has the caption "a photo of sks dog": a rare word for the subject, and its class. Prior preservation is
    a blend with pictures of the class that the base draws: `data.blend=[{path: data/subject, weight: 1}, {path:
    data/class, weight: 1}]`. `model.lora=lora optimizer.lr=1e-4` trains only adapters. One GPU. The learning rate is
    that of NeMo's recipe, whose TP 8 does not divide the 6 heads of the model of `pretrain`.

    Source: Ruiz et al. 2022, arXiv:2208.12242, sections 3.2 and 3.3; the blend gives both terms the same weight.
    """
    recipe = _on_base("dreambooth", base)
    recipe.data.path = "data/subject"
    recipe.optimizer.lr = 1e-6
    recipe.training.num_steps = 1000
    recipe.training.global_batch_size = 2
    recipe.checkpoint.interval = 200
    return recipe
