"""Overrides reach the setting that they name, with the type of its annotation."""

import dataclasses
import importlib
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Optional

import fiddle
import nemo_run as run
import pytest

from dit.data_api import DataConfig
from dit.errors import ConfigError
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.settings import TrainingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from launch.argument_types import split_arguments
from launch.overrides import all_keys, apply_overrides, parse_value, value_of
from launch.train import call_recipe
from recipes import registry
from tests.unit.launch.recipes_for_tests import ending


def overridden(*texts: str) -> run.Partial:
    task = ending()
    apply_overrides(task, list(texts))
    return task


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "-3", -3),
        (float, "1e-4", 1e-4),
        (float, "2", 2.0),
        (bool, "true", True),
        (bool, "False", False),
        (str, "main", "main"),
        (str, "os.path", "os.path"),
        (str, "Config/x", "Config/x"),
        (str, "'a=b, c'", "a=b, c"),
        (Path, "a/b.txt", Path("a/b.txt")),
        (Optional[int], "none", None),
        (Optional[int], "4", 4),
        (int | None, "4", 4),
        (Optional[str], "None", None),
        (Literal["x", "y"], "y", "y"),
        (Optional[Literal["x", "y"]], "x", "x"),
        (list[int], "[1, 2]", [1, 2]),
        (Optional[list[str]], "['1x8x8', '2x8x8']", ["1x8x8", "2x8x8"]),
        (Any, "3", 3),
        (Any, "data/mine", "data/mine"),
    ],
)
def test_a_text_becomes_a_value_of_the_annotated_type(annotation, text, value):
    parsed = parse_value(text, annotation, "key")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "expected"),
    [
        (int, "1.5", "a whole number"),
        (int, "none", "a whole number"),
        (float, "fast", "a number"),
        (float, "nan", "a number"),
        (bool, "maybe", "true or false"),
        (Literal["x", "y"], "z", "one of x, y"),
        (Optional[int], "x", "a whole number or none"),
        (list[int], "[1, x]", r"a list of whole numbers such as \[1, 2\]"),
        (Optional[list[str]], "[a, b]", r"a list of texts such as \['a', 'b'\] \(in a shell, .* double quotes\)"),
    ],
)
def test_a_text_of_another_type_is_refused_with_the_expected_one(annotation, text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_value(text, annotation, "key")


def test_lists_are_not_shared_between_parses():
    """nemo-run caches parsed values, so two settings with the same text would share one list."""
    first, second = (parse_value("[1, 2]", list[int], "key") for _ in range(2))
    assert first == second
    assert first is not second


def test_a_part_is_replaced_before_its_settings_at_any_position():
    for texts in (("objective=edm", "objective.p_mean=-0.4"), ("objective.p_mean=-0.4", "objective=edm")):
        objective = overridden(*texts).objective
        assert objective.__fn_or_cls__ is EDM
        assert objective.p_mean == -0.4


def test_settings_of_a_part_may_stand_in_parentheses():
    objective = overridden("objective=ddpm(prediction='v', discrete_steps=none)").objective
    assert objective.__fn_or_cls__ is DDPM
    assert (objective.prediction, objective.discrete_steps) == ("v", None)


OWN_PART = """
import nemo_run as run
from dit.objectives.base import Objective
from dit.objectives.edm import EDM

@run.cli.factory(target=Objective)
def {name}() -> run.Config[EDM]:
    return run.Config(EDM, p_mean=0.5)
"""


def test_a_part_of_a_user_package_is_found_by_name(tmp_path, monkeypatch):
    (tmp_path / "own_part_of_a_user.py").write_text(OWN_PART.format(name="own_edm_of_a_user"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"no Objective of that name; choose one of .*needs DIT_PACKAGES=MODULE"):
        overridden("objective=own_edm_of_a_user")
    monkeypatch.setenv("DIT_PACKAGES", "own_part_of_a_user")
    assert overridden("objective=own_edm_of_a_user").objective.p_mean == 0.5
    monkeypatch.setenv("DIT_PACKAGES", "no_package_of_a_user")
    with pytest.raises(ConfigError, match="DIT_PACKAGES names 'no_package_of_a_user', which is not installed"):
        overridden("objective=unknown_part")


def test_replaced_parts_are_independent():
    first, second = overridden("objective=edm", "objective.p_mean=5.0"), overridden("objective=edm")
    assert first.objective.p_mean == 5.0
    assert second.objective.p_mean == EDM().p_mean


def test_an_operator_is_refused():
    with pytest.raises(ConfigError, match=r"overrides only assign; write optimizer\.lr=VALUE"):
        overridden("optimizer.lr*=2")


@pytest.mark.parametrize("text", ["training.run_dir[0]=x", "training.num_steps[0]=1"])
def test_assignment_to_an_entry_is_refused(text):
    with pytest.raises(ConfigError, match=r"write the list in full"):
        overridden(text)


@pytest.mark.parametrize("recipe", ["dit_xl2_imagenet", "pretrain_ditllama5b", "mock_stdit_s", "flux_12b"])
def test_the_error_for_a_misspelt_setting_suggests_the_correct_name(recipe):
    """Also where a default is a list, which fiddle's `getattr` does not return."""
    with pytest.raises(ConfigError, match=r"did you mean training\.num_steps\?"):
        apply_overrides(call_recipe(recipe), ["training.num_stepz=3"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data.path=data/mine", "data.path: MockData has no setting 'path'; .*; data=energon has it$"),
        (
            "objective.p_std=1",
            "FlowMatching has no setting 'p_std'; .*; objective=edm or objective=edm_uncertainty has it$",
        ),
    ],
)
def test_the_error_for_a_setting_of_another_part_names_that_part(text, says):
    task = call_recipe("tiny_dit")
    apply_overrides(task, ["data=mock", "objective=flow_matching"])
    with pytest.raises(ConfigError, match=says):
        apply_overrides(task, [text])


def test_the_error_for_the_name_of_another_setting_as_a_value_names_that_setting():
    says = "=fp8 is unknown; use one of bf16, fp16, fp32; did you mean training.fp8, which is one of tensor"
    with pytest.raises(ConfigError, match=says):
        overridden("training.precision=fp8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "schedule=cosin",
            r"no Schedule of that name; did you mean cosine or warmup_cosine\? A name of your own needs",
        ),
        ("model=qqq", "no ModelConfig of that name; choose one of .*dit_xl"),
        ("training=qqq", "no TrainingConfig of that name; set its fields one by one"),
        ("objective=edm(p_mean=1", r"lacks a parenthesis at its end; write 'objective=NAME\("),
        ("model.lora.rank=4", "model.lora=None has no settings of its own; add model.lora=lora first"),
        ("parallel.tp=2", r"did you mean parallel\.tensor_model_parallel_size\?"),
        ("tp=2", r"tp does not exist; did you mean parallel\.tensor_model_parallel_size\?"),
    ],
)
def test_a_misspelt_part_or_a_short_name_is_answered_with_the_correct_one(text, says):
    with pytest.raises(ConfigError, match=says):
        apply_overrides(call_recipe("tiny_dit"), [text])


