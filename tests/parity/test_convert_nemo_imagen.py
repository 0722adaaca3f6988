"""NeMo's Imagen and ours: a `.nemo` of each kind of network is imported, and the outputs are the same."""

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from dit.checkpoint.full_weights import read_full_weights
from dit.checkpoint.reading import find_checkpoint, read_settings, slot_of
from dit.convert import nemo_imagen
from dit.errors import ConfigError
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.parallel.build import parameter_shapes
from launch import import_weights
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_bits, load, random_weights, run
from tests.parity.reference_nemo_imagen import EfficientUNetModel, UNetModel
from tests.support.reference import RTOL, relative_error
from tests.unit.launch.pages import run_line, shown_commands

TEXT, TOKENS = 64, 8
REGULAR: dict[str, Any] = {
    **{"embed_dim": 32, "image_size": 16, "channels": 3, "num_res_blocks": [1, 2, 1], "channel_mult": [1, 2, 3]},
    **{"attention_resolutions": [4, 8], "per_head_channels": 16, "cond_dim": 96, "learned_sinu_pos_emb_dim": 0},
    **{"stable_attention": False, "flash_attention": True, "gradient_checkpointing": False, "dropout": False},
}
EFFICIENT: dict[str, Any] = {
    **{"embed_dim": 32, "image_size": 16, "channels": 3, "num_resblocks": [1, 2, 1], "channel_mult": [1, 2, 3]},
    **{"atnn_enabled_at": [0, 1, 1], "per_head_channels": 16, "learned_sinu_pos_emb_dim": 0, "stride": 2},
    **{"stable_attention": True, "flash_attention": False, "skip_connection_scaling": True},
}
BOTH: dict[str, dict[str, Any]] = {
    "fused": {},
    "stacked": {"attention_type": "stacked"},
    "mean": {"feature_pooling_type": "mean"},
    "null token": {"use_null_token": True, "feature_pooling_type": "mean"},
    "learned time": {"learned_sinu_pos_emb_dim": 6},
    "added": {"scale_shift_norm": False, "init_conv_kernel_size": 5},
}
SMALL_PICTURE = {"low_res_cond": True}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    **{f"base {name}": ("base", {**REGULAR, **changes}, False) for name, changes in BOTH.items()},
    "base pooled": ("base", {**REGULAR, "resample_with_conv": False}, False),
    "base blocks": ("base", {**REGULAR, "resblock_updown": True}, False),
    "base same blocks": ("base", {**REGULAR, "num_res_blocks": 1}, False),
    "sr-unet": ("sr-unet", {**REGULAR, **SMALL_PICTURE}, False),
    "sr-unet noised": ("sr-unet", {**REGULAR, **SMALL_PICTURE, "learned_sinu_pos_emb_dim": 4}, True),
    **{f"sr {name}": ("sr", {**EFFICIENT, **changes}, False) for name, changes in BOTH.items()},
    "sr cross": ("sr", {**EFFICIENT, "attention_type": "cross"}, False),
    "sr self": ("sr", {**EFFICIENT, "attention_type": "self"}, False),
    "sr heads": ("sr", {**EFFICIENT, "per_head_channels": -1, "num_attn_heads": 2}, False),
    "sr plain sum": ("sr", {**EFFICIENT, "skip_connection_scaling": False}, False),
    "sr noised": ("sr", EFFICIENT, True),
}
NOT_ARITHMETIC = {"channels", "stable_attention", "flash_attention", "gradient_checkpointing", "dropout", "stride"}


