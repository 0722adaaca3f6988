"""Wan 2.2 with a time per token, against diffusers: output and every gradient of clips with several noise levels."""

from dataclasses import replace

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from dit.backends.process_groups import ProcessGroups
from dit.convert.diffusers_cross import DiffusersWan
from dit.layout import CLEAN
from dit.levels import with_levels
from dit.parallel.build import parameter_shapes
from dit.patchify import patchify, unpatchify
from dit.verify.trial import disturb_constants
from launch.verify import MockPacks
from tests.conftest import BuildModel
from tests.laws.backbones import config_of
from tests.parity.convert_cases import assert_same_gradients, relative_error

OUTPUT_RTOL = 1e-5


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
    real_RC = output_TC[batch.layout.valid_T]
    assert relative_error(real_RC.detach(), exact_RC.detach()) <= OUTPUT_RTOL
    assert_same_gradients(form, config, network, real_RC, reference, exact_RC)
