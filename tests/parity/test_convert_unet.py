"""The latent-diffusion UNet against diffusers' UNet2DConditionModel: outputs, gradients, exact round trips, sizes."""

import math
from dataclasses import replace

import fiddle
import pytest
import torch
from diffusers import UNet2DConditionModel

from dit.convert.diffusers_unet import DiffusersUNet
from dit.errors import ConfigError
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.parallel.build import parameter_shapes
from recipes.models import sdxl_unet
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, plain, predict, random_weights, relative_error, run

RTOL, GRADIENT_RTOL = 1e-5, 1e-4  # fp32; another order of sums
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
SIZES["control"] = replace(SIZES["deep"], control_channels=2, transformer_layers=[1, 0])
LATENT_SIZE = (1, 8, 8)


def diffusers_model(model: LDMUNetConfig) -> UNet2DConditionModel:
    settings, notes = DiffusersUNet().write_settings(model, LATENT_SIZE)
    assert notes == []
    return UNet2DConditionModel.from_config(settings).eval()


@pytest.mark.parametrize("name", SIZES)
def test_diffusers_module_has_the_same_outputs(build_model: BuildModel, name: str):
    """Outputs and every gradient, for latents of two sizes, one odd after halving; each has another time and text."""
    model, form = SIZES[name], DiffusersUNet()
    model.validate()
    external = diffusers_model(model)
    shapes = {n: tuple(x.shape) for n, x in external.state_dict().items()}
    state = random_weights(shapes, scale=0.2, seed=1)
    external.load_state_dict(state)
    rules = form.rules(model, parameter_shapes(model), LATENT_SIZE)
    assert_same_bits(rules.to_external(rules.from_external(state)), state)
    network = load(build_model(model), rules.from_external(state))
    generator = torch.Generator().manual_seed(2)
    for height, width in ((8, 4), (6, 10)):
        latents = torch.randn(3, model.in_channels, 1, height, width, generator=generator)
        texts = torch.randn(3, 5, model.context_size, generator=generator)
        steps = torch.tensor([0.0, 321.0, 999.0])
        network.zero_grad()
        external.zero_grad()
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
        actual = predict(network, model, latents, steps / 1000, texts=list(texts), control=control, others=others)
        given = latents if control is None else torch.cat([latents, control], 1)
        exact = external(given[:, :, 0], steps, texts, added_cond_kwargs=added).sample[:, :, None]
        assert relative_error(actual, exact.detach()) <= RTOL
        cotangent = torch.randn(exact.shape, generator=generator)
        actual.backward(cotangent)
        exact.backward(cotangent)
        ours_by_name = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
        found = rules.to_external(ours_by_name)
        wanted = {n: p.grad for n, p in external.named_parameters()}
        assert found.keys() == wanted.keys()
        errors = {n: relative_error(found[n], gradient) for n, gradient in wanted.items() if gradient.norm() > 0}
        assert len(errors) == len(wanted)
        assert {n: error for n, error in errors.items() if not error <= GRADIENT_RTOL} == {}


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


@pytest.mark.parametrize("name", SIZES)
def test_the_config_survives_a_round_trip(name: str):
    form, external = DiffusersUNet(), diffusers_model(SIZES[name]).config
    imported = form.read_settings(external)
    assert imported.model == SIZES[name]
    settings, _ = form.write_settings(imported.model, imported.latent_size)
    again = UNet2DConditionModel.from_config(settings).config
    assert plain(again) == plain(external)


