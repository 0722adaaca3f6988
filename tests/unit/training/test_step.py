"""What the step does to a micro-batch before the network sees it: which conditions it drops, and how often."""

import math

import pytest
import torch

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch, SequenceLayout
from dit.layers.context import TextTokens
from dit.layers.embeddings import PooledVectorEmbedder
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.training.step import drop_conditions

NUM_CLASSES = 7
SAMPLES = 1 << 14


def batch_of(count: int, *, classes: bool = True, texts: bool = True) -> PackedBatch:
    """Samples of one token, each with a label, a text of one token and a pooled text."""
    layout = SequenceLayout.from_lengths([1] * count)
    return PackedBatch(
        latents_TC=torch.zeros(count, 4),
        positions_T3=torch.zeros(count, 3, dtype=torch.int64),
        layout=layout,
        sample_ids_S=torch.arange(count),
        grids=((1, 1, 1),) * count,
        keys=("",) * count,
        labels_S=torch.arange(count) % NUM_CLASSES if classes else None,
        context_KD=torch.ones(count, 6) if texts else None,
        context_layout=layout if texts else None,
        pooled_SD=torch.ones(count, 3) if texts else None,
    )


def dropped(batch: PackedBatch, p: float, q: float) -> tuple[PackedBatch, AddressedNoise]:
    model = DiTConfig(num_classes=NUM_CLASSES, class_dropout=p, context_size=6, context_dropout=q)
    noise = AddressedNoise(3, 11, batch.sample_ids_S, batch.layout)
    return drop_conditions(batch, noise, model), noise


def assert_share(flags_S: torch.Tensor, share: float) -> None:
    """Check a count of independent draws; four standard errors of the binomial law."""
    error = math.sqrt(share * (1 - share) / len(flags_S))
    assert flags_S.float().mean().item() == pytest.approx(share, abs=4 * error)


SHARES = [(0.1, 0.1), (0.1, 0.3), (0.3, 0.1), (0.0, 0.2), (0.2, 0.0), (1.0, 0.2), (0.2, 1.0)]


@pytest.mark.parametrize(("p", "q"), SHARES)
def test_class_and_text_are_dropped_in_their_shares_and_together(p: float, q: float) -> None:
    """Class on p of the samples, text on q, both on min(p, q): one never goes without the other where p = q."""
    batch, noise = dropped(batch_of(SAMPLES), p, q)
    no_class_S, no_text_S = batch.labels_S == NUM_CLASSES, batch.context_dropped_S
    assert_share(no_class_S, p)
    assert_share(no_text_S, q)
    assert int((no_class_S & no_text_S).sum()) == min(int(no_class_S.sum()), int(no_text_S.sum()))
    assert torch.equal(batch.labels_S[~no_class_S], (torch.arange(SAMPLES) % NUM_CLASSES)[~no_class_S])
    either_S = no_class_S | no_text_S
    if 0 < max(p, q) < 1:  # whatever the noise level: the mean of n uniform draws has the deviation sqrt(1 / 12 n)
        levels = noise.level_S()[either_S]
        assert levels.mean().item() == pytest.approx(0.5, abs=4 / math.sqrt(12 * len(levels)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_a_single_condition_is_dropped_in_its_share(share: float) -> None:
    """The other condition's share does not matter where there is no such condition."""
    only_class, _ = dropped(batch_of(SAMPLES, texts=False), share, 0.5)
    assert_share(only_class.labels_S == NUM_CLASSES, share)
    assert only_class.context_dropped_S is None
    only_text, _ = dropped(batch_of(SAMPLES, classes=False), 0.5, share)
    assert_share(only_text.context_dropped_S, share)
    assert only_text.labels_S is None


def test_a_text_goes_with_its_pooled_embedding(one_rank_world) -> None:
    """The samples whose text tokens become the null token are those whose pooled vector becomes the null vector."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    provider = LayerProvider(config, one_rank_world.collection)
    batch, _ = dropped(batch_of(64), 0.0, 0.4)
    tokens, pooled = TextTokens(6, provider), PooledVectorEmbedder(3, 8, provider)
    for parameter in [*tokens.parameters(), *pooled.parameters()]:
        torch.nn.init.constant_(parameter, 0.5)
    context_KD, _ = tokens(batch)
    assert torch.equal((context_KD == tokens.null).all(1), batch.context_dropped_S)
    vectors_SD = pooled(batch)
    without_text = vectors_SD[batch.context_dropped_S.nonzero()[0, 0]]
    assert torch.equal((vectors_SD == without_text).all(1), batch.context_dropped_S)
    assert 0 < int(batch.context_dropped_S.sum()) < 64