def settings(case: str) -> dict[str, Any]:
    """Return the `model_config.yaml` of a case, with keys that NeMo adds."""
    unet_type, unet, noised = CASES[case]
    data = {} if unet_type == "base" else {"target_resolutions": [4, 16]}
    return {
        "precision": "${trainer.precision}",
        "micro_batch_size": 48,
        "unet_type": unet_type,
        "unet": unet,
        "noise_cond_aug": noised,
        "preconditioning_type": "EDM",
        "preconditioning": {"loss_type": "l2", "sigma_data": 0.5, "p_mean": -1.2, "p_std": 1.2},
        "conditioning": {"embed_dim": TEXT, "token_length": TOKENS, "drop_rate": 0.1, "out_key": "t5_text"},
        "data": {"num_workers": 16, "train": {"dataset_path": ["x.pkl"], **data}},
        "optim": {"name": "fused_adam", "lr": 1e-4},
        "hidden_size": unet["embed_dim"],
        "nemo_version": "2.0.0",
        "target": "nemo.collections.multimodal.models.text_to_image.imagen.imagen.MegatronImagen",
    }


def network(case: str) -> nn.Module:
    """Return NeMo's network with random weights."""
    unet_type, unet, noised = CASES[case]
    arithmetic = {name: value for name, value in unet.items() if name not in NOT_ARITHMETIC}
    kind = EfficientUNetModel if unet_type == "sr" else UNetModel
    model = kind(**arithmetic, text_embed_dim=TEXT, noise_cond_aug=noised).eval()
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    model.load_state_dict({**model.state_dict(), **random_weights(shapes, scale=0.15, seed=1)}, strict=False)
    return model


def stored(model: nn.Module, prefix: str = "model.model.unet.") -> dict[str, Tensor]:
    return {f"{prefix}{name}": x for name, x in model.state_dict().items()}


def nemo_file(path: Path, config: Mapping[str, Any], weights: object) -> Path:
    """Write a `.nemo` as `save_to` does: a tar of a folder."""
    folder = path.with_suffix(".folder")
    folder.mkdir()
    (folder / "model_config.yaml").write_text(yaml.safe_dump(dict(config)))
    torch.save(weights, folder / "model_weights.ckpt")
    with tarfile.open(path, "w:") as archive:
        archive.add(folder, arcname=".")
    return path


@pytest.mark.parametrize("case", CASES)
def test_nemos_network_and_ours_compute_the_same(case: str, build_model: BuildModel, tmp_path: Path) -> None:
    theirs = network(case)
    names = dict(theirs.named_parameters())
    found = import_weights.read_nemo_imagen(nemo_file(tmp_path / "x.nemo", settings(case), stored(theirs)), None)
    model = found.trained.model
    weights = found.rules.from_external(found.tensors)
    assert sum(x.numel() for x in weights.values()) == sum(x.numel() for x in names.values())
    assert_same_bits(found.rules.to_external(weights), found.tensors)
    ours = load(build_model(model), weights)
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pictures, time, lengths = draw(3, 3, 16, 16), torch.tensor([-1.1, 0.2, 0.9]), (3, TOKENS, 5)
    mask = torch.tensor([[i < length for i in range(TOKENS)] for length in lengths])
    text = draw(3, TOKENS, TEXT) * mask[..., None]
    low, level, given, others = None, None, {}, {}
    if model.low_resolution_factor is not None:
        low = draw(3, 3, 16, 16)
        given = {"low": low[:, :, None]}
    if model.noise_augmentation:
        level = torch.tensor([0.3, 1.2, 0.02])
        others = {"augmentation": level}
    with torch.no_grad():
        exact = theirs.double()(
            pictures.double(),
            time.double(),
            text.double(),
            mask,
            *([] if low is None else [low.double()]),
            *([] if level is None else [(level.double().log() / 4)]),
        )
    texts = [x[:length] for x, length in zip(text, lengths)]
    out = run(ours, model, pictures[:, :, None], time, texts=texts, others=others, **given)
    assert relative_error(out[:, :, 0], exact) <= RTOL


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("model.model.unet._orig_mod.", "nemo"),
        ("model.module.model.unet.", "nemo"),
        ("model.model.unet.", "ckpt"),
        ("unet.", "pt"),
        ("", "safetensors"),
    ],
)
def test_every_way_of_saving_is_read(prefix: str, kind: str, tmp_path: Path) -> None:
    """With or without torch.compile, half precision's wrapper and Lightning; T5's weights are left out with a note."""
    theirs, path, document = network("base fused"), tmp_path / f"x.{kind}", tmp_path / "imagen.yaml"
    weights = stored(theirs, prefix)
    notes = []
    if kind == "nemo":
        encoder = {f"text_encoder.model.layer.{i}.weight": torch.zeros(2) for i in range(3)}
        nemo_file(path, settings("base fused"), {**weights, **encoder})
        notes = ["3 tensors of the text encoder are left out"]
    elif kind == "safetensors":
        save_file({name: x.clone() for name, x in weights.items()}, path)
    else:
        lightning = {"epoch": 0, "state_dict": weights, "optimizer_states": [{"state": {0: torch.zeros(2)}}]}
        torch.save(lightning if kind == "ckpt" else weights, path)
    document.write_text(yaml.safe_dump({"name": "imagen", "trainer": {}, "model": settings("base fused")}))
    found = import_weights.read_nemo_imagen(path, None if kind == "nemo" else str(document))
    assert_same_bits(found.rules.to_external(found.rules.from_external(found.tensors)), theirs.state_dict())
    assert found.trained.notes == notes


