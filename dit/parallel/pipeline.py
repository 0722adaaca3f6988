"""Which layers lie on which pipeline stage: pure arithmetic, no ranks needed.

The network is cut into `pipeline ranks x virtual chunks` stages in a row. Rank `r` of `p` holds stages `r`, `r + p`,
`r + 2 p`, ..., one model chunk each (Megatron-Core's interleaving), so the first rank embeds and the last has the head.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import Stage


def split_layers(
    num_layers: int, pp_size: int, vpp_size: Optional[int] = None, layers: Optional[Sequence[int]] = None
) -> list[int]:
    """Return how many layers each stage holds, in the order of the network.

    Args:
        vpp_size: chunks per rank; None for one.
        layers: the answer itself, checked; None for equal shares.

    Raises:
        ConfigError: the shares are not equal, or the list does not add up to the model.
    """
    count = pp_size * (vpp_size or 1)
    asked = f"pipeline_model_parallel_size={pp_size}" + (
        f" x virtual_pipeline_model_parallel_size={vpp_size} = {count} stages" if vpp_size else ""
    )
    if layers is None:
        if num_layers % count:
            share, rest = divmod(num_layers, count)
            # The last stage also has the head and the first the embedding: what is left over goes to the middle.
            order = sorted(range(count), key=lambda i: (i == count - 1, i == 0, i))
            uneven = [share + (i in order[:rest]) for i in range(count)]
            cure = f"use parallel.pipeline_layers={uneven}, or " if share else ""
            fits = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
            raise ConfigError(
                f"num_layers={num_layers} cannot be split evenly over parallel.{asked}; {cure}"
                f"change the number of stages (to one of {fits})"
            )
        return [num_layers // count] * count
    if len(layers) != count:
        raise ConfigError(
            f"parallel.pipeline_layers={list(layers)} names {len(layers)} stages but parallel.{asked} has {count}; "
            "give one number per stage, in the order of the network"
        )
    if min(layers) < 1 or sum(layers) != num_layers:
        raise ConfigError(
            f"parallel.pipeline_layers={list(layers)} adds up to {sum(layers)} layers, smallest stage {min(layers)}; "
            f"the model has num_layers={num_layers} and every stage needs at least one"
        )
    return list(layers)


def stages(
    num_layers: int,
    pp_size: int,
    pp_rank: int,
    vpp_size: Optional[int] = None,
    layers: Optional[Sequence[int]] = None,
) -> list[Stage]:
    """Return the stages that pipeline rank `pp_rank` holds, one per model chunk.

    Args:
        vpp_size: chunks per rank; None for one.
        layers: layers of each stage in the order of the network; None for equal shares.

    Raises:
        ConfigError: see `split_layers`.
    """
    ends = [0, *accumulate(split_layers(num_layers, pp_size, vpp_size, layers))]
    last = len(ends) - 2
    return [Stage(range(ends[i], ends[i + 1]), first=i == 0, last=i == last) for i in range(pp_rank, last + 1, pp_size)]


def layers_in_flight(split: Sequence[float], pp_size: int, pp_rank: int, micro_batches: int) -> float:
    """Count the layers whose activations rank `pp_rank` keeps at most, once per micro-batch that passed through them.

    The warm-up of 1F1B lets `pp_size - pp_rank` micro-batches in before the first comes back. Interleaved, the rank
    makes `2 (pp_size - pp_rank - 1) + (chunks - 1) pp_size + 1` passes through its chunks.

    Args:
        split: layers of every stage, from `split_layers`; or what each stage keeps of a micro-batch, to add that up.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the schedules of Megatron-Core.
    """
    mine = list(split[pp_rank::pp_size])
    if len(mine) == 1:
        return min(pp_size - pp_rank, micro_batches) * mine[0]
    passes = 2 * (pp_size - pp_rank - 1) + (len(mine) - 1) * pp_size + 1
    # Chunks are passed in turn, by `pp_size` micro-batches each.
    turns = [layers for _ in range(micro_batches // pp_size) for layers in mine for _ in range(pp_size)]
    return sum(turns[:passes])
