"""A first training on a folder of the user; sizes of the model and the pack are read from the folder.

docs/own-data.md has the commands, from pictures and videos to samples.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.wan.config import WanConfig
from dit.objectives.ddpm import DDPM
from dit.settings import SamplingConfig
from dit.training.pretrain import pretrain
from energon_data.contents import Contents
from energon_data.dataset import EnergonData
from recipes.base import small_run

ABSENT = Contents(shapes=((16, 1, 32, 32),), is_latent=True, context_size=1024)
"""Assumed contents of a folder that does not exist yet, so that the recipe can be printed."""
LATENT_PATCHES, PIXEL_PATCHES = (2, 4, 1), (4, 8, 16, 2, 1)
PICTURE_TOKENS = 1024  # limit for a picture or frame; it determines the patch
PACK_SAMPLES, PACK_TOKENS = 32, 4096
MULTIPLE = 64  # of a pack's length, so that context- and tensor-parallel ranks divide it
PROMPTS = 8
BACKBONES = ("pixart", "wan", "flux", "dit")


def _encoded(contents: Contents, vae: Optional[str]) -> Contents:
    """Return the contents with the shapes of the latents that an autoencoder computes during training."""
    if vae is None:
        return contents
    geometry = Geometry.read(vae)
    shapes = tuple(geometry.latent_shape(t, h, w) for _, t, h, w in contents.shapes)
    return replace(contents, shapes=shapes, is_latent=True)


def _patch(contents: Contents) -> int:
    """Return the first patch that divides all sides and gives at most `PICTURE_TOKENS`, else that of fewest tokens."""
    shapes = contents.shapes + contents.reference_shapes
    sides = math.gcd(*(side for _, _, h, w in shapes for side in (h, w)))
    area = max(h * w for _, _, h, w in shapes)
    known = LATENT_PATCHES if contents.is_latent else PIXEL_PATCHES
    fitting = [patch for patch in known if sides % patch == 0]
    few = [patch for patch in fitting if area // patch**2 <= PICTURE_TOKENS]
    return few[0] if few else max(fitting)


def _text_width(contents: Contents, folder: str, text_encoder: Optional[str]) -> Optional[int]:
    """Return the width of the texts that are stored, or embedded during training; None without texts."""
    if text_encoder is not None:
        return None if text_encoder == "none" else check_text_encoder(text_encoder).widths.get("text")
    if contents.needs_text_encoder:
        raise ConfigError(
            f"{folder} has captions and no embeddings of them: prepare it with --text-encoder all-minilm-l6-v2, or "
            f"embed them while training: --factory \"own_data(data='{folder}', text_encoder='all-minilm-l6-v2')\"; "
            "text_encoder='none' trains without captions"
        )
    return contents.context_size


def _backbone(name: Optional[str], has_frames: bool, text_width: Optional[int]) -> str:
    """Return the name of the backbone, by default one that diffusers supports.

    Args:
        has_frames: whether samples are clips, or have a reference at another time.
    """
    name = name or ("dit" if text_width is None else "wan" if has_frames else "pixart")
    if name not in BACKBONES or (text_width is None and name != "dit"):
        raise ConfigError(
            f"own_data(backbone={name!r}): the backbones are {', '.join(BACKBONES)}, of which only dit needs no texts"
        )
    return name


def _model(
    name: str, contents: Contents, patch: int, text_width: Optional[int], text_encoder: Optional[str]
) -> run.Config[ModelConfig]:
    """Return a backbone of 6 layers of width 192.

    Args:
        name: of `BACKBONES`.
        text_encoder: encoder of the texts; None if it is unknown, and the null of a text is learned.
    """
    moves = any(t > 1 for _, t, _, _ in contents.shapes)
    common: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 6}
    common |= {"in_channels": contents.shapes[0][0], "patch_spatial": patch}
    positions = "sincos_3d" if moves else "sincos_2d"
    if text_width is None:
        classes: dict[str, Any] = {"num_classes": contents.num_classes or None, "class_dropout": 0.1}
        # As diffusers computes the sinusoid of the time.
        return run.Config(
            DiTConfig, **common, **classes, num_layers=6, position_embedding=positions, time_frequency_shift=1
        )
    common |= {"context_size": text_width, "context_dropout": 0.1}
    if name == "flux":
        pooled = 0 if text_encoder is None else check_text_encoder(text_encoder).widths.get("pooled", 0)
        if not pooled:
            raise ConfigError(
                "own_data(backbone='flux') reads a pooled text, too: prepare the data with --text-encoder text=T5 "
                "--text-encoder pooled=CLIP"
            )
        sizes = {"num_joint_layers": 2, "num_single_layers": 4, "ffn_hidden_size": None, "rope_axes": [4, 14, 14]}
        return run.Config(FluxConfig, **common, **sizes, pooled_size=pooled)
    common["num_layers"] = 6
    if name == "dit":
        return run.Config(DiTCrossConfig, **common, position_embedding=positions, add_bias=True, fps_conditioning=moves)
    common["null_text"] = "learned" if text_encoder is None else "empty"
    if name == "wan":
        return run.Config(WanConfig, **common, ffn_hidden_size=None)
    side = math.sqrt(max(h * w for _, _, h, w in contents.shapes)) / patch
    return run.Config(
        STDiTConfig,
        **common,
        layer_pattern=["full"],
        position_embedding=positions,
        position_span=float(round(side)),
        qk_layernorm=False,
        fps_conditioning=False,
    )


@run.cli.factory(target=pretrain)
def own_data(
    data: str = "data/mine",
    vae: Optional[str] = None,
    text_encoder: Optional[str] = None,
    backbone: Optional[str] = None,
) -> run.Partial:
    """Your own pictures or clips, a small backbone that diffusers supports (4 M with texts): two CPU cores or one GPU.

    `python -m energon_data.prepare images --in pictures --out data/mine --size 256 --vae VAE --text-encoder
    all-minilm-l6-v2`, then `python -m launch.train --yes --factory own_data`. Channels, patch, width of the texts or
    number of classes, the length of a pack and eight captions to draw are read from the folder's `dataset.json`.
    `--factory "own_data(data='data/pictures')"` reads another folder and trains in `runs/pictures`. Samples of the
    captions are drawn and decoded every 500 of 2000 steps. `vae='models/vae'` and `text_encoder='all-minilm-l6-v2'`
    encode stored pixels and captions during training. `backbone` is `pixart` for pictures with texts, `wan` for
    clips with texts or edits of pictures, and `dit` for classes by default. `flux` also reads a pooled text; `dit`
    with texts (cross-attention) has no class in diffusers.
    """
    found = Contents.read(Path(data))
    contents = _encoded(found or ABSENT, vae)
    patch, text_width = _patch(contents), _text_width(contents, data, text_encoder)
    edited = contents.most_references > 0
    longest = sum(map(math.prod, contents.largest_grids(1, patch)))
    moves = any(t > 1 for _, t, _, _ in contents.shapes)
    name = _backbone(backbone, moves or edited, text_width)
    recipe = small_run(
        f"runs/{Path(data).name}",
        model=_model(name, contents, patch, text_width, text_encoder or contents.text_encoder),
        data=run.Config(
            EnergonData,
            path=data,
            num_streams=1 if contents.num_train == 1 else 2,
            references=edited,
            max_tokens_per_pack=-(-max(longest, min(PACK_SAMPLES * longest, PACK_TOKENS)) // MULTIPLE) * MULTIPLE,
            online_vae=vae,
            online_text_encoder=text_encoder if text_width is not None else None,
        ),
    )
    if not moves and (name == "pixart" or text_width is None):
        # Pipelines of diffusers draw samples of these models by DDPM with 1000 steps only.
        recipe.objective = run.Config(DDPM, schedule="cosine", prediction="v", discrete_steps=1000)
        recipe.sampling = run.Config(SamplingConfig, solver="ddim", num_steps=30)
    recipe.training.validation_interval = 500 if contents.num_held_out else 0
    # Edits of held-out pictures are drawn; prompts have no reference.
    recipe.training.sample_interval = 500 if contents.num_held_out or not edited else 0
    recipe.sampling.guidance_scale = 3.0 if text_width is not None or contents.num_classes else 1.0
    if text_width is not None:
        recipe.sampling.prompts = list(contents.captions[:PROMPTS]) or None
    return recipe
