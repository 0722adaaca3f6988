"""What every backbone is to the rest of the house."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Self

from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.layout import SequenceLayout
from dit.models.activations import BatchForm, SavedActivations


@dataclass(frozen=True)
class Stage:
    """The part of a model that one pipeline rank (or virtual chunk) holds.

    Attributes:
        layers: global indices of its layers.
        first: it embeds the input.
        last: it holds the head.
    """

    layers: range
    first: bool = True
    last: bool = True


@dataclass(kw_only=True)
class ModelConfig(ABC):
    """Sizes of a backbone, as recipes write them. Subclasses add their own fields.

    Attributes:
        in_channels: channels of a latent before patchifying.
        patch_spatial, patch_temporal: patch sizes.
        num_classes: classes the model is conditioned on; None for none.
        class_dropout: share of samples trained without their class, for guidance; 0.1 as in DiT (Peebles and Xie 2023).
        context_size: width of the text embeddings; None if the model takes no text.
        context_dropout: share of samples trained without their text, for guidance; 0.1 as in Open-Sora, where NeMo's
            recipes have 0.2. Of a model with classes and texts, the smaller of the two shares is trained without both.
    """

    in_channels: int = 4
    patch_spatial: int = 2
    patch_temporal: int = 1
    num_classes: Optional[int] = None
    class_dropout: float = 0.1
    context_size: Optional[int] = None
    context_dropout: float = 0.1

    @property
    def token_channels(self) -> int:
        """Width of a patchified latent."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def pooled_size(self) -> Optional[int]:
        """Width of the single vector that the model wants of each text besides its tokens; None for none."""
        return None

    @abstractmethod
    def validate(self) -> None:
        """Check the sizes against each other; raise `ConfigError` with the numbers."""

    @abstractmethod
    def megatron_sizes(self) -> dict[str, Any]:
        """Return what Megatron-Core's `TransformerConfig` must know of this model."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Count the trainable parameters of the whole model."""

    def nemo_weights(self) -> int:
        """Count the weights that NeMo's convention multiplies with every token, whether they meet tokens or not."""
        return self.num_parameters()

    @abstractmethod
    def forward_flops(
        self, layout: SequenceLayout, context_layout: Optional[SequenceLayout] = None, *, padding: bool = False
    ) -> int:
        """Count the floating-point operations of the matrix products of one forward pass, two per multiply-add.

        Attention counts every pair of tokens of a sample; what depends on the sample alone counts once per sample.

        Args:
            layout: the tokens of the whole pack; rows held by one rank only make no difference.
            context_layout: the texts, for a model that reads them token by token.
            padding: count the padding rows too, as the device computes them.
        """

    def unattended_flops(self, grids: Sequence[tuple[int, int, int]]) -> int:
        """Count the operations of `forward_flops` that attention inside frames and columns leaves out.

        Args:
            grids: (t, h, w) in patches of each sample.
        """
        return 0

    @abstractmethod
    def saved_activations(self, layer: int, form: BatchForm) -> SavedActivations:
        """Count what autograd keeps of one layer for each token and each text token, with no recompute.

        Args:
            layer: global index of the layer.
        """

    def without_layers(self) -> Self:
        """Return these sizes with no layer between embedding and head, to count what the ends need."""
        return replace(self, num_layers=0)  # type: ignore[call-arg]

    def layer_kind(self, layer: int) -> Hashable:
        """Return what a layer's cost depends on: layers of one kind cost the same.

        Args:
            layer: its global index.
        """
        return None

    @abstractmethod
    def build(self, provider: Any, attention: Any, stage: Stage) -> "Backbone":
        """Build the part of the model that `stage` names."""


class Backbone(nn.Module, ABC):
    """A network from (noised tokens, time, conditions) to a prediction per token.

    Megatron-Core's wrappers and schedules read `config` and call `set_input_tensor`.
    """

    config: Any
    share_embeddings_and_output_weights = False
    fsdp_units: tuple[type[nn.Module], ...] = ()
    """Kinds of layers that are one to Megatron-FSDP, which gathers and frees their weights, and to recompute.

    Their weights are used nowhere outside their own `forward`.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.pre_process, self.post_process = stage.first, stage.last
        self.input_tensor: Optional[Tensor] = None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the activations of the previous pipeline stage."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def units(self) -> Iterator[nn.Module]:
        """List the layers of these kinds, first to last."""
        return (module for module in self.modules() if isinstance(module, self.fsdp_units))

    @abstractmethod
    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Predict the objective's target.

        Args:
            inputs_TC: noised latents of the whole pack, float32.
            time_S: the objective's time per sample, float32.
            batch: positions, layout and conditions; its latents are not read.

        Returns:
            `[T, out_channels]` on the last stage, else the activations for the next one.
        """
