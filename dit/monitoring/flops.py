"""Floating-point operations of a training step, in three conventions that must never be mixed.

| convention | rows | adaLN | for |
|---|---|---|---|
| `model` | real tokens | once per sample | the default: work the maths asks for |
| `hardware` | all rows, padding included | once per sample | what the device does, recomputed activations included |
| `nemo` | real tokens | once per token | the published tables of NeMo's diffusion framework, and nothing else |

All count two operations per multiply-add, and attention over every pair of tokens of a sample; the first two leave out
the pairs that attention inside frames and columns does not visit, where the samples' grids are given. A step's backward
pass costs twice its forward pass. Counts are for the whole pack: divide by the ranks that share it.
"""

from collections.abc import Sequence
from typing import Literal, Optional

from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.parallel.dims import ParallelConfig
from dit.parallel.pipeline import split_layers
from dit.settings import TrainingConfig

Convention = Literal["model", "hardware", "nemo"]
Grid = tuple[int, int, int]


def forward_flops(
    config: ModelConfig,
    layout: SequenceLayout,
    context_layout: Optional[SequenceLayout] = None,
    *,
    grids: Sequence[Grid] = (),
    convention: Convention = "model",
) -> int:
    """Count the operations of one forward pass over a pack.

    Args:
        layout: the tokens of the pack.
        context_layout: its texts, if the model takes text.
        grids: (t, h, w) in patches of its samples, for models that attend inside frames and columns.
    """
    if convention == "nemo":
        h, layers = config.megatron_sizes().hidden_size, config.megatron_sizes().num_layers
        pairs = sum(n * n for n in layout.lengths)
        return 2 * config.nemo_weights() * layout.valid_tokens + 4 * layers * h * pairs
    dense = config.forward_flops(layout, context_layout, padding=convention == "hardware")
    return dense - config.unattended_flops(grids)


def training_flops(
    config: ModelConfig,
    layout: SequenceLayout,
    context_layout: Optional[SequenceLayout] = None,
    *,
    grids: Sequence[Grid] = (),
    convention: Convention = "model",
    recomputed: float = 0.0,
) -> int:
    """Count the operations of a forward and a backward pass over a pack.

    Args:
        layout: the tokens of the pack.
        context_layout: its texts, if the model takes text.
        grids: as in `forward_flops`.
        recomputed: share of the layers that run once more in the backward pass (`recomputed_share`); counted in the
            `hardware` convention alone, for it adds work and no result.
    """
    forward = forward_flops(config, layout, context_layout, grids=grids, convention=convention)
    if convention != "hardware" or not recomputed:
        return 3 * forward
    ends = forward_flops(config.without_layers(), layout, context_layout, convention=convention)
    return 3 * forward + round(recomputed * (forward - ends))


def recomputed_share(training: TrainingConfig, parallel: ParallelConfig, num_layers: int) -> float:
    """Return the share of the layers whose matrix products run once more in the backward pass."""
    if training.recompute != "full":
        return 0.0
    if training.recompute_layers is None:
        return 1.0
    chunks = split_layers(
        num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.pipeline_layers,
    )
    return sum(min(training.recompute_layers, count) for count in chunks) / num_layers


def flops_per_token(
    config: ModelConfig,
    sequence_length: int,
    context_length: Optional[int] = None,
    *,
    grid: Optional[Grid] = None,
    convention: Convention = "model",
) -> float:
    """Return the training operations per token of samples of one length.

    Args:
        sequence_length: tokens of a sample.
        context_length: tokens of its text, if the model takes text.
        grid: (t, h, w) in patches of the sample, for models that attend inside frames and columns.
    """
    layout = SequenceLayout.from_lengths([sequence_length])
    context_layout = None if context_length is None else SequenceLayout.from_lengths([context_length])
    grids = () if grid is None else (grid,)
    return training_flops(config, layout, context_layout, grids=grids, convention=convention) / sequence_length


def nemo_flops_per_token(num_parameters: float, num_layers: int, hidden_size: int, sequence_length: int) -> float:
    """Return 6 N + 12 L h s, the training operations per token behind NeMo's published TFLOPS.

    N includes the adaLN projections, which run once per sample: the figure overstates the work of the 7B model at 8k
    tokens by 45 %. Use it only beside those tables.

    Source: fitted to the four rows of the NeMo diffusion README (Nov 2024), each met within 0.6 %.
    """
    return 6 * num_parameters + 12 * num_layers * hidden_size * sequence_length
