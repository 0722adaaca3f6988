"""SANA and PRX: one stream of image tokens that reads the text in every layer; flow matching.

Sizes and settings are those of the published models.
"""

import nemo_run as run

from dit.models.base import ModelConfig
from dit.models.prx.config import PRXConfig
from dit.models.sana.config import SanaConfig
from dit.optimizer.schedules import Constant
from dit.settings import OptimizerConfig, SamplingConfig
from energon_data.dataset import EnergonData
from recipes.base import registered, variant
from recipes.dit import as_tiny, flow_conditional
from recipes.models import prx_1_2b, sana_1_6b


def _sana(model: run.Config[ModelConfig]) -> run.Partial:
    """Return flow matching with logit-normal times, shifted by 3; one text in ten is replaced by the empty text.

    Source: Xie et al. 2024, arXiv:2410.10629, section 3 and appendix; time shift of the published scheduler.
    """
    return flow_conditional(model, guidance_scale=4.5, num_steps=20, time_shift=3.0)


@registered
def tiny_sana() -> run.Partial:
    """2-layer SANA of width 64, images and clips with texts: any machine.

    Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
    """
    recipe = as_tiny(_sana(run.Config(SanaConfig, num_cross_attention_heads=2)))
    recipe.model.ffn_hidden_size, recipe.model.patch_spatial = 128, 2
    return recipe


@registered
def sana_1_6b_1024() -> run.Partial:
    """SANA 1.6B (1.60 B) on images of 1024 px in packs of 8192 tokens (8 images): one 80 GB GPU or more.

    Texts: the last layer of Gemma 2 2B after the published instruction; dropped ones are the empty text. Optimizer and
    warm-up are those of the authors' run with AdamW (NVlabs/Sana, Sana_1600M_img1024_AdamW.yaml); the released weights
    were trained with CAME.
    """
    recipe = _sana(sana_1_6b())
    recipe.model.null_text = "empty"
    recipe.optimizer = run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.01, clip_grad=0.1)
    recipe.schedule = run.Config(Constant, warmup_steps=2000)
    recipe.data = run.Config(
        EnergonData,
        path="data/latents_1024_sana",
        max_tokens_per_sample=1024,
        max_tokens_per_pack=8192,
        max_text_tokens=300,
    )
    recipe.training.global_batch_size = 16
    return recipe


tiny_prx = variant(
    "tiny_prx", lambda: as_tiny(_sana(run.Config(PRXConfig, rope_axes=[4, 6, 6]))), model={"ffn_hidden_size": 128}
)
"""2-layer PRX of width 64, images and clips with texts: any machine.

Packs of 128 tokens, 20 steps; the loss falls by a tenth or more. Heads rotate with t, too, for clips.
"""


def _prx(pixels: int, tokens: int, packs: int) -> run.Partial:
    """Return PRX on pictures of a number of tokens, 256 pictures in a step.

    Deviation: linear layers start with Xavier's weights, the published ones with torch's default.

    Source: the published configurations `optimizer/adamw` and `flux1-vae-benchmark/Flux-Baseline` of Photoroom/PRX.
    """
    recipe = _sana(prx_1_2b())
    recipe.model.null_text = "empty"
    recipe.data = run.Config(
        EnergonData,
        path=f"data/latents_{pixels}_prx",
        max_tokens_per_sample=tokens,
        max_tokens_per_pack=8192,
        max_text_tokens=256,
    )
    recipe.optimizer = run.Config(OptimizerConfig, lr=1e-4, beta2=0.95, eps=1e-15, clip_grad=0.2)
    recipe.schedule = run.Config(Constant, warmup_steps=1_000)
    recipe.training.num_steps, recipe.training.global_batch_size, recipe.training.ema_decay = 100_000, packs, None
    return recipe


@registered
def prx_256() -> run.Partial:
    """PRX (1.17 B) on images of 256 px in packs of 8192 tokens (32 images): one 80 GB GPU or more.

    The baseline of the authors' benchmark, for which they report FID 18.2 after 100,000 steps of 256 images, on 1 M
    synthetic pictures with long captions. Deviation: in the published code, one time in ten is uniform. Texts: T5Gemma
    2B; dropped ones are the empty text.
    """
    recipe = _prx(256, tokens=256, packs=8)
    recipe.objective.time_shift = 1.0
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=3.5)
    return recipe


@registered
def prx_512() -> run.Partial:
    """PRX (1.17 B) on images of 512 px in packs of 8192 tokens (8 images): one 80 GB GPU or more.

    Optimizer and batch are those of prx_256, because the authors published none for latents of 512 px. Times are
    shifted by 3, as the published sampler.
    """
    recipe = _prx(512, tokens=1024, packs=32)
    recipe.sampling = run.Config(SamplingConfig, solver="euler", num_steps=28, guidance_scale=4.0)
    return recipe