def imported(source: Path) -> dict[str, Tensor]:
    found = import_weights.read_nemo_imagen(source, None)
    return found.rules.from_external(found.tensors)


def importing(source: Path, out: Path, *words: object) -> int:
    given = ["--from", source, "--format", "nemo_imagen", "--out", out, *words]
    return import_weights.main([str(word) for word in given])


@pytest.mark.parametrize("preconditioning", ["EDM", "DDPM"])
def test_a_run_folder_has_the_weights_the_objective_and_the_sampling(
    preconditioning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, config = network("sr fused"), settings("sr fused")
    config["preconditioning_type"] = preconditioning
    if preconditioning == "DDPM":
        config["preconditioning"] = {"loss_type": "l1", "pred_objective": "noise", "noise_schedule": "linear"}
    else:
        config["preconditioning"]["p_mean"] = -1.0
    source = nemo_file(tmp_path / "x.nemo", config, stored(theirs))
    assert importing(source, tmp_path / "run") == 0
    printed = capsys.readouterr().err
    folder, _ = find_checkpoint(tmp_path / "run")
    run_config, metadata = read_settings(folder)
    edm, ddpm = EDM(p_mean=-1.0), DDPM(schedule="linear", loss_kind="l1", network_time="log_snr")
    assert run_config.objective == (edm if preconditioning == "EDM" else ddpm)
    solver = "heun" if preconditioning == "EDM" else "ancestral"
    sampling = run_config.sampling
    assert (sampling.solver, sampling.guidance_scale, sampling.thresholding) == (solver, 8.0, "dynamic")
    assert metadata["latent_size"] == [1, 16, 16]
    assert "(recorded with the weights)" in printed
    assert "give --text-encoder" in printed
    rules = nemo_imagen.rules(run_config.model, parameter_shapes(run_config.model))
    weights = read_full_weights(folder, slot_of(folder, run_config, "ema"))
    assert_same_bits(rules.to_external(weights), theirs.state_dict())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    weights = stored(network("base stacked"))
    qkv = next(name for name in weights if name.endswith("qkv.weight"))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model.model.unet.time_embed.1.weight": None}, "1 missing: time_embed.1.weight"),
        ({qkv: None}, r"2 missing: .*qkv \(q\).weight .*qkv \(k, v\).weight"),
        ({qkv: weights[qkv][:-1]}, r"2 missing: .*1 unknown: .*qkv.weight"),
        ({"model.model.unet.extra": torch.zeros(2)}, r"1 unknown: extra \[2\]"),
        ({"model.sampler.extra": torch.zeros(2)}, r"1 unknown: model.sampler.extra"),
        ({"unet.out.0.weight": torch.zeros(2)}, "has out.0.weight twice"),
        ({"model.model.unet.init_conv.0.weight": torch.zeros(32, 3, 3, 3)}, "copies of one tensor differ"),
        ({"model.model.unet.init_conv.0.bias": torch.full((32,), torch.nan)}, "not finite"),
    ]
    for i, (change, message) in enumerate(changes):
        changed = {name: x for name, x in {**weights, **change}.items() if x is not None}
        source = nemo_file(tmp_path / f"{i}.nemo", settings("base stacked"), changed)
        with pytest.raises(ConfigError, match=message) as caught:
            imported(source)
        assert "\n" not in str(caught.value)


