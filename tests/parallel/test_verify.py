"""`launch.verify` names the parameter with a wrong gradient; `tests/laws` tests models without faults."""

import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dit.verify.trial
from dit.errors import EXIT_CONFIG, EXIT_OK, EXIT_UNEXPECTED, ConfigError
from dit.layout import SequenceLayout
from dit.models.lora_config import LoRAConfig
from dit.objectives.mean_flow import MeanFlow
from dit.optimizer.ema import EMA
from dit.parallel.build import build_on_meta, count_parameters
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.step.forward_step import training_forward_step
from dit.verify.laws import Check
from dit.verify.ranks import run_world
from dit.verify.report import Verdict
from dit.verify.tiny import tiny_model
from dit.verify.trial import EMA_DECAY, train
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import Outcome, Pair, adapted_layers, check_case, compare, main, world_size_of
from recipes import registry
from tests.support.ranks import one_step

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECIPE = "pretrain_7b"
"""A backbone with texts; some faults concern its null text."""


@cache
def config_of(recipe: str) -> RunConfig:
    return built(call_recipe(recipe))


def pair_of(recipe: str, ranks: int = 2, **parallel):
    """Return the tiny form of a recipe under a layout of some ranks, instead of the layout of the recipe."""
    return one_step(replace(config_of(recipe), parallel=ParallelConfig(**parallel)), ranks)


def with_adapters(recipe: str, targets: list[str]) -> RunConfig:
    """Return a recipe that trains adapters of a model, under tensor and sequence parallelism."""
    config = config_of(recipe)
    return replace(
        config,
        parallel=ParallelConfig(**TP2SP),
        model=replace(config.model, lora=LoRAConfig(rank=4, alpha=2.0, targets=targets)),
        checkpoint=replace(config.checkpoint, start_from="runs/base"),
    )


def adapters_pair() -> Pair:
    """Return the tiny form of a recipe with adapters on all modulations and on two of its last layers."""
    return one_step(with_adapters("finetune_lora", ["layers.1[01].*.linear_*", "*modulation.*"]), 2)


def mean_flow_pair() -> Pair:
    """Return the tiny form of a recipe with guided targets, which are differences of predictions."""
    config = config_of("tiny_dit")
    return one_step(
        replace(
            config,
            parallel=ParallelConfig(**TP2SP),
            model=replace(config.model, interval_conditioning=True),
            objective=MeanFlow(guidance_scale=2.0),
            sampling=replace(config.sampling, guidance_scale=1.0),
        ),
        2,
    )


def sum_no_sequence_shards(chunks: list) -> None:
    """Do not sum gradients over sequence shards."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.sequence_parallel = False


def sum_the_text_twice(chunks: list) -> None:
    """Sum the gradient of the null text over sequence shards, although every rank has the complete gradient."""
    chunks[0].text.null.sequence_parallel = True


def doubled_loss(case: dict) -> dict:
    """Train with twice the loss, as if both tensor-parallel ranks added it; logs are unchanged."""

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


def skewed_average(case: dict) -> dict:
    """Train with another decay of the average on the last rank."""
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    decay = 0.5 if is_last else EMA_DECAY
    with mock.patch.object(EMA, "weight", return_value=1 - decay):
        return train(case["trial"])


def forget_the_parts_of_adapters(chunks: list) -> None:
    """Do not sum the gradients of copied A and B over sequence shards, as if each rank had all tokens."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "lora_" in name:
                parameter.sequence_parallel = False


def without_mask(chunks: list) -> None:
    """Let attention treat the pack as one sample."""
    for layer in chunks[0].layers.values():

        def over_the_pack(q, k, v, layout_q, layout_k, attention=layer.attention.attention):
            pack = SequenceLayout.from_lengths([layout_q.total_tokens])
            return attention(q, k, v, pack, pack)

        layer.attention.attention = over_the_pack


def attends_padding(chunks: list) -> None:
    """Let attention treat the padding after each sample as tokens; packs of one rank have no padding."""
    for layer in chunks[0].layers.values():

        def with_padding(q, k, v, layout_q, layout_k, attention=layer.attention.attention):
            layouts = (replace(x.gathered, lengths=x.padded_lengths) for x in (layout_q, layout_k))
            return attention(q, k, v, *layouts)

        layer.attention.attention = with_padding


