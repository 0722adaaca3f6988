"""The registry lists, without importing recipes, what importing them would register; its page is up to date."""

import importlib
import inspect
import re
from dataclasses import replace
from typing import Optional

import catalogue
import fiddle
import pytest
from nemo_run.config import get_type_namespace

from dit.command_line import closest
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.parallel.build import count_parameters
from dit.training.pretrain import pretrain
from launch import train
from launch.config_file import built
from launch.overrides import parse_call
from launch.train import call_recipe
from recipes import registry
from recipes.base import variant
from recipes.finetune import finetune
from recipes.models import ddpm_unet_512
from tests.support import recipes_page

RECIPES = [entry.name for entry in registry.recipes()]


def test_a_recipe_states_its_hardware_and_result():
    for entry in registry.recipes():
        _, _, more = entry.docstring.partition("\n")
        assert re.search(r"GPU|GB|CPU|ranks|machine|anywhere", entry.docstring), entry.name
        assert len(more.split()) >= 5, f"{entry.name} has no text below its first line"


def test_the_page_is_up_to_date():
    """Renew it with `python -m tests.support.recipes_page --write`."""
    assert recipes_page.README.read_text(encoding="utf-8") == recipes_page.page()


def test_write_renews_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes_page, "README", tmp_path / "README.md")
    assert recipes_page.main([]) == 0
    assert recipes_page.main(["--write"]) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_every_recipe_is_in_one_section_and_measuring_is_last():
    sections = registry.sections(registry.recipes())
    assert sorted(entry.name for group in sections.values() for entry in group) == sorted(RECIPES)
    titles = list(sections)
    assert (titles[0], titles[-1]) == ("Start here", "Measuring systems")
    assert {entry.name for entry in sections["Start here"]} == {"tiny_dit", "own_data"}
    assert "letters_dit" in {entry.name for entry in sections[registry.REGISTERED]}
    assert "dit_xl2_imagenet" in {entry.name for entry in sections["Published and larger models"]}
    assert "train_mock" in {entry.name for entry in sections["Measuring systems"]}


