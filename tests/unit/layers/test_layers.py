"""Layers on packs: the inputs that each row may depend on, and the weights that start as zero."""

import pytest
import torch

from dit.backends.init import initialize_weights
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.errors import ConfigError
from dit.kernels.attention import segment_sdpa
from dit.layers.adaln import Modulation
from dit.layers.attention import SelfAttention, per_head_norm
from dit.layers.embeddings import LabelEmbedder, PooledTextEmbedder
from dit.layers.heads import FinalLayer
from dit.layers.mlp import MLP
from dit.layout import SequenceLayout
from tests.support.batches import pack_of

LAYOUT = SequenceLayout.from_lengths([5, 3, 6], multiple_of=4, total_tokens=24)


def started(layer: torch.nn.Module) -> torch.nn.Module:
    initialize_weights(layer, 1, tp_rank=0)
    return layer


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_attention_does_not_mix_samples(provider: LayerProvider):
    """The derivative of a sample's output is zero for other samples and padding, and nonzero for all its tokens."""
    layer = started(SelfAttention(16, 4, provider, segment_sdpa, qk_layernorm=True))
    x = randn(24, 16).requires_grad_()
    for i, (start, length) in enumerate(zip(LAYOUT.starts, LAYOUT.lengths)):
        (grad,) = torch.autograd.grad(layer(x, LAYOUT).added()[start : start + length].square().sum(), x)
        own = (LAYOUT.segment_ids_T == i) & LAYOUT.valid_T
        assert (grad[own].abs().sum(1) > 0).all()
        assert not grad[~own].any()


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
def test_a_sum_of_outputs_keeps_every_pending_bias(biases: tuple[bool, bool]):
    a, b = (PendingBias(randn(5, 4, seed=i), randn(4, seed=10 + i) if has else None) for i, has in enumerate(biases))
    torch.testing.assert_close((a + b).added(), a.added() + b.added())
    torch.testing.assert_close((a + randn(5, 4, seed=7)).added(), a.added() + randn(5, 4, seed=7))
    assert torch.equal(a.map(lambda y: y.flip(0)).added(), a.added().flip(0))


def test_query_and_key_norms_fix_the_scale(provider: LayerProvider):
    """With QK-layernorm, attention does not depend on the scale of queries and keys; without it, it does."""
    for qk_layernorm in (True, False):
        layer = started(SelfAttention(16, 4, provider, segment_sdpa, bias=False, qk_layernorm=qk_layernorm, eps=1e-12))
        x = randn(24, 16)
        before = layer(x, LAYOUT).added()
        with torch.no_grad():
            # Rows are ordered by head: q, k, v of each head; q and k grow, v stays.
            layer.linear_qkv.weight.view(4, 3, 4, 16)[:, :2] *= 5.0
        assert torch.allclose(layer(x, LAYOUT).added(), before, atol=1e-5) == qk_layernorm


def test_head_norm_gives_unit_root_mean_square(provider: LayerProvider):
    norm = started(per_head_norm(8, provider, eps=1e-8))
    rms = norm(10 * randn(6, 4, 8)).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones(6, 4))


@pytest.mark.parametrize("num_sublayers", [1, 2, 3])
def test_modulation_gives_each_sublayer_its_own_chunks(provider: LayerProvider, num_sublayers: int):
    """Sub-layer i takes shift, scale and gate from rows 3i, 3i + 1 and 3i + 2 of the projection, in that order."""
    layer = started(Modulation(16, num_sublayers, provider))
    assert not any(p.any() for p in layer.parameters())
    with torch.no_grad():
        layer.linear.bias.copy_(torch.arange(3.0 * num_sublayers).repeat_interleave(16))
    for i, part in enumerate(layer(randn(3, 16))):
        for chunk, value in zip((part.shift_SD, part.scale_SD, part.gate_SD), range(3 * i, 3 * i + 3)):
            assert torch.equal(chunk, torch.full((3, 16), float(value)))


def test_final_layer_starts_at_zero_and_learns(provider: LayerProvider):
    """The output starts as zero, and the weight of the linear has a gradient, so that training can change it."""
    layer = started(FinalLayer(16, 8, provider))
    out = layer(randn(24, 16), randn(3, 16), LAYOUT)
    assert not out.any()
    out.sum().backward()
    assert layer.linear.weight.grad.any()


def test_the_mlp_equals_its_formula(provider: LayerProvider):
    layer = started(MLP(16, 40, provider))
    x = randn(7, 16)
    hidden = x @ layer.linear_fc1.weight.T
    hidden = hidden / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    torch.testing.assert_close(layer(x).added(), hidden @ layer.linear_fc2.weight.T, rtol=1e-5, atol=1e-6)


def test_the_label_table_has_a_row_for_a_missing_class(provider: LayerProvider):
    layer = started(LabelEmbedder(3, 16, provider))
    assert torch.equal(layer(torch.tensor([3, 0, 3])), layer.weight[[3, 0, 3]])


def text_batch(context: torch.Tensor | None, layout: SequenceLayout | None, dropped: list[bool] | None) -> PackedBatch:
    text = Entry("text", context, layout, None if dropped is None else torch.tensor(dropped))
    return pack_of(SequenceLayout.from_lengths([1, 1]), torch.zeros(2, 4), conditions=Conditions(context=text))


def test_pooled_text_depends_only_on_the_mean(provider: LayerProvider):
    """The order, repetition and padding of text tokens do not matter; every real token does."""
    layer = started(PooledTextEmbedder(6, 16, provider))
    a, b = randn(3, 6, seed=1), randn(1, 6, seed=2)
    plain = layer(text_batch(torch.cat([a, b]), SequenceLayout.from_lengths([3, 1]), None))
    again = torch.cat([a.flip(0), a, torch.full((2, 6), 9.0), b, torch.full((3, 6), 9.0)])
    layout = SequenceLayout.from_lengths([6, 1], multiple_of=4)
    torch.testing.assert_close(layer(text_batch(again, layout, [False, False])), plain)
    for token in range(3):
        changed = a.clone()
        changed[token] += 1
        other = layer(text_batch(torch.cat([changed, b]), SequenceLayout.from_lengths([3, 1]), None))
        assert not torch.allclose(other[0], plain[0])
        assert torch.equal(other[1], plain[1])


def test_dropped_text_hides_the_text_and_trains_the_null_vector(provider: LayerProvider):
    layer = started(PooledTextEmbedder(6, 16, provider))
    layout = SequenceLayout.from_lengths([3, 1])
    one, other = (layer(text_batch(randn(4, 6, seed=s), layout, [True, False])) for s in (1, 2))
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    (grad,) = torch.autograd.grad(one[0].sum(), layer.null, retain_graph=True)
    assert grad.any()
    (grad,) = torch.autograd.grad(one[1].sum(), layer.null)
    assert not grad.any()


def test_uneven_split_is_refused_with_the_cure(provider: LayerProvider):
    provider.tp_size = 3
    with pytest.raises(ConfigError, match=r"num_attention_heads=4.*tensor_model_parallel_size=3.*\[1, 2, 4\]"):
        SelfAttention(16, 4, provider, segment_sdpa)
