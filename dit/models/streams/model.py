"""Transformers with text and image as two streams, then as one, on Megatron-Core linears."""

import torch
from torch import Tensor, nn

from dit.backends.init import normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import Approximator, Modulation, RMSNorm
from dit.layers.conditioner import Conditioner
from dit.layers.heads import FinalLayer
from dit.layers.positions import add_sincos
from dit.layers.text import TextTokens, text_layout
from dit.layers.tokens import (
    PatchEmbedding,
    from_previous_stage,
    shard_tokens,
    to_next_stage,
    unshard_tokens,
    with_control,
)
from dit.layout import SequenceLayout
from dit.levels import with_references_at_sample_time, with_text_level
from dit.models.base import Backbone, Stage
from dit.models.streams.config import StreamsConfig
from dit.models.streams.layer import Condition, JointLayer, SingleLayer
from dit.models.streams.layouts import StreamLayouts
from dit.models.streams.sandwich import RefinerLayer, SandwichLayer

BLOCKS = {"adaln_zero": (JointLayer, SingleLayer), "sandwich": (RefinerLayer, SandwichLayer)}
"""Layers with two streams, and with one, by `StreamsConfig.block`."""
SANDWICH_HEAD_EPSILON = 1e-6  # of the layer norm in the head of all published models


