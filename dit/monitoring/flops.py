"""Floating-point operations of a training step, in three conventions that must never be mixed.

| convention | tokens | adaLN | for |
|---|---|---|---|
| `model` | real tokens | once per sample | the default: work the maths asks for |
| `hardware` | all tokens, padding included | once per sample | what the device does, recomputed activations included |
| `nemo` | real tokens | once per token | the published tables of NeMo's diffusion framework, and nothing else |

All count two operations per multiply-add. The first two are read from the forward pass of the program, so that
attention counts the pairs of tokens that it visits; `nemo` counts every pair of a sample. A step's backward pass costs
twice its forward pass; once where adapters (LoRA) alone are trained, for frozen weights have no gradients (those of the
adapters, a few percent, are left out). Counts are for the full pack: divide by the ranks that share it.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, Optional

from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.parallel.build import parameter_shapes
from dit.parallel.dims import ParallelConfig
from dit.parallel.pipeline import split_layers
from dit.patchify import Grid
from dit.settings import TrainingConfig
from dit.tracing.forward import ForwardCost

Convention = Literal["model", "hardware", "nemo"]


class PackFlops:
    """Counts the operations of a model's packs.

    Args:
        model: its sizes.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._cost = ForwardCost(model)
        self._nemo_weights: Optional[int] = None

    def forward(
        self,
        layout: SequenceLayout,
        grids: Sequence[Grid],
        context_layout: Optional[SequenceLayout] = None,
        *,
        convention: Convention = "model",
    ) -> int:
        """Count one forward pass over a pack.

        Args:
            layout: the tokens of the pack.
            grids: (t, h, w) in patches of its samples.
            context_layout: its texts; None counts the null text of each sample.
        """
        return self._forward(layout, grids, context_layout, convention, 0.0)

    def training(
        self,
        layout: SequenceLayout,
        grids: Sequence[Grid],
        context_layout: Optional[SequenceLayout] = None,
        *,
        convention: Convention = "model",
        recomputed: float = 0.0,
    ) -> int:
        """Count a forward and a backward pass over a pack.

        Args:
            layout, grids, context_layout: as in `forward`.
            recomputed: share of the layers that run once more in the backward pass (`recomputed_share`); counted in the
                `hardware` convention alone, for it adds work and no result.
        """
        again = self._forward(layout, grids, context_layout, convention, recomputed)
        backward = 2 if self.model.adapters is None else 1
        return backward * self.forward(layout, grids, context_layout, convention=convention) + again

    def _forward(
        self,
        layout: SequenceLayout,
        grids: Sequence[Grid],
        context_layout: Optional[SequenceLayout],
        convention: Convention,
        recomputed: float,
    ) -> int:
        if convention == "nemo":
            sizes = self.model.megatron_sizes()
            pairs = sum(n * n for n in layout.lengths)
            return 2 * self._weights() * layout.valid_tokens + 4 * sizes.num_layers * sizes.hidden_size * pairs
        texts = [1] * len(grids) if context_layout is None else context_layout.lengths
        total = layers = 0
        for grid, text in zip(grids, texts, strict=True):
            sample = self._cost.of_sample(grid, text)
            total, layers = total + sample.total, layers + sample.layers
        if convention == "model":
            return total
        if padding := layout.total_tokens - layout.valid_tokens:
            row = self._cost.of_padding(grids[0])
            total, layers = total + padding * row.total, layers + padding * row.layers
        return total + round(recomputed * layers)

    def _weights(self) -> int:
        """Count the weights that NeMo multiplies with every token: all but those of the text's keys and values."""
        if self._nemo_weights is None:
            shapes = parameter_shapes(self.model)
            self._nemo_weights = sum(
                prod(shape) for name, shape in shapes.items() if not name.endswith("cross_attention.linear_kv.weight")
            )
        return self._nemo_weights


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


def nemo_flops_per_token(num_parameters: float, num_layers: int, hidden_size: int, sequence_length: int) -> float:
    """Return 6 N + 12 L h s, the training operations per token behind NeMo's published TFLOPS.

    N includes the adaLN projections, which run once per sample: the figure overstates the work of the 7B model at 8k
    tokens by 45 %. Use it only beside those tables.

    Source: fitted to the four rows of the NeMo diffusion README (Nov 2024), each met within 0.6 %.
    """
    return 6 * num_parameters + 12 * num_layers * hidden_size * sequence_length
