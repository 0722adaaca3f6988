"""Named parts for overrides: `objective=edm`, `optimizer=adamw_large`, `data=mock`.

Each is a starting point for its fields: `objective=edm objective.p_mean=-0.4`, or `objective=ddpm(prediction='v')`.
"""

import nemo_run as run

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


@run.cli.factory(target=Objective)
def autoencoding() -> run.Config[Autoencoding]:
    """Reconstruction and KL of an autoencoder (Rombach et al. 2022); set model=autoencoder_kl_f8 with it."""
    return run.Config(Autoencoding)


@run.cli.factory(target=Objective)
def vq_autoencoding() -> run.Config[VQAutoencoding]:
    """Reconstruction, codebook and commitment (van den Oord et al. 2017); set model=autoencoder_vq_f4 with it."""
    return run.Config(VQAutoencoding)


@run.cli.factory(target=Objective)
def edm() -> run.Config[EDM]:
    """EDM (Karras et al. 2022): log-normal noise levels, preconditioned network."""
    return run.Config(EDM)


@run.cli.factory(target=Objective)
def edm_uncertainty() -> run.Config[EDM]:
    """EDM with noise levels weighed by a learned uncertainty, with p_mean and p_std of EDM2 (Karras et al. 2024)."""
    return run.Config(EDM, p_mean=-0.4, p_std=1.0, weighting=uncertainty())


@run.cli.factory(target=Objective)
def flow_matching() -> run.Config[FlowMatching]:
    """Flow matching on the straight path; the network outputs the velocity."""
    return run.Config(FlowMatching)


@run.cli.factory(target=Objective)
def flow_matching_logit_normal() -> run.Config[FlowMatching]:
    """Flow matching with logit-normal times, which visit the middle of the path more often (Esser et al. 2024)."""
    return run.Config(FlowMatching, time_distribution="logit_normal")


@run.cli.factory(target=Objective)
def contrastive_flow_matching() -> run.Config[ContrastiveFlowMatching]:
    """Flow matching that also avoids the velocity of another sample (Stoica et al. 2025)."""
    return run.Config(ContrastiveFlowMatching)


@run.cli.factory(target=Objective)
def mean_flow() -> run.Config[MeanFlow]:
    """Average velocity over a time interval, for samples of one or a few steps; set model.interval_conditioning."""
    return run.Config(MeanFlow, time_distribution="logit_normal", logit_mean=-0.4)


@run.cli.factory(target=Objective)
def ddpm() -> run.Config[DDPM]:
    """DDPM (Ho et al. 2020) on the linear 1000-step table; the network outputs the noise."""
    return run.Config(DDPM, schedule="linear", discrete_steps=1000, prediction="noise")


@run.cli.factory(target=Objective)
def ddpm_latent() -> run.Config[DDPM]:
    """DDPM on the 1000-step table of latent diffusion (Rombach et al. 2022); the network outputs the noise."""
    return run.Config(DDPM, schedule="scaled_linear", discrete_steps=1000, prediction="noise")


@run.cli.factory(target=Objective)
def ddpm_learned_variance() -> run.Config[DDPM]:
    """DDPM that learns its variance as the original DiT does; set model.out_channels to twice model.in_channels."""
    return run.Config(DDPM, schedule="linear", discrete_steps=1000, prediction="noise", variance=learned_variance())


@run.cli.factory(target=UncertaintyWeighting)
def uncertainty() -> run.Config[UncertaintyWeighting]:
    """Noise levels weighted by a learned uncertainty (EDM2), `objective.weighting=uncertainty` of EDM."""
    return run.Config(UncertaintyWeighting)


@run.cli.factory(target=LearnedVariance)
def learned_variance() -> run.Config[LearnedVariance]:
    """Learned variance of the reverse steps, `objective.variance=learned_variance` of DDPM; two outputs per channel."""
    return run.Config(LearnedVariance)


@run.cli.factory(target=Adversarial)
def adversarial() -> run.Config[Adversarial]:
    """Discriminator of patches (VQGAN), `objective.adversarial=adversarial` of autoencoding and vq_autoencoding."""
    return run.Config(Adversarial)


@run.cli.factory(target=OptimizerConfig)
def adamw() -> run.Config[OptimizerConfig]:
    """AdamW as for the original DiT: lr 1e-4, betas 0.9 and 0.999, no weight decay."""
    return run.Config(OptimizerConfig, lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0)


@run.cli.factory(target=OptimizerConfig)
def adamw_large() -> run.Config[OptimizerConfig]:
    """AdamW as for billions of parameters: lr 1e-4, betas 0.9 and 0.95, weight decay 0.1."""
    return run.Config(OptimizerConfig, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)


@run.cli.factory(target=OptimizerConfig)
def muon() -> run.Config[OptimizerConfig]:
    """Muon for the 2-D weights of transformer blocks, AdamW for all else: lr 1e-4 for both, momentum 0.95."""
    return run.Config(OptimizerConfig, algorithm="muon", lr=1e-4, beta1=0.9, beta2=0.95)


@run.cli.factory(target=Schedule)
def constant() -> run.Config[Constant]:
    """Constant peak learning rate from the first step."""
    return run.Config(Constant)


@run.cli.factory(target=Schedule)
def cosine() -> run.Config[Cosine]:
    """Fall as a cosine to 0 at the last step."""
    return run.Config(Cosine)


@run.cli.factory(target=Schedule)
def linear() -> run.Config[Linear]:
    """Fall as a straight line to 0 at the last step."""
    return run.Config(Linear)


@run.cli.factory(target=Schedule)
def torch_one_cycle() -> run.Config[TorchOneCycle]:
    """One cycle as torch's OneCycleLR: from 1/25 of the peak up over 30 % of the run, and down to 1/250,000 of it."""
    return run.Config(TorchOneCycle)


@run.cli.factory(target=Schedule)
def inverse_sqrt() -> run.Config[InverseSqrt]:
    """Constant peak for 70,000 steps, then decay as 1 / sqrt(step) (EDM2)."""
    return run.Config(InverseSqrt)


@run.cli.factory(target=Schedule)
def wsd() -> run.Config[WSD]:
    """Warm-up over 100 steps, constant peak, linear decay to 0 over the last 1000 steps."""
    return run.Config(WSD, warmup_steps=100, decay_steps=1000)


@run.cli.factory(target=Schedule)
def warmup_hold() -> run.Config[Constant]:
    """Linear warm-up over 100 steps, then constant peak learning rate."""
    return run.Config(Constant, warmup_steps=100)


@run.cli.factory(target=Schedule)
def warmup_cosine() -> run.Config[Cosine]:
    """Rise linearly over 100 steps, then fall as a cosine to 0 at the last step."""
    return run.Config(Cosine, warmup_steps=100)


@run.cli.factory(target=DataConfig)
def energon() -> run.Config[EnergonData]:
    """A prepared Energon data set; set data.path."""
    return run.Config(EnergonData)


@run.cli.factory(target=DataConfig)
def mock() -> run.Config[MockData]:
    """Synthetic latents, the same on every machine; needs no files."""
    return run.Config(MockData)
