"""Records with invalid content but matching hashes are refused, and the error names the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit.checkpoint.base_model import check_start, stored_parameters
from dit.checkpoint.manifest import MANIFEST, Manifest, check_same_model
from dit.checkpoint.reading import read_settings
from dit.checkpoint.records import CONFIG_FILE, METADATA_FILE, read_metadata, usable
from dit.config_record import from_record
from dit.errors import CheckpointError, ConfigError
from dit.monitoring.exit_record import read_outcome

SOUND = {"class_names": ["a"], "latent_size": [1, 8, 8], "fps": 24.0, "text_encoder": None, "attributions": []}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("latent_size", wrong) for wrong in ("8x8", [8, 8], [1, 8, 0.5], [1, 8, 0], [1, 8, 2**40], [1, 8, True])),
        *(("class_names", wrong) for wrong in ("ab", [1], {"a": 0})),
        *(("fps", wrong) for wrong in ("24", 0, -1e308, True)),
        ("reference_aspect", "wide"),
        *((name, 3) for name in ("text_encoder", "autoencoder", "attributions")),
    ],
)
def test_metadata_of_a_wrong_type_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / METADATA_FILE).write_text(json.dumps(SOUND | {name: value}))
    with pytest.raises(CheckpointError, match=rf"{METADATA_FILE}: {name}=.* is not a "):
        read_metadata(tmp_path)
    (tmp_path / METADATA_FILE).write_text(json.dumps(SOUND))
    assert read_metadata(tmp_path) == SOUND


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), OverflowError("x"), RecursionError("x")])
def test_nonsense_raises_an_error_that_names_the_file(error: Exception) -> None:
    with (
        pytest.raises(CheckpointError, match=r"a\.json has an entry that cannot be used: .*'x'"),
        usable(Path("a.json")),
    ):
        raise error


@pytest.mark.parametrize("error", [ConfigError("x"), OSError("x"), AssertionError("x")])
def test_other_errors_propagate(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, usable(Path("a.json")):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", [0, 10**40, True, [], {"a": 1}])
def test_a_class_that_is_not_a_name_is_refused(name: Any) -> None:
    with pytest.raises(CheckpointError, match="the record names"):
        from_record({"_target_": name})


def test_an_error_of_a_record_names_its_file(tmp_path: Path) -> None:
    parts: dict[str, Any] = {name: {} for name in ("model", "objective", "training", "sampling")}
    parts["training"] = {"_target_": "dit.settings.TrainingConfig", "sead": 1}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(parts))
    (tmp_path / METADATA_FILE).write_text(json.dumps(SOUND))
    with pytest.raises(CheckpointError, match=rf"{tmp_path / CONFIG_FILE}.*sead"):
        read_settings(tmp_path)


@pytest.mark.parametrize("stored", [None, 1, [], {}, {"parameters": []}])
def test_a_fingerprint_of_a_wrong_type_is_read_as_none(tmp_path: Path, stored: Any) -> None:
    manifest = Manifest(step=3, files={}, meta={"fingerprint": stored})
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / MANIFEST).write_text(manifest.to_text())
    for read in (lambda: check_start(folder, {"w": (2,)}), lambda: stored_parameters(folder)):
        with pytest.raises(
            CheckpointError, match=r"step 3 has no model fingerprint, .*; start from another checkpoint"
        ):
            read()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("lora", "recipe"), [(False, "finetune"), (True, "finetune_lora")])
def test_weights_of_another_size_are_refused_with_a_cure_for_a_start(
    tmp_path: Path, adapters: bool, lora: bool, recipe: str
) -> None:
    """Another `training.run_dir` would start from the same weights."""
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    manifest = Manifest(step=3, files={}, meta={"fingerprint": {"parameters": {"w": [2]}}})
    (folder / MANIFEST).write_text(manifest.to_text())
    with pytest.raises(ConfigError, match=r"w is \[2\] in the checkpoint and \[3\] in the model") as caught:
        check_start(folder, {"w": (3,)}, adapters=adapters, lora=lora)
    message = str(caught.value)
    assert message.startswith(f"checkpoint.start_from: {folder} is of another model")
    assert "run_dir" not in message
    assert f"--factory \"{recipe}(base='{folder}')\"" in message


@pytest.mark.parametrize("is_added", [True, False])
def test_a_discriminator_in_only_one_of_run_and_checkpoint_is_named_with_the_cure(is_added):
    """The error does not report another model, and does not list the parameters."""
    without, added = {"w": (1,)}, {"w": (1,), "discriminator.first.weight": (4, 3), "discriminator.first.bias": (4,)}
    saved, expected = (without, added) if is_added else (added, without)
    has = "lacks" if is_added else "has"
    with pytest.raises(
        ConfigError, match=rf"step 3 {has} the discriminator .*\(2 parameters\).*checkpoint.start_from="
    ):
        check_same_model(saved, expected, "the checkpoint of step 3")
    with pytest.raises(ConfigError, match="another model"):
        check_same_model(saved, {**expected, "w": (2,), "v": (1,)}, "a run")


def test_shapes_of_a_wrong_type_differ() -> None:
    with pytest.raises(ConfigError, match=r"w is 5 in the checkpoint and \[2\] in the model"):
        check_same_model({"w": 5}, {"w": (2,)}, "a run")


@pytest.mark.parametrize(
    ("name", "value"), [("time", [None]), ("code", "x"), ("rank", None), ("reason", 3), ("error", [0]), ("step", 0.5)]
)
def test_an_exit_record_of_wrong_types_is_read_as_none(tmp_path: Path, name: str, value: Any) -> None:
    sound = {"code": 5, "reason": "checkpoint", "step": None, "rank": 0, "time": 1.0}
    (tmp_path / "exit.json").write_text(json.dumps(sound))
    assert read_outcome(tmp_path) is not None
    (tmp_path / "exit.json").write_text(json.dumps(sound | {name: value}))
    assert read_outcome(tmp_path) is None