class Streams(Backbone):
    """Text and image as two streams with joint attention, then as one stream; a modulated head for the image.

    The text stream is handled like the image stream: under sequence parallelism its tokens are split, and pipeline
    stages send them with the image tokens. Under context parallelism it is replicated (see `ContextAttention`).

    A dropped text keeps its length, as null tokens. Joint attention attends to all of them, so it differs from a
    missing text, which is one null token. Guidance drops texts in the same way as training. A learned vector replaces a
    missing pooled text.

    A modulation that all blocks share is replicated over pipeline stages; gradients are summed over the stages.

    Source: black-forest-labs/flux, `model.py`. Deviations: packs of any lengths instead of texts padded to 512 tokens
    that are attended to; modulations, gates and head are zero-initialised; sine-cosine positions of the image are an
    option.
    """

    fsdp_units = (JointLayer, SingleLayer, RefinerLayer, SandwichLayer)

    def __init__(self, config: StreamsConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        size, eps, width = config.hidden_size, config.layernorm_epsilon, config.condition_width
        bias = config.add_bias or config.block == "sandwich"
        learned_null = config.null_text == "learned"
        self.rotary = config.rotary()
        self.modulation: nn.Module = nn.Identity()
        if config.approximator is None:
            self.conditioner = Conditioner(
                width,
                provider,
                time_scale=config.time_scale,
                inner_size=config.time_hidden_size,
                pooled_size=config.pooled_size,
                learned_null=learned_null,
                guidance=config.guidance,
                bias=bias,
            )
        else:
            count, sizes = config.num_single_layers + 4 * config.num_joint_layers, config.approximator
            self.modulation = Approximator(
                size, count, provider, sizes=sizes, time_scale=config.time_scale, bias=bias, eps=eps
            )
        if config.block == "sandwich" and config.modulation_silu:
            self.modulation = nn.SiLU()
        if config.shared_modulation:
            count = 5 if config.num_single_layers else 4
            self.modulation = Modulation(size, count, provider, condition_size=width, bias=bias, eps=eps)
        replicate_on_all_stages(self.modulation.parameters())
        if stage.first:
            self.embed = PatchEmbedding(config.input_features, size, provider, bias=bias)
            text_size = config.text_size()
            self.text = TextTokens(text_size, provider, stream=True, learned_null=learned_null)
            self.text_norm = RMSNorm(text_size, provider, eps=eps) if config.text_norm else nn.Identity()
            init = xavier_uniform(text_size, size)
            self.embed_text = provider.replicated_linear(text_size, size, bias=bias, init=init)
            if config.sample_multiple > 1:
                self.text_padding, self.image_padding = (provider.parameter((size,), normal(0.02)) for _ in range(2))
        two_streams, one_stream = BLOCKS[config.block]
        kinds = {i: config.layer_kind(i) for i in stage.layers}
        self.layers = nn.ModuleDict(
            {
                str(i): (two_streams if kind.joint else one_stream)(config, provider, attention, kind)
                for i, kind in kinds.items()
            }
        )
        if stage.last:
            shifted = config.block != "sandwich"
            self.head = FinalLayer(
                size,
                config.output_features,
                provider,
                eps=eps if shifted else SANDWICH_HEAD_EPSILON,
                condition_size=width,
                shifted=shifted,
                bias=bias,
                modulated=config.approximator is None,
            )

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        provider = self.provider
        time_L = 1 - time_S if self.model_config.reversed_time else time_S
        if not self.model_config.clean_reference_time:
            time_L, batch = with_references_at_sample_time(time_L, batch)
        text_time_S, time_L, batch = with_text_level(time_L, batch)
        layouts = StreamLayouts.of(self.text_layout(batch), batch.layout, self.model_config.sample_multiple, provider)
        texts, joint = layouts.texts, layouts.single
        rotation_J = of_streams = None
        if self.rotary is not None:
            # Attention gets the tokens of all tensor-parallel ranks.
            text_KA, image_TA = token_positions(self.model_config, batch, texts)
            start_1A = nn.functional.pad(image_TA.new_zeros(1, image_TA.shape[1] - 1), (1, 0), value=-1)
            image_TA = layouts.extend_image(image_TA, start_1A)
            rotation_J = self.rotary(layouts.to_single(text_KA, image_TA))
            of_streams = rotation_J if layouts.padding is None else self.rotary(layouts.streams.join(text_KA, image_TA))
        has_approximator = self.model_config.approximator is not None
        cond = time_L if has_approximator else self.conditioner(time_L, batch)
        condition = self.modulation(cond)
        positions_T3 = sincos_positions(self.model_config, batch)
        layout, _ = shard_tokens(layouts.image, provider)
        local_texts, _ = shard_tokens(texts, provider)
        local_joint, _ = shard_tokens(joint, provider)
        single = max(self.stage.layers.start, self.model_config.num_joint_layers)
        if self.stage.layers.start > self.model_config.num_joint_layers:
            x_JD = from_previous_stage(self.input_tensor)
        else:
            if self.pre_process:
                text_KD = self.embed_texts(text_time_S, batch, layouts)
                x_TD = self.embed_image(inputs_TC, positions_T3, batch, layouts)
            else:
                rows_D = from_previous_stage(self.input_tensor)
                text_KD, x_TD = rows_D.split([local_texts.num_local_tokens, layout.num_local_tokens])
            for i in range(self.stage.layers.start, min(single, self.stage.layers.stop)):
                text_KD, x_TD = self.layers[str(i)](
                    text_KD, x_TD, self.of_layer(i, condition), local_texts, layout, layouts.streams, of_streams
                )
            if single >= self.stage.layers.stop and not self.post_process:
                return to_next_stage(torch.cat([text_KD, x_TD]))
            # Under sequence parallelism, tokens are redistributed over the ranks here.
            x_JD = layouts.to_single(unshard_tokens(text_KD, provider), unshard_tokens(x_TD, provider))
            _, (x_JD,) = shard_tokens(joint, provider, x_JD)
        for i in range(single, self.stage.layers.stop):
            x_JD = self.layers[str(i)](x_JD, self.of_layer(i, condition), local_joint, joint, rotation_J)
        if not self.post_process:
            return to_next_stage(x_JD)
        # The head also processes the few text tokens; dropping them first would communicate wider tensors.
        out_JC = self.head(x_JD, condition if has_approximator else cond, local_joint)
        return joint.split(unshard_tokens(out_JC, provider, is_output=True))[1]

    def of_layer(self, layer: int, condition: Condition) -> Condition:
        """Return the part of the modulations of all layers for one layer; a conditioning vector unchanged."""
        indices = self.model_config.sublayers(layer)
        if indices is None or isinstance(condition, Tensor):
            return condition
        return [condition[i] for i in indices]

    def text_layout(self, batch: PackedBatch) -> SequenceLayout:
        return text_layout(batch)

    def embed_texts(self, time_S: Tensor, batch: PackedBatch, layouts: StreamLayouts) -> Tensor:
        """Return the local tokens of the text stream."""
        context_KC, _ = self.text(batch)
        local, (local_KC,) = shard_tokens(layouts.texts, self.provider, layouts.extend_texts(context_KC))
        text_KD = self.embed_text(self.text_norm(local_KC))
        if self.model_config.sample_multiple == 1:
            return text_KD
        is_text = local.token_index_T[:, None] < local.per_token(layouts.given.lengths_S)
        return torch.where(is_text, text_KD, self.text_padding)

    def embed_image(
        self, inputs_TC: Tensor, positions_T3: Tensor, batch: PackedBatch, layouts: StreamLayouts
    ) -> Tensor:
        """Return the local tokens of the image stream."""
        inputs_TC = with_control(inputs_TC, batch, self.model_config.input_features)
        layout, (inputs_TC, positions_T3) = shard_tokens(batch.layout, self.provider, inputs_TC, positions_T3)
        x_TD = add_sincos(self.embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
        if self.model_config.sample_multiple == 1:
            return x_TD
        if layouts.padding is None:
            return torch.cat([x_TD, self.image_padding.expand(0, -1)])  # with a gradient of zero
        x_TD = layouts.extend_image(unshard_tokens(x_TD, self.provider), self.image_padding)
        return shard_tokens(layouts.image, self.provider, x_TD)[1][0]


def sincos_positions(config: StreamsConfig, batch: PackedBatch) -> Tensor:
    """Return the sine-cosine positions of image tokens `[T, 3]`; only h and w are cropped.

    Source: cropped positions: `PatchEmbed.cropped_pos_embed` of diffusers (Stable Diffusion 3).
    """
    if config.position_crop is None:
        return batch.positions_T3
    side, span = config.position_crop
    _, h_S, w_S = batch.grid_sizes().unbind(1)
    t_T1, hw_T2 = batch.positions_T3.split([1, 2], 1)
    corner_T2 = batch.layout.per_token(torch.stack([(side - h_S) // 2, (side - w_S) // 2], 1))
    return torch.cat([t_T1, (hw_T2 + corner_T2) / (side / span)], 1)


def token_positions(config: StreamsConfig, batch: PackedBatch, texts: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return the rotary positions of text tokens `[K, A]` and of image tokens `[T, A]` on each of `position_axes`.

    Source: `origin`: black-forest-labs/flux; `own_axis`: `pipeline_flux2.py` of diffusers; `after_image`, centred:
    Wu et al. 2025 (Qwen-Image), arXiv:2508.02324 (MSRoPE), and `transformer_qwenimage.py` of diffusers; `before_image`:
    `transformer_lumina2.py` of diffusers.
    """
    image_T3, index_K1 = batch.positions_T3, texts.token_index_T[:, None]
    if config.frame_spacing > 1:
        image_T3 = image_T3 * image_T3.new_tensor([config.frame_spacing, 1, 1])
    if config.centred_positions:
        image_T3 = image_T3 - nn.functional.pad(_centres(batch), (1, 0))
    if config.text_positions == "before_image":
        start_T1 = batch.layout.per_token(texts.lengths_S)
        return nn.functional.pad(index_K1, (0, 2)), image_T3 + nn.functional.pad(start_T1, (0, 2))
    if config.text_positions == "own_axis":
        return nn.functional.pad(index_K1, (3, 0)), nn.functional.pad(image_T3, (0, 1))
    if config.text_positions == "after_image":
        share = 2 if config.centred_positions else 1
        start_K1 = texts.per_token(batch.picture_sizes()[:, :, 1:].amax((0, 2)) // share)
        return (index_K1 + start_K1).expand(-1, 3), image_T3
    return image_T3.new_zeros(texts.total_tokens, 3), image_T3


def _centres(batch: PackedBatch) -> Tensor:
    """Return h and w of the centre of each token's picture, the sample or one of its references, int64 `[T, 2]`."""
    sizes_RS3 = batch.picture_sizes()
    centres_RS2, ends_RS = (sizes_RS3[:, :, 1:] + 1) // 2, sizes_RS3.prod(2).cumsum(0)
    centres_T2 = batch.layout.per_token(centres_RS2[0])
    for start_S, centre_S2 in zip(ends_RS, centres_RS2[1:]):
        is_reference_T1 = batch.layout.token_index_T[:, None] >= batch.layout.per_token(start_S)
        centres_T2 = torch.where(is_reference_T1, batch.layout.per_token(centre_S2), centres_T2)
    return centres_T2
