"""The typed run: its parts are the arguments of `pretrain`, and its record is read back unchanged."""

import dataclasses
import re
import typing
from dataclasses import fields, replace

import pytest
import yaml

from dit.config_record import CLASS_KEY, to_record
from dit.data_api import NoData
from dit.errors import CheckpointError, ConfigError
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Cosine
from dit.parallel.dims import ParallelConfig
from dit.run_config import TRAINING_FUNCTION, RunConfig
from dit.settings import OptimizerConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain
from energon_data.mock import MockData

RUN = RunConfig(
    model=DiTConfig(hidden_size=32, num_layers=2, num_attention_heads=2, num_classes=3),
    data=MockData(shapes=["1x8x8"]),
    objective=DDPM(prediction="v", discrete_steps=1000),
    schedule=Cosine(),
    parallel=ParallelConfig(pipeline_model_parallel_size=2, pipeline_layers=[1, 1]),
    training=TrainingConfig(run_dir="runs/x", precision="fp32", global_batch_size=8, micro_batch_size=4),
    sampling=SamplingConfig(prompts=["a", "b"]),
)


def changed(run: RunConfig, settings: dict[str, typing.Any]) -> RunConfig:
    """Return the run with changed settings, named as in overrides."""
    for name, value in settings.items():
        part, field = name.split(".")
        run = replace(run, **{part: replace(getattr(run, part), **{field: value})})
    return run


def test_the_parts_are_the_arguments_of_pretrain_with_their_types():
    """The flat signature that recipes configure has the fields of the typed run."""
    hints = typing.get_type_hints(pretrain)
    assert hints.pop("return") is type(None)
    assert list(hints.items()) == [(part.name, part.type) for part in fields(RunConfig)]
    assert f"{pretrain.__module__}.{pretrain.__qualname__}" == TRAINING_FUNCTION


def test_a_run_survives_a_round_trip_through_its_record():
    """Also through YAML, as on disk; each part is stored as its own record, under the name of its class."""
    record = RUN.to_record()
    assert RunConfig.from_record(yaml.safe_load(yaml.safe_dump(record, sort_keys=False))) == RUN
    assert list(record) == [CLASS_KEY, *(part.name for part in fields(RUN))]
    assert record[CLASS_KEY] == TRAINING_FUNCTION
    assert all(record[name] == to_record(part) for name, part in RUN.parts().items())


def test_records_of_other_versions_and_of_imported_weights_are_read():
    """A missing part gets its defaults, an unknown part is ignored, and imported weights have no data."""
    record = {**RUN.to_record(), "class_names": ["a"], "latent_size": [1, 8, 8], "data": None}
    del record["logging"]
    found = RunConfig.from_record(record)
    assert replace(found, data=RUN.data) == RUN
    assert found.data == NoData()
    with pytest.raises(ConfigError, match="have no data"):
        found.check()


@pytest.mark.parametrize("part", [0, [], "edm", {"lr": 1}, {CLASS_KEY: "dit.settings.OptimizerConfig"}])
def test_a_part_of_another_kind_is_refused(part):
    record = {**RUN.to_record(), "objective": part}
    with pytest.raises(CheckpointError, match=r"the record's objective is .*, not settings of Objective; restore"):
        RunConfig.from_record(record)


def test_a_record_of_foreign_classes_is_refused():
    record = RUN.to_record()
    record["objective"][CLASS_KEY] = "shutil.rmtree"
    with pytest.raises(CheckpointError, match=r"shutil\.rmtree"):
        RunConfig.from_record(record)


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ("model", {"num_attention_heads": 3}, "num_attention_heads=3"),
        ("model", {"out_channels": 2}, "out_channels"),
        ("sampling", {"num_steps": 2000}, "2000"),
        ("sampling", {"variance": "large"}, "has no effect with sampling.solver='euler'"),
        ("sampling", {"variance": "learned", "solver": "ancestral"}, "needs an objective with a learned variance"),
        ("sampling", {"guidance_channels": 5}, "use at most 4"),
        ("training", {"recompute_layers": 2}, "recompute_layers=2"),
        ("schedule", {"min_lr": 1.0}, "min_lr=1.0"),
        ("logging", {"profile_steps": [3]}, r"profile_steps=\[3\]"),
        ("parallel", {"tensor_model_parallel_size": 4}, "tensor_model_parallel_size=4"),
        ("data", {"shapes": ["1x9x9"]}, "patches"),
    ],
)
def test_every_part_is_checked_by_itself_or_against_the_others(part, changes, says):
    """Sampling steps, for example, must be steps of the objective's table."""
    RUN.check()
    with pytest.raises(ConfigError, match=says):
        replace(RUN, **{part: replace(getattr(RUN, part), **changes)}).check()


@pytest.mark.parametrize("times", [{"min_time": 0.875}, {"max_time": 0.875}])
def test_one_model_of_a_pair_draws_no_samples_in_training(times):
    run = replace(RUN, objective=FlowMatching(**times))
    run.check()
    with pytest.raises(ConfigError, match=r"trains on times from 0.*use training\.sample_interval=0"):
        changed(run, {"training.sample_interval": 100}).check()


def test_muon_refuses_a_unet():
    run = replace(RUN, optimizer=OptimizerConfig(algorithm="muon"))
    run.check()
    with pytest.raises(ConfigError, match=r"DDPMUNetConfig consists of convolutions.*use optimizer\.algorithm=adamw"):
        replace(run, model=DDPMUNetConfig()).check()


FP16 = {"training.precision": "fp16"}
AVERAGED_GRIDS = {"training.ema_decay": 0.9, "training.sample_interval": 100}


