"""What every backbone is to the rest of the house."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Optional

from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.condition_table import CONTEXT, FPS, LABEL
from dit.conditions import Condition
from dit.data_api import BatchSpec
from dit.errors import ConfigError


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


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """What Megatron-Core's `TransformerConfig` must know of a model, by its names.

    A layout splits layers, heads and experts, so `check_parallel` reads them here, too.

    Attributes:
        num_query_groups: heads of keys and values; None for as many as of queries.
        num_moe_experts: experts of each layer; None for none, and for the other numbers about experts.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: Optional[int] = None
    ffn_hidden_size: Optional[int] = None
    add_bias_linear: bool = True
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    num_moe_experts: Optional[int] = None
    moe_ffn_hidden_size: Optional[int] = None
    moe_router_topk: Optional[int] = None
    moe_router_pre_softmax: Optional[bool] = None
    moe_router_dtype: Optional[str] = None
    moe_expert_capacity_factor: Optional[float] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `TransformerConfig`; it has its own defaults for what is None here."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Supports:
    """What a backbone can do beside plain data parallelism in fp32; a flag that it sets to False is refused by name.

    Attributes:
        tensor: linear layers and heads split over tensor-parallel ranks.
        sequence: activations between the linear layers split over the tensor-parallel ranks.
        pipeline: layers split over pipeline stages.
        context: tokens of a sample split over context-parallel ranks.
        expert: experts split over expert-parallel ranks, where the backbone has any.
        fsdp: weights, gradients and optimizer sharded by Megatron-FSDP.
        bf16: bf16 weights with fp32 masters.
        mixed_shapes: samples of different shapes in one micro-batch, packed or not.
    """

    tensor: bool = True
    sequence: bool = True
    pipeline: bool = True
    context: bool = True
    expert: bool = True
    fsdp: bool = True
    bf16: bool = True
    mixed_shapes: bool = True

    def __str__(self) -> str:
        words = [word for name, word in SUPPORT_WORDS.items() if getattr(self, name)]
        return ", ".join(["data parallelism", "fp32", *words])


SUPPORT_WORDS = {
    "tensor": "tensor parallelism",
    "sequence": "sequence parallelism",
    "pipeline": "pipeline parallelism",
    "context": "context parallelism",
    "expert": "expert parallelism",
    "fsdp": "FSDP",
    "bf16": "bf16",
    "mixed_shapes": "samples of different shapes in one micro-batch",
}
"""What the flags of `Supports` stand for, in messages."""


@dataclass(kw_only=True)
class ModelConfig(ABC):
    """Sizes of a backbone, as recipes write them. Subclasses add their own fields.

    A backbone that cannot do everything says so in `supports`.

    Attributes:
        in_channels: channels of a latent before patchifying.
        patch_spatial, patch_temporal: patch sizes.
        num_classes: classes the model is conditioned on; None for none.
        class_dropout: share of samples trained without their class, for guidance; 0.1 as in DiT (Peebles and Xie 2023).
        context_size: width of the text embeddings; None if the model takes no text.
        context_dropout: share of samples trained without their text, for guidance; 0.1 as in Open-Sora, where NeMo's
            recipes have 0.2. Of a model with classes and texts, the smaller of the two shares is trained without both.
        model_path: `module:Class` of the network, for a backbone outside this repository; those inside have a line in
            `dit.models.registry`.
    """

    model_path: ClassVar[Optional[str]] = None
    supports: ClassVar[Supports] = Supports()

    in_channels: int = 4
    patch_spatial: int = 2
    patch_temporal: int = 1
    num_classes: Optional[int] = None
    class_dropout: float = 0.1
    context_size: Optional[int] = None
    context_dropout: float = 0.1

    def check_supports(self, what: str, asked: str, cure: str) -> None:
        """Check that the backbone can do something that was asked of it.

        Args:
            what: a flag of `Supports`.
            asked: the setting that asks for it, with its value.
            cure: settings that do without.

        Raises:
            ConfigError: it cannot.
        """
        if not getattr(self.supports, what):
            raise ConfigError(
                f"{type(self).__name__} does not support {SUPPORT_WORDS[what]}, which {asked} asks for; "
                f"it supports {self.supports}. Use {cure}"
            )

    @property
    def token_channels(self) -> int:
        """Width of a patchified latent."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def output_features(self) -> int:
        """Width of what the model predicts for a token: a multiple of `token_channels` where outputs are several."""
        return self.token_channels

    def conditions(self) -> tuple[Condition, ...]:
        """Return what the model is given of each sample besides the noised latent.

        The frame rate is among it for every model: samples of the data's rate are played at that rate.
        """
        wanted = [FPS]
        if self.num_classes is not None:
            wanted.append(replace(LABEL, num_classes=self.num_classes, dropout=self.class_dropout))
        if self.context_size is not None:
            wanted.append(replace(CONTEXT, shape=(self.context_size,), dropout=self.context_dropout))
        return tuple(wanted)

    def batch_spec(self, *, micro_batch_size: int = 1, multiple_of: int = 1) -> BatchSpec:
        """Return what this model fixes about every micro-batch.

        Args:
            micro_batch_size: samples per micro-batch when not packing.
            multiple_of: every sample is padded to a multiple of this many tokens.
        """
        return BatchSpec(
            patch_temporal=self.patch_temporal,
            patch_spatial=self.patch_spatial,
            latent_channels=self.in_channels,
            conditions=self.conditions(),
            micro_batch_size=micro_batch_size,
            multiple_of=multiple_of,
        )

    @abstractmethod
    def validate(self) -> None:
        """Check the sizes against each other; raise `ConfigError` with the numbers."""

    @abstractmethod
    def megatron_sizes(self) -> TransformerSizes:
        """Return what Megatron-Core's `TransformerConfig` must know of this model."""

    def layer_kind(self, layer: int) -> Hashable:
        """Return what a layer's cost depends on: layers of one kind cost the same.

        Args:
            layer: its global index.
        """
        return None


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