@pytest.mark.parametrize("part", registry.components(), ids=lambda part: part.name)
def test_every_setting_of_every_part_has_its_value(part):
    """The configuration that is printed and written has the values of the built objects, including defaults."""
    config = getattr(importlib.import_module(part.module), part.function)()
    made = fiddle.build(config)
    for key in all_keys(config):
        *parents, name = key.split(".")
        node = reduce(value_of, parents, config)
        assert fiddle.build(value_of(node, name)) == getattr(reduce(getattr, parents, made), name)


def test_a_setting_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        overridden("optimizer.lr.peak=3")


@pytest.mark.parametrize("text", ["..=1", "training..num_steps=1", "[]=1", "training.[0].num_steps=1"])
def test_a_path_with_an_empty_step_is_refused(text):
    with pytest.raises(ConfigError, match="names no setting between its dots"):
        overridden(text)


def test_a_wrong_argument_of_a_part_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"objective=edm\(\)\(\): .* is not an override"):
        overridden("objective=edm()()")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("a=1", ["a=1"]),
        ("a=1, b=[2, 3],c='x, (y'", ["a=1", "b=[2, 3]", "c='x, (y'"]),
        ('a="]", b={1: (2, 3)}', ['a="]"', "b={1: (2, 3)}"]),
    ],
)
def test_arguments_are_split_at_outer_commas(text, parts):
    assert split_arguments(text) == parts


def test_every_field_of_a_settings_class_can_be_reached():
    """A field nemo-run cannot parse would be a setting that cannot be changed."""
    values = {"run_dir": "x", "precision": "fp32", "ema_decay": "0.5", "stop_at_step": "3"}
    values |= {
        "attention": "sdpa",
        "linears": "megatron",
        "kernels": "eager",
        "recompute": "full",
        "deterministic": "True",
        "fp8": "mxfp8",
    }
    values |= dict.fromkeys(("loss_scale", "initial_loss_scale"), "7.0")
    values |= {"ema_offload": "True", "ema_sigma_rel": "[0.05, 0.1]", "cuda_graph": "True", "hooks": "['a.B']"}
    values |= {"on_bad_numbers": "skip", "spike_threshold": "20.0", "hang_timeout_s": "60.0"}
    values |= {"time_limit": "03:55:00"}
    for name in (field.name for field in dataclasses.fields(TrainingConfig)):
        text = values.get(name, "7")
        assert str(getattr(overridden(f"training.{name}={text}").training, name)) == text


def test_data_can_be_replaced_by_name():
    def feeds(data: DataConfig) -> None: ...

    task = run.Partial(feeds, data=run.Config(EnergonData, path="somewhere"))
    apply_overrides(task, ["data.shapes=['1x8x8']", "data=mock", "data.height=8"])
    assert task.data.__fn_or_cls__ is MockData
    assert task.data.shapes == ["1x8x8"]
    assert task.data.height == 8


def test_a_replaced_part_names_the_settings_that_become_defaults(capsys):
    task = ending()
    task.objective.prediction, task.objective.time_distribution = "x0", "logit_normal"
    chosen = ["objective=contrastive_flow_matching", "objective.time_distribution=logit_normal"]
    apply_overrides(task, chosen)
    assert capsys.readouterr().err == (
        "objective was replaced and now has the defaults objective.prediction=velocity; "
        "to keep the former values, add objective.prediction=x0\n"
    )
