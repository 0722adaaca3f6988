"""The metrics `fid`, `kid` and `clip`: generated pictures against real ones, and against their texts."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit import extensions
from dit.errors import ConfigError
from launch import environment
from launch.held_out import held_out_batches
from launch.measurement import Measurement
from launch.sample import sampling_settings, tile_settings
from launch.sample_requests import add_request_arguments, what_to_draw

if TYPE_CHECKING:
    from dit.evaluation.features import Features
    from dit.inference.decoding import Decoder
    from dit.inference.generator import Generator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of these metrics."""
    group = parser.add_argument_group("--metric fid, kid, clip")
    group.add_argument(
        "--features",
        metavar="FILE",
        help="of fid and kid: weights of Inception v3 (that of FID, or torchvision's), a TorchScript file, a folder "
        f"with a CLIP model, or a registered name ({', '.join(extensions.registered('features')) or 'none'})",
    )
    group.add_argument("--clip-model", metavar="DIR", help="of clip: a local folder with transformers' CLIPModel")
    group.add_argument("--vae", metavar="PATH", help="autoencoder that decodes (default: the one the data set names)")
    add_request_arguments(parser.add_argument_group("--metric clip: what is drawn"))


def fid(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure the Frechet distance between held-out pictures and generated ones; every rank calls this."""
    from dit.evaluation.frechet import Moments, frechet_distance

    moments: list[Moments] = []
    features_of = _features(args, generator)
    for pair in _feature_pairs(args, generator, features_of):
        moments = moments or [Moments(pair[0].shape[1]) for _ in pair]
        for known, features in zip(moments, pair):
            known.add(features)
    width = _agreed_width(moments[0].width if moments else 0)
    moments = moments or [Moments(width), Moments(width)]
    for known in moments:
        known.reduce()
    (mean, covariance), (other_mean, other_covariance) = (known.mean_and_covariance() for known in moments)
    distance = frechet_distance(mean, covariance, other_mean, other_covariance)
    count = moments[0].count
    lines = [
        f"FID: {distance:.4f} ({count:,} held-out and as many generated pictures, {width} features, "
        f"{features_of.network})",
    ]
    if count <= width:
        lines.append(f"too few pictures for {width} features: the distance is biased upwards; measure more, or kid")
    return _measurement("fid", distance, count, width, features_of, lines)


def kid(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure the kernel distance between held-out pictures and generated ones; every rank calls this."""
    from dit.evaluation.kernel_distance import kernel_distance

    features_of = _features(args, generator)
    pairs = list(_feature_pairs(args, generator, features_of))
    real, drawn = (_of_all_ranks([pair[i].double().cpu() for pair in pairs]) for i in range(2))
    distance = kernel_distance(real, drawn)
    count, width = real.shape
    lines = [
        f"KID: {distance:.6f} ({count:,} held-out and as many generated pictures, {width} features, "
        f"{features_of.network}, unbiased)",
    ]
    return _measurement("kid", distance, count, width, features_of, lines)


def _measurement(
    metric: str, distance: float, count: int, width: int, features: "Features", lines: list[str]
) -> Measurement:
    """Return a distance with the network that it is by, and what must be known of that."""
    record = {metric: distance, "pictures": count, "features": width, "network": features.network}
    if features.note is None:
        return Measurement(lines, record)
    return Measurement([*lines, features.note], record | {"note": features.note})


def clip(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure how well generated pictures fit their prompts; every rank calls this.

    Raises:
        ConfigError: there is no CLIP model or no prompt, or the model takes no text.
    """
    from dit.backends.device import local_device
    from dit.evaluation.clip import ClipModel
    from dit.inference.drawing import draw

    if args.clip_model is None:
        raise ConfigError("--metric clip needs --clip-model DIR, a local folder with transformers' CLIPModel")
    requests = what_to_draw(args, generator)
    texts = [request.record.get("prompt") for request in requests]
    if None in texts:
        raise ConfigError("--metric clip needs texts, and the run has no sampling.prompts; give --prompts FILE")
    model, decode = ClipModel(args.clip_model, local_device()), _decoder(args, generator)
    sums = torch.zeros(2, dtype=torch.float64)
    for indices, latents in draw(
        generator,
        requests,
        batch_size=generator.batch_size(None, None),
        rank=environment.rank(),
        world_size=environment.world_size(),
        **sampling_settings(args),
    ):
        images = _frames(decode(latents))
        shown = [str(texts[i]) for i in indices for _ in range(len(images) // len(indices))]
        scores = model.scores(images, shown)
        sums += torch.tensor([float(scores.double().sum()), float(len(scores))], dtype=torch.float64)
    total, count = _of_all_ranks([sums[None]]).sum(0).tolist()
    score = total / count
    lines = [f"CLIP score: {score:.3f} ({int(count):,} pictures of {len(set(texts)):,} prompts)"]
    missed = []
    if args.minimum is not None and score < args.minimum:
        missed.append(f"below the minimum of {args.minimum:g}: CLIP score, {score:.3f}")
    return Measurement(lines, {"clip_score": score, "pictures": int(count), "prompts": len(set(texts))}, missed)


def _feature_pairs(
    args: argparse.Namespace, generator: "Generator", features: "Features"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features of this rank's held-out pictures and of generated ones, `[N, D]` each.

    A generated picture has the size and the conditions of a held-out one, and noise that depends on its name only.
    """
    from dit.backends.device import local_device

    tiles = tile_settings(args)
    settings = {name: value for name, value in sampling_settings(args).items() if name not in ("fps", *tiles)}
    sampling, decode = generator.sampling(**settings), _decoder(args, generator)

    def features_of(latents: Sequence[Tensor]) -> Tensor:
        alike: dict[torch.Size, list[Tensor]] = {}
        for latent in latents:
            alike.setdefault(latent.shape, []).append(latent)
        return torch.cat([features(_frames(decode(torch.stack(group)))) for group in alike.values()])

    for batch in held_out_batches(args, generator):
        batch = batch.to(local_device())
        real = batch.unpatchified(batch.latents_TC, *generator.spec.patch)
        yield features_of(real), features_of(generator.generate_pack(batch, sampling, **tiles))


def _frames(clips: Tensor) -> Tensor:
    """Return the frames of clips `[N, 1 or 3, T, H, W]` as pictures `[N T, 3, H, W]`."""
    return clips.transpose(1, 2).flatten(0, 1).expand(-1, 3, -1, -1)


def _decoder(args: argparse.Namespace, generator: "Generator") -> "Decoder":
    from dit.backends.device import local_device
    from dit.inference.decoding import Decoder, find_autoencoder

    name, note = find_autoencoder(generator.config.model.in_channels, args.vae, generator.autoencoder, "--vae PATH")
    if note is not None:
        raise ConfigError(f"pictures are measured, and {note}")
    return Decoder(name, local_device())


def _features(args: argparse.Namespace, generator: "Generator") -> "Features":
    """Return the network of `--features`.

    Raises:
        ConfigError: the flag is missing, or the network cannot be read.
    """
    from dit.backends.device import local_device
    from dit.evaluation.features import load_features

    registered = extensions.load("features", {})
    if args.features is None:
        names = "".join(f", or {name}" for name in registered)
        raise ConfigError(
            f"--metric {args.metric} compares features of pictures; give --features PATH with weights of Inception v3, "
            f"a TorchScript file or a folder with a CLIP model{names}"
        )
    if args.features in registered:
        features: Features = registered[args.features](args, generator)
        return features
    return load_features(args.features, local_device())


def _agreed_width(width: int) -> int:
    """Return the width of the features, which a rank without pictures does not know."""
    return int(_of_all_ranks([torch.tensor([[width]])]).max())


def _of_all_ranks(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors of all ranks, rank by rank."""
    import torch.distributed as dist

    found: list[Any] = [parts]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, parts)
    return torch.cat([part for of_rank in found for part in of_rank])
