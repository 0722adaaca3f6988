"""The latent-diffusion UNet against diffusers' UNet2DConditionModel: outputs, exact round trips, settings."""

from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel

from dit.convert.diffusers_unet import DiffusersUNet
from dit.errors import ConfigError
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, relative_error, run

RTOL = 1e-5  # fp32; another order of sums
SIZES = {
    # The form of Stable Diffusion v1: no transformer at the lowest resolution.
    "v1": LDMUNetConfig(
        block_out_channels=[8, 16, 24],
        transformer_layers=[1, 1, 0],
        layers_per_block=2,
        num_attention_heads=2,
        norm_num_groups=4,
        context_size=10,
        null_text="empty",
    ),
    "deep": LDMUNetConfig(
        block_out_channels=[16, 8],
        transformer_layers=[0, 2],
        mid_transformer_layers=2,
        layers_per_block=1,
        num_attention_heads=4,
        norm_num_groups=2,
        context_size=6,
        in_channels=3,
        null_text="empty",
    ),
}
SIZES["xl"] = LDMUNetConfig(
    block_out_channels=[8, 16, 24],
    transformer_layers=[0, 1, 3],
    mid_transformer_layers=3,
    layers_per_block=1,
    head_size=4,
    norm_num_groups=4,
    context_size=10,
    pooled_size=6,
    null_text="zeros",
)
SIZES["large heads"] = replace(SIZES["xl"], block_out_channels=[20, 40, 80], head_size=8)  # 20 is no multiple
SIZES["control"] = replace(SIZES["deep"], control_channels=2, transformer_layers=[1, 0])
LATENT_SIZE = (1, 8, 8)


def diffusers_model(model: LDMUNetConfig) -> UNet2DConditionModel:
    settings, notes = DiffusersUNet().write_settings(model, LATENT_SIZE)
    assert notes == []
    return UNet2DConditionModel.from_config(settings).eval()


@pytest.mark.parametrize("name", SIZES)
def test_diffusers_module_has_the_same_outputs(build_model: BuildModel, name: str):
    """Latents have two sizes, one odd after halving; each has another time and text. Gradients: tests/laws."""
    model, form = SIZES[name], DiffusersUNet()
    model.validate()
    external = diffusers_model(model)
    shapes = {n: tuple(x.shape) for n, x in external.state_dict().items()}
    state = random_weights(shapes, scale=0.2, seed=1)
    external.load_state_dict(state)
    assert form.read_settings(external.config).model == model
    rules = form.rules(model, parameter_shapes(model), LATENT_SIZE)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)
    network = load(build_model(model), rules.from_external(state))
    generator = torch.Generator().manual_seed(2)
    for height, width in ((8, 4), (6, 10)):
        latents = torch.randn(3, model.in_channels, 1, height, width, generator=generator)
        texts = torch.randn(3, 5, model.context_size, generator=generator)
        steps = torch.tensor([0.0, 321.0, 999.0])
        control = None
        if model.control_channels is not None:
            control = torch.randn(3, model.control_channels, 1, height, width, generator=generator)
        others, added = None, None
        if model.pooled_size is not None:
            pooled = torch.randn(3, model.pooled_size, generator=generator)
            # Below 64: float32 sines of 1,000 are off by 1e-4, because frequencies are rounded differently.
            lengths = torch.randint(0, 64, (3, 6), generator=generator).float()
            others = {"pooled": pooled, "size_and_crop": lengths}
            added = {"text_embeds": pooled, "time_ids": lengths}
        actual = run(network, model, latents, steps / 1000, texts=list(texts), control=control, others=others)
        given = latents if control is None else torch.cat([latents, control], 1)
        with torch.no_grad():
            exact = external(given[:, :, 0], steps, texts, added_cond_kwargs=added).sample[:, :, None]
        assert relative_error(actual, exact) <= RTOL


def test_texts_of_one_pack_may_differ_in_length(build_model: BuildModel):
    """Each latent attends only to its text, so outputs equal those of single samples."""
    model = SIZES["v1"]
    network = build_model(model, perturb=0.1)
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, 4, 1, 8, 8, generator=generator)
    texts = [torch.randn(n, model.context_size, generator=generator) for n in (2, 7)]
    time = torch.tensor([0.2, 0.7])
    together = run(network, model, latents, time, texts=texts)
    for i in range(2):
        alone = run(network, model, latents[i : i + 1], time[i : i + 1], texts=texts[i : i + 1])
        assert relative_error(together[i : i + 1], alone) <= RTOL


def test_a_learned_null_token_is_not_exported():
    learned = replace(SIZES["v1"], null_text="learned")
    [note] = DiffusersUNet().rules(learned, parameter_shapes(learned), LATENT_SIZE).export_notes()
    assert note.startswith("text.null is not exported")
    assert "model.null_text=empty" in note


def test_missing_sizes_are_those_of_the_latent(build_model: BuildModel):
    """The default is the size in pixels without a crop; another crop or pooled text changes the output."""
    model = SIZES["xl"]
    network = build_model(model, perturb=0.1)
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, 4, 1, 8, 4, generator=generator)
    texts, time = list(torch.randn(2, 3, model.context_size, generator=generator)), torch.tensor([0.2, 0.7])
    pooled = torch.randn(2, model.pooled_size, generator=generator)

    def drawn(**others: torch.Tensor) -> torch.Tensor:
        return run(network, model, latents, time, texts=texts, others={"pooled": pooled, **others})

    given = torch.tensor([64.0, 32.0, 0.0, 0.0, 64.0, 32.0]).repeat(2, 1)
    assert torch.equal(drawn(), drawn(size_and_crop=given))
    (derived,) = (c for c in model.conditions() if c.name == "size_and_crop")
    assert torch.equal(derived.derive(latents[0]), given[0])
    given[0, 2] = 16.0
    changed = (drawn(size_and_crop=given) - drawn()).abs().amax((1, 2, 3, 4))
    assert changed[0] > 1e-4
    assert changed[1] == 0
    assert (drawn(pooled=torch.zeros_like(pooled)) - drawn()).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_size": None}, "context_size=None"),
        ({"head_size": 5}, "model.head_size=5"),
        ({"transformer_layers": [1, 1]}, "one number for each resolution"),
        ({"norm_num_groups": 3}, "multiples of model.norm_num_groups=3"),
        ({"transformer_layers": [0] * 3, "mid_transformer_layers": 0}, "no layer attends to the text"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SIZES["v1"], **changes).validate()
