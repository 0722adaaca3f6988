"""The scale of an autoencoder's latents, measured on the data it was trained on."""

import math
from itertools import islice

import torch

from dit.backends.device import local_device
from dit.errors import ConfigError
from dit.inference.generator import Generator

SAMPLES = 1024


@torch.no_grad()
def measure_latents(autoencoder: Generator, samples: int = SAMPLES) -> tuple[float, float]:
    """Return mean and standard deviation of the latents (the means of the posteriors), over all channels together.

    Args:
        autoencoder: a trained one; its data are read in the order of its training.
        samples: pictures to encode, at least.

    Raises:
        ConfigError: the latents do not vary.
        DataError: the data are missing or damaged.

    Source: Rombach et al. 2022, arXiv:2112.10752, appendix G, where the latent is scaled to unit deviation.
    """
    config, device = autoencoder.config, local_device()
    per_batch = config.training.micro_batch_size
    spec = config.model.batch_spec(micro_batch_size=per_batch)
    stream = config.data.build_train(spec, dp_rank=0, dp_size=1, seed=config.training.seed, log_dir=None)
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in islice(iter(stream.__next__, None), -(-samples // per_batch)):
        batch = batch.to(device)
        time_S = torch.zeros(batch.layout.num_samples, device=device)
        output_TC = autoencoder.network(batch.latents_TC, time_S, batch)[batch.layout.valid_T]
        posterior_TC = output_TC[:, config.model.token_channels :].double().cpu()
        mean_TC = posterior_TC.chunk(2, 1)[0]
        sums += torch.stack([mean_TC.sum(), mean_TC.square().sum(), torch.tensor(float(mean_TC.numel()))])
    stream.close()
    total, squares, count = sums.tolist()
    mean = total / count
    deviation = math.sqrt(max(0.0, squares / count - mean**2))
    if not deviation > 0:
        raise ConfigError(
            "the latents do not vary: every picture has the same one; train with a smaller objective.kl_weight"
        )
    return mean, deviation
