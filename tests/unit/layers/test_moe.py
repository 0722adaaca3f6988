"""The tokens that each expert selects depend only on the sample."""

import math

import pytest
import torch
from torch import Tensor

from dit.backends.init import initialize_weights
from dit.backends.provider import LayerProvider
from dit.layers.mlp import MLP
from dit.layers.moe import MoE
from dit.layers.routing import balancing_loss, expert_capacity, select_experts, select_tokens
from dit.layout import SequenceLayout

SIZE, INNER = 16, 24
LAYOUT = SequenceLayout.from_lengths([5, 13, 1, 8], multiple_of=4, total_tokens=40)


EXPERTS = {"hidden_size": SIZE, "moe_ffn_hidden_size": INNER, "moe_expert_capacity_factor": 1.0}


@pytest.fixture
def provider(provider_of) -> LayerProvider:
    return provider_of(num_moe_experts=4, **EXPERTS)


def moe(provider: LayerProvider, router: str, num_experts: int = 4, **changes) -> MoE:
    options = {"capacity_factor": 1.5, "top_k": 2, "aux_loss_coeff": 0.0, **changes}
    layer = MoE(SIZE, provider, ffn_hidden_size=INNER, num_experts=num_experts, router=router, **options)
    initialize_weights(layer, 1, tp_rank=0)
    with torch.no_grad():  # far from uniform scores
        layer.router.weight *= 30
        for i, expert in enumerate(layer.experts.values()):
            expert.linear_fc1.bias.copy_(randn(INNER, seed=i))
            expert.linear_fc2.bias.copy_(randn(SIZE, seed=i))
    return layer


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def samples(layout: SequenceLayout) -> list[slice]:
    return [slice(start, start + length) for start, length in zip(layout.starts, layout.lengths)]


def test_the_capacity_of_experts_is_exact():
    """It is rounded up once, never because of the last bit of a float, and never exceeds the length of the sample."""
    assert [expert_capacity(n, 4, 2.0) for n in (1, 2, 3, 4, 256)] == [1, 1, 2, 2, 128]
    assert expert_capacity(30, 1, 0.1) == 3  # 30 * 0.1 > 3 in floats
    assert expert_capacity(7, 64, 8.0) == 1
    assert expert_capacity(5, 4, 4.0) == 5


@pytest.mark.parametrize("capacity_factor", [0.3, 1.0, 2.5, 4.0])
def test_every_expert_is_full_in_every_sample(capacity_factor: float):
    """Each expert selects exactly its capacity, and no selected token has a lower score than an unselected one."""
    scores = randn(40, 4).softmax(-1)
    selected = select_tokens(scores, LAYOUT, capacity_factor)
    for rows, length in zip(samples(LAYOUT), LAYOUT.lengths):
        assert selected[rows].sum(0).tolist() == [expert_capacity(length, 4, capacity_factor)] * 4
        for e in range(4):
            taken, left = scores[rows, e][selected[rows, e]], scores[rows, e][~selected[rows, e]]
            assert not len(left) or taken.min() >= left.max()


@pytest.mark.parametrize("scores", [torch.zeros(40, 4), torch.full((40, 4), torch.nan)], ids=["zero", "nan"])
def test_padding_is_never_selected(scores: Tensor):
    """For any scores of the padding, also if they exceed those of all real tokens."""
    real = randn(40, 4).softmax(-1)
    scores = torch.where(LAYOUT.valid_T[:, None], real - 1, scores)
    for selected in (select_tokens(scores, LAYOUT, 4.0), select_experts(scores, LAYOUT.valid_T, 4)):
        assert torch.equal(selected, LAYOUT.valid_T[:, None].expand(-1, 4))
    assert torch.equal(select_tokens(scores, LAYOUT, 1.5), select_tokens(real, LAYOUT, 1.5))