def padding_adds(chunks: list) -> None:
    """Add a sum over padding to the output."""
    forward = chunks[0].forward

    def with_padding(inputs_TC, time_S, batch):
        return forward(inputs_TC, time_S, batch) + inputs_TC[~batch.layout.valid_T].sum()

    chunks[0].forward = with_padding


def place_in_pack_matters(chunks: list) -> None:
    """Scale each sample by its position in the pack."""
    forward = chunks[0].forward

    def with_place(inputs_TC, time_S, batch):
        places_S = 1 + 0.01 * torch.arange(batch.layout.num_samples)
        return forward(inputs_TC, time_S, batch) * batch.layout.per_token(places_S)

    chunks[0].forward = with_place


def mean_of_means(chunks: list) -> None:
    """Give each micro-batch the same weight, whatever its number of tokens."""

    def wrong(*arguments):
        step = training_forward_step(*arguments)

        def forward_step(batches, network):
            prediction, loss_function = step(batches, network)

            def mean(output):
                total, count, logged = loss_function(output)
                return 100 * total / count, torch.full_like(count, 100), logged

            return prediction, mean

        return forward_step

    dit.verify.trial.training_forward_step = wrong  # this process runs only this check


MODEL_FAULTS = {
    without_mask: ("packed", {"packed", "accumulated", "padding"}),
    padding_adds: ("padding", {"padding", "packed", "accumulated"}),
    place_in_pack_matters: ("order", {"order", "packed", "accumulated"}),
    mean_of_means: ("accumulated", {"accumulated"}),
}
"""For each fault: the check for it, and all checks that may fail."""


@pytest.fixture(scope="module")
def fault_checks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Check]]:
    """Checks of a model with each fault; the last fault is last because it patches the process."""
    one = pair_of("tiny_dit_pack", data_parallel="ddp").one
    cases = [check_case(replace(one, alter=fault)) for fault in MODEL_FAULTS]
    return dict(zip(MODEL_FAULTS, run_world(1, cases, tmp_path_factory.mktemp("faults")), strict=True))


