"""What the backbones cost by formula, as papers count: parameters, and the operations of a forward pass.

The project reads costs from the program; this is what they are compared with.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Optional

from dit.layout import SequenceLayout
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import ModelConfig
from dit.models.chroma.config import ChromaConfig
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.flux.config import FluxConfig
from dit.models.flux2.config import Flux2Config
from dit.models.hunyuan_video.config import HunyuanVideoConfig
from dit.models.imagen_config import ImagenConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.lumina2.config import Lumina2Config
from dit.models.moviegen.config import MovieGenConfig
from dit.models.prx.config import PRXConfig
from dit.models.qwen_image.config import QwenImageConfig
from dit.models.sana.config import SanaConfig
from dit.models.sd3.config import SD3Config
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.config import StreamsConfig
from dit.models.transformer_config import CONDITION_FEATURES
from dit.models.unet.config import UNetConfig
from dit.models.wan.config import WanConfig
from dit.models.z_image.config import ZImageConfig


def num_parameters(config: ModelConfig) -> int:
    """Count the parameters of a whole model."""
    return PARAMETERS[type(config)](config)


def forward_flops(
    config: ModelConfig,
    layout: SequenceLayout,
    grids: Sequence[tuple[int, int, int]] = (),
    context_layout: Optional[SequenceLayout] = None,
    *,
    padding: bool = False,
) -> int:
    """Count the operations of one forward pass over a pack, two per multiply-add.

    Args:
        layout: of its tokens.
        grids: (t, h, w) of its samples; attention in frames and columns leaves pairs out only where they are known.
        context_layout: of its texts; None for one null token to each sample.
        padding: padded tokens count, too.
    """
    texts = context_layout or SequenceLayout.from_lengths([1] * layout.num_samples)
    multiply_adds = MULTIPLY_ADDS[type(config)](config, layout, texts, padding)
    return 2 * multiply_adds - _unattended(config, grids)


def _rows(layout: SequenceLayout, padding: bool) -> int:
    return layout.total_tokens if padding else layout.valid_tokens


def _mlp_weights(c: Any, *, bias: bool, gated: bool = False) -> int:
    """Count the weights of one layer's MLP, or of its experts with their router."""
    h, size = c.hidden_size, c.ffn_size if c.num_experts is None else c.expert_size(c.ffn_size)
    mlp = (3 if gated else 2) * h * size + (size + h if bias else 0)
    return mlp if c.num_experts is None else c.num_experts * (mlp + h)


def _mlp(c: Any, layout: SequenceLayout, padding: bool, *, gated: bool = False) -> int:
    """Count the multiply-adds of one layer's MLP or experts; padding goes to the router alone."""
    rows, matrices, h = _rows(layout, padding), 3 if gated else 2, c.hidden_size
    if c.num_experts is None:
        return rows * matrices * h * c.ffn_size
    return rows * h * c.num_experts + c.routed_pairs(layout.lengths) * matrices * h * c.expert_size(c.ffn_size)


def _kv_size(c: Any) -> int:
    """Return the width of all keys, and of all values."""
    return c.head_size * (c.num_query_groups or c.num_attention_heads)


def _numbers(c: Any) -> list[int]:
    """Return the numbers of each sinusoid that a sample is conditioned on."""
    return [1] + [1] * c.fps_conditioning + [3] * c.size_conditioning


def _conditioner_weights(c: Any) -> int:
    h = c.hidden_size
    labels = 0 if c.num_classes is None else (c.num_classes + 1) * h
    return sum((count * CONDITION_FEATURES + 1) * h + (h + 1) * h for count in _numbers(c)) + labels + c.context_size


def _conditioner(c: Any) -> int:
    """Count the multiply-adds of one sample's conditioning vector."""
    return sum((count * CONDITION_FEATURES + c.hidden_size) * c.hidden_size for count in _numbers(c))


