"""Repositories of the Hugging Face hub: its cache, and machines without network."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dit.checkpoint.base_model import find_start
from dit.checkpoint.diffusers_folder import local_path
from dit.convert.sliced_weights import StoredTensors
from dit.errors import ConfigError
from tests.support.published import save_network


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "flux"
    save_network("flux", folder)
    return folder


def cached(root: Path, source: Path) -> None:
    """Put a pipeline into a cache of the Hugging Face hub."""
    repository = root / "models--owner--name"
    shutil.copytree(source, repository / "snapshots" / ("0" * 40) / "transformer")
    (repository / "snapshots" / ("0" * 40) / "model_index.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


def test_a_name_of_the_hub_is_read_from_the_cache(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(tmp_path, flux)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    start = find_start("hf://owner/name")
    assert start.digest(None) == find_start(str(flux)).digest(None)
    assert capsys.readouterr().err == ""


def test_a_variant_in_the_cache_is_read_without_network(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository may have other weights, so they are downloaded if the hub can be reached."""
    expected = StoredTensors(flux).read_all()
    cached(tmp_path, flux)
    for weights in tmp_path.rglob("diffusion_pytorch_model*"):
        weights.unlink()
    (folder,) = tmp_path.rglob("transformer")
    save_file(expected, folder / "diffusion_pytorch_model.fp16.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert local_path("hf://owner/name") == folder.parent


def test_a_part_of_a_repository_in_the_cache_is_not_the_repository(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have downloaded only the settings; the weights are then downloaded."""
    cached(tmp_path, flux)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot be reached"):
        local_path("hf://owner/name")


def test_a_name_of_the_hub_without_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"owner/name is not .* in the local cache, and .* cannot be reached"):
        local_path("hf://owner/name")
    with pytest.raises(ConfigError, match="write hf://owner/name"):
        local_path("hf://name")