def test_ties_select_the_first():
    even = torch.ones(8, 4)
    layout = SequenceLayout.from_lengths([8])
    assert torch.equal(select_tokens(even, layout, 2.0), (torch.arange(8) < 4)[:, None].expand(-1, 4))
    assert torch.equal(select_experts(even, layout.valid_T, 3), (torch.arange(4) < 3).expand(8, -1))


def test_each_token_has_its_best_experts():
    scores = randn(40, 4).softmax(-1)
    selected = select_experts(scores, LAYOUT.valid_T, 2)
    assert selected[LAYOUT.valid_T].sum(1).tolist() == [2] * LAYOUT.valid_tokens
    left_out = scores.masked_fill(selected, -1).max(1).values
    assert (scores.masked_fill(~selected, 2).min(1).values >= left_out)[LAYOUT.valid_T].all()


@pytest.mark.parametrize("router", ["expert_choice", "top_k"])
def test_a_pack_equals_its_samples(provider: LayerProvider, router: str):
    """In a pack or in a separate batch, with or without padding: the same outputs and gradients."""
    layer = moe(provider, router, aux_loss_coeff=0.3)
    x, cotangent = randn(40, SIZE), randn(40, SIZE, seed=1)
    out = layer(x, LAYOUT)
    out.backward(torch.where(LAYOUT.valid_T[:, None], cotangent, 0.0))
    packed = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    for rows, length in zip(samples(LAYOUT), LAYOUT.lengths):
        alone = layer(x[rows], SequenceLayout.from_lengths([length]))
        torch.testing.assert_close(out[rows], alone)
        alone.backward(cotangent[rows])
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert not out[~LAYOUT.valid_T].any()


@pytest.mark.parametrize("router", ["expert_choice", "top_k"])
def test_order_of_tokens_and_samples_does_not_matter(provider: LayerProvider, router: str):
    layer = moe(provider, router)
    x, layout = randn(24, SIZE), SequenceLayout.from_lengths([9, 15])
    out = layer(x, layout)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer(torch.cat([x[:9][order], x[9:]]), layout), torch.cat([out[:9][order], out[9:]]))
    swapped = layer(torch.cat([x[9:], x[:9]]), SequenceLayout.from_lengths([15, 9]))
    torch.testing.assert_close(swapped, torch.cat([out[9:], out[:9]]))


@pytest.mark.parametrize("router", ["expert_choice", "top_k"])
def test_one_expert_equals_a_plain_mlp(provider_of, router: str):
    provider = provider_of(num_moe_experts=1, **EXPERTS)
    layer = moe(provider, router, 1, capacity_factor=1.0, top_k=1)
    mlp = MLP(SIZE, INNER, provider)
    mlp.load_state_dict(layer.experts["0"].state_dict(), strict=False)
    x = randn(40, SIZE)
    torch.testing.assert_close(layer(x, LAYOUT)[LAYOUT.valid_T], mlp(x).added()[LAYOUT.valid_T])


def test_both_routers_agree_when_everything_is_selected(provider: LayerProvider):
    x = randn(40, SIZE)
    by_expert = moe(provider, "expert_choice", capacity_factor=4.0)(x, LAYOUT)
    torch.testing.assert_close(by_expert, moe(provider, "top_k", top_k=4)(x, LAYOUT))


def test_an_unselected_token_has_no_output(provider: LayerProvider):
    layer = moe(provider, "expert_choice", capacity_factor=0.5)
    x = randn(40, SIZE)
    scores = torch.nn.functional.linear(x, layer.router.weight).softmax(-1)
    lonely = ~select_tokens(scores, LAYOUT, 0.5).any(1)
    out = layer(x, LAYOUT)
    assert not out[lonely].any()
    assert out[~lonely].any(1).all()
    load = layer.load.take(x.device)
    assert load[:-3].tolist() == [sum(expert_capacity(n, 4, 0.5) for n in LAYOUT.lengths)] * 4
    assert load[-3:].tolist() == [LAYOUT.valid_tokens, int((lonely & LAYOUT.valid_T).sum()), 0]
    assert not layer.load.take(x.device).any()


