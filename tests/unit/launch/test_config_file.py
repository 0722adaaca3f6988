"""A configuration survives a round trip through YAML, and a file cannot name foreign code."""

from dataclasses import dataclass

import fiddle
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.checkpoint.resume_check import changes, check_same_experiment
from dit.config_record import CLASS_KEY, from_record, to_record, trust_prefix
from dit.errors import CheckpointError, ConfigError
from dit.run_config import RunConfig
from examples.letters.recipes import letters_dit
from launch import config_file
from launch.overrides import apply_overrides
from recipes.tiny import tiny_dit, tiny_edm2

WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=0, max_size=12)


@dataclass(frozen=True)
class OwnSettings:
    width: int


def built(task):
    return {name: to_record(fiddle.build(getattr(task, name))) for name in task.__arguments__}


def reread(task, folder):
    config_file.write(task, folder / "config.yaml")
    return config_file.load(folder / "config.yaml")


@settings(max_examples=15, deadline=None)
@given(
    objective=st.sampled_from(["edm", "ddpm", "flow_matching"]),
    lr=st.floats(1e-8, 1.0),
    ema_decay=st.none() | st.floats(0, 0.99999),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    sequence_parallel=st.booleans(),
    run_dir=WORDS,
)
def test_a_configuration_survives_a_round_trip_through_yaml(
    tmp_path_factory, objective, lr, ema_decay, precision, sequence_parallel, run_dir
):
    task = letters_dit()
    overrides = [f"objective={objective}", f"optimizer.lr={lr!r}", f"training.ema_decay={ema_decay}"]
    overrides += [f"training.precision={precision}", f"parallel.sequence_parallel={sequence_parallel}"]
    apply_overrides(task, overrides)
    task.training.run_dir = run_dir
    assert built(reread(task, tmp_path_factory.mktemp("round"))) == built(task)


def test_the_file_is_complete(tmp_path):
    """Defaults are written out, so a file records the settings of its run even after a default has changed."""
    text = config_file.dump(tiny_dit())
    assert "weight_decay: 0.0" in text
    assert "beta2: 0.999" in text
    assert config_file.dump(reread(tiny_dit(), tmp_path)) == text


def test_the_record_in_a_run_folder_is_a_valid_configuration(tmp_path):
    parts = {name: fiddle.build(getattr(tiny_dit(), name)) for name in tiny_dit().__arguments__}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_record(parts)))
    assert built(config_file.load(tmp_path)) == built(tiny_dit())


