"""Settings that a resumed run may change, each tested separately."""

import copy
import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import dit.models
import dit.objectives
import energon_data
from dit.checkpoint.resume_check import EVERY, REPORTED, changes, check_same_experiment, replaced_data
from dit.config_record import CLASS_KEY
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Cosine
from dit.run_config import RunConfig
from dit.settings import OptimizerConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from energon_data.mock import MockData

FOLDER = Path("runs/x/checkpoints/iter_0000006")
REFUSED = {
    "model": EVERY,
    "objective": EVERY,
    "data": "path blend blend_steps shuffle_buffer max_tokens_per_pack pack_cost_tokens packing_buffer_size pad_packs "
    "bucket_by_shape max_text_tokens max_tokens_per_sample min_aesthetic_score min_side max_side max_aspect_ratio "
    "min_seconds max_seconds min_caption_length max_caption_length resize_side crop_size random_crop flip "
    "clean_first_frame frame_levels inpaint references vary_captions online_vae online_text_encoder online_precision "
    "frames height width shapes same_shape text_tokens dataset_size",
    "optimizer": "algorithm beta1 beta2 eps weight_decay muon_momentum",
    "training": "global_batch_size precision fp8 seed ema_decay ema_start_step ema_sigma_rel",
}
"""Settings whose change would make a run another experiment."""


def config_of(**changed):
    model, data = DiTConfig(num_classes=3), MockData(shapes=["1x8x8"])
    parts = {"model": model, "data": data, "objective": FlowMatching(), "schedule": Cosine()}
    return RunConfig(**{**parts, **changed})


def classes_of(base):
    """Return a class of settings and all of its subclasses in the packages, but not in other tests."""
    subclasses = [kind for kind in base.__subclasses__() if kind.__module__.startswith(("dit.", "energon_data."))]
    return {base}.union(*map(classes_of, subclasses))


def changed_value(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, *value]
    return 1 if value is None else f"{value}x"


def test_every_setting_of_every_class_is_refused_or_reported():
    """A new setting must be listed, except in a part whose settings are all treated alike."""
    for package in (dit.models, dit.objectives, energon_data):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith("energon_data.prepare"):
                importlib.import_module(found.name)
    parts = {name: p.annotation for name, p in inspect.signature(pretrain).parameters.items()}
    assert parts.keys() == REFUSED.keys() | REPORTED.keys()
    for part, base in parts.items():
        refused, reported = (table.get(part, "").split() for table in (REFUSED, REPORTED))
        if EVERY in (*refused, *reported):
            assert sorted([*refused, *reported]) == [EVERY], part
            continue
        fields = {field.name for cls in classes_of(base) for field in dataclasses.fields(cls)}
        assert sorted([*refused, *reported]) == sorted(fields), part


@pytest.mark.parametrize("data", [MockData(shapes=["1x8x8"]), EnergonData(path="x")], ids=["mock", "energon"])
def test_each_changed_setting_is_reported_separately(data):
    """Each change is reported with its path and both values, and is refused as the table states."""
    config = config_of(data=data)
    assert changes(config.to_record(), config) == []
    for part, value in config.parts().items():
        for field in dataclasses.fields(value):
            new = changed_value(getattr(value, field.name))
            other = dataclasses.replace(config, **{part: copy.copy(value)})
            setattr(getattr(other, part), field.name, new)  # bypasses the checks of a constructor
            (change,) = changes(config.to_record(), other)
            assert (change.path, change.old, change.new) == (f"{part}.{field.name}", getattr(value, field.name), new)
            refused = REFUSED.get(part, "").split()
            assert change.is_refused == (field.name in refused or EVERY in refused), change
            if change.is_refused:
                with pytest.raises(ConfigError, match=rf"{part}\.{field.name}: .*accept_changes=\[\"{change.path}\"\]"):
                    check_same_experiment(FOLDER, config.to_record(), other, [])
            for accepted in ([change.path], [part]):
                assert check_same_experiment(FOLDER, config.to_record(), other, accepted) == [change]


