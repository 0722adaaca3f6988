"""Metrics that compare generated pictures with real ones (`fid`, `kid`, `precision`) or with texts (`clip`, `ocr`)."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dit import extensions
from dit.backends.device import local_device
from dit.batch import pixel_values
from dit.errors import ConfigError, DataError
from dit.evaluation.clip import ClipModel
from dit.evaluation.features import Features, load_features
from dit.evaluation.frechet import Gaussian, Moments, frechet_distance
from dit.evaluation.kernel_distance import kernel_distance
from dit.evaluation.precision_recall import precision_recall
from dit.evaluation.reference import read_features, read_gaussian, read_pictures
from dit.evaluation.text_reader import TextReader, edit_distance, quoted_texts, words_of
from dit.inference.decoding import Decoder, find_autoencoder
from dit.inference.drawing import Request, draw
from dit.safe_files import read_bytes
from energon_data.media_files import PICTURES, open_picture
from energon_data.prepare.walk import Skipped, extension_of, folders_below
from energon_data.samples import SampleError
from launch import environment
from launch.held_out import redrawn
from launch.measurement import Measurement
from launch.sample import sampling_settings
from launch.sample_requests import add_request_arguments, what_to_draw

if TYPE_CHECKING:
    from dit.inference.generator import Generator

REFERENCE_BATCH = 32
"""Pictures of which features are computed at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of these metrics."""
    group = parser.add_argument_group("--metric fid, kid, clip")
    group.add_argument(
        "--features",
        metavar="FILE",
        help="of fid, kid, precision, pictograms: weights of FID's Inception v3, a "
        "TorchScript file, a folder with a CLIP model, efficientnet_lite0, or a registered name "
        f"({', '.join(extensions.registered('features')) or 'none'})",
    )
    group.add_argument(
        "--reference",
        type=Path,
        metavar="PATH",
        help="of fid, kid, precision: compare with these, not with held-out data: an .npz file with mu and sigma "
        "(fid), feats (kid, precision) or pictures (arr_0), or a folder of pictures; samples are then requested as in "
        "launch.sample",
    )
    group.add_argument("--clip-model", metavar="DIR", help="of clip: a local folder with transformers' CLIPModel")
    group.add_argument("--vae", metavar="PATH", help="autoencoder that decodes (default: the one the data set names)")
    add_request_arguments(parser.add_argument_group("samples of clip and ocr, and of others with --reference"))


def fid(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure the Frechet distance between real pictures and generated ones; every rank calls this."""
    real, drawn, network = _both_sides(args, generator, Moments, read_gaussian)
    assert drawn.count is not None
    distance = frechet_distance(real, drawn)
    result = _measurement(args, f"FID: {distance:.4f}", {"fid": distance}, real, drawn, network)
    if min(drawn.count, real.count or drawn.count) <= drawn.width:
        result.lines.insert(
            1, f"too few pictures for {drawn.width} features: the distance is biased upwards; measure more, or kid"
        )
    return result