def test_a_record_may_have_a_former_setting_without_effect(tmp_path):
    """It starts, resumes and draws the run; with another value, which had an effect, it is refused with a cure."""
    config = config_file.built(tiny_edm2())
    record = config.to_record()
    record["model"]["dropout"] = 0.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(record))
    loaded = config_file.built(config_file.load(tmp_path))
    assert loaded == config == RunConfig.from_record(record)
    assert changes(record, config) == []
    record["model"]["dropout"] = 0.1
    with pytest.raises(CheckpointError, match="'dropout'; read it with the version that wrote it"):
        RunConfig.from_record(record)
    with pytest.raises(ConfigError, match=r"0\.1 -> no longer a setting\..*accept_changes=\[\"model\.dropout\"\]'"):
        check_same_experiment(tmp_path, record, config, [])


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("_target_: energon_data.mock.MockData", "_target_: os.system", "os.system"),
        ("_target_: energon_data.mock.MockData", "_target_: dit.errors.ConfigError", "DataConfig"),
        ("_target_: energon_data.mock.MockData", "_target_: dit.errors.nothing", "dit.errors.nothing"),
        ("  _target_: energon_data.mock.MockData\n", "", "DataConfig"),
        ("num_steps: 20\n", "num_stepps: 20\n", "training.num_steps"),
        ("num_steps: 20\n", "num_steps: many\n", r"config\.yaml: training\.num_steps=many is not a whole number"),
        ("precision: fp32", "precision: fp8", "bf16, fp16, fp32"),
        ("sampling:\n", "sampling: [\n", "cannot be read"),
        ("dit.training.pretrain.pretrain", "shutil.rmtree", "shutil.rmtree"),
    ],
)
def test_an_invalid_file_is_refused_with_the_line(tmp_path, old, new, word):
    text = config_file.dump(tiny_dit())
    assert old in text
    (tmp_path / "config.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=word):
        config_file.load(tmp_path / "config.yaml")


def test_a_date_that_does_not_exist_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 2024-13-99")
    with pytest.raises(ConfigError, match="--to-yaml FILE writes"):
        config_file.load(tmp_path / "config.yaml")


@pytest.mark.parametrize("trusted", ["", "other", "test", "tests.unit", ".", "tests.unit.launch"])
def test_a_user_class_is_imported_only_if_its_package_is_trusted(monkeypatch, trusted):
    """Training finds it by --factory. A record may come from a stranger, so reading one requires DIT_PACKAGES."""
    name = f"{OwnSettings.__module__}.{OwnSettings.__qualname__}"
    monkeypatch.setenv("DIT_PACKAGES", trusted)
    with pytest.raises(CheckpointError, match=r"DIT_PACKAGES=(\S+,)?tests$"):
        from_record({CLASS_KEY: name, "width": 3})
    monkeypatch.setenv("DIT_PACKAGES", "other,tests")
    assert from_record({CLASS_KEY: name, "width": 3}) == OwnSettings(3)


def test_the_packages_that_a_record_needs_are_those_of_its_classes_outside_this_project():
    """Nested classes count; the prefix of a shell command names each package once."""
    own = [{CLASS_KEY: "camera.Model"}, {CLASS_KEY: "dit.x.Y", "part": {CLASS_KEY: "a.b.C"}}, {CLASS_KEY: "camera.Z"}]
    assert trust_prefix({"parts": own}) == "DIT_PACKAGES=a,camera "
    assert trust_prefix({"model": {CLASS_KEY: "dit.x.Y", "text": "os.system"}}) == ""


@pytest.mark.parametrize("name", ["os.system", "ditto.x", "dit", ".x", "", "energon_data"])
def test_no_other_package_is_imported(monkeypatch, name):
    monkeypatch.setenv("DIT_PACKAGES", "")
    refused = "which is not in dit, energon_data, so it is not" if "." in name[1:] else "write the class as package"
    with pytest.raises(CheckpointError, match=refused):
        from_record({CLASS_KEY: name})


def test_a_file_without_a_part_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("training: {num_steps: 3}\n")
    with pytest.raises(ConfigError, match="lacks model, data"):
        config_file.load(tmp_path / "config.yaml")


def test_yaml_floats_without_a_dot_are_numbers(tmp_path):
    """YAML 1.1 reads 3e-4 as a string."""
    (tmp_path / "config.yaml").write_text(config_file.dump(tiny_dit()).replace("  lr: 0.003\n", "  lr: 3e-4\n"))
    assert config_file.load(tmp_path / "config.yaml").optimizer.lr == 3e-4


@pytest.mark.parametrize("text", ["0123", "089", "1_23"])
def test_a_number_with_leading_zeros_is_decimal(tmp_path, text):
    """As on the command line; YAML 1.1 reads 0123 to base 8."""
    file = tmp_path / "config.yaml"
    file.write_text(config_file.dump(tiny_dit()).replace("  seed: 1234\n", f"  seed: {text}\n", 1))
    assert config_file.load(file).training.seed == int(text)


@pytest.mark.parametrize("text", ["23:50:00", "0123", "on", "1.50", "2026-01-31"])
def test_a_text_that_yaml_reads_as_another_value_needs_quotes(tmp_path, text):
    """YAML 1.1 has numbers to base 60, more truth values, and dates."""
    file, dump = tmp_path / "config.yaml", config_file.dump(tiny_dit())
    file.write_text(dump.replace("wandb_name: null", f"wandb_name: {text}"))
    with pytest.raises(ConfigError, match=r"logging\.wandb_name is a text, .*; write it in quotes"):
        config_file.load(file)
    file.write_text(dump.replace("wandb_name: null", f"wandb_name: '{text}'"))
    assert config_file.load(file).logging.wandb_name == text


def test_an_optional_list_of_numbers_is_read_back(tmp_path):
    task = letters_dit()
    apply_overrides(task, ["data.crop_size=[16, 24]", "logging.profile_steps=[2, 3]"])
    assert built(reread(task, tmp_path)) == built(task)


def test_the_summary_shows_differences_from_the_defaults():
    line = next(x for x in config_file.summary(tiny_dit()).splitlines() if x.startswith("optimizer"))
    assert line.split(maxsplit=1)[1] == "OptimizerConfig(lr=0.003)"
