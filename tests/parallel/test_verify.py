"""`launch.verify` finds every backbone equal on any layout, and names the parameter in which a fault shows."""

import re
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from dit.errors import EXIT_CONFIG, EXIT_OK, EXIT_UNEXPECTED
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.training.step import training_forward_step
from dit.verify.ranks import run_world
from dit.verify.trial import train
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import compare, main, tiny_pair
from recipes import registry
from tests.parallel.rows import rows, selected
from tests.parity.costs import num_parameters

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "tp2_sp": TP2SP,
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "fsdp2": {"data_parallel": "fsdp"},
}
RECIPES = {
    "dit": "dit_xl2_imagenet",
    "dit_cross": "pretrain_7b",
    "stdit": "pretrain_stdit_xl",
    "moviegen": "pretrain_ditllama5b",
    "flux": "flux_12b",
    "wan": "wan_14b_mock",
    "ecdit": "pretrain_ecditllama1b",
}
ROW = ("backbone", "layout")
CASES = [(backbone, layout) for backbone in RECIPES for layout in LAYOUTS]
QUICK = {
    ("dit", "fsdp2"),
    ("stdit", "cp2"),
    ("flux", "pp2"),
    *((name, "tp2_sp") for name in RECIPES if name != "moviegen"),
}


@cache
def config_of(recipe: str) -> RunConfig:
    return built(call_recipe(recipe))


def pair_of(recipe: str, **parallel):
    """Return the tiny form of a recipe under a layout of two ranks, in place of the recipe's own."""
    return tiny_pair(replace(config_of(recipe), parallel=ParallelConfig(**parallel)), 2)


def sum_no_sequence_shards(chunks: list) -> None:
    """As if the sum of gradients over sequence shards had been forgotten."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.sequence_parallel = False


def sum_the_text_twice(chunks: list) -> None:
    """As if the null text met the tokens of one sequence shard alone."""
    chunks[0].text.null.sequence_parallel = True


def doubled_loss(case: dict) -> dict:
    """Train with twice the loss, as one that every tensor-parallel rank adds; what is logged stays."""

    def doubling(*arguments):
        inner = training_forward_step(*arguments)

        def forward_step(batches, network):
            prediction, loss_function = inner(batches, network)

            def twice(output):
                total, *rest = loss_function(output)
                return (2 * total, *rest)

            return prediction, twice

        return forward_step

    with mock.patch("dit.verify.trial.training_forward_step", doubling):
        return train(case["trial"])


FAULTS = {
    "no sum": {"alter": sum_no_sequence_shards},
    "text twice": {"alter": sum_the_text_twice},
    "loss twice": {"task": "tests.parallel.test_verify:doubled_loss"},
}


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """Every selected case's verdict and those of the faults; each world size starts once."""
    folder = tmp_path_factory.mktemp("verify")
    pairs = {row: pair_of(RECIPES[row[0]], **LAYOUTS[row[1]]) for row in sorted(selected(request, ROW))}
    pairs |= dict.fromkeys(FAULTS, pair_of(RECIPES["dit_cross"], **TP2SP))
    references = {}
    for pair in pairs.values():
        references.setdefault(repr(pair.one), pair.one)
    tasks = [{"task": "dit.verify.trial:run_case", "trial": pair.many} for pair in pairs.values()]
    for task, fault in zip(tasks[-len(FAULTS) :], FAULTS.values()):
        task["trial"] = replace(task["trial"], alter=fault.get("alter"))
        task["task"] = fault.get("task", task["task"])
    one = run_world(1, [{**tasks[0], "trial": trial} for trial in references.values()], folder / "1")
    alone = dict(zip(references, one))
    many = run_world(2, tasks, folder / "2")
    return {name: compare(pair, alone[repr(pair.one)], found) for (name, pair), found in zip(pairs.items(), many)}


@pytest.mark.parametrize(ROW, rows(CASES, lambda *row: row in QUICK))
def test_the_tiny_form_of_a_recipe_equals_one_rank(verdicts, backbone, layout):
    verdict = verdicts[backbone, layout]
    assert verdict.comparison.differences == ()
    assert verdict.idle == ()
    assert verdict.text().endswith(f"equal: {verdict.compared} gradients, losses, weights and their copies")


