"""mu-parametrisation: factors of every kind of parameter, and activations that do not drift with the width."""

import math

import pytest
import torch

from benchmarks.parallel_training import tiny_model
from dit.backends.init import init_of
from dit.backends.sharding import Matrices, sharding_of
from dit.backends.width import linear_factors, rate_factor, set_width
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.models.lora_config import LoRAConfig
from dit.optimizer.muon import direction
from dit.parallel.build import build_model, build_on_meta, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from tests.support.batches import Sample, pack

M = 4
SETTINGS = {"num_layers": 2, "num_classes": 5, "context_size": 40, "in_channels": 4}
HIDDEN, INPUT, OUTPUT, VECTOR = "hidden", "input", "output", "vector"
KINDS = {
    "embed.weight": INPUT,
    "conditioner.time.linear_1.weight": INPUT,
    "conditioner.time.linear_2.weight": HIDDEN,
    "conditioner.label.weight": VECTOR,
    "layers.0.modulation.linear.weight": HIDDEN,
    "layers.0.modulation.linear.bias": VECTOR,
    "layers.0.attention.linear_qkv.weight": HIDDEN,
    "layers.1.attention.linear_proj.weight": HIDDEN,
    "layers.1.attention.q_layernorm.weight": VECTOR,
    "layers.0.mlp.linear_fc1.weight": HIDDEN,
    "layers.1.mlp.linear_fc2.weight": HIDDEN,
    "layers.1.mlp.linear_fc2.bias": VECTOR,
    "head.linear.weight": OUTPUT,
    "head.linear.bias": VECTOR,
}
VARIANCE_OF_INIT = {HIDDEN: 1 / M, INPUT: 1, OUTPUT: 1 / M**2, VECTOR: 1}
"""Table 3 of arXiv:2203.03466 for fan-in and fan-out that grow M times, relative to the base width."""
ADAM = {HIDDEN: 1 / M, INPUT: 1, OUTPUT: 1 / M, VECTOR: 1}
"""Learning rates of the same table."""


def network(width, base_width=None, **options):
    config = DiTConfig(
        **SETTINGS,
        hidden_size=width,
        num_attention_heads=width // 16,
        qk_layernorm=True,
        base_width=base_width,
        **options,
    )
    model = build_on_meta(config)
    if base_width is not None:
        set_width(model, build_on_meta(config.at_base_width()), 1)
    return model


def test_each_kind_of_parameter_has_the_factors_of_the_paper():
    base = dict(network(32).named_parameters())
    model = dict(network(32 * M, 32).named_parameters())
    assert set(KINDS) <= set(model), sorted(set(model))
    for name, kind in KINDS.items():
        assert rate_factor(model[name], muon=False) == pytest.approx(ADAM[kind]), name
        init, of_base = init_of(model[name], name), init_of(base[name], name)
        assert init.kind == of_base.kind
        if init.kind != "constant":
            assert (init.scale / of_base.scale) ** 2 == pytest.approx(VARIANCE_OF_INIT[kind]), name
        else:
            assert init == of_base


WIDTHS, STEPS, RATE = (64, 128, 256, 512), 5, 4e-3


def coordinates(groups, width, base_width, algorithm):
    """Return the root mean squares of the changes of activations over some updates, by layer."""
    config = DiTConfig(
        **{**SETTINGS, "context_size": 12}, hidden_size=width, num_attention_heads=width // 16, base_width=base_width
    )
    parallel, training = ParallelConfig(), TrainingConfig(precision="fp32")
    (model,) = build_model(config, parallel, training, groups)
    groups_of_rates = {}
    for parameter in model.parameters():
        of_muon = algorithm == "muon" and sharding_of(parameter).matrices is not None
        factor = rate_factor(parameter, muon=algorithm == "muon")
        groups_of_rates.setdefault((of_muon, factor), []).append(parameter)
    optimizers = [
        torch.optim.Muon(members, RATE * factor, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        if of_muon
        else torch.optim.AdamW(members, RATE * factor, weight_decay=0.0)
        for (of_muon, factor), members in groups_of_rates.items()
    ]
    batch = pack([Sample((1, 4, 4), 3, label=i) for i in range(3)], config)
    time_S = torch.tensor([0.2, 0.5, 0.8])
    target_TC = torch.randn(
        batch.layout.total_tokens, config.output_features, generator=torch.Generator().manual_seed(1)
    )
    values, kept = {}, [(f"layer {i}", layer) for i, layer in model.layers.items()]
    for name, module in [*kept, ("prediction", model.head), ("conditions", model.conditioner)]:
        module.register_forward_hook(lambda m, args, out, name=name: values.setdefault(name, []).append(out.detach()))
    for _ in range(STEPS + 1):
        loss = (model(batch.latents_TC, time_S, batch) - target_TC).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: float((outs[-1] - outs[0]).square().mean().sqrt()) for name, outs in values.items()}