def _dit_weights(c: DiTConfig) -> int:
    h, bias = c.hidden_size, int(c.add_bias)
    attention = 4 * h * h + 4 * h * bias + (2 * c.head_size if c.qk_layernorm else 0)
    embed = (c.token_channels + 1) * h + (CONDITION_FEATURES + 1) * h + (h + 1) * h
    if c.num_classes is not None:
        embed += (c.num_classes + 1) * h
    if c.context_size is not None:
        embed += c.context_size + (c.context_size + 1) * h + (h + 1) * h
    head = 2 * h * (h + 1) + (h + 1) * c.output_features
    return embed + c.num_layers * (attention + _mlp_weights(c, bias=c.add_bias) + 6 * h * (h + bias)) + head


def _dit(c: DiTConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, samples, rows = c.hidden_size, layout.num_samples, _rows(layout, padding)
    pairs = sum(n * n for n in layout.lengths)
    layer = rows * 4 * h * h + _mlp(c, layout, padding) + 2 * pairs * h + samples * 6 * h * h
    embed = rows * c.token_channels * h + samples * (CONDITION_FEATURES + h) * h
    if c.context_size is not None:
        # The text is pooled before its first matrix product, so its length does not count.
        embed += samples * (c.context_size + h) * h
    return embed + c.num_layers * layer + rows * h * c.output_features + samples * 2 * h * h


def _modulation(c: DiTCrossConfig) -> int:
    h, rank = c.hidden_size, c.adaln_lora_rank
    return 9 * h * h if rank is None else h * rank + rank * 9 * h


def _dit_cross_weights(c: DiTCrossConfig) -> int:
    h, f, text, kv, bias = c.hidden_size, c.ffn_size, c.context_size or 0, _kv_size(c), int(c.add_bias)
    norms = 2 * c.head_size * c.qk_layernorm
    attention = h * (h + 2 * kv) + h * h + bias * (2 * h + 2 * kv) + norms
    cross = 2 * h * h + text * 2 * kv + bias * (2 * h + 2 * kv) + norms
    layer = attention + cross + 2 * h * f + bias * (f + h) + _modulation(c) + 9 * h * bias
    head = 2 * h * (h + 1) + (h + 1) * c.output_features
    return (c.token_channels + 1) * h + _conditioner_weights(c) + c.num_layers * layer + head


def _dit_cross(c: DiTCrossConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, kv, samples = c.hidden_size, _kv_size(c), layout.num_samples
    rows, text_rows = _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths, strict=True))
    per_row = h * (h + 2 * kv) + 3 * h * h + 2 * h * c.ffn_size
    layer = rows * per_row + text_rows * 2 * kv * (c.context_size or 0) + 2 * pairs * h + samples * _modulation(c)
    embed = rows * c.token_channels * h + samples * _conditioner(c)
    return embed + c.num_layers * layer + rows * h * c.output_features + samples * 2 * h * h


def _moviegen_weights(c: MovieGenConfig) -> int:
    h, text, kv = c.hidden_size, c.context_size or 0, _kv_size(c)
    norms = 2 * c.head_size * c.qk_layernorm
    attention = h * (h + 2 * kv) + h * h + norms
    cross = 2 * h * h + text * 2 * kv + norms
    layer = attention + cross + _mlp_weights(c, bias=False, gated=True) + 6 * h * h + 3 * h
    positions = sum(c.max_grid) * h if c.position_embedding == "learned_3d" else 0
    embed = (c.token_channels + 1) * h + _conditioner_weights(c) + positions
    return embed + c.num_layers * layer + h + 2 * h * (h + 1) + (h + 1) * c.output_features


def _moviegen(c: MovieGenConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, kv, samples = c.hidden_size, _kv_size(c), layout.num_samples
    rows, text_rows = _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths, strict=True))
    own = rows * (h * (h + 2 * kv) + 3 * h * h) + _mlp(c, layout, padding, gated=True)
    layer = own + text_rows * 2 * kv * (c.context_size or 0) + 2 * pairs * h + samples * 6 * h * h
    embed = rows * c.token_channels * h + samples * _conditioner(c)
    return embed + c.num_layers * layer + rows * h * c.output_features + samples * 2 * h * h


