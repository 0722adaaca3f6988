"""Samples of a metric, and the data set that they are compared with."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from dit.errors import ConfigError, DataError
from energon_data.dataset import EnergonData
from launch import environment
from launch.sample import sampling_settings

if TYPE_CHECKING:
    from dit.conditions import Value
    from dit.encoders.vae import VAE
    from dit.inference.generator import Generator

DECODED_AT_ONCE = 50


def folder_to_compare(
    args: argparse.Namespace, generator: "Generator", names: Collection[str], what: str, default: str
) -> str:
    """Return the folder of a metric's reference data: that of the flag, of the run, or of its blend, or `default`.

    Args:
        names: `name` of suitable data sets in `dataset.json`.
        what: their content, for messages.
        default: folder for a run without a data folder, such as an average or imported weights.

    Raises:
        ConfigError: the blend of the run does not have exactly one suitable data set.
        DataError: the blend cannot be read, or `default` does not exist.
    """
    if args.data:
        return args.data
    data = generator.config.data
    if getattr(data, "blend", None) is None:
        if path := getattr(data, "path", ""):
            return path
        if not Path(default).is_dir():
            raise DataError(
                f"samples are compared with the data set that the model was trained on; the checkpoint names none, and "
                f"{default} does not exist; give the folder with --data"
            )
        return default
    assert isinstance(data, EnergonData)  # other data are not blended
    members = {str(member.path): member.description.get("name") in names for member in data.folders("train")}
    readable = [member for member, suits in members.items() if suits]
    if len(readable) != 1:
        raise ConfigError(
            f"the run trained on {data.origin}, a blend with {len(readable)} data sets of {what}, but samples are "
            f"compared with one; name it, such as --data {(readable or list(members))[0]} (the blend has "
            f"{', '.join(members)})"
        )
    return readable[0]


def description_to_compare(args: argparse.Namespace, generator: "Generator", name: str, default: str) -> dict[str, Any]:
    """Return the content of `dataset.json` of a metric's reference data; arguments as of `folder_to_compare`.

    Raises:
        ConfigError: a minimum is no share, or the data set has another name.
    """
    from energon_data.folder import check_dataset

    check_minimums(args)
    folder = folder_to_compare(args, generator, (name,), name, default)
    description = check_dataset(folder, "train").description
    if description.get("name") != name:
        raise ConfigError(f"{folder} holds no {name}; give those that the model was trained on with --data")
    return description


def check_minimums(args: argparse.Namespace) -> None:
    """Check that the minimums in the arguments are shares."""
    for name, share in vars(args).items():
        if name.startswith("minimum") and share is not None and not 0 <= share <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {share} is a share; use a value from 0 to 1, such as 0.9")


def below_minimum(minimum: Optional[float], name: str, share: float) -> list[str]:
    """Return a line if a share is below its minimum; None is no minimum."""
    if minimum is None or share >= minimum:
        return []
    return [f"below the minimum of {100 * minimum:.1f} %: {name}, {100 * share:.1f} %"]


def draw_samples(
    args: argparse.Namespace,
    generator: "Generator",
    conditions: "Mapping[str, Sequence[Value]]",
    references: Optional[Sequence[Sequence[Tensor]]] = None,
) -> Tensor:
    """Draw a sample for each value of the conditions (collective).

    Batches are distributed over the ranks. They do not depend on the number of ranks, so the samples are bit-identical
    on any number of ranks.

    Args:
        references: latents that each sample is edited from; None for none.

    Returns:
        Latents `[N, C, T, H, W]`, all of them on every rank, on its device.
    """
    count, at_once = len(next(iter(conditions.values()))), generator.batch_size(None, None, references)
    starts = range(0, count, at_once)
    rank, ranks = environment.rank(), environment.world_size()
    batches = []
    for start in starts[rank::ranks]:
        rows = range(start, min(start + at_once, count))
        of_batch = {name: [values[i] for i in rows] for name, values in conditions.items()}
        settings = sampling_settings(args)
        if references is not None:
            settings["references"] = references[rows.start : rows.stop]
        batches.append(generator.generate(conditions=of_batch, numbers=rows, **settings))
    if ranks == 1:
        return torch.cat(batches)
    from dit.backends.device import local_device
    from dit.backends.process_groups import gather_objects

    of_rank = gather_objects([latents.cpu() for latents in batches])
    return torch.cat([of_rank[i % ranks][i // ranks] for i in range(len(starts))]).to(local_device())


def decoded(vae: Optional["VAE"], latents: Tensor) -> Tensor:
    """Return pictures `[N, C, T, H, W]` on the host; without an autoencoder, latents are pixels."""
    if vae is None:
        return latents.cpu()
    return torch.cat([vae.decode(part) for part in latents.split(DECODED_AT_ONCE)]).cpu()