@pytest.mark.parametrize(
    ("unused", "needs"),
    [
        ({"checkpoint.keep_best": 2}, {"training.validation_interval": 100}),
        ({"sampling.raw_weights": True}, {"training.sample_interval": 100}),
        ({"training.ema_decay": None, "sampling.raw_weights": True}, AVERAGED_GRIDS),
        ({"training.max_bad_steps": 5}, {"training.on_bad_numbers": "skip"}),
        ({"training.stop_at_step": 1001}, {"training.num_steps": 1001}),
        ({"training.loss_scale": 8.0}, FP16),
        ({"training.initial_loss_scale": 8.0}, FP16),
        ({"training.loss_scale_window": 8}, FP16),
        ({**FP16, "training.loss_scale_window": 8, "training.loss_scale": 4.0}, {"training.loss_scale": None}),
        ({"model.context_dropout": 0.3}, {"model.context_size": 8}),
        ({"model.num_classes": None, "model.class_dropout": 0.3}, {"model.num_classes": 3}),
        ({"model.num_classes": None, "sampling.guidance_scale": 4.0}, {"model.num_classes": 3}),
        ({"training.ema_decay": None, "training.ema_start_step": 9}, {"training.ema_decay": 0.9}),
        ({"training.ema_decay": None, "training.ema_offload": True}, {"training.ema_decay": 0.9}),
    ],
    ids=lambda settings: ",".join(f"{name.partition('.')[2]}={value}" for name, value in settings.items()),
)
def test_a_setting_without_effect_is_refused(unused, needs):
    """The error has its name, its value and the cure. With a setting that gives it an effect, it is accepted."""
    with pytest.raises(ConfigError) as refusal:
        changed(RUN, unused).check()
    *_, (name, value) = [item for item in unused.items() if item[0] not in needs]
    assert f"{name}={value} has no effect" in str(refusal.value)
    assert any(setting in str(refusal.value) for setting in needs)
    changed(RUN, unused | needs).check()


def test_a_hang_is_reported_before_a_collective_times_out():
    TrainingConfig(num_steps=0).check_time_out()  # other settings are checked later
    with pytest.raises(ConfigError, match="hang_timeout_s=1 must be"):
        TrainingConfig(hang_timeout_s=1).check_time_out()
    assert all(TrainingConfig(hang_timeout_s=seconds).collective_timeout_s > seconds for seconds in (3, 900, 86_400))


def test_a_guidance_scale_of_one_is_accepted_for_a_model_without_guidance():
    changed(RUN, {"model.num_classes": None, "sampling.guidance_scale": 1.0}).check()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"training.validation_interval": 1001}, "training.validation_interval=1001 .* no held-out loss is measured"),
        ({"training.sample_interval": 1001}, "training.sample_interval=1001 .* no samples are drawn"),
        ({"logging.profile_steps": [10, 1001]}, r"logging.profile_steps=\[10, 1001\] .* not all of them are traced"),
    ],
)
def test_a_shortened_run_reports_intervals_that_it_does_not_reach(settings, line):
    """This is a line and not an error, because a recipe's intervals are chosen for its full length."""
    dims, _ = changed(RUN, settings).check()
    (found,) = changed(RUN, settings).adaptations(dims)
    assert re.fullmatch(line, found)
    assert changed(RUN, settings | {"training.num_steps": 1001}).adaptations(dims) == []


def test_guidance_without_dropout_is_reported():
    """Weights to start from may have been trained with dropout."""
    dims, _ = RUN.check()
    kept = changed(RUN, {"model.class_dropout": 0.0})
    (found,) = kept.adaptations(dims)
    assert re.fullmatch(r"sampling.guidance_scale=2 uses .* which model.class_dropout=0 never trains; train .*", found)
    for settings in ({"sampling.guidance_scale": 1.0}, {"checkpoint.start_from": "x"}, {"model.class_dropout": 0.1}):
        assert changed(kept, settings).adaptations(dims) == []
    text = replace(RUN, model=DiTCrossConfig(context_size=4, context_dropout=0.0), parallel=ParallelConfig())
    assert "model.context_dropout=0 never trains" in text.adaptations(text.check()[0])[0]


def test_an_autoencoder_that_is_not_a_folder_is_refused(tmp_path):
    """A hub name is not looked up, and a relative path may be created later."""
    for missing in (tmp_path / "vae", "~/no such folder"):
        with pytest.raises(ConfigError, match=r"sampling\.vae='.*' is not a folder"):
            changed(RUN, {"sampling.vae": str(missing)}).check()
    for name in (str(tmp_path), "models/vae", "stabilityai/sd-vae-ft-ema"):
        changed(RUN, {"sampling.vae": name}).check()


def test_a_folder_called_tilde_is_refused():
    for name in ("training.run_dir", "checkpoint.start_from", "checkpoint.resume_from"):
        with pytest.raises(ConfigError, match=f"{name}='~/x' would be a folder called ~; write /"):
            changed(RUN, {name: "~/x"}).check()


def test_adapted_settings_are_reported():
    dims, spec = replace(RUN, training=replace(RUN.training, global_batch_size=6)).check(world_size=4)
    assert (dims.micro_batch_size, spec.micro_batch_size, dims.micro_batches) == (3, 3, 1)
    adapted = replace(RUN, training=replace(RUN.training, global_batch_size=6, num_steps=5))
    adapted = replace(adapted, schedule=dataclasses.replace(adapted.schedule, warmup_steps=9))
    lines = adapted.adaptations(dims)
    assert len(lines) == 2
    assert "micro-batches of 3, not training.micro_batch_size=4" in lines[0]
    assert "schedule.warmup_steps=9 is too long: the rate rises for 5 steps" in lines[1]
    assert replace(RUN, objective=FlowMatching()).adaptations(RUN.check()[0]) == []