def test_a_recipe_or_component_is_described(capsys):
    assert train.main(["--describe", "letters_dit"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("letters_dit (examples/letters/recipes.py)\n\nCapital letters")
    assert "98 % of the samples" in out
    assert registry.description("edm").startswith("edm (recipes/components.py)\n\nEDM")
    assert train.main(["--describe", "leters_dit"]) == 2
    assert "did you mean letters_dit" in capsys.readouterr().err


def test_every_factory_has_a_distinct_line():
    lines = [entry.line for entry in registry.entries()]
    assert all(line.endswith(".") for line in lines)
    assert len(set(lines)) == len(lines)
    assert len({entry.name for entry in registry.entries()}) == len(lines)


def test_a_variant_has_its_folder_and_settings_and_leaves_its_base_unchanged():
    recipe = call_recipe("tiny_dit_pack")
    recipe.data.shapes.append("1x8x8")
    assert len(call_recipe("tiny_dit_pack").data.shapes) == 6
    base = call_recipe("tiny_dit")
    assert (base.data.shapes, base.training.run_dir) == (None, "runs/tiny_dit")
    assert (recipe.data.max_tokens_per_pack, recipe.training.run_dir) == (256, "runs/tiny_dit_pack")


def test_a_variant_takes_the_arguments_of_its_base(monkeypatch):
    """`--factory "NAME(argument=value)"` reads them from the signature."""
    monkeypatch.setattr("recipes.base.named_recipe", lambda name, recipe: recipe)  # not in the registry
    shorter = variant("finetune_for_tests", finetune, training={"num_steps": 3})
    assert inspect.signature(shorter) == inspect.signature(finetune)
    training = shorter(gpu_memory=24).training
    assert (training.num_steps, training.run_dir) == (3, "runs/finetune_for_tests")
    with pytest.raises(ConfigError, match=r"--factory x[(]gpu_memory=much[)]: gpu_memory=much is not a whole number"):
        parse_call(shorter, "x(gpu_memory=much)", "--factory")


def test_recipes_in_the_source_equal_recipes_registered_in_nemo_run():
    for entry in registry.entries():
        module = importlib.import_module(entry.module)
        target = pretrain if entry.is_recipe else getattr(module, entry.target)
        assert catalogue.check_exists(get_type_namespace(target), entry.name), entry.name
        function = getattr(module, entry.function)
        assert callable(function), entry.name
        if inspect.isfunction(function) and function.__doc__:  # other recipes are assignments
            assert function.__doc__.strip().startswith(entry.line), entry.name
        assert entry.line, entry.name


RANKS = re.compile(
    r"(?P<ranks>\d+|one|two) (?:x (?P<each>\d+) GB|(?P<one>\d+) GB GPUs?|GPUs?(?: of (?P<of>\d+) GB)?|ranks)"
    r"(?P<more> or more)?(?:, (?P<need>\d+) GiB)?"
)


def stated_ranks(line: str) -> Optional[int]:
    """Return the number of ranks in the description of a recipe."""
    match = RANKS.search(line)
    return match and ({"one": 1, "two": 2}.get(match["ranks"]) or int(match["ranks"]))


@pytest.mark.parametrize("entry", registry.recipes(), ids=lambda entry: entry.name)
def test_a_recipe_runs_on_the_number_of_ranks_in_its_line(entry):
    """Each part can be constructed, and model and batch can be divided by the layout."""
    task = call_recipe(entry.name)
    assert set(task.__arguments__) == set(fiddle.get_callable(task).__annotations__) - {"return"}
    for part in task.__arguments__:
        fiddle.build(getattr(task, part))
    built(task).check(stated_ranks(entry.line))


@pytest.mark.parametrize("entry", [e for e in registry.recipes() if " or more" in e.line], ids=lambda entry: entry.name)
def test_a_recipe_fits_more_gpus_if_its_line_states_this(entry):
    for factor in (2, 4):
        built(call_recipe(entry.name)).check(factor * stated_ranks(entry.line))


def test_recipes_are_independent_in_every_call():
    first, second = call_recipe("letters_dit"), call_recipe("letters_dit")
    first.model.hidden_size = 7
    assert second.model.hidden_size == 128
    parts = ddpm_unet_512(), ddpm_unet_512()
    parts[0].mid_out_channels.append(7)
    assert parts[1].mid_out_channels == [512, 512, 256]


COUNT = re.compile(r"\((?P<number>[\d.]+) (?P<unit>[MB])[,)]")


@pytest.fixture(scope="module")
def counts():
    """Cache of the number of parameters of each model, because many recipes share one."""
    return {}


@pytest.mark.parametrize("line", [e for e in registry.entries() if COUNT.search(e.line)], ids=lambda e: e.name)
def test_the_parameter_count_in_a_line_is_right(counts, line):
    part = getattr(importlib.import_module(line.module), line.function)()
    model = fiddle.build(part.model if line.is_recipe else part)
    assert isinstance(model, ModelConfig)
    if model.adapters is not None:
        model = replace(model, lora=None)
    stated = COUNT.search(line.line)
    millions = float(stated["number"]) * {"M": 1, "B": 1000}[stated["unit"]]
    if (key := repr(model)) not in counts:
        counts[key] = count_parameters(model)
    assert counts[key] / 1e6 == pytest.approx(millions, rel=0.03 if stated["unit"] == "M" else 0.005)


def test_names_are_read_from_decorators(tmp_path):
    (tmp_path / "mine.py").write_text(
        "@run.cli.factory(target=pretrain, name='short')\n"
        "def long_name():\n    '''One line.\n\n    More.'''\n"
        "@run.cli.factory\ndef bare(): ...\n"
        "@other.decorator(target=pretrain)\ndef not_one(): ...\n"
    )
    (entry,) = registry.read_entries(tmp_path / "mine.py", module="mypackage.mine")
    assert (entry.name, entry.function, entry.module) == ("short", "long_name", "mypackage.mine")
    assert entry.line == "One line."
    assert entry.is_recipe


def test_names_are_read_from_assignments(tmp_path):
    (tmp_path / "mine.py").write_text(
        "_schedule = partial(part, Schedule)\n"
        "slow = _schedule('slow', Constant)\n'''One line.\n\nMore.'''\n"
        "wide = part(ModelConfig, 'wide', DiTConfig, hidden_size=64)\n'''Another line.'''\n"
        "other = partial(print, 1)\n"
    )
    slow, wide = registry.read_entries(tmp_path / "mine.py", module="mypackage.mine")
    assert (slow.name, slow.function, slow.target, slow.line) == ("slow", "slow", "Schedule", "One line.")
    assert slow.docstring == "One line.\n\nMore."
    assert (wide.name, wide.target, wide.line) == ("wide", "ModelConfig", "Another line.")


@pytest.mark.parametrize(
    ("typed", "known", "best"),
    [
        ("hiden_size", ["num_layers", "hidden_size", "ffn_hidden_size"], "hidden_size"),
        ("XL2", ["dit_s2_imagenet", "dit_xl2_imagenet"], "dit_xl2_imagenet"),
        ("lr", ["eps", "lr"], "lr"),
        ("qqq", ["eps", "lr"], None),
        ("--tp", ["--list", "--help"], None),
    ],
)
def test_the_nearest_name_is_suggested_first(typed, known, best):
    assert (closest(typed, known) or [None])[0] == best
