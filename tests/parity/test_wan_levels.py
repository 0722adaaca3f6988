"""Wan 2.2 with a time per token, against diffusers: output and every gradient of clips with several noise levels."""

from dataclasses import replace

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from dit.backends.process_groups import ProcessGroups
from dit.convert.diffusers_wan import DiffusersWan
from dit.layout import CLEAN
from dit.levels import with_levels
from dit.parallel.build import count_parameters, parameter_shapes
from dit.patchify import patchify, unpatchify
from dit.verify.compare import tensor_errors
from dit.verify.public import gradient_errors
from dit.verify.trial import disturb_constants
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import MockPacks
from tests.conftest import BuildModel
from tests.laws.backbones import config_of

OUTPUT_RTOL, GRADIENT_RTOL = 1e-5, 1e-4
TI2V_5B = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
    "num_layers": 30,
}


def test_times_per_token_equal_those_of_diffusers(build_model: BuildModel, one_rank_world: ProcessGroups) -> None:
    """Compare a padded pack with one call per clip: clean first frame, one level, or one level per frame."""
    config = config_of("wan")
    network = build_model(config)
    disturb_constants([network], one_rank_world)
    batch = MockPacks(config)([0, 1, 2, 3, 4, 5, 6], multiple_of=8, tail=8)
    assert max(t for t, _, _ in batch.grids) > 2
    segments = []
    for i, (t, h, w) in enumerate(batch.grids):
        numbers = [CLEAN if i % 2 and t > 1 and frame == 0 else (0, frame)[i % 3 > 0] for frame in range(t)]
        segments.append([(h * w, number) for number in numbers])
    batch = replace(batch, layout=with_levels(batch.layout, segments))
    levels = batch.layout.levels
    assert levels is not None
    time_L = torch.rand(len(levels.numbers), generator=torch.Generator().manual_seed(1)).masked_fill(
        levels.clean_L, 0.0
    )

    form, size = DiffusersWan(), (1, 8, 8)
    settings, _ = form.write_settings(config, size)
    rules = form.rules(config, parameter_shapes(config), size)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    reference = WanTransformer3DModel.from_config(settings).eval()
    reference.load_state_dict(rules.to_external(weights))

    output_TC = network(batch.latents_TC, time_L, batch)
    time_T = levels.layout.per_token(time_L)[:, 0]
    text, exact = batch.conditions["context"], []
    assert text.layout is not None
    t, s = config.patch_temporal, config.patch_spatial
    for i, (start, length, grid) in enumerate(zip(batch.layout.starts, batch.layout.lengths, batch.grids)):
        tokens = slice(start, start + length)
        latents = unpatchify(batch.latents_TC[tokens], grid, t, s)[None]
        context = text.values[text.layout.starts[i] :][: text.layout.lengths[i]]
        predicted = reference(latents, 1000 * time_T[None, tokens], context[None]).sample
        exact.append(patchify(predicted[0], t, s)[0])
    exact_RC = torch.cat(exact)
    cotangent_RC = torch.randn(exact_RC.shape, generator=torch.Generator().manual_seed(2))
    exact_RC.backward(cotangent_RC)
    real_RC = output_TC[batch.layout.valid_T]
    real_RC.backward(cotangent_RC)
    outputs = tensor_errors({"output": exact_RC.detach()}, {"output": real_RC.detach()})
    assert outputs["output"] <= OUTPUT_RTOL
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in network.named_parameters()}
    errors = gradient_errors(rules, gradients, dict(reference.named_parameters()))
    assert len(errors) > 50
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_RTOL} == {}


def test_the_settings_of_ti2v_5b_equal_the_published_settings() -> None:
    """Names and shapes of all weights, and their total; the recipe trains this model."""
    form = DiffusersWan()
    imported = form.read_settings(TI2V_5B)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with torch.device("meta"):
        published = {name: tuple(p.shape) for name, p in WanTransformer3DModel(**TI2V_5B).named_parameters()}
    assert rules.external_shapes() == published
    model = built(call_recipe("wan_2_2_ti2v_5b_mock")).model
    same = {"context_dropout": imported.model.context_dropout, "null_text": "empty"}
    assert replace(model, **same) == imported.model
    assert round(count_parameters(model) / 1e9, 2) == 5.0
