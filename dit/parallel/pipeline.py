"""Assignment of layers to pipeline stages.

The network is split into `pipeline ranks x virtual chunks` consecutive stages. Rank `r` of `p` has the stages `r`,
`r + p`, `r + 2 p`, ..., one model chunk each (Megatron-Core's interleaving). The first rank has the embedding, the last
rank the head. 8 layers, 2 ranks, 2 chunks per rank:

    layers   embedding 0 1 | 2 3 | 4 5 | 6 7 head
    stage         0           1     2       3
    rank          0           1     0       1
    chunk         0           0     1       1
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Optional

from dit.errors import ConfigError
from dit.models.base import Stage
from dit.ranges import divisors


def split_layers(
    num_layers: int, pp_size: int, vpp_size: Optional[int] = None, layers: Optional[Sequence[int]] = None
) -> list[int]:
    """Return the number of layers of each stage, in the order of the network.

    Args:
        vpp_size: chunks per rank; None for one.
        layers: layers of each stage, which are checked; None for equal stages.
    """
    count = pp_size * (vpp_size or 1)
    requested = f"pipeline_model_parallel_size={pp_size}" + (
        f" x virtual_pipeline_model_parallel_size={vpp_size} = {count} stages" if vpp_size else ""
    )
    if layers is None:
        if num_layers % count:
            share, rest = divmod(num_layers, count)
            # The first stage also has the embedding and the last stage the head, so middle stages get the remainder.
            order = sorted(range(count), key=lambda i: (i == count - 1, i == 0, i))
            uneven = [share + (i in order[:rest]) for i in range(count)]
            cure = f"use parallel.pipeline_layers={uneven}, or " if share else ""
            raise ConfigError(
                f"num_layers={num_layers} cannot be split evenly over parallel.{requested}; {cure}"
                f"change the number of stages (to one of {divisors(num_layers)})"
            )
        return [num_layers // count] * count
    if len(layers) != count:
        raise ConfigError(
            f"parallel.pipeline_layers={list(layers)} has {len(layers)} stages but parallel.{requested} has {count}; "
            "use one number per stage, in the order of the network"
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
    """Return the stages of pipeline rank `pp_rank`, one per model chunk."""
    ends = [0, *accumulate(split_layers(num_layers, pp_size, vpp_size, layers))]
    last = len(ends) - 2
    return [Stage(range(ends[i], ends[i + 1]), first=i == 0, last=i == last) for i in range(pp_rank, last + 1, pp_size)]


def layers_in_flight(split: Sequence[float], pp_size: int, pp_rank: int, micro_batches: int) -> float:
    """Return the largest number of layers whose activations rank `pp_rank` saves at once, per micro-batch.

    1F1B runs `pp_size - pp_rank` forward passes before the first backward pass. The interleaved schedule runs
    `2 (pp_size - pp_rank - 1) + (chunks - 1) pp_size + 1`. 1F1B on 2 ranks (F forward, B backward, by micro-batch):

        rank 0   F0 F1 .  B0 F2 B1 ...        2 micro-batches in flight
        rank 1   .  F0 B0 F1 B1 ...           1 micro-batch in flight

    Args:
        split: layers of every stage, from `split_layers`; or the bytes that each stage saves per micro-batch.

    Returns:
        The sum of `split` over the forward passes in flight.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the schedules of Megatron-Core.
    """
    local = list(split[pp_rank::pp_size])
    if len(local) == 1:
        return min(pp_size - pp_rank, micro_batches) * local[0]
    passes = 2 * (pp_size - pp_rank - 1) + (len(local) - 1) * pp_size + 1
    # Each chunk runs `pp_size` micro-batches before the next chunk.
    turns = [layers for _ in range(micro_batches // pp_size) for layers in local for _ in range(pp_size)]
    return sum(turns[:passes])