def _stdit_weights(c: STDiTConfig) -> int:
    h, f, text, kv, bias = c.hidden_size, c.ffn_size, c.context_size or 0, _kv_size(c), int(c.add_bias)
    attention = 2 * h * h + 2 * h * kv + bias * (2 * h + 2 * kv) + 2 * c.head_size * c.qk_layernorm
    chunks = 3 * (c.attentions_per_layer + 1) * h
    layer = (c.attentions_per_layer + 1) * attention + 2 * h * f + bias * (f + h) + chunks
    projection = (text + 1) * h + (h + 1) * h
    embed = (c.token_channels + 1) * h + _conditioner_weights(c) + projection + (h + 1) * chunks
    return embed + c.num_layers * layer + 2 * h + (h + 1) * c.output_features


def _stdit(c: STDiTConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, kv, samples, count = c.hidden_size, _kv_size(c), layout.num_samples, c.attentions_per_layer
    rows, text_rows = _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * (count * n + k) for n, k in zip(layout.lengths, texts.lengths, strict=True))
    per_row = count * (2 * h * h + 2 * h * kv) + 2 * h * h + 2 * h * c.ffn_size
    layer = rows * per_row + text_rows * 2 * h * kv + 2 * pairs * h
    text = text_rows * ((c.context_size or 0) * h + h * h)
    per_sample = _conditioner(c) + 3 * (count + 1) * h * h
    ends = rows * h * (c.token_channels + c.output_features)
    return ends + samples * per_sample + text + c.num_layers * layer


def _unattended(c: ModelConfig, grids: Sequence[tuple[int, int, int]]) -> int:
    """Count the operations that attention inside frames and columns leaves out."""
    if not isinstance(c, STDiTConfig):
        return 0
    left_out = 0
    for t, h, w in grids:
        n = t * h * w
        pairs = {"full": n * n, "spatial": n * h * w, "temporal": n * t}
        left_out += sum(n * n - pairs[kind] for layer in range(c.num_layers) for kind in c.kinds(layer))
    return 4 * left_out * c.hidden_size


def _wan_weights(c: WanConfig) -> int:
    h, f, text, kv = c.hidden_size, c.ffn_size, c.context_size or 0, _kv_size(c)
    norms = (h + kv) * c.qk_layernorm
    attention = (h + 1) * (h + 2 * kv) + (h + 1) * h + norms
    cross = 2 * (h + 1) * h + (h + 1) * 2 * kv + norms
    embed = (c.token_channels + 1) * h + _conditioner_weights(c) + (text + 1) * h + (h + 1) * h
    layers = c.num_layers * (6 * h + attention + 2 * h + cross + 2 * h * f + f + h)
    return embed + 6 * h * (h + 1) + layers + 2 * h + (h + 1) * c.output_features


def _wan(c: WanConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, kv, samples = c.hidden_size, _kv_size(c), layout.num_samples
    rows, text_rows = _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths, strict=True))
    per_row = h * (h + 2 * kv) + 3 * h * h + 2 * h * c.ffn_size
    layer = rows * per_row + text_rows * 2 * kv * h + 2 * pairs * h
    once = samples * (_conditioner(c) + 6 * h * h) + text_rows * ((c.context_size or 0) + h) * h
    return once + rows * h * (c.token_channels + c.output_features) + c.num_layers * layer


def _prx_weights(c: PRXConfig) -> int:
    h, text = c.hidden_size, c.context_size or 0
    layer = 6 * h * (h + 1) + 6 * h * h + 3 * c.head_size + 3 * h * c.ffn_size
    ends = (c.token_channels + 1) * h + 2 * h * (h + 1) + (h + 1) * c.output_features
    time = (CONDITION_FEATURES + 1) * h + (h + 1) * h
    return ends + time + (text + 1) * h + text * (c.null_text == "learned") + c.num_layers * layer


