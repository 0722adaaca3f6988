"""The encoders of data are those that a model was trained with."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import pytest

from dit.condition_table import CONTEXT, LABEL, POOLED
from dit.encoders.comparison import compare_encoders
from dit.errors import ConfigError, DataError

MINILM = "all-minilm-l6-v2"


@dataclass
class Data:
    vae: Optional[str] = None
    texts: Optional[str] = None

    def autoencoder(self) -> Optional[str]:
        return self.vae

    def text_encoder(self) -> Optional[str]:
        if self.texts == "absent":
            raise DataError("the folder is absent")
        return self.texts


def compare(data: Any, *trained: Optional[str], conditions: Any = (CONTEXT,)) -> list[str]:
    return compare_encoders(data, (trained[0], trained[1]), conditions, "runs/a", ", or accept it")


def autoencoder(folder: Path, scale: float) -> str:
    folder.mkdir(parents=True)
    settings = {"_class_name": "AutoencoderKL", "latent_channels": 16, "scaling_factor": scale}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def test_another_autoencoder_is_refused_by_its_sizes_and_reported_by_its_name(tmp_path: Path) -> None:
    """The folder of a pipeline and that of its autoencoder are one."""
    flux, sd3 = autoencoder(tmp_path / "flux/vae", 0.36), autoencoder(tmp_path / "sd3/vae", 1.53)
    copy = autoencoder(tmp_path / "copy", 0.36)
    with pytest.raises(ConfigError) as raised:
        compare(Data(sd3), flux, None)
    assert str(raised.value) == (
        f"runs/a was trained with the autoencoder {flux!r}, and the data are encoded by {sd3!r}, which is "
        "of another kind, size or scale; encode the data by the former (--vae or data.online_vae), or accept it"
    )
    for other in (copy, str(tmp_path / "moved")):
        (line,) = compare(Data(other), flux, None)
        assert f"are encoded by {other!r}; if these are not the same, encode the data by the former" in line
    for same in (flux, str(tmp_path / "flux"), f"{tmp_path}/sd3/../flux/vae", None):
        assert compare(Data(same), flux, None) == []
    assert compare(Data(sd3), None, None) == []


def test_encoders_are_compared_for_the_texts_of_the_model_only() -> None:
    with pytest.raises(ConfigError, match=r"text encoder 'identity', and the data .*--text-encoder"):
        compare(Data(texts=MINILM), None, "identity")
    for other in (f"{MINILM}:max_tokens=40", f"{MINILM}:no_option", "unknown"):
        (line,) = compare(Data(texts=other), None, MINILM)
        assert "if these are not the same" in line
    for same in (MINILM, f"text+pooled={MINILM}", f"{MINILM},pooled={MINILM}", "absent"):
        assert compare(Data(texts=same), None, MINILM) == []
    assert compare(Data(texts=MINILM), None, "identity", conditions=(LABEL,)) == []
    pooled = CONTEXT, replace(POOLED, shape=(384,))
    for same in (f"text+pooled={MINILM}", f"pooled={MINILM},{MINILM}"):
        assert compare(Data(texts=same), None, f"{MINILM},pooled={MINILM}", conditions=pooled) == []