@pytest.mark.parametrize("algorithm", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_changes_of_activations_do_not_depend_on_the_width(one_rank_world, algorithm, monkeypatch):
    """Measured: at most 14 % between widths with a base width; without one, 8 to 16 times as large at width 512."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torch's Muon; 780 s in bf16 on an AMD EPYC
    scaled, plain = (
        [coordinates(one_rank_world, width, base_width, algorithm) for width in WIDTHS] for base_width in (64, None)
    )
    assert scaled[0] == plain[0]  # to the bit: the width is the base width
    for name in scaled[0]:
        values = [changes[name] for changes in scaled]
        assert max(values) < 1.25 * min(values), (name, values)
    for name in ("layer 0", "layer 1", "prediction"):
        assert plain[-1][name] > 5 * plain[0][name], name


@pytest.mark.parametrize(("outputs", "inputs"), [((16, 64), (16, 64)), ((48, 48), (24, 96)), ((24, 96), (40, 40))])
def test_updates_of_muon_have_the_spectral_norm_of_the_width(outputs, inputs):
    """Condition 1 of arXiv:2310.17813: the norm of an update is proportional to sqrt(out / in).

    Rows alternate between two matrices, as in SwiGLU; half of the rows belong to each.
    """
    pairs = Matrices(((2, 2),))
    quotients = []
    for width in (0, 1):
        shape = (2 * outputs[width], inputs[width])
        update = direction(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), pairs)
        base = torch.Size((2 * outputs[0], inputs[0]))
        norm = torch.linalg.matrix_norm(update[::2], 2) * linear_factors(torch.Size(shape), base, pairs).muon
        quotients.append(float(norm) / math.sqrt(outputs[width] / inputs[width]))
    assert quotients[1] == pytest.approx(quotients[0], rel=0.2)  # singular values of Newton-Schulz are 0.7 to 1.2


def test_columns_that_store_several_matrices_have_the_factor_of_one():
    """Of an output layer with a wide input: both dimensions grow four times, so Muon's rate halves."""
    size, base = torch.Size((64, 96)), torch.Size((16, 24))
    factors = linear_factors(size, base, Matrices(((4, 1), (2, 1)), dim=1))
    assert (factors.adamw, factors.muon) == (1 / 4, 1 / 2)


@pytest.mark.parametrize(("shape", "kind"), [((64, 256), HIDDEN), ((64, 24), INPUT), ((16, 256), OUTPUT)])
def test_initial_weights_and_rates_of_linears_are_those_of_the_paper(shape, kind):
    base = tuple(size // M if size in (64, 256) else size for size in shape)
    factors = linear_factors(torch.Size(shape), torch.Size(base), None)
    assert (factors.init**2, factors.adamw) == pytest.approx((VARIANCE_OF_INIT[kind], ADAM[kind]))


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_the_optimizer_has_these_rates_and_the_weight_decay_of_a_step(one_rank_world, algorithm):
    config = tiny_model(num_layers=1, hidden_size=64, base_width=16)
    training, parallel = TrainingConfig(precision="fp32"), ParallelConfig(data_parallel="ddp")
    chunks = build_model(config, parallel, training, one_rank_world)
    settings = OptimizerConfig(algorithm=algorithm, lr=3e-3, weight_decay=0.2)
    optimizer = build_optimizer(wrap(chunks, parallel, one_rank_world), settings, parallel, training, one_rank_world)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"layers.0.mlp.linear_fc1.weight": 1 / 2 if algorithm == "muon" else 1 / 4, "head.linear.weight": 1 / 4}
    parameters = dict(chunks[0].named_parameters())
    for name, factor in {**expected, "embed.weight": 1.0, "layers.0.mlp.linear_fc1.bias": 1.0}.items():
        assert rates[id(parameters[name])] == pytest.approx(3e-3 * factor), name
    decays = {group["lr"] * group["weight_decay"] for group in optimizer.param_groups}
    assert sorted(decays) == pytest.approx([0.0, 3e-3 * 0.2])


def test_settings_that_grow_with_the_width_are_divided():
    config = DiTConfig(**SETTINGS, hidden_size=96, num_attention_heads=6, ffn_hidden_size=192, base_width=32)
    base = config.at_base_width()
    assert (base.hidden_size, base.num_attention_heads, base.ffn_hidden_size, base.base_width) == (32, 2, 64, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_width": 24}, "no whole number for model.num_attention_heads=6; use a multiple of 16"),
        ({"base_width": 32, "lora": LoRAConfig(rank=2)}, "trains only adapters"),
    ],
)
def test_widths_that_cannot_be_scaled_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DiTConfig(**SETTINGS, hidden_size=96, num_attention_heads=6, **options).validate()
