"""The scale of an autoencoder's latents, measured on its training data."""

import math
from itertools import islice

import torch

from dit.backends.device import local_device
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.models.autoencoder.model import Autoencoder

SAMPLES = 1024


@torch.no_grad()
def measure_latents(autoencoder: Generator, samples: int = SAMPLES) -> tuple[float, float]:
    """Return mean and standard deviation of the latents (`Autoencoder.encode`) of training data over all channels.

    Source: Rombach et al. 2022, arXiv:2112.10752, appendix G, where the latent is scaled to unit deviation.
    """
    config, network, device = autoencoder.config, autoencoder.network, local_device()
    assert isinstance(network, Autoencoder)
    per_batch = config.training.micro_batch_size
    spec = config.model.batch_spec(micro_batch_size=per_batch)
    stream = config.data.build_train(spec, dp_rank=0, dp_size=1, seed=config.training.seed, log_dir=None)
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in islice(iter(stream.__next__, None), -(-samples // per_batch)):
        batch = batch.to(device)
        z_NCHW = network.encode(batch.dense(batch.latents_TC).flatten(0, 1)).double().cpu()
        sums += torch.stack([z_NCHW.sum(), z_NCHW.square().sum(), torch.tensor(float(z_NCHW.numel()))])
    stream.close()
    total, squares, count = sums.tolist()
    mean = total / count
    deviation = math.sqrt(max(0.0, squares / count - mean**2))
    if not deviation > 0:
        raise ConfigError(
            "the latents do not vary: every picture has the same latent; train with a smaller objective.kl_weight"
        )
    return mean, deviation