class DictConfig:
    """Stands in for OmegaConf's settings, which Lightning stores in every `.ckpt` of NeMo."""


def test_a_ckpt_with_objects_is_refused_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lightning = {"state_dict": stored(network("base fused")), "hyper_parameters": {"cfg": DictConfig()}}
    torch.save(lightning, tmp_path / "x.ckpt")
    assert importing(tmp_path / "x.ckpt", tmp_path / "run") == 2
    printed = capsys.readouterr().err
    assert "DictConfig" in printed
    assert "give the .nemo of the run, or, if you trust the file" in printed
    assert not (tmp_path / "run").exists()


def test_settings_that_are_missing_or_not_offered_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, config = stored(network("base fused")), settings("base fused")
    torch.save(weights, tmp_path / "x.pt")
    assert importing(tmp_path / "x.pt", tmp_path / "run") == 2
    assert "does not have the settings of its network; give --nemo-config" in capsys.readouterr().err
    changes: list[tuple[Any, str]] = [
        ({**config, "unet": {**config["unet"], "embed_dims": 3}}, "embed_dims=3: no such key is known; did you mean"),
        ({**config, "unet": {**config["unet"], "image_size": "wide"}}, "image_size=wide is no number of pixels"),
        ({**config, "unet_type": "sd"}, "unet_type=sd is none of base, sr-unet, sr"),
        ({**config, "unet": {**config["unet"], "cond_dim": 33}}, "the width 33 of the text tokens"),
        ({"name": "gpt"}, "has no section `unet`"),
        ([1], "has no section `unet`"),
    ]
    for i, (document, message) in enumerate(changes):
        (tmp_path / f"{i}.yaml").write_text(yaml.safe_dump(document))
        assert importing(tmp_path / "x.pt", tmp_path / "run", "--nemo-config", tmp_path / f"{i}.yaml") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_archives_that_are_no_nemo_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = nemo_file(tmp_path / "x.nemo", settings("base fused"), stored(network("base fused"))).read_bytes()
    sharded, many = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=sharded, mode="w:") as archive:
        for name in ("model_config.yaml", "mp_rank_00/model_weights.ckpt"):
            archive.addfile(tarfile.TarInfo(name))
    with tarfile.open(fileobj=many, mode="w:") as archive:
        for number in range(1001):
            archive.addfile(tarfile.TarInfo(str(number)))
    files = {
        "cut": (whole[: len(whole) // 2], "y.nemo"),
        "compressed": (gzip.compress(whole), "rename them to .gz and gunzip them"),
        "sharded": (
            sharded.getvalue(),
            "has no model_weights.ckpt, but model_config.yaml, mp_rank_00/model_weights.ckpt",
        ),
        "many": (many.getvalue(), "more than 1000 members"),
        "empty": (b"", "y.nemo"),
    }
    for content, message in files.values():
        (tmp_path / "y.nemo").write_bytes(content)
        assert importing(tmp_path / "y.nemo", tmp_path / "run") == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.startswith("error: ")
        assert printed.count("\n") == 1
    (tmp_path / "link").mkdir()
    assert importing(tmp_path / "link", tmp_path / "run") == 2


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    weights, config = stored(network("base fused")), settings("base fused")
    nemo_file(tmp_path / "imagen.nemo", config, weights)
    torch.save(weights, tmp_path / "weights.pt")
    (tmp_path / "imagen.yaml").write_text(yaml.safe_dump({"model": config}))
    imports = [line for line in shown_commands(Path("docs/nemo.md")) if "import_weights" in line]
    assert [run_line(line, tmp_path).code for line in imports] == [0, 0]