def test_changed_settings_are_refused_or_accepted_as_the_table_states():
    """The table: settings that define another experiment, and settings that a resumed run may change."""
    refused = [
        *("objective.time_shift", "model.num_attention_heads", "model.time_scale", "model.class_dropout"),
        *("training.precision", "training.global_batch_size", "training.seed", "training.ema_decay"),
        *("optimizer.beta1", "optimizer.beta2", "data.path", "data.something_new", "training.something_new"),
    ]
    reported = [
        *("optimizer.lr", "optimizer.clip_grad", "schedule.warmup_steps", "training.num_steps", "training.run_dir"),
        "training.micro_batch_size",
        *("training.recompute", "training.attention", "training.log_interval", "checkpoint.interval"),
        *("parallel.tensor_model_parallel_size", "logging.wandb", "sampling.solver", "data.max_lost_samples"),
    ]
    from dit.checkpoint.resume_check import Change

    assert [path for path in refused if not Change(path, 1, 2).is_refused] == []
    assert [path for path in reported if Change(path, 1, 2).is_refused] == []
    restarts = ["data.path", "training.seed"]
    keeps = ["data.max_lost_samples", "data.num_streams", "training.global_batch_size", "objective", "parallel"]
    assert [Change(path, 1, 2).restarts_data for path in (*restarts, *keeps)] == [True] * 2 + [False] * 5


def test_another_class_is_one_change_and_a_moved_class_is_no_change():
    record = config_of().to_record()
    config = config_of(objective=EDM(p_mean=0.0))
    assert list(map(str, changes(record, config))) == ["objective: FlowMatching -> EDM"]
    with pytest.raises(ConfigError) as raised:
        check_same_experiment(FOLDER, record, config, [])
    for words in (str(FOLDER), "FlowMatching -> EDM", "training.run_dir", "start_from", 'accept_changes=["objective"]'):
        assert words in str(raised.value)
    assert len(check_same_experiment(FOLDER, record, config, ["objective"])) == 1

    record["objective"][CLASS_KEY] = "dit.elsewhere.FlowMatching"
    assert changes(record, config_of()) == []


def test_settings_of_another_version_are_compared():
    """A new setting has its default in older records; a removed one is refused, because its effect is unknown."""
    record = config_of().to_record()
    del record["model"]["rope_factors"], record["optimizer"]["beta2"], record["sampling"]
    assert changes(record, config_of()) == []
    (change,) = changes(record, config_of(optimizer=OptimizerConfig(beta2=0.5)))
    assert str(change) == "optimizer.beta2: 0.999 -> 0.5"
    record["training"]["former"] = 3
    (change,) = changes(record, config_of())
    assert (str(change), change.is_refused) == ("training.former: 3 -> no longer a setting", True)
    assert check_same_experiment(FOLDER, record, config_of(), ["training.former"]) == [change]


def test_the_message_names_all_refused_and_accepted_settings():
    record = config_of().to_record()
    config = config_of(optimizer=OptimizerConfig(beta1=0.5, beta2=0.5, lr=1.0), objective=EDM())
    with pytest.raises(ConfigError) as raised:
        check_same_experiment(FOLDER, record, config, ["objective"])
    assert "optimizer.beta1: 0.9 -> 0.5; optimizer.beta2: 0.999 -> 0.5." in str(raised.value)
    assert str(raised.value).endswith('accept_changes=["objective","optimizer.beta1","optimizer.beta2"]\'')


@pytest.mark.parametrize("name", ["optimizer.beta3", "optimiser", "optimizer.", "beta1"])
def test_an_accepted_change_must_name_a_setting(name):
    with pytest.raises(ConfigError, match="accept_changes names"):
        check_same_experiment(FOLDER, config_of().to_record(), config_of(), [name])


def test_replaced_data_are_a_change_of_the_setting_that_names_them():
    config = config_of(data=EnergonData(blend=[{"path": "a"}, {"path": "b"}]))
    saved = {"blend": {"a": "80 samples", "b": "7 samples"}, "validation_split": {"a": "8 samples"}}
    assert replaced_data(saved, saved) == replaced_data({}, saved) == []
    now = {"blend": {"a": "30 samples", "b": "7 samples", "c": "1 sample"}, "validation_split": {"a": "3 samples"}}
    train, held_out = found = replaced_data(saved, now)
    assert (str(train), train.restarts_data) == ("data.blend: a: 80 samples -> 30 samples", True)
    assert (str(held_out), held_out.is_refused) == ("data.validation_split: a: 8 samples -> 3 samples", False)
    with pytest.raises(ConfigError, match=r"a: 80 samples -> 30 samples\. .*accept_changes=\[\"data\.blend\"\]"):
        check_same_experiment(FOLDER, config.to_record(), config, [], found)
    for accepted in ("data.blend", "data"):
        assert check_same_experiment(FOLDER, config.to_record(), config, [accepted], found) == found