def test_a_step_that_is_not_applied_does_not_count(provider: LayerProvider):
    """However often it is computed, and even if it is not finite; the steps before and after it count."""
    layer = moe(provider, "top_k")
    good, bad = randn(40, SIZE), torch.full((40, SIZE), torch.nan)
    layer(good, LAYOUT)
    once = layer.load.take(good.device)
    for steps in (1, 2):
        for _ in range(steps):
            layer.load.begin_step()
            layer(bad, LAYOUT)
            layer(bad, LAYOUT)
        layer.load.drop_step(steps)
        layer.load.begin_step()
        layer(good, LAYOUT)
    torch.testing.assert_close(layer.load.take(good.device), 2 * once)


def test_load_is_counted_in_training_only(provider: LayerProvider):
    layer = moe(provider, "top_k")
    with torch.no_grad():
        layer(randn(40, SIZE), LAYOUT)
    assert not layer.load.take(torch.device("cpu")).any()


def test_the_balancing_loss_equals_its_formula():
    """sum_s n_s E sum_e f_se P_se, sample by sample."""
    scores = randn(40, 4).softmax(-1)
    selected = select_experts(scores, LAYOUT.valid_T, 2)
    expected = 0.0
    for rows, length in zip(samples(LAYOUT), LAYOUT.lengths):
        share = [int(selected[rows, e].sum()) / (2 * length) for e in range(4)]
        mean = [float(scores[rows, e].sum()) / length for e in range(4)]
        expected += length * 4 * sum(f * p for f, p in zip(share, mean))
    taken = LAYOUT.sum_per_sample(selected.float())
    assert balancing_loss(scores, taken, LAYOUT, 2).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("preferred", "expected"), [(0.25, 1.0), (0.5, 2.0)], ids=["even", "two of four"])
def test_balancing_loss_ends_at_its_bounds(preferred: float, expected: float):
    """1 per token when scores and choices are even, E / k when all tokens choose the same k experts."""
    layout = SequenceLayout.from_lengths([8])
    scores = torch.tensor([[preferred, preferred, 0.5 - preferred, 0.5 - preferred]]).expand(8, -1)
    selected = torch.zeros(8, 4)
    for t in range(8):
        selected[t, [0, 1] if preferred == 0.5 else [2 * t % 4, (2 * t + 1) % 4]] = 1
    loss = balancing_loss(scores, layout.sum_per_sample(selected), layout, 2)
    assert loss.item() / 8 == pytest.approx(expected)


def test_balancing_loss_reaches_the_router_at_its_weight(provider: LayerProvider):
    """The backward pass adds `coefficient` times the gradient of the formula, for the router and the input."""
    x = randn(40, SIZE)
    gradients = []
    for coefficient in (0.0, 0.7):
        layer = moe(provider, "top_k", aux_loss_coeff=coefficient)
        layer(x, LAYOUT).sum().backward()
        gradients.append(layer.router.weight.grad)
    weight = layer.router.weight.detach().clone().requires_grad_()
    scores = torch.nn.functional.linear(x, weight).softmax(-1)
    taken = LAYOUT.sum_per_sample(select_experts(scores, LAYOUT.valid_T, 2).float())
    (0.7 * balancing_loss(scores, taken, LAYOUT, 2)).backward()
    torch.testing.assert_close(gradients[1] - gradients[0], weight.grad, rtol=1e-4, atol=1e-5)


def test_experts_start_different_and_by_name(provider: LayerProvider):
    """Initial weights differ between experts and depend on the expert's global name."""
    layer, again = moe(provider, "top_k"), moe(provider, "expert_choice")
    weights = [expert.linear_fc1.weight for expert in layer.experts.values()]
    assert all(not torch.allclose(a, b) for i, a in enumerate(weights) for b in weights[:i])
    assert torch.equal(weights[3], dict(again.named_parameters())["experts.3.linear_fc1.weight"])
    bound = math.sqrt(6 / (SIZE + INNER))
    assert 0.9 * bound < weights[0].abs().max() <= bound
