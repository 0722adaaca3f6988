"""Laws of classifier-free guidance and of thresholding."""

import torch

from dit.layout import CLEAN, SequenceLayout
from dit.levels import with_levels
from dit.sampling.guidance import (
    QUANTILE,
    combine,
    dynamic_threshold,
    guided_columns,
    threshold,
)

LAYOUT = SequenceLayout.from_lengths([3, 2], multiple_of=4, total_tokens=10)


def test_scale_zero_is_unconditional_and_one_is_conditional():
    """Scale 0 is unconditional, 2 doubles the difference; NeMo's cond + g (cond - uncond) is scale g + 1."""
    cond, uncond = torch.tensor([3.0]), torch.tensor([1.0])
    assert [combine(cond, uncond, s).item() for s in (0.0, 1.0, 2.0)] == [1.0, 3.0, 5.0]
    for g in (0.5, 7.0):
        assert combine(cond, uncond, g + 1) == cond + g * (cond - uncond)


def test_guidance_applies_to_all_channels_of_the_mean_by_default():
    """Latents have 4 channels and a patch 2 positions; the second output is a variance."""
    assert guided_columns(4, 2, 1, None) is None
    assert guided_columns(4, 2, 2, None).tolist() == 8 * [True] + 8 * [False]
    assert guided_columns(4, 2, 2, 3).tolist() == 2 * [True, True, True, False] + 8 * [False]


def test_a_layout_followed_by_itself_repeats_samples_and_padding():
    """Both halves have the rows, valid tokens and positions of the original; the second has the next sample numbers."""
    layout, double = LAYOUT, LAYOUT.followed_by(LAYOUT)
    assert double.valid_tokens == 2 * layout.valid_tokens
    assert double.total_tokens == 2 * layout.total_tokens
    first, second = double.segment_ids_T.chunk(2)
    assert torch.equal(first, layout.segment_ids_T)
    assert torch.equal(second, layout.segment_ids_T + layout.num_samples)
    assert torch.equal(double.valid_T, layout.valid_T.repeat(2))
    assert torch.equal(double.token_index_T, layout.token_index_T.repeat(2))


def test_dynamic_threshold_scales_each_sample_by_its_quantile():
    """Samples within [-1, 1] are unchanged; larger ones are clipped at their quantile and divided by it."""
    layout = SequenceLayout.from_lengths([100, 50], multiple_of=64)
    x = torch.zeros(layout.total_tokens, 2)
    x[:100] = torch.linspace(-4, 4, 200).view(100, 2)
    x[128:178] = torch.linspace(-0.9, 0.9, 100).view(50, 2)
    x[100:128] = 1e6
    out = dynamic_threshold(x, layout)
    limit = x[:100].abs().flatten().sort().values[round(200 * QUANTILE) - 1]
    torch.testing.assert_close(out[:100], x[:100].clamp(-limit, limit) / limit)
    assert torch.equal(out[128:178], x[128:178])
    assert out[:100].abs().max() == 1
    assert torch.equal(threshold("static", layout)(x), x.clamp(-1, 1))


def test_clean_tokens_do_not_count_in_a_dynamic_threshold():
    """The noised tokens of a sample with a reference are divided by their own quantile."""
    x = 3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    layout = with_levels(SequenceLayout.from_lengths([4200, 2]), [[(200, 0), (4000, CLEAN)], []])
    found = dynamic_threshold(torch.cat([x, torch.zeros(4002, 3)]), layout)
    assert torch.equal(found[:200], dynamic_threshold(x, SequenceLayout.from_lengths([200])))