def kid(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure the kernel distance between real pictures and generated ones; every rank calls this."""
    real, drawn, network = _both_sides(args, generator, FeatureRows, read_features)
    distance = kernel_distance(real, drawn)
    return _measurement(args, f"KID: {distance:.6f}, unbiased", {"kid": distance}, real, drawn, network)


def precision_and_recall(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure how many generated pictures are like real ones, and the reverse; every rank calls this."""
    real, drawn, network = _both_sides(args, generator, FeatureRows, read_features)
    precision, recall = precision_recall(real, drawn)
    line = f"precision: {100 * precision:.1f} %, recall: {100 * recall:.1f} %"
    result = _measurement(args, line, {"precision": precision, "recall": recall}, real, drawn, network)
    return replace(result, missed=_missed(args, "precision", precision))


def _measurement(
    args: argparse.Namespace,
    result: str,
    record: dict[str, Any],
    real: Gaussian | Tensor,
    drawn: Gaussian | Tensor,
    network: str,
) -> Measurement:
    """Return lines and record of a comparison; a reference may not record its number of pictures."""
    (num_real, _), (count, width) = map(_size, (real, drawn))
    record = record | {"pictures": count, "features": width, "network": network}
    if args.reference is None:
        compared = f"{count:,} held-out and as many generated pictures"
    else:
        of_real = "" if num_real is None else f", {num_real:,} pictures"
        compared = f"{count:,} generated pictures, compared with {args.reference}{of_real}"
        record |= {"reference": str(args.reference), "reference_pictures": num_real}
    return Measurement([f"{result} ({compared}, {width} features, {network})"], record)


class FeatureRows:
    """The features of all pictures."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, features: Tensor) -> None:
        """Add feature vectors `[N, D]`."""
        self._parts.append(features.double().cpu())

    def reduce(self) -> Tensor:
        """Return the features of all ranks `[N, D]`, float64; every rank calls this once."""
        return _of_all_ranks(self._parts)


def _both_sides(
    args: argparse.Namespace,
    generator: "Generator",
    new: Callable[[], FeatureRows | Moments],
    read: Callable[[Path, str], Any],
) -> tuple[Any, Any, str]:
    """Return the statistics of the real pictures and of the generated ones, and the name of the feature network.

    Args:
        new: creates a collector of features, whose `reduce` returns the statistics of all ranks.
        read: reads the statistics of a reference, see `dit.evaluation.reference`.
    """
    path, features = args.reference, feature_network(args, generator)
    stored = None if path is None or path.is_dir() else read(path, features.network)
    real, drawn = new(), new()
    if path is None:
        for pair in _feature_pairs(args, generator, features):
            real.add(pair[0])
            drawn.add(pair[1])
    else:
        for images in reference_pictures(path) if stored is None else ():
            real.add(features(images))
        width = None if stored is None else _size(stored)[1]
        for _, images in _drawn(args, generator, what_to_draw(args, generator, every_class=True)):
            rows = features(images)
            if width not in (None, rows.shape[1]):
                raise ConfigError(
                    f"{path} has {width:,} features and {features.network} makes {rows.shape[1]:,}; give the network "
                    "of the reference as --features"
                )
            drawn.add(rows)
    return real.reduce() if stored is None else stored, drawn.reduce(), features.network


def _size(statistics: Gaussian | Tensor) -> tuple[Optional[int], int]:
    """Return the number of pictures, None if unknown, and the size of a feature vector."""
    if isinstance(statistics, Tensor):
        return len(statistics), statistics.shape[1]
    return statistics.count, statistics.width


def by_shape(pictures: Sequence[Tensor]) -> Iterator[Tensor]:
    """Stack tensors of one shape; yields one tensor per shape."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for picture in pictures:
        alike.setdefault(picture.shape, []).append(picture)
    return map(torch.stack, alike.values())


def reference_pictures(path: Path) -> Iterator[Tensor]:
    """Yield this rank's share of the pictures of a folder or an `.npz` file, float32 `[n, 3, H, W]` in [-1, 1].

    A picture of a folder has its own size.
    """
    rank, ranks = environment.rank(), environment.world_size()
    if not path.is_dir():
        yield from map(pixel_values, islice(read_pictures(path, REFERENCE_BATCH), rank, None, ranks))
        return
    files = _reference_files(path)[rank::ranks]
    for start in range(0, len(files), REFERENCE_BATCH):
        yield from by_shape([_reference_picture(file) for file in files[start : start + REFERENCE_BATCH]])


def _reference_files(folder: Path) -> list[Path]:
    skipped: list[Skipped] = []
    files = [
        place / name
        for place, names in folders_below(folder, follow_links=False, skipped=skipped)
        for name in names
        if extension_of(name) in PICTURES
    ]
    if skipped:
        raise DataError(f"{folder / skipped[0].name} is {skipped[0].detail.partition(';')[0]}; replace it by a folder")
    if not files:
        raise DataError(f"{folder} holds no picture that ends in {', '.join(sorted(PICTURES))}")
    return files


def _reference_picture(path: Path) -> Tensor:
    try:
        pixels = np.asarray(open_picture(read_bytes(path)))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; remove it from the folder") from error
    except SampleError as error:
        raise DataError(f"{path} cannot be read: {error.detail}; remove it from the folder") from error
    return pixel_values(torch.tensor(pixels).movedim(2, 0))


def clip(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure how well generated pictures fit their prompts; every rank calls this."""
    if args.clip_model is None:
        raise ConfigError("--metric clip needs --clip-model DIR, a local folder with transformers' CLIPModel")
    requests = what_to_draw(args, generator)
    texts = _prompts(args, requests)
    model = ClipModel(args.clip_model, local_device())
    sums = torch.zeros(2, dtype=torch.float64)
    for indices, images in _drawn(args, generator, requests):
        scores = model.scores(images, [texts[i] for i in indices])
        sums += torch.tensor([float(scores.double().sum()), float(len(scores))], dtype=torch.float64)
    total, count = _of_all_ranks([sums[None]]).sum(0).tolist()
    score = total / count
    lines = [f"CLIP score: {score:.3f} ({int(count):,} pictures of {len(set(texts)):,} prompts)"]
    record = {"clip_score": score, "pictures": int(count), "prompts": len(set(texts))}
    return Measurement(lines, record, _missed(args, "CLIP score", score))


def ocr(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Measure how well the quoted texts of prompts can be read in their pictures; every rank calls this."""
    requests = what_to_draw(args, generator)
    prompts = _prompts(args, requests)
    quoted = [quoted_texts(prompt) for prompt in prompts]
    if not all(quoted):
        raise ConfigError(
            f"--metric ocr reads the texts in double quotes of each prompt, and {prompts[quoted.index([])]!r} has "
            'none; give --prompts FILE with lines such as: a shop sign that says "OPEN"'
        )
    reader = TextReader("--metric ocr")
    sums = torch.zeros(4, dtype=torch.float64)
    for indices, images in _drawn(args, generator, requests):
        for i, lines in zip(indices, reader.texts(images), strict=True):
            distances = [edit_distance(text, words_of(lines)) / len(text) for text in quoted[i]]
            sums += torch.tensor([distances.count(0), sum(distances), len(distances), 1], dtype=torch.float64)
    correct, distance, count, pictures = _of_all_ranks([sums[None]]).sum(0).tolist()
    share, distance = correct / count, distance / count
    lines = [
        f"texts read exactly: {100 * share:.1f} % ({correct:,.0f} of {count:,.0f}; {pictures:,.0f} pictures), "
        f"mean edit distance {distance:.3f}"
    ]
    record = {"ocr": share, "edit_distance": distance}
    record |= {"correct": int(correct), "texts": int(count), "pictures": int(pictures)}
    return Measurement(lines, record, _missed(args, "texts read exactly", share))


def _prompts(args: argparse.Namespace, requests: Sequence[Request]) -> list[str]:
    texts = [request.record.get("prompt") for request in requests]
    if None in texts:
        raise ConfigError(
            f"--metric {args.metric} needs texts, and the run has no sampling.prompts; give --prompts FILE"
        )
    return [str(text) for text in texts]


def _missed(args: argparse.Namespace, name: str, value: float) -> list[str]:
    if args.minimum is None or value >= args.minimum:
        return []
    return [f"below the minimum of {args.minimum:g}: {name}, {value:.3f}"]


def _feature_pairs(
    args: argparse.Namespace, generator: "Generator", features: Features
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features of this rank's held-out pictures and of generated ones, `[N, D]` each."""
    decode = _decoder(args, generator)

    def features_of(latents: Sequence[Tensor]) -> Tensor:
        return torch.cat([features(_frames(decode(group))) for group in by_shape(latents)])

    for real, drawn in redrawn(args, generator):
        yield features_of(real), features_of(drawn)


def _drawn(
    args: argparse.Namespace, generator: "Generator", requests: Sequence[Request]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the frames `[N T, 3, H, W]` of this rank's share of the requested samples, with the request of each."""
    decode = _decoder(args, generator)
    for indices, latents in draw(
        generator,
        requests,
        batch_size=generator.batch_size(None, None),
        rank=environment.rank(),
        world_size=environment.world_size(),
        **sampling_settings(args),
    ):
        frames = _frames(decode(latents))
        yield [i for i in indices for _ in range(len(frames) // len(indices))], frames


def _frames(clips: Tensor) -> Tensor:
    """Return the frames of clips `[N, 1 or 3, T, H, W]` as pictures `[N T, 3, H, W]`."""
    return clips.transpose(1, 2).flatten(0, 1).expand(-1, 3, -1, -1)


def _decoder(args: argparse.Namespace, generator: "Generator") -> Decoder:
    name, note = find_autoencoder(generator.config.model.in_channels, args.vae, generator.autoencoder, "--vae PATH")
    if note is not None:
        raise ConfigError(f"pictures are measured, and {note}")
    return Decoder(name, local_device())


def feature_network(args: argparse.Namespace, generator: "Generator") -> Features:
    """Return the network of `--features`, which fid, kid and pictograms read."""
    registered = extensions.load("features", {})
    if args.features is None:
        names = "".join(f", or {name}" for name in registered)
        raise ConfigError(
            f"--metric {args.metric} compares features of pictures; give --features PATH with weights of Inception v3, "
            f"a TorchScript file or a folder with a CLIP model, or give efficientnet_lite0{names}"
        )
    if args.features in registered:
        features: Features = registered[args.features](args, generator)
        return features
    return load_features(args.features, local_device())


def _of_all_ranks(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors of all ranks, rank by rank."""
    from dit.backends.process_groups import gather_objects

    by_rank = gather_objects(parts) if dist.is_initialized() else [parts]
    parts = [part for of_rank in by_rank for part in of_rank]
    return torch.cat(parts) if parts else torch.zeros(0, 0)
