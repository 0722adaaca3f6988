"""Class-conditional DiT to and from the published code base and diffusers: equal outputs, exact round trips."""

import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

from dit.convert import original_dit
from dit.convert.diffusers_dit import DiffusersDiT
from dit.convert.diffusers_format import format_of_settings
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.parallel.build import parameter_shapes
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_round_trip, assert_same_bits, load, relative_error, run
from tests.parity.public_dit import public_forward, random_state

RTOL = 1e-5  # float32 against float64, or against float32 with another order of sums
SIZES = {"size": 48, "depth": 2, "inner": 192, "channels": 4, "out_channels": 8, "patch": 2, "classes": 7, "grid": 4}
STEPS = torch.tensor([0, 37, 999])
LABELS = torch.tensor([3, 7, 0])  # 7 is the null class


def images() -> torch.Tensor:
    return torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def diffusers_model(**changes) -> DiTTransformer2DModel:
    settings = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "sample_size": 8,
        "num_embeds_ada_norm": 7,
        "norm_eps": 1e-6,
    }
    return DiTTransformer2DModel(**{**settings, **changes}).eval()


@pytest.mark.parametrize(
    "changes", [{}, {"out_channels": 4, "inner": 100, "patch": 4, "grid": 2}], ids=["sigma", "plain"]
)
def test_a_published_state_dict_has_the_same_outputs(build_model: BuildModel, changes: dict):
    """Sizes are inferred from the tensors; predictions equal the public formulas, also for the null class."""
    external = random_state(**{**SIZES, **changes})
    imported = original_dit.read_sizes(external, num_attention_heads=4)
    rules = original_dit.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    network = load(build_model(imported.model), rules.from_external(external))
    actual = run(network, imported.model, images()[:, :, None], STEPS / 1000, labels_B=LABELS)[:, :, 0]
    exact = public_forward(external, 4, images(), STEPS, LABELS)
    assert actual.shape == exact.shape
    assert relative_error(actual, exact) <= RTOL
    back = rules.to_external(rules.from_external(external))
    # Our table is computed, so it differs by rounding.
    torch.testing.assert_close(back.pop("pos_embed"), external.pop("pos_embed"), rtol=0, atol=1e-6)
    assert_same_bits(back, external)


def test_the_config_survives_a_round_trip():
    assert_round_trip(DiffusersDiT(), diffusers_model(sample_size=16, patch_size=4, num_layers=3).config)


def test_differences_of_diffusers_are_reported():
    form = DiffusersDiT()
    assert "norm_eps=1e-05" in form.read_settings(diffusers_model(norm_eps=1e-5).config).notes[0]
    _, notes = form.write_settings(DiTConfig(num_classes=3), (1, 8, 8))
    assert "time_frequency_shift=0" in notes[0]


def test_the_published_folder_of_2022_is_read():
    """It has the old class name, removed arguments, and the position table as a weight."""
    gone = {"cross_attention_dim": None, "num_vector_embeds": None, "only_cross_attention": False}
    old = {"_class_name": "Transformer2DModel", "out_channels": 8, "norm_type": "ada_norm_zero", **gone}
    form = format_of_settings(old)
    imported = form.read_settings(old)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    assert (imported.model.hidden_size, imported.model.num_layers, imported.latent_size) == (1152, 28, (1, 32, 32))
    with torch.device("meta"):
        published = {name: tuple(p.shape) for name, p in DiTTransformer2DModel(out_channels=8).named_parameters()}
    assert rules.external_shapes() == published
    torch.testing.assert_close(
        rules.tables["pos_embed.pos_embed"], DiTTransformer2DModel(num_layers=0).pos_embed.pos_embed
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_layernorm": True},
        {"num_classes": None},
        {"context_size": 8},
        {"position_embedding": "rope_3d"},
        {"time_scale": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_without_a_diffusers_form_is_refused(changes: dict):
    model = DiTConfig(**{"num_classes": 3, **changes})
    with pytest.raises(ConfigError, match=next(iter(changes))):
        original_dit.rules(model, parameter_shapes(model), (1, 8, 8))
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DiffusersDiT().write_settings(model, (1, 8, 8))


def test_weights_that_do_not_fit_are_named():
    external = random_state(**SIZES)
    imported = original_dit.read_sizes(external, num_attention_heads=4)
    rules = original_dit.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    wrong = {**external, "blocks.1.attn.proj.bias": torch.zeros(47), "lora.up": torch.zeros(2)}
    del wrong["t_embedder.mlp.2.weight"]
    with pytest.raises(ConfigError) as error:
        rules.from_external(wrong)
    text = str(error.value)
    assert "1 missing: t_embedder.mlp.2.weight [48, 48]" in text
    assert "1 unknown: lora.up [2]" in text
    assert "blocks.1.attn.proj.bias is [47], needs [48]" in text
    shifted = {**external, "pos_embed": external["pos_embed"].roll(1, dims=1)}
    with pytest.raises(ConfigError, match="not the fixed table"):
        rules.from_external(shifted)
    with pytest.raises(ConfigError, match="lacks pos_embed"):
        original_dit.read_sizes({n: x for n, x in external.items() if n != "pos_embed"})
    with pytest.raises(ConfigError, match="--num-attention-heads"):
        original_dit.read_sizes(external)


def test_separate_embedders_in_each_block_are_refused():
    """diffusers stores embedders in each block; ours are shared, so the stored ones must be equal."""
    external = diffusers_model()
    form = DiffusersDiT()
    imported = form.read_settings(external.config)
    rules = form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size)
    with pytest.raises(ConfigError, match="copies of one tensor differ"):
        rules.from_external(external.state_dict())
