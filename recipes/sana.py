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


def _on_packs(model: run.Config[ModelConfig], data: str, tokens: int, text_tokens: int) -> run.Partial:
    """Return flow matching on pictures of `tokens` in packs of 8192 tokens; dropped texts are the empty text."""
    recipe = _sana(model)
    recipe.model.null_text = "empty"
    recipe.data = run.Config(EnergonData, path=f"data/{data}", max_tokens_per_sample=tokens, max_tokens_per_pack=8192)
    recipe.data.max_text_tokens = text_tokens
    return recipe


sana_1_6b_1024 = variant(
    "sana_1_6b_1024",
    lambda: _on_packs(sana_1_6b(), "latents_1024_sana", 1024, 300),
    optimizer=run.Config(OptimizerConfig, lr=1e-4, weight_decay=0.01, clip_grad=0.1),
    schedule=run.Config(Constant, warmup_steps=2000),
    training={"global_batch_size": 16},
)
"""SANA 1.6B (1.60 B) on images of 1024 px in packs of 8192 tokens (8 images): one 80 GB GPU or more.

Texts: the last layer of Gemma 2 2B after the published instruction; dropped ones are the empty text. Optimizer and
warm-up are those of the authors' run with AdamW (NVlabs/Sana, Sana_1600M_img1024_AdamW.yaml); the released weights
were trained with CAME.
"""

tiny_prx = variant(
    "tiny_prx", lambda: as_tiny(_sana(run.Config(PRXConfig, rope_axes=[4, 6, 6]))), model={"ffn_hidden_size": 128}
)
"""2-layer PRX of width 64, images and clips with texts: any machine.

Packs of 128 tokens, 20 steps; the loss falls by a tenth or more. Heads rotate with t, too, for clips.
"""


prx_256 = variant(
    "prx_256",
    lambda: _on_packs(prx_1_2b(), "latents_256_prx", 256, 256),
    objective={"time_shift": 1.0},
    optimizer=run.Config(OptimizerConfig, lr=1e-4, beta2=0.95, eps=1e-15, clip_grad=0.2),
    schedule=run.Config(Constant, warmup_steps=1_000),
    training={"num_steps": 100_000, "global_batch_size": 8, "ema_decay": None},
    sampling=run.Config(SamplingConfig, solver="euler", num_steps=50, guidance_scale=3.5),
)
"""PRX (1.17 B) on images of 256 px in packs of 8192 tokens (32 images): one 80 GB GPU or more.

The baseline of the authors' benchmark, for which they report FID 18.2 after 100,000 steps of 256 images, on 1 M
synthetic pictures with long captions. Deviations: in the published code, one time in ten is uniform, and linear layers
start with torch's default weights, here with Xavier's. Texts: T5Gemma 2B; dropped ones are the empty text.

Source: the published configurations `optimizer/adamw` and `flux1-vae-benchmark/Flux-Baseline` of Photoroom/PRX.
"""

prx_512 = variant(
    "prx_512",
    prx_256,
    data={"path": "data/latents_512_prx", "max_tokens_per_sample": 1024},
    objective={"time_shift": 3.0},
    training={"global_batch_size": 32},
    sampling=run.Config(SamplingConfig, solver="euler", num_steps=28, guidance_scale=4.0),
)
"""PRX (1.17 B) on images of 512 px in packs of 8192 tokens (8 images): one 80 GB GPU or more.

Optimizer and batch are those of prx_256, because the authors published none for latents of 512 px. Times are
shifted by 3, as the published sampler.
"""
