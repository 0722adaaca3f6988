"""Named parts for overrides: `objective=edm`, `optimizer=adamw_large`, `data=mock`.

Each is a starting point for its fields: `objective=edm objective.p_mean=-0.4`, or `objective=ddpm(prediction='v')`.
"""

from functools import partial

from dit.data_api import DataConfig
from dit.objectives.adversarial import Adversarial
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.base import Objective
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import UncertaintyWeighting
from dit.objectives.mean_flow import MeanFlow
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.optimizer.schedules import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule, TorchOneCycle
from dit.settings import OptimizerConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from recipes.base import part

_objective = partial(part, Objective)
_optimizer = partial(part, OptimizerConfig)
_schedule = partial(part, Schedule)

autoencoding = _objective("autoencoding", Autoencoding)
"""Reconstruction and KL of an autoencoder (Rombach et al. 2022); set model=autoencoder_kl_f8 with it."""

vq_autoencoding = _objective("vq_autoencoding", VQAutoencoding)
"""Reconstruction, codebook and commitment (van den Oord et al. 2017); set model=autoencoder_vq_f4 with it."""

edm = _objective("edm", EDM)
"""EDM (Karras et al. 2022): log-normal noise levels, preconditioned network."""

uncertainty = part(UncertaintyWeighting, "uncertainty", UncertaintyWeighting)
"""Noise levels weighted by a learned uncertainty (EDM2), `objective.weighting=uncertainty` of EDM."""

edm_uncertainty = _objective("edm_uncertainty", EDM, p_mean=-0.4, p_std=1.0, weighting=uncertainty())
"""EDM with noise levels weighed by a learned uncertainty, with p_mean and p_std of EDM2 (Karras et al. 2024)."""

flow_matching = _objective("flow_matching", FlowMatching)
"""Flow matching on the straight path; the network outputs the velocity."""

flow_matching_logit_normal = _objective("flow_matching_logit_normal", FlowMatching, time_distribution="logit_normal")
"""Flow matching with logit-normal times, which visit the middle of the path more often (Esser et al. 2024)."""

contrastive_flow_matching = _objective("contrastive_flow_matching", ContrastiveFlowMatching)
"""Flow matching that also avoids the velocity of another sample (Stoica et al. 2025)."""

mean_flow = _objective("mean_flow", MeanFlow, time_distribution="logit_normal", logit_mean=-0.4)
"""Average velocity over a time interval, for samples of one or a few steps; set model.interval_conditioning."""

ddpm = _objective("ddpm", DDPM, schedule="linear", discrete_steps=1000, prediction="noise")
"""DDPM (Ho et al. 2020) on the linear 1000-step table; the network outputs the noise."""

ddpm_latent = _objective("ddpm_latent", DDPM, schedule="scaled_linear", discrete_steps=1000, prediction="noise")
"""DDPM on the 1000-step table of latent diffusion (Rombach et al. 2022); the network outputs the noise."""

learned_variance = part(LearnedVariance, "learned_variance", LearnedVariance)
"""Learned variance of the reverse steps, `objective.variance=learned_variance` of DDPM; two outputs per channel."""

ddpm_learned_variance = _objective(
    "ddpm_learned_variance",
    DDPM,
    schedule="linear",
    discrete_steps=1000,
    prediction="noise",
    variance=learned_variance(),
)
"""DDPM that learns its variance as the original DiT does; set model.out_channels to twice model.in_channels."""

adversarial = part(Adversarial, "adversarial", Adversarial)
"""Discriminator of patches (VQGAN), `objective.adversarial=adversarial` of autoencoding and vq_autoencoding."""

adamw = _optimizer("adamw", OptimizerConfig, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0)
"""AdamW as for the original DiT: lr 1e-4, betas 0.9 and 0.999, no weight decay."""

adamw_large = _optimizer("adamw_large", OptimizerConfig, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)
"""AdamW as for billions of parameters: lr 1e-4, betas 0.9 and 0.95, weight decay 0.1."""

muon = _optimizer("muon", OptimizerConfig, algorithm="muon", lr=1e-4, beta1=0.9, beta2=0.95)
"""Muon for the 2-D weights of transformer blocks, AdamW for all else: lr 1e-4 for both, momentum 0.95."""

constant = _schedule("constant", Constant)
"""Constant peak learning rate from the first step."""

cosine = _schedule("cosine", Cosine)
"""Fall as a cosine to 0 at the last step."""

linear = _schedule("linear", Linear)
"""Fall as a straight line to 0 at the last step."""

torch_one_cycle = _schedule("torch_one_cycle", TorchOneCycle)
"""One cycle as torch's OneCycleLR: from 1/25 of the peak up over 30 % of the run, and down to 1/250,000 of it."""

inverse_sqrt = _schedule("inverse_sqrt", InverseSqrt)
"""Constant peak for 70,000 steps, then decay as 1 / sqrt(step) (EDM2)."""

wsd = _schedule("wsd", WSD, warmup_steps=100, decay_steps=1000)
"""Warm-up over 100 steps, constant peak, linear decay to 0 over the last 1000 steps."""

warmup_hold = _schedule("warmup_hold", Constant, warmup_steps=100)
"""Linear warm-up over 100 steps, then constant peak learning rate."""

warmup_cosine = _schedule("warmup_cosine", Cosine, warmup_steps=100)
"""Rise linearly over 100 steps, then fall as a cosine to 0 at the last step."""

energon = part(DataConfig, "energon", EnergonData)
"""A prepared Energon data set; set data.path."""

mock = part(DataConfig, "mock", MockData)
"""Synthetic latents, the same on every machine; needs no files."""