@pytest.mark.parametrize("fault", MODEL_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_every_layout_is_detected(fault_checks, fault):
    check, allowed = MODEL_FAULTS[fault]
    wrong = {name for name, found in fault_checks[fault].items() if found.wrong}
    assert check in wrong - {"diffusers"} <= allowed


def test_the_comparison_with_one_rank_does_not_detect_a_fault_of_every_layout(capsys):
    pair = pair_of("tiny_dit_pack", data_parallel="ddp")
    broken = replace(pair, one=replace(pair.one, alter=padding_adds), many=replace(pair.many, alter=padding_adds))
    with mock.patch("launch.verify.tiny_pair", return_value=broken):
        assert main(["--factory", "tiny_dit_pack", "--world-size", "2"]) == EXIT_UNEXPECTED
    out = capsys.readouterr().out
    assert "2 ranks against one, ParallelConfig(data_parallel='ddp')" in out
    assert "padding" in {line.split()[0] for line in out.splitlines() if " differ: " in line}
    assert "equal: 36 gradients, losses, weights and their copies" in out


def refuses(chunks: list) -> None:
    """Raise the error of a network that does not support the sizes of the tiny form."""
    raise ConfigError("hidden_size=32 is too small; use at least 64")


def test_an_error_of_a_rank_is_one_line(capsys):
    pair = pair_of("tiny_dit_pack", data_parallel="ddp")
    broken = replace(pair, one=replace(pair.one, alter=refuses), many=replace(pair.many, alter=refuses))
    with mock.patch("launch.verify.tiny_pair", return_value=broken):
        assert main(["--factory", "tiny_dit_pack", "--world-size", "2"]) == EXIT_CONFIG
    assert capsys.readouterr().err == ("error: tiny form of the recipe: hidden_size=32 is too small; use at least 64\n")


FAULTS = {
    "no sum": {"alter": sum_no_sequence_shards},
    "text twice": {"alter": sum_the_text_twice},
    "loss twice": {"task": "tests.parallel.test_verify:doubled_loss"},
    "average": {"task": "tests.parallel.test_verify:skewed_average"},
}
RUN = "dit.verify.trial:run_case"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Verdict of each fault; each world size starts once.

    `tests/laws` has the verdicts of backbones without faults.
    """
    folder, pair = tmp_path_factory.mktemp("verify"), pair_of(RECIPE, **TP2SP)
    adapted, averaged = adapters_pair(), mean_flow_pair()
    padded = replace(pair, one=replace(pair.one, alter=attends_padding), many=replace(pair.many, alter=attends_padding))
    ones = pair.one, adapted.one, padded.one, averaged.one
    one, one_adapted, one_padded, one_averaged = run_world(
        1, [{"task": RUN, "trial": trial} for trial in ones], folder / "1"
    )
    cases = [
        {"task": fault.get("task", RUN), "trial": replace(pair.many, alter=fault.get("alter"))}
        for fault in FAULTS.values()
    ]
    cases += [
        {"task": RUN, "trial": trial}
        for trial in (
            *(adapted.many, replace(adapted.many, alter=forget_the_parts_of_adapters)),
            *(padded.many, averaged.many),
        )
    ]
    *many, sound, broken, many_padded, many_averaged = run_world(2, cases, folder / "2")
    return {name: compare(pair, one, found) for name, found in zip(FAULTS, many, strict=True)} | {
        "adapters": compare(adapted, one_adapted, sound),
        "adapters, no sum": compare(adapted, one_adapted, broken),
        "padding": compare(padded, one_padded, many_padded),
        "mean flow": compare(averaged, one_averaged, many_averaged),
    }


def test_a_different_average_on_one_rank_is_detected(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["average"]
    assert verdict.wrong == ()
    assert {kind for kind in verdict.comparison.errors if verdict.comparison.wrong(kind)} == {"averages"}
    assert "head.linear.bias (average)" in verdict.comparison.drifted
    assert "weight average after the steps: " in verdict.text()


@pytest.mark.long
def test_a_different_average_is_detected_on_a_rank_that_shares_no_group_with_the_first(tmp_path: Path) -> None:
    """The last of two tensor-parallel ranks in two replicas; the values that rank 0 gathers are those of one rank."""
    pair = pair_of(RECIPE, 4, tensor_model_parallel_size=2, data_parallel="ddp")
    case = {"task": FAULTS["average"]["task"], "trial": pair.many}
    (result,) = run_world(4, [case], tmp_path)
    weights = set(result["averages"])
    assert {f"{name} (average)" for name in weights} <= set(result["drifted"])
    assert not weights & set(result["drifted"])


def test_a_model_that_reads_padding_differs_from_one_rank(verdicts: dict[str, Verdict]) -> None:
    """The packs of one rank have the same samples without the padding that the layout requires."""
    verdict = verdicts["padding"]
    assert "layers.1.attention.linear_qkv.weight" in {wrong.row.name for wrong in verdict.wrong}


def test_a_missing_sum_is_named_by_the_parameter_nearest_the_loss(verdicts):
    """Each rank has a part of the gradient of the head's bias, from the tokens of its shard, so the copies drift."""
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


def test_a_fine_tuning_of_adapters_equals_one_rank(verdicts):
    """Compares every A and B of the layers that the recipe names, and no parameter of the base."""
    verdict, model = verdicts["adapters"], build_on_meta(adapters_pair().many.model)
    assert verdict.comparison.differences == ()
    gradients = set(verdict.comparison.errors["gradients"])
    last = ("attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    cross = ("cross_attention.linear_q", "cross_attention.linear_kv", "cross_attention.linear_proj")
    adapted = {f"layers.1.{part}" for part in (*last, *cross)} | {f"layers.{i}.modulation.linear" for i in range(2)}
    assert gradients == {f"{part}.lora_{x}.weight" for part in adapted for x in "AB"}
    assert verdict.idle == ()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert verdict.frozen == len(frozen) > 0
    assert f"frozen: {len(frozen)} parameters, which have no gradient\nequal: 18 gradients" in verdict.text()


@pytest.mark.parametrize(
    ("recipe", "parallel", "target", "tiny"),
    [
        ("finetune_lora", {}, "layers.11.mlp.*", ["layers.1.mlp.*"]),
        ("finetune_lora", {}, "layers.[56].*", ["layers.0.*", "layers.1.*"]),
        ("finetune_lora", {}, "layers.1*.linear_*", ["layers.0.*linear_*", "layers.1.*linear_*"]),
        ("finetune_lora", {}, "layers.*.linear_*", ["layers.*.linear_*"]),
        ("finetune_lora", {"pipeline_model_parallel_size": 4}, "layers.8.*", ["layers.2.*"]),
        ("tiny_dit", {"pipeline_model_parallel_size": 4}, "layers.1.*", ["layers.2.*", "layers.3.*"]),
        ("flux_12b", {}, "layers.18.*", ["layers.0.*"]),
        ("flux_12b", {}, "layers.19.*", ["layers.1.*"]),
        ("tiny_ldm_unet", {}, "down_blocks.0.attentions.1.*", ["down_blocks.*.attentions.*.*"]),
    ],
)
def test_adapters_are_verified_on_the_layers_that_stand_for_theirs(recipe, parallel, target, tiny):
    config = with_adapters(recipe, [target])
    model = tiny_model(config.model, ParallelConfig(**parallel))
    assert model.adapters.targets == tiny
    line = f"adapters on {target} are verified on {', '.join(tiny)} of the tiny form"
    assert adapted_layers(config.model, model) == ("" if tiny == [target] else line)


def test_differences_of_predictions_equal_one_rank(verdicts):
    """The default step of the difference would multiply rounding errors by more than the bounds allow."""
    assert verdicts["mean flow"].is_equal, verdicts["mean flow"].text()


def test_a_wrong_gradient_of_an_adapter_is_named(verdicts):
    """Replicated: B of row-parallel and A of column-parallel layers. The sharded matrices have correct gradients."""
    verdict = verdicts["adapters, no sum"]
    split = ("linear_proj.lora_A", "linear_fc2.lora_A", "qkv.lora_B", "_q.lora_B", "fc1.lora_B")
    assert verdict.wrong[0].row.name == "layers.1.mlp.linear_fc2.lora_B.weight"
    assert verdict.wrong[0].row.reduced == "TP 2 (sequence shards)"
    assert "a part is missing" in verdict.reading()
    assert all("lora_" in wrong.row.name for wrong in verdict.wrong)
    assert not any(part in wrong.row.name for wrong in verdict.wrong for part in split)


@pytest.mark.parametrize(("error", "is_equal"), [(2e-5, True), (1.0, False)])
def test_rounding_of_a_gradient_of_one_number_is_no_difference(error, is_equal):
    """EDM2's gains have gradients whose parts cancel; a wrong one is detected nevertheless."""
    pair = pair_of("tiny_edm2", data_parallel="fsdp")
    gradients = {name: torch.ones(2) for name, _ in build_on_meta(pair.many.model).named_parameters()}
    one = {"gradients": gradients | {"down.0.gain": torch.tensor([1e-6])}, "losses": [1.0], "grad_norms": [1.0]}
    one |= {"parameters": gradients, "averages": gradients, "drifted": []}
    many = one | {"gradients": one["gradients"] | {"down.0.gain": torch.tensor([1e-6 * (1 + error)])}}
    assert compare(pair, one, many).is_equal == is_equal


def test_an_unnecessary_sum_is_counted(verdicts):
    """The null text's gradient is complete on every rank; a sum over two ranks doubles it and no other gradient."""
    (wrong,) = verdicts["text twice"].wrong
    assert (wrong.row.name, wrong.row.reduced) == ("text.null", "-")
    assert (wrong.ratio, *wrong.by_rank.values()) == pytest.approx((2.0, 2.0, 2.0), rel=1e-5)
    assert "counted TP 2 times" in verdicts["text twice"].reading()


def test_a_doubled_loss_is_not_attributed_to_a_parameter(verdicts):
    verdict = verdicts["loss twice"]
    assert len(verdict.wrong) == verdict.compared
    assert {round(wrong.ratio, 4) for wrong in verdict.wrong} == {2.0}
    assert "every gradient is 2.000 times its size" in verdict.reading()


def test_an_undeclared_replica_on_all_stages_is_named(verdicts):
    verdict = verdicts["no sum"]
    first = replace(verdict.wrong[0], by_rank={"tp 0 pp 0": 0.4, "tp 0 pp 1": 0.9})
    assert "replicate_on_all_stages(module.parameters())" in replace(verdict, wrong=(first,)).reading()
    stated = replace(first, sharding=replace(first.sharding, every_stage=True))
    assert "a part is missing" in replace(verdict, wrong=(stated,)).reading()


def test_a_different_first_loss_is_reported_before_gradients(verdicts):
    verdict = verdicts["no sum"]
    other = verdict.comparison.errors | {"losses": {"step 0": 0.1}}
    verdict = replace(verdict, comparison=replace(verdict.comparison, errors=other))
    assert verdict.reading().startswith("the first loss differs, too")


@pytest.mark.parametrize("recipe", [entry.name for entry in registry.recipes()])
def test_every_recipe_has_a_tiny_form_for_its_parallel_ranks(recipe):
    """The tiny form keeps backbone, objective and all settings except sizes; tensor-parallel where supported."""
    model, objective = config_of(recipe).model, config_of(recipe).objective
    pair = pair_of(recipe, **(TP2SP if model.supports.tensor else {}))
    if getattr(objective, "alignment", None) is not None:
        objective = replace(objective, alignment=replace(pair.many.objective.alignment, weight=0.5))
    assert type(pair.many.model) is type(model)
    assert pair.many.objective == objective
    assert getattr(pair.many.model, "position_embedding", None) == getattr(model, "position_embedding", None)
    assert count_parameters(pair.many.model) < 1_500_000


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("adapters", EXIT_OK, "equal: 18 gradients, losses, weights and their copies"),
        ("no sum", EXIT_UNEXPECTED, "first wrong gradient of the backward pass: head.linear.bias"),
    ],
)
def test_the_command_prints_equal_or_names_the_difference(verdicts, capsys, name, code, line):
    with mock.patch("launch.verify.verify_tiny", return_value=Outcome({}, {"fp32": verdicts[name]})):
        assert main(["--factory", "tiny_dit_pack", "parallel.tensor_model_parallel_size=2"]) == code
    assert line in capsys.readouterr().out