def _prx(c: PRXConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    """The text has keys and values, but no queries."""
    h, samples, rows, text_rows = c.hidden_size, layout.num_samples, _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * (n + k) for n, k in zip(layout.lengths, texts.lengths, strict=True))
    layer = rows * (4 * h * h + 3 * h * c.ffn_size) + text_rows * 2 * h * h + 2 * pairs * h + samples * 6 * h * h
    once = samples * (CONDITION_FEATURES + 3 * h) * h + text_rows * (c.context_size or 0) * h
    return once + rows * h * (c.token_channels + c.output_features) + c.num_layers * layer


def _sana_weights(c: SanaConfig) -> int:
    h, f, text, norms = c.hidden_size, c.ffn_size, c.context_size or 0, 2 * c.hidden_size * c.qk_layernorm
    layer = 6 * h + 3 * h * h + 5 * (h + 1) * h + 2 * norms + (h + 1) * 2 * f + 10 * 2 * f + f * h
    ends = (c.token_channels + 1) * h + 2 * h + (h + 1) * c.output_features
    return ends + _conditioner_weights(c) + (text + 1) * h + (h + 1) * h + h + 6 * h * (h + 1) + c.num_layers * layer


def _sana(c: SanaConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    """The convolution has 9 taps, and a head the products of H x (H + 1) numbers twice, both only for real tokens."""
    h, f, rows, text_rows = c.hidden_size, c.ffn_size, _rows(layout, padding), _rows(texts, padding)
    pairs = sum(n * k for n, k in zip(layout.lengths, texts.lengths, strict=True))
    per_token = 2 * h * (c.head_size + 1) + 9 * 2 * f
    layer = rows * (6 * h * h + 3 * h * f) + layout.valid_tokens * per_token + 2 * h * (text_rows * h + pairs)
    once = layout.num_samples * (_conditioner(c) + 6 * h * h) + text_rows * ((c.context_size or 0) + h) * h
    return once + rows * h * (c.token_channels + c.output_features) + c.num_layers * layer


def _streams_matrices(c: StreamsConfig) -> tuple[int, int]:
    """Return the weights that every row meets in one stream of a joint block, and in a single-stream block."""
    h, f, inner = c.hidden_size, c.ffn_size, c.ffn_size * (2 if c.activation == "swiglu" else 1)
    return 4 * h * h + h * inner + f * h, h * (3 * h + inner) + (h + f) * h


def _streams_modulations(c: StreamsConfig) -> int:
    """Return the rows of all modulations, as multiples of the width."""
    joint, single = c.num_joint_layers, c.num_single_layers
    if c.approximator is not None:
        return 0
    if c.shared_modulation:
        return 12 * min(joint, 1) + 3 * min(single, 1)
    return 12 * joint + 3 * single + 3 * c.num_dual_layers - (0 if c.text_output else 4)


def _sandwich(c: StreamsConfig, modulated: bool) -> tuple[int, int]:
    """Return the weights that every row of a sandwich block meets, and its further parameters."""
    h, kv, f, bias = c.hidden_size, _kv_size(c), c.ffn_size, int(c.add_bias)
    inner = f * (2 if c.activation == "swiglu" else 1)
    norms = 4 * h + 2 * c.head_size * c.qk_layernorm
    modulation = 4 * h * (c.condition_width + 1) if modulated else 0
    return 2 * h * (h + kv) + h * (inner + f), norms + bias * (3 * h + 2 * kv + inner) + modulation


def _sandwich_ends(c: StreamsConfig) -> tuple[int, int, int]:
    """Return the weights that an image row, a text row and a sample meet outside the blocks."""
    h, width = c.hidden_size, c.condition_width
    inner = c.time_hidden_size or width
    per_sample = CONDITION_FEATURES * inner + inner * width + width * h
    return c.token_channels * h + h * c.output_features, (c.context_size or 0) * h + h * c.output_features, per_sample


def _sandwich_weights(c: StreamsConfig) -> int:
    h, text, (embed, embed_text, sample) = c.hidden_size, c.context_size or 0, _sandwich_ends(c)
    ends = embed + embed_text - h * c.output_features + sample
    ends += 3 * h + c.condition_width + (c.time_hidden_size or c.condition_width) + c.output_features
    ends += text + text * (c.null_text == "learned") + 2 * h * (c.learned_padding > 1)  # norm, null token, padding
    with_modulation, without = sum(_sandwich(c, True)), sum(_sandwich(c, False))
    return ends + c.num_joint_layers * (with_modulation + without) + c.num_single_layers * with_modulation


def _sandwich_model(c: StreamsConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, real_rows = c.hidden_size, _rows(layout, padding)
    images, captions = ([n + -n % c.learned_padding for n in x.lengths] for x in (layout, texts))
    rows, text_rows = (
        sum(long) - sum(x.lengths) + _rows(x, padding) for long, x in ((images, layout), (captions, texts))
    )
    squares = [sum(n**2 for n in lengths) for lengths in (images, captions)]
    joint = sum((n + k) ** 2 for n, k in zip(images, captions, strict=True))
    matrices, (embed, embed_text, sample) = _sandwich(c, True)[0], _sandwich_ends(c)
    pairs = c.num_joint_layers * sum(squares) + c.num_single_layers * joint
    modulated = c.num_joint_layers + c.num_single_layers
    per_sample = sample + modulated * 4 * h * c.condition_width
    blocks = c.num_layers * (rows + text_rows) * matrices + 2 * pairs * h
    embedded = real_rows * embed + (rows - real_rows) * h * c.output_features + text_rows * embed_text
    return blocks + embedded + layout.num_samples * per_sample


def _streams_conditioner(c: StreamsConfig) -> int:
    h, sinusoids, pooled = c.hidden_size, 1 + (c.guidance is not None), c.pooled_size
    if c.approximator is not None:  # instead of the head's modulation, too
        features, width, blocks = c.approximator
        vectors = 12 * c.num_joint_layers + 3 * c.num_single_layers + 2
        return vectors * (features * width + 2 * blocks * width * width + width * h) - 2 * h * h
    return sinusoids * (CONDITION_FEATURES * h + h * h) + (0 if pooled is None else pooled * h + h * h)


def _streams_weights(c: StreamsConfig) -> int:
    h, text, norms = c.hidden_size, c.context_size or 0, 2 * c.head_size * c.qk_layernorm
    bias, inner = int(c.add_bias), c.ffn_size * (2 if c.activation == "swiglu" else 1)
    stream, single = _streams_matrices(c)
    output = stream - 3 * h * h + bias * (h + inner + h)
    stream += bias * (3 * h + h + inner + h) + norms
    single += bias * (3 * h + inner + h) + norms
    embedders = 1 + (c.guidance is not None) + (c.pooled_size is not None)
    nulls = (text + (c.pooled_size or 0)) * (c.null_text == "learned")
    conditioner = _streams_conditioner(c) + bias * 2 * embedders * h
    if c.approximator is not None:
        features, width, blocks = c.approximator
        linears = (features + bias) * width + blocks * 2 * width * (width + bias) + (width + bias) * h
        conditioner = linears + blocks * width - 2 * h * (h + bias)
    embed = (c.token_channels + bias) * h + (text + bias) * h + text * c.text_norm + nulls
    head = 2 * h * (h + bias) + (h + bias) * c.output_features
    layers = 2 * c.num_joint_layers * stream + c.num_single_layers * single
    layers += c.num_dual_layers * (4 * h * (h + bias) + norms) - (0 if c.text_output else output)
    return embed + conditioner + layers + _streams_modulations(c) * h * (h + bias) + head


def _streams(c: StreamsConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    h, samples = c.hidden_size, layout.num_samples
    rows, text_rows = _rows(layout, padding), _rows(texts, padding)
    pairs = sum((n + k) ** 2 for n, k in zip(layout.lengths, texts.lengths, strict=True))
    stream, single = _streams_matrices(c)
    layers = (rows + text_rows) * (c.num_joint_layers * stream + c.num_single_layers * single)
    layers += c.num_dual_layers * (rows * 4 * h * h + 2 * sum(n**2 for n in layout.lengths) * h)
    layers -= 0 if c.text_output else text_rows * (stream - 3 * h * h)
    layers += c.num_layers * 2 * pairs * h + samples * _streams_modulations(c) * h * h
    embed = rows * c.token_channels * h + text_rows * (c.context_size or 0) * h
    # The text goes through the head, too.
    head = (rows + text_rows) * h * c.output_features + samples * 2 * h * h
    return embed + samples * _streams_conditioner(c) + layers + head


def _hunyuan_matrices(c: HunyuanVideoConfig) -> tuple[int, int]:
    """Return the weights of a refiner that a text row meets, and that a sample meets, without biases."""
    h, text = c.hidden_size, c.context_size or 0
    return c.num_refiner_layers * (4 + 8) * h * h, (
        CONDITION_FEATURES + text + 2 * h + 2 * c.num_refiner_layers * h
    ) * h


def _hunyuan_weights(c: HunyuanVideoConfig) -> int:
    h, g, inner, image = c.hidden_size, c.glyph_size, c.glyph_hidden_size, c.image_context_size
    # Of attention, norms, MLP and gates; of the embedders of time and mean text.
    biases = c.num_refiner_layers * (4 * h + 4 * h + 5 * h + 2 * h) + 4 * h
    glyph = 2 * g + (g + 1) * inner + (inner + 1) * inner + (inner + 1) * h
    picture = 2 * image + (image + 1) * image + (image + 1) * h + 2 * h
    inputs = (c.input_features - c.token_channels) * h
    return _streams_weights(c) + inputs + sum(_hunyuan_matrices(c)) + biases + glyph + picture + 3 * h


def _hunyuan(c: HunyuanVideoConfig, layout: SequenceLayout, texts: SequenceLayout, padding: bool) -> int:
    """Without a shown text and a picture."""
    row, sample = _hunyuan_matrices(c)
    inputs = _rows(layout, padding) * (c.input_features - c.token_channels) * c.hidden_size
    pairs = c.num_refiner_layers * 2 * sum(n**2 for n in texts.lengths) * c.hidden_size
    refiner = _rows(texts, padding) * row + pairs + layout.num_samples * sample
    return _streams(c, layout, texts, padding) + inputs + refiner


def convolution(inputs: int, outputs: int, size: int = 3) -> int:
    return (inputs * size**2 + 1) * outputs


def _autoencoder_weights(c: AutoencoderConfig) -> int:
    def block(inputs: int, outputs: int) -> int:
        shortcut = convolution(inputs, outputs, 1) if inputs != outputs else 0
        return 2 * inputs + convolution(inputs, outputs) + 2 * outputs + convolution(outputs, outputs) + shortcut

    def half(channels: list[int], layers: int, outer: int, inner: int) -> int:
        first, last = channels[0], channels[-1]
        levels = sum(block(i, o) + (layers - 1) * block(o, o) for i, o in zip([first, *channels], channels))
        between = sum(convolution(o, o) for o in channels[:-1])
        return convolution(outer, first) + levels + between + 2 * last + convolution(last, inner)

    widths, wide, z = c.block_out_channels, c.block_out_channels[-1], c.latent_channels
    middle = 2 * block(wide, wide) + c.mid_block_add_attention * (2 * wide + 4 * convolution(wide, wide, 1))
    encoded = z if c.codebook_size else 2 * z
    down = half(widths, c.layers_per_block, c.in_channels, encoded)
    up = half(widths[::-1], c.layers_per_block + 1, z, c.in_channels)
    codebook = (c.codebook_size or 0) * z
    return down + up + 2 * middle + convolution(encoded, encoded, 1) + convolution(z, z, 1) + codebook


def _linear(inputs: int, outputs: int, taps: int = 1) -> int:
    """Count a linear layer, or a convolution of so many taps."""
    return taps * inputs * outputs + outputs


def _imagen_attention(c: ImagenConfig, size: int) -> int:
    kinds = {"stacked": ("self", "cross")}.get(c.attention_type, (c.attention_type,))
    total = 0
    for kind in kinds:
        total += 2 * size + 2 * _linear(size, size)
        total += 0 if kind == "cross" else _linear(size, 2 * size)
        total += 2 * size if kind == "fused" else 0
        if kind != "self":
            assert c.text_width is not None
            total += 2 * c.text_width + _linear(c.text_width, 2 * size)
    if c.attention_type == "stacked":
        total += 4 * size + 2 * _linear(size, size) + _linear(size, 8 * size) + _linear(4 * size, size)
    return total


def _imagen_branch(c: ImagenConfig, inputs: int, outputs: int) -> int:
    vector = _linear(4 * c.hidden_size, outputs * (2 if c.scale_shift_norm else 1))
    return 2 * inputs + _linear(inputs, outputs, 9) + vector + 2 * outputs + _linear(outputs, outputs, 9)


def _imagen_conditions(c: ImagenConfig) -> int:
    """Count time, level of the noise, text and the first convolution; fixed frequencies, attention pooling."""
    assert c.context_size is not None
    assert c.text_width is not None
    vector, text, tokens = 4 * c.hidden_size, c.context_size, c.text_width
    time = _linear(c.hidden_size, vector) + _linear(vector, vector)
    pooling = _linear(text, 1) + 2 * text + _linear(text, tokens)
    caption = _linear(text, tokens) + pooling + 2 * tokens + _linear(tokens, vector) + _linear(vector, vector)
    inputs = c.token_channels * (2 if c.low_resolution_factor else 1)
    return time * (1 + c.noise_augmentation) + caption + _linear(inputs, c.channels[0], c.init_kernel_size**2)


def _unet_weights(c: UNetConfig) -> int:
    """Count the regular UNet, with convolutions where the size changes."""

    def block(inputs: int, outputs: int) -> int:
        return _imagen_branch(c, inputs, outputs) + (_linear(inputs, outputs) if inputs != outputs else 0)

    widths, total, last = c.channels, _imagen_conditions(c), len(c.channels) - 1
    skips, x = [widths[0]], widths[0]
    for level, width in enumerate(widths):
        for _ in range(c.num_res_blocks[level]):
            total += block(x, width) + (_imagen_attention(c, width) if level in c.attention_levels else 0)
            x = width
            skips.append(x)
        if level < last:
            total += _linear(x, x, 9)
            skips.append(x)
    total += 2 * block(x, x) + _imagen_attention(c, x)
    for level in range(last, -1, -1):
        for _ in range(c.num_res_blocks[level] + 1):
            attention = _imagen_attention(c, widths[level]) if level in c.attention_levels else 0
            total += block(x + skips.pop(), widths[level]) + attention
            x = widths[level]
        total += _linear(x, x, 16) if level else 0
    return total + 2 * x + _linear(x, c.output_features, c.init_kernel_size**2)


def _efficient_unet_weights(c: EfficientUNetConfig) -> int:
    widths, total, last = c.channels, _imagen_conditions(c), len(c.channels) - 1
    for level, width in enumerate(widths):
        above = widths[max(level - 1, 0)]
        for inputs, outputs in ((above, width), (width, above)):
            more = c.num_res_blocks[level] - 1
            total += _imagen_branch(c, inputs, outputs) + _linear(inputs, outputs)
            total += more * (_imagen_branch(c, outputs, outputs) + _linear(outputs, outputs))
            total += _imagen_attention(c, outputs) if level in c.attention_levels else 0
        total += 2 * _linear(above, above, 16) if level < last else 0
    return total + _linear(widths[0], c.output_features)


def _ddpm_unet_weights(c: DDPMUNetConfig) -> int:
    def pair(inputs: int, middle: int, outputs: int) -> int:
        return 9 * inputs * middle + 9 * middle * outputs + 2 * middle + 2 * outputs

    def block(inputs: int, middle: int, outputs: int) -> int:
        attention = 6 * outputs * outputs + 10 * outputs
        return pair(inputs, inputs, inputs) + pair(inputs, middle, outputs) + (c.hidden_size + 1) * outputs + attention

    widths, middle = c.block_out_channels, [c.block_out_channels[-1], *c.mid_out_channels]
    down = sum(block(i, o, o) for i, o in pairwise(widths))
    bottom = sum(pair(i, o, o) for i, o in pairwise(middle))
    skips = widths[-2::-1]  # those that the blocks on the way up are given, each as wide as the next one's
    outputs = [*skips[1:], widths[0]]
    inputs = [skip + own for skip, own in zip(skips, [middle[-1], *outputs])]
    up = sum(block(i, i // 2, o) for i, o in zip(inputs, outputs))
    labels = 0 if c.num_classes is None else (c.num_classes + 1) * c.hidden_size
    ends = pair(c.token_channels, widths[0], widths[0]) + (widths[0] + 1) * c.output_features
    return labels + ends + down + bottom + up


def _ldm_unet_weights(c: LDMUNetConfig) -> int:
    widths, text, size = c.block_out_channels, c.context_size or 0, 4 * c.block_out_channels[0]

    def block(inputs: int, outputs: int) -> int:
        shortcut = convolution(inputs, outputs, 1) if inputs != outputs else 0
        norms = 2 * inputs + 2 * outputs
        return norms + convolution(inputs, outputs) + (size + 1) * outputs + convolution(outputs, outputs) + shortcut

    def transformer(width: int, layers: int) -> int:
        attention = 4 * width * width + width
        cross = 2 * width * width + 2 * text * width + width
        mlp = (width + 1) * 8 * width + (4 * width + 1) * width
        return (2 * width + 2 * (width + 1) * width + layers * (attention + cross + mlp + 6 * width)) if layers else 0

    skips, total, before = [widths[0]], 0, widths[0]
    for level, (width, layers) in enumerate(zip(widths, c.transformer_layers)):
        total += block(before, width) + (c.layers_per_block - 1) * block(width, width)
        total += c.layers_per_block * transformer(width, layers)
        skips += [width] * c.layers_per_block
        if level < len(widths) - 1:
            total += convolution(width, width)
            skips.append(width)
        before = width
    total += 2 * block(before, before) + transformer(before, c.mid_transformer_layers)
    for level, (width, layers) in reversed(list(enumerate(zip(widths, c.transformer_layers)))):
        for _ in range(c.layers_per_block + 1):
            total += block(before + skips.pop(), width) + transformer(width, layers)
            before = width
        total += convolution(width, width) if level else 0
    time = (widths[0] + 1) * size + (size + 1) * size
    ends = convolution(c.input_features, widths[0]) + 2 * widths[0] + convolution(widths[0], c.output_features)
    lengths = 6 * 256  # a sinusoid of each
    added = 0 if c.pooled_size is None else (c.pooled_size + lengths + 1) * size + (size + 1) * size
    return total + time + added + ends + text


PARAMETERS: dict[type, Any] = {
    AutoencoderConfig: _autoencoder_weights,
    DDPMUNetConfig: _ddpm_unet_weights,
    LDMUNetConfig: _ldm_unet_weights,
    DiTConfig: _dit_weights,
    DiTCrossConfig: _dit_cross_weights,
    EfficientUNetConfig: _efficient_unet_weights,
    **dict.fromkeys((ChromaConfig, FluxConfig, Flux2Config, QwenImageConfig, SD3Config), _streams_weights),
    **dict.fromkeys((Lumina2Config, ZImageConfig), _sandwich_weights),
    HunyuanVideoConfig: _hunyuan_weights,
    MovieGenConfig: _moviegen_weights,
    PRXConfig: _prx_weights,
    SanaConfig: _sana_weights,
    STDiTConfig: _stdit_weights,
    UNetConfig: _unet_weights,
    WanConfig: _wan_weights,
}
MULTIPLY_ADDS: dict[type, Any] = {
    DiTConfig: _dit,
    DiTCrossConfig: _dit_cross,
    **dict.fromkeys((ChromaConfig, FluxConfig, Flux2Config, QwenImageConfig, SD3Config), _streams),
    **dict.fromkeys((Lumina2Config, ZImageConfig), _sandwich_model),
    HunyuanVideoConfig: _hunyuan,
    MovieGenConfig: _moviegen,
    PRXConfig: _prx,
    SanaConfig: _sana,
    STDiTConfig: _stdit,
    WanConfig: _wan,
}