def test_a_forgotten_sum_shows_first_in_the_parameter_nearest_the_loss(verdicts):
    """The head's bias: each rank counts the tokens of its shard, so that both have a part, and their copies drift."""
    verdict = verdicts["no sum"]
    first = verdict.wrong[0]
    assert first.row.name == "head.linear.bias"
    assert first.row.reduced == "TP 2 (sequence shards)"
    assert set(first.by_rank) == {"tp 0", "tp 1"}
    assert all(ratio < 0.98 for ratio in first.by_rank.values())
    text = verdict.text()
    assert "first wrong gradient of the backward pass: head.linear.bias\n" in text
    assert "a part is missing" in text
    assert "head.linear.bias" in verdict.comparison.drifted
    assert "copies that differ between ranks: " in text
    assert not any("linear_qkv" in wrong.row.name for wrong in verdict.wrong)


def test_a_needless_sum_is_counted(verdicts):
    """The null text's gradient is complete on every rank; summed over two it is twice as large, and nothing else is."""
    (wrong,) = verdicts["text twice"].wrong
    assert (wrong.row.name, wrong.row.reduced) == ("text.null", "-")
    assert (wrong.ratio, *wrong.by_rank.values()) == pytest.approx((2.0, 2.0, 2.0), rel=1e-5)
    assert "counted TP 2 times" in verdicts["text twice"].reading()


def test_a_doubled_loss_is_no_fault_of_a_parameter(verdicts):
    verdict = verdicts["loss twice"]
    assert len(verdict.wrong) == verdict.compared
    assert {round(wrong.ratio, 4) for wrong in verdict.wrong} == {2.0}
    assert "every gradient is 2.000 times its size" in verdict.reading()


def test_a_first_loss_that_differs_comes_before_any_gradient(verdicts):
    verdict = verdicts["no sum"]
    other = verdict.comparison.errors | {"losses": {"step 0": 0.1}}
    verdict = replace(verdict, comparison=replace(verdict.comparison, errors=other))
    assert verdict.reading().startswith("the first loss differs, too")


@pytest.mark.parametrize("recipe", [entry.name for entry in registry.recipes()])
def test_every_recipe_has_a_tiny_form_for_tensor_parallel_ranks(recipe):
    """It is small, and keeps backbone, objective and what is no size."""
    pair, model = pair_of(recipe, **TP2SP), config_of(recipe).model
    assert type(pair.many.model) is type(model)
    assert pair.many.objective == config_of(recipe).objective
    assert pair.many.model.position_embedding == model.position_embedding
    assert num_parameters(pair.many.model) < 500_000


def test_the_command_says_equal_or_names_what_is_not(verdicts, capsys):
    words = ["--factory", "tiny_dit_pack", "parallel.tensor_model_parallel_size=2"]
    assert main(words) == EXIT_OK
    out = capsys.readouterr().out
    assert "2 ranks against one, ParallelConfig(tensor_model_parallel_size=2, data_parallel='ddp')" in out
    assert "equal: 36 gradients, losses, weights and their copies" in out
    with mock.patch("launch.verify.verify", return_value=verdicts["no sum"]):
        assert main(words) == EXIT_UNEXPECTED
    assert "first wrong gradient of the backward pass: head.linear.bias" in capsys.readouterr().out


def test_the_command_explains_the_real_model(capsys):
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
    words = [f"parallel.{name}={size}" for name, size in layout.items()]
    assert main(["--explain", "--factory", "pretrain_7b", *words, "--world-size", "8"]) == EXIT_OK
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("layers.0-31.mlp.linear_fc2.weight"))
    assert re.split(r"\s{2,}", line)[1:] == ["3072 x 12288", "TP 2, dim 1", "DP x CP 2", "DP x CP 2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --factory RECIPE"),
        (["--factory", "tiny_dti"], "did you mean tiny_dit"),
        (["--factory", "tiny_dit", "--world-size", "1"], "--world-size 1 leaves nothing to compare"),
        (["--factory", "tiny_dit_tp2sp", "--world-size", "3"], "world size 3 is not a multiple"),
        (["--factory", "tiny_dit", "parallel.tensor_model_parallel_size=32"], "needs 32 ranks.*--world-size 32"),
        (["--factory", "tiny_dit", "parallel.expert_model_parallel_size=2"], "the model has none"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(capsys, words, says):
    assert main(words) == EXIT_CONFIG
    assert re.search(says, capsys.readouterr().err)