def test_the_command_explains_the_real_model(capsys):
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}
    words = [f"parallel.{name}={size}" for name, size in layout.items()]
    assert main(["--explain", "--factory", "pretrain_7b", *words, "--world-size", "8"]) == EXIT_OK
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("layers.0-31.mlp.linear_fc2.weight"))
    assert re.split(r"\s{2,}", line)[1:] == ["3072 x 12288", "TP 2, dim 1", "DP x CP 2", "DP x CP 2"]


def test_frozen_parameters_are_not_reduced(capsys):
    assert main(["--explain", "--factory", "finetune_lora", "parallel.tensor_model_parallel_size=2"]) == EXIT_OK
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()[1:]]
    frozen = {name for name, *_, reduced in rows if reduced == "frozen"}
    assert frozen == {name for name, *_ in rows if "lora_" not in name}


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
def test_incomparable_settings_are_refused_in_one_line(capsys, words, says):
    assert main(words) == EXIT_CONFIG
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({}, 2),
        ({"context_parallel_size": 2}, 2),
        (TP2SP, 4),
        ({"pipeline_model_parallel_size": 2}, 4),
        ({"expert_model_parallel_size": 2}, 4),
        ({**TP2SP, "pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2}, 16),
    ],
)
def test_at_least_two_ranks_share_each_weight_under_fsdp(layout: dict[str, Any], ranks: int) -> None:
    assert world_size_of(ParallelConfig(data_parallel="fsdp", **layout), None) == ranks


def test_a_failed_check_of_one_rank_is_a_failure() -> None:
    failed = Check({"head.linear.bias": 1.0})
    assert Outcome({"order": Check({"head.linear.bias": 0.0})}, {}).is_right
    assert not Outcome({"order": failed}, {}).is_right