def test_the_defaults_equal_stable_diffusion_v1():
    """Names and shapes of all 859,520,964 parameters; a learned null token is additional and is not exported."""
    form, model = DiffusersUNet(), LDMUNetConfig(null_text="empty")
    model.validate()
    settings, _ = form.write_settings(model, (1, 64, 64))
    actual = parameter_shapes(model)
    with torch.device("meta"):
        external = {name: tuple(p.shape) for name, p in UNet2DConditionModel.from_config(settings).named_parameters()}
    assert form.rules(model, actual, (1, 64, 64)).external_shapes() == external
    assert sum(math.prod(shape) for shape in external.values()) == 859_520_964
    learned = replace(model, null_text="learned")
    [note] = form.rules(learned, parameter_shapes(learned), (1, 64, 64)).export_notes()
    assert note.startswith("text.null is not exported")
    assert "model.null_text=empty" in note
    assert parameter_shapes(learned) == {**actual, "text.null": (768,)}
    published = {  # unet/config.json of runwayml/stable-diffusion-v1-5
        **{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": 8, "sample_size": 64},
        **{"block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False, "cross_attention_dim": 768},
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        **{"downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "out_channels": 4},
        **{"layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32},
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    }
    assert form.read_settings(published).model == model


def test_stable_diffusion_xl_has_the_published_parameters():
    """Names and shapes of all 2,567,463,684 parameters are equal."""
    form, model = DiffusersUNet(), fiddle.build(sdxl_unet())
    model.validate()
    published = {  # unet/config.json of stabilityai/stable-diffusion-xl-base-1.0
        **{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": [5, 10, 20]},
        **{"addition_embed_type": "text_time", "addition_embed_type_num_heads": 64, "addition_time_embed_dim": 256},
        **{"block_out_channels": [320, 640, 1280], "center_input_sample": False, "cross_attention_dim": 2048},
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        **{"downsample_padding": 1, "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "out_channels": 4},
        **{"layers_per_block": 2, "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32},
        **{"num_attention_heads": None, "projection_class_embeddings_input_dim": 2816, "sample_size": 128},
        **{"transformer_layers_per_block": [1, 2, 10], "upcast_attention": None, "use_linear_projection": True},
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    }
    assert form.read_settings(published).model == model
    settings, _ = form.write_settings(model, (1, 128, 128))
    actual = parameter_shapes(model)
    for config in (published, settings):
        with torch.device("meta"):
            external = {name: tuple(p.shape) for name, p in UNet2DConditionModel.from_config(config).named_parameters()}
        assert form.rules(model, actual, (1, 128, 128)).external_shapes() == external
    assert sum(math.prod(shape) for shape in external.values()) == 2_567_463_684


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
    ("change", "message"),
    [
        ({"use_linear_projection": True}, "use_linear_projection=True"),
        ({"addition_embed_type": "text_time"}, "addition_embed_type='text_time'"),
        ({"attention_head_dim": [2, 4, 8]}, r"attention_head_dim=\[2, 4, 8\]"),
        ({"out_channels": 8}, "in_channels=4, out_channels=8"),
        ({"up_block_types": ["CrossAttnUpBlock2D"] * 3}, "up_block_types="),
        ({"down_block_types": ["AttnDownBlock2D"] * 3}, "down_block_types="),
        ({"in_channels": 9}, "in_channels=9 are those of an inpainting model"),
        (
            {
                **{"addition_embed_type": "text_time", "addition_time_embed_dim": 256, "cross_attention_dim": 1280},
                "projection_class_embeddings_input_dim": 2560,
            },
            "input_dim=2560 is that of the refiner",
        ),
    ],
)
def test_unsupported_settings_are_refused(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DiffusersUNet().read_settings({**diffusers_model(SIZES["v1"]).config, **change})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mid_transformer_layers": 0}, "mid_transformer_layers=0"),
        ({"transformer_layers": [1, 1, 2]}, "as many transformer layers as its lowest resolution"),
        ({"patch_spatial": 2}, "patch_spatial=2"),
    ],
)
def test_models_without_a_diffusers_form_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DiffusersUNet().write_settings(replace(SIZES["v1"], **changes), LATENT_SIZE)
    with pytest.raises(ConfigError, match="draws pictures, not clips"):
        DiffusersUNet().write_settings(SIZES["v1"], (2, 8, 8))


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
