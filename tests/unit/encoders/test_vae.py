"""Autoencoders, compared with diffusers: sizes computed by hand, latents and pixels up to rounding."""

import json
import shutil
import sys
from functools import cache

import pytest
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Flux2Pipeline,
    VQModel,
)
from einops import rearrange

from dit.encoders.vae import VAE, Geometry, encode_together
from dit.errors import ConfigError
from dit.patchify import patchify
from tests.support.encoders import DC_AUTOENCODER, autoencoder_blocks

IMAGE = {
    **autoencoder_blocks(8, 8, 8),
    "norm_num_groups": 4,
    "latent_channels": 4,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
NORMALISED = {**IMAGE, "shift_factor": None, "latents_mean": (0.1, -0.2, 0.3, 0.4), "latents_std": (0.5, 1.5, 2.0, 1.0)}
HUNYUAN = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
VQ = {
    **{name: value for name, value in IMAGE.items() if name != "shift_factor"},
    "num_vq_embeddings": 40,
    "vq_embed_dim": 3,
}
WAN_2_2 = {
    **{"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1, "z_dim": 4, "is_residual": True, "patch_size": 2},
    **{"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
    **{"latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [0.5, 1.5, 2.0, 1.0]},
}
MODELS = {
    "image": (AutoencoderKL, IMAGE),
    "normalised": (AutoencoderKL, NORMALISED),
    "wan": (AutoencoderKLWan, {"base_dim": 8, "num_res_blocks": 1}),
    "hunyuan": (AutoencoderKLHunyuanVideo, HUNYUAN),
    "hunyuan 1.5": (
        AutoencoderKLHunyuanVideo15,
        {"latent_channels": 4, "block_out_channels": (8,) * 5, "layers_per_block": 1},
    ),
    "vq": (VQModel, VQ),
    "flux2": (AutoencoderKLFlux2, {name: IMAGE[name] for name in list(IMAGE)[:5]}),
    "dc": (AutoencoderDC, DC_AUTOENCODER),
    "qwen image": (AutoencoderKLQwenImage, {"base_dim": 8, "num_res_blocks": 1}),
    "wan 2.2": (AutoencoderKLWan, WAN_2_2),
}
SCALED = ("hunyuan", "hunyuan 1.5", "vq", "dc")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a named autoencoder with random weights, and returns its folder and the model."""

    @cache
    def save(name):
        kind, config = MODELS[name]
        torch.manual_seed(0)
        model = kind(**config).eval()
        if kind is AutoencoderKLFlux2:
            model.bn.running_mean.normal_()
            model.bn.running_var.uniform_(0.5, 2.0)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return str(folder), model

    return save


def scale_and_shift(name, model):
    """Return mean and factor of a latent as diffusers' pipelines apply them: (z - mean) * factor."""
    config = model.config
    if name == "image":
        return config.shift_factor, config.scaling_factor
    if name in SCALED:
        return 0.0, config.scaling_factor
    mean, std = (torch.tensor(x)[:, None, None, None] for x in (config.latents_mean, config.latents_std))
    return mean, config.get("scaling_factor", 1.0) / std


@pytest.mark.parametrize(("kind", "config"), [(AutoencoderKL, IMAGE), (VQModel, VQ)], ids=["kl", "vq"])
def test_an_autoencoder_of_one_channel_encodes_the_brightness_of_a_picture(tmp_path, kind, config):
    for channels in (1, 2):
        kind(**config, in_channels=channels, out_channels=channels).save_pretrained(tmp_path / str(channels))
    vae, pixels = VAE(str(tmp_path / "1")), torch.rand(2, 3, 1, 8, 8) * 2 - 1
    red, green, blue = pixels.unbind(1)
    brightness = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    torch.testing.assert_close(vae.encode(pixels), vae.encode(brightness))
    assert vae.decode(vae.encode(pixels)).shape == brightness.shape
    with pytest.raises(ConfigError, match="encodes pictures of 2 channels, and these have 3; use an autoencoder of 3"):
        VAE(str(tmp_path / "2")).encode(pixels)


def test_latents_of_flux2_equal_those_of_its_pipeline(saved):
    """The pipeline normalises patches of 2 x 2 with channels first; our latents have the network's patch order."""
    folder, model = saved("flux2")
    pipeline = Flux2Pipeline(scheduler=None, vae=model, text_encoder=None, tokenizer=None, transformer=None)
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae = VAE(folder)
    latent = vae.encode(pixels[:, :, None])
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels, None)
        z = model.encode(pixels).latent_dist.mode()
        decoded = model.decode(z).sample
    tokens, _ = patchify(latent[0], 1, 2)
    expected = rearrange(expected[0], "(c y x) h w -> (h w) (y x c)", y=2, x=2)
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vae.decode(latent)[:, :, 0], decoded.clamp(-1, 1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="32 x 36 pixels cannot be encoded; sides must be multiples of 8"):
        vae.geometry.latent_shape(1, 32, 36)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "flux2"])
def test_latents_and_pixels_equal_those_of_diffusers(saved, name):
    folder, model = saved(name)
    vae = VAE(folder)
    frames = 5 if vae.geometry.time > 1 else 2
    pixels = torch.rand(2, 3, frames, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean, factor = scale_and_shift(name, model)
    with torch.no_grad():
        if name in ("vq", "dc"):  # before quantisation
            z = torch.stack([model.encode(pixels[:, :, t])[0] for t in range(frames)], 2)
        elif vae.geometry.time == 1:  # frame by frame
            z = torch.stack([model.encode(pixels[:, :, t]).latent_dist.mean for t in range(frames)], 2)
        else:
            z = torch.cat([model.encode(clip[None]).latent_dist.mean for clip in pixels])
        expected = (z - mean) * factor
        if vae.geometry.time == 1:
            decoded = torch.stack([model.decode(z[:, :, t]).sample for t in range(frames)], 2)
        else:
            decoded = torch.cat([model.decode(clip[None]).sample for clip in z])
    latent = vae.encode(pixels)
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vae.decode(latent), decoded.clamp(-1, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_known_without_the_weights(saved, name, tmp_path):
    folder, _ = saved(name)
    (tmp_path / "vae").mkdir()
    shutil.copy(f"{folder}/config.json", tmp_path / "vae")
    geometry = Geometry.read(str(tmp_path))  # a pipeline's folder, without weights
    vae = VAE(folder)
    assert geometry == vae.geometry
    frames = 1 + 2 * geometry.time
    shape = geometry.latent_shape(frames, 32, 64)
    if geometry.time > 1:
        assert tuple(vae.encode(torch.zeros(1, 3, frames, 32, 64)).shape[1:]) == shape
    assert geometry.pixel_shape(*shape[1:]) == (frames, 32, 64)


def test_clips_of_any_shapes_are_encoded_in_batches_and_returned_in_order(saved):
    vae = VAE(saved("image")[0])
    generator = torch.Generator().manual_seed(2)
    clips = [torch.rand(3, 1, 16, 16 + 16 * (i % 3), generator=generator) for i in range(7)]
    together = encode_together(vae.encode, clips, batch=2)
    for clip, latent in zip(clips, together, strict=True):
        torch.testing.assert_close(latent, vae.encode(clip[None])[0], rtol=1e-5, atol=1e-5)


def test_a_vq_model_decodes_quantised_latents_and_has_no_tiles(saved):
    """Latents close to the same codebook entries decode to the same pixels; other autoencoders tile such sides."""
    folder, model = saved("vq")
    with torch.no_grad():
        model.quantize.embedding.weight.normal_(generator=torch.Generator().manual_seed(5))
    vae = VAE(folder)
    vae._model.load_state_dict(model.state_dict())
    code = torch.arange(24).view(1, 1, 4, 6)
    entries = model.quantize.embedding.weight.detach()[code].permute(0, 4, 1, 2, 3) * model.config.scaling_factor
    near = entries + 1e-3 * torch.randn(entries.shape, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(vae.decode(near, 16), vae.decode(entries, 16), rtol=1e-5, atol=1e-5)
    assert vae.encode(torch.zeros(1, 3, 1, 32, 48)).shape == (1, 3, 1, 8, 12)


@pytest.mark.parametrize("name", ["encoders/new/vae", "./vae", "/encoders/vae"])
def test_a_path_without_a_folder_is_named_in_full(tmp_path, monkeypatch, name):
    """A relative path in `dataset.json` is relative to the folder in which the data were prepared."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no autoencoder at '{name}': {(tmp_path / name)} is not a folder; name"):
        Geometry.read(name)


def test_errors_of_reading_and_encoding_have_one_line(saved, tmp_path, monkeypatch):
    folder, _ = saved("hunyuan")
    with pytest.raises(ConfigError, match="multiples of 8"):
        Geometry.read(folder).latent_shape(1, 30, 32)
    with pytest.raises(ConfigError, match=r"1 \+ a multiple of 4"):
        Geometry.read(folder).latent_shape(4, 32, 32)
    with pytest.raises(ConfigError, match="no autoencoder at"):
        Geometry.read(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(ConfigError, match="is a UNet2DModel"):
        Geometry.read(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(ConfigError, match=r"autoencoder .* cannot be loaded"):
        VAE(str(tmp_path))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=f"autoencoder '{folder}' needs diffusers, .*pip install"):
        VAE(folder)
