"""The interface of backbones: their settings, what they support, and the network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Optional, Self

import torch
from torch import Tensor, nn

from dit.auxiliary import AuxiliaryNetworks, Projection
from dit.batch import PackedBatch
from dit.condition_table import FPS
from dit.conditions import Condition
from dit.data_api import BatchSpec
from dit.errors import ConfigError
from dit.models.lora_config import LoRAConfig
from dit.ranges import PATCHES, WIDTH, check_ranges, ranged

if TYPE_CHECKING:
    from dit.backends.megatron_types import MegatronConfig, MegatronModelType
    from dit.backends.provider import LayerProvider


@dataclass(frozen=True)
class Stage:
    """The part of a model on one pipeline rank (or virtual chunk).

    Attributes:
        layers: global indices of the layers.
        first: whether the stage embeds the input.
        last: whether the stage has the output layer.
    """

    layers: range
    first: bool = True
    last: bool = True


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """Sizes of a model under the names of Megatron-Core's `TransformerConfig`.

    `check_parallel` checks that a layout can split these layers, heads and experts.

    Attributes:
        num_query_groups: key and value heads; None for the number of query heads.
        num_moe_experts: experts of each layer; this and the other expert settings are None without experts.
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

    def arguments(self) -> dict[str, object]:
        """Return the arguments of `TransformerConfig`, without values that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _ability(description: str, default: bool = True) -> bool:
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, kw_only=True)
class Supports:
    """Features of a backbone, other than data parallelism in fp32. A setting that needs a missing one is an error."""

    tensor: bool = _ability("tensor parallelism")
    sequence: bool = _ability("sequence parallelism")
    pipeline: bool = _ability("pipeline parallelism")
    context: bool = _ability("context parallelism")
    expert: bool = _ability("expert parallelism")
    fsdp: bool = _ability("FSDP")
    bf16: bool = _ability("bf16")
    fp16: bool = _ability("fp16")
    mixed_shapes: bool = _ability("samples of different shapes in one micro-batch")
    levels: bool = _ability("several noise levels in a sample")  # see `dit.levels`
    split_texts: bool = _ability("context parallelism of all tokens")  # no stream of tokens is replicated
    aligned: bool = _ability("alignment of hidden states", False)  # with features of a teacher (`objective.alignment`)
    compiled: bool = _ability("compiled layers", False)  # by torch.compile (`training.kernels=compile`)
    fixed_packs: bool = _ability("CUDA graphs of packs", False)  # passes read no lengths of samples (`dit.fixed_packs`)

    def __str__(self) -> str:
        return ", ".join(["data parallelism", "fp32", *(DESCRIPTIONS[name] for name in DESCRIPTIONS if self.has(name))])

    def has(self, ability: str) -> bool:
        return bool(getattr(self, ability))


DESCRIPTIONS: dict[str, str] = {ability.name: ability.metadata["description"] for ability in fields(Supports)}
"""Descriptions of the fields of `Supports`, for messages."""
PICTURES = Supports(
    tensor=False,
    sequence=False,
    pipeline=False,
    context=False,
    expert=False,
    mixed_shapes=False,
    levels=False,
    split_texts=False,
)
"""Features of a network of convolutions on complete pictures of one shape."""


@dataclass(kw_only=True)
class ModelConfig(ABC):
    """Settings of every backbone.

    Subclasses add their own fields, and list features in `supports`.

    Attributes:
        in_channels: channels of a latent (of a picture for an autoencoder).
        patch_spatial: height and width of a patch (one token); the compression factor of an autoencoder.
        patch_temporal: frames of a patch.
        model_path: `module:Class` of the network, for a backbone outside this repository; backbones inside it have a
            line in `dit.models.registry`.
    """

    model_path: ClassVar[Optional[str]] = None

    in_channels: int = ranged(4, WIDTH)
    patch_spatial: int = ranged(2, PATCHES)
    patch_temporal: int = ranged(1, PATCHES)

    @property
    def supports(self) -> Supports:
        """Features of the backbone with these settings; a class attribute if they do not depend on settings."""
        return Supports()

    def check_supports(self, ability: str, setting: str, cure: str) -> None:
        """Check that the backbone supports a feature, a field of `Supports`.

        The message also names each setting of the model whose default makes the backbone support it.

        Args:
            setting: the setting that requires the feature, with its value.
            cure: settings that do not require it.
        """
        if self.supports.has(ability):
            return
        defaults = {f.name: f.default for f in fields(self) if f.default not in (MISSING, getattr(self, f.name))}
        others = [
            f", or model.{name}={'null' if default is None else default}"
            for name, default in defaults.items()
            if replace(self, **{name: default}).supports.has(ability)
        ]
        raise ConfigError(
            f"{type(self).__name__} does not support {DESCRIPTIONS[ability]}, which {setting} requires; "
            f"it supports {self.supports}. Use {cure}{''.join(others)}"
        )

    @property
    def token_channels(self) -> int:
        """Width of a patchified latent."""
        return self.in_channels * self.patch_temporal * self.patch_spatial**2

    @property
    def input_features(self) -> int:
        """Features that the network reads for each token: the latent, and pictures of its size."""
        return self.token_channels

    @property
    def draws_in_training(self) -> bool:
        """Whether the network needs the random keys `PackedBatch.draw_keys_S` in training."""
        return False

    @property
    def uncut_layers(self) -> range:
        """Layers that must be on one pipeline stage."""
        return range(0)

    def middle_tokens(self, length: int) -> int:
        """Return the number of tokens of a sample in the layers with the fewest tokens, in training."""
        return length

    @property
    def takes_references(self) -> bool:
        """Whether samples may have clean tokens outside their grid, for example a picture to edit."""
        return self.supports.levels

    @property
    def sample_multiple(self) -> int:
        """Multiple to which the network extends the tokens of each text and of each sample, for counts of FLOPs."""
        return 1

    @property
    def output_features(self) -> int:
        """Predicted channels per token: a multiple of `token_channels` if there are several outputs."""
        return self.token_channels

    @property
    def posterior_features(self) -> int:
        """Features per token, among `output_features`, for an autoencoder's posterior; 0 for other models."""
        return 0

    @property
    def quantizes(self) -> bool:
        """Whether the network is an autoencoder whose latents are entries of a codebook."""
        return False

    @property
    def adapters(self) -> Optional[LoRAConfig]:
        """Settings of low-rank adapters, in the field `lora` of backbones that have them; None to train all weights."""
        return getattr(self, "lora", None)

    def without_adapters(self) -> Self:
        return self if self.adapters is None else self.with_adapters(None)

    def with_adapters(self, lora: Optional[LoRAConfig]) -> Self:
        """Return the settings with adapters added to the base model, or with None."""
        if not hasattr(self, "lora"):
            raise ConfigError(f"{type(self).__name__} has no adapters (LoRA); train all its weights")
        return replace(self, **{"lora": lora})  # type: ignore[arg-type]

    def at_base_width(self) -> Optional[Self]:
        """Return the settings at the base width of the mu-parametrisation; None without one."""
        return None

    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions of each sample, i.e. the inputs of the model other than the noised latent.

        Every model has the frame rate, because samples are played at the frame rate of the data.
        """
        return (FPS,)

    def condition(self, name: str) -> Optional[Condition]:
        """Return the condition of this name; None if the model does not have it."""
        return next((condition for condition in self.conditions() if condition.name == name), None)

    def batch_spec(self, *, micro_batch_size: int = 1, multiple_of: int = 1) -> BatchSpec:
        """Return the properties of micro-batches that this model requires."""
        return BatchSpec(
            patch_temporal=self.patch_temporal,
            patch_spatial=self.patch_spatial,
            latent_channels=self.in_channels,
            conditions=self.conditions(),
            micro_batch_size=micro_batch_size,
            multiple_of=multiple_of,
            attention_tokens=self.attention_tokens,
            largest_grid=self.largest_grid,
            orders_frames=self.orders_frames,
            side_multiple=self.side_multiple,
        )

    @property
    def attention_tokens(self) -> int:
        """Sample length at which attention costs about as much as the other operations, for balanced packs.

        Per layer and token, the projections of attention cost 8 H^2 and the MLP 4 H F operations, and attention to n
        tokens 4 H n. Gates, text and experts are ignored, because balance is not sensitive to a factor of two.
        """
        sizes = self.megatron_sizes()
        return 2 * sizes.hidden_size + (sizes.ffn_hidden_size or 4 * sizes.hidden_size)

    def validate(self) -> None:
        """Check the settings; raise `ConfigError` with the numbers."""
        check_ranges("model", self)
        if self.token_channels not in WIDTH:
            raise ConfigError(
                f"model.in_channels={self.in_channels} x patch_temporal={self.patch_temporal} x patch_spatial="
                f"{self.patch_spatial} squared gives {self.token_channels:,} features per token, which must be {WIDTH}"
            )
        if self.adapters is not None:
            self.adapters.validate()

    @abstractmethod
    def megatron_sizes(self) -> TransformerSizes:
        """Return the sizes of this model for Megatron-Core's `TransformerConfig`."""

    @property
    def other_blocks(self) -> dict[str, TransformerSizes]:
        """Sizes of blocks that `megatron_sizes` does not describe, by the setting that adds them."""
        return {}

    @property
    def convolved_channels(self) -> Optional[int]:
        """Groups of channels that ranks exchange for a convolution over tokens; None without one."""
        return None

    @property
    def head_sizes(self) -> frozenset[int]:
        """Features of a head of each attention that has several implementations."""
        sizes = self.megatron_sizes()
        return frozenset({sizes.hidden_size // sizes.num_attention_heads})

    @property
    def largest_grid(self) -> Optional[tuple[int, int, int]]:
        """Largest numbers of patches along t, h and w; None for no limit."""
        return None

    @property
    def orders_frames(self) -> bool:
        """Whether the model distinguishes the order of a clip's frames."""
        return True

    @property
    def side_multiple(self) -> int:
        """Number of patches that the sides of a sample must be multiples of."""
        return 1

    @property
    def halvings(self) -> int:
        """Number of times the backbone halves the sides of a sample."""
        return 0

    def layer_kind(self, layer: int) -> Hashable:
        """Return a key that is equal for layers of equal cost; by default, all layers cost the same.

        `layer` is a global index. FLOPs and planned times count one layer of each kind. A model of that layer
        without the others must run.
        """
        return None


class Backbone(nn.Module, ABC):
    """A network from (noised tokens, time, conditions) to a prediction per token.

    Megatron-Core's wrappers and schedules read `config` and `model_type`, and call `set_input_tensor`.
    """

    config: "MegatronConfig"
    model_type: "MegatronModelType"
    share_embeddings_and_output_weights = False
    fsdp_units: tuple[type[nn.Module], ...] = ()
    """Classes of layers that Megatron-FSDP gathers and frees, and that recompute handles, as one unit.

    Their weights are used only inside their own `forward`.
    """
    compiled_units: tuple[type[nn.Module], ...] = ()
    """Classes of layers that `training.kernels=compile` compiles; empty for those of `fsdp_units`."""
    sum_over_context_ranks: Callable[[Tensor], Tensor]
    """Sums a tensor over the ranks that have other tokens of the same samples."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.pre_process, self.post_process = stage.first, stage.last
        self.input_tensor: Optional[Tensor] = None

    def add_networks(self, auxiliary: AuxiliaryNetworks, provider: "LayerProvider") -> None:
        """Add the networks of an objective; their outputs become the last columns of the predictions."""
        if auxiliary.projection is not None:
            self.align(auxiliary.projection, provider)
        if auxiliary.uncertainty:
            self.learn_uncertainty(provider)

    def align(self, projection: Projection, provider: "LayerProvider") -> None:
        """Add the projection to the stage that has its layer, if the backbone is `Supports.aligned`.

        The negative cosine of each token becomes a column after the predictions.
        """
        raise NotImplementedError

    def learn_uncertainty(self, provider: "LayerProvider") -> None:
        """Add the head u(sigma) to the last stage; u becomes the last column of the predictions.

        A forward hook computes u, because data-parallel wrappers gather its weights only in the forward pass.
        """
        from dit.layers.uncertainty import Uncertainty  # configs import this file and must not import Megatron-Core

        if self.stage.last:
            self.uncertainty = Uncertainty(provider)
            self.register_forward_hook(_append_uncertainty)

    def set_input_tensor(self, input_tensor: Tensor | list[Optional[Tensor]] | None) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def units(self) -> Iterator[nn.Module]:
        """Iterate over the layers in `fsdp_units`, first to last."""
        return (module for module in self.modules() if isinstance(module, self.fsdp_units))

    @abstractmethod
    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        """Predict the objective's target.

        Args:
            inputs_TC: noised latents of the pack (the local tokens under context parallelism), float32.
            time_S: the objective's time per sample, or per noise level if samples have several, float32; `[S, 2]` with
                the lengths of intervals (`mean_flow`).
            batch: positions, layout and conditions; its latents are not used.

        Returns:
            `[T, out_channels]` on the last stage, the activations for the next stage on others.
        """


def _append_uncertainty(backbone: Backbone, args: tuple[Tensor, Tensor, PackedBatch], prediction_TC: Tensor) -> Tensor:
    """Append u of each token's noise level as a column to a prediction; float32."""
    _, time_S, batch = args
    return torch.cat([prediction_TC.float(), batch.layout.level_layout.per_token(backbone.uncertainty(time_S))], 1)
