"""Features that a backbone does not support are refused before anything is built: in training, dry run and sampling."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional

import nemo_run as run
import pytest

from dit.backends.process_groups import ProcessGroups
from dit.errors import ConfigError
from dit.models.base import DESCRIPTIONS, Supports
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig, check_supported
from dit.run_config import RunConfig
from dit.settings import TrainingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from launch.dry_run import report
from recipes.tiny import tiny_dit

HALVES = ("bf16", "fp16")
NOTHING = dict.fromkeys(Supports.__dataclass_fields__, False)
EVERYTHING = Supports(**dict.fromkeys(NOTHING, True))


@dataclass(kw_only=True)
class DataParallelOnly(DiTConfig):
    """A backbone with experts that only supports data parallelism in fp32 on samples of one shape."""

    supports = Supports(**NOTHING)
    num_experts: Any = 4
    num_classes: Any = 3
    model_path: ClassVar[Optional[str]] = "tests:NothingIsBuilt"


ASKED = {
    "tensor": ({"tensor_model_parallel_size": 2}, "tensor parallelism, which parallel.tensor_model_parallel_size=2"),
    "pipeline": ({"pipeline_model_parallel_size": 2}, "pipeline parallelism, which parallel.pipeline_model_parallel"),
    "context": ({"context_parallel_size": 2}, "context parallelism, which parallel.context_parallel_size=2"),
    "expert": ({"expert_model_parallel_size": 2}, "expert parallelism, which parallel.expert_model_parallel_size=2"),
    "sequence": ({"sequence_parallel": True}, "sequence parallelism, which parallel.sequence_parallel=True"),
    "fsdp": ({"data_parallel": "fsdp"}, "FSDP, which parallel.data_parallel=fsdp"),
    "bf16": ({}, "bf16, which training.precision=bf16"),
    "fp16": ({}, "fp16, which training.precision=fp16"),
}


def run_of(parallel: dict, precision: str, model: DiTConfig | None = None, data: Any = None) -> RunConfig:
    return RunConfig(
        model=DataParallelOnly() if model is None else model,
        data=MockData(shapes=["1x16x16"]) if data is None else data,
        objective=FlowMatching(),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(precision=precision, global_batch_size=8, micro_batch_size=2),
    )


def dry_run(config: RunConfig) -> None:
    task = tiny_dit()
    task.model = run.Config(DataParallelOnly)
    for part in ("parallel", "training"):
        for name, value in vars(getattr(config, part)).items():
            setattr(getattr(task, part), name, value)
    report(task, None)


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "fp8", "says"),
    [
        (2, False, None, "there is none with .*_size=2 and sequence_parallel=False; use at least 2 and True, or"),
        (1, False, None, "there is none with .*_size=1 and sequence_parallel=False; use at least 2 and True, or"),
        (2, True, "mxfp8", "cannot quantise its products by training.fp8=mxfp8; use training.fp8=None, or"),
    ],
)
def test_linears_without_communication_or_with_quantised_products_are_not_overlapped(
    ranks: int, sequence_parallel: bool, fp8: Any, says: str
) -> None:
    layout = ParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    with pytest.raises(ConfigError, match=f"^training.linears=overlapped .*{says} training.linears=auto$"):
        check_supported(DiTConfig(), layout, TrainingConfig(linears="overlapped", fp8=fp8))
    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    check_supported(DiTConfig(), layout, TrainingConfig(linears="overlapped"))


@pytest.mark.parametrize("what", ASKED)
def test_unsupported_features_are_refused_equally_everywhere(one_rank_world: ProcessGroups, what: str) -> None:
    """Training, the dry run and sampling give the same message, which lists the supported features."""
    parallel, says = ASKED[what]
    config = run_of(parallel, what if what in HALVES else "fp32")
    doors = {
        "training": config.check_here,
        "dry run": lambda: dry_run(config),
        "sampling": lambda: build_model(config.model, config.parallel, config.training, one_rank_world),
    }
    found = []
    for door in doors.values():
        with pytest.raises(ConfigError) as raised:
            door()
        found.append(str(raised.value))
    assert len(set(found)) == 1
    assert found[0].startswith(f"DataParallelOnly does not support {says}")
    assert "it supports data parallelism, fp32. Use " in found[0]


def test_the_message_names_a_setting_without_which_the_model_supports_the_feature() -> None:
    config = run_of({"pipeline_model_parallel_size": 2}, "fp32", DiTConfig(value_residual=True, num_layers=4))
    cure = "Use parallel.pipeline_model_parallel_size=1, or model.value_residual=False$"
    with pytest.raises(ConfigError, match=cure):
        config.check()


def test_each_unsupported_feature_is_refused_and_listed_separately() -> None:
    """No flag implies another: the message names one missing feature and lists the others."""
    words = DESCRIPTIONS
    others = {"mixed_shapes", "levels", "split_texts", "aligned", "compiled", "fixed_packs"}
    assert words.keys() == ASKED.keys() | others
    for what, (parallel, says) in ASKED.items():

        @dataclass(kw_only=True)
        class Lacks(DataParallelOnly):
            supports = replace(EVERYTHING, **{what: False})

        if what == "sequence":
            parallel = {**parallel, "tensor_model_parallel_size": 2}
        with pytest.raises(ConfigError, match=says) as raised:
            run_of(parallel, what if what in HALVES else "bf16", Lacks()).check()
        listed = str(raised.value).partition("it supports ")[2].partition(". Use")[0].split(", ")
        assert listed == ["data parallelism", "fp32", *(word for name, word in words.items() if name != what)]


def test_supported_features_are_accepted() -> None:
    """The same backbone may run with data parallelism in fp32; DiT supports everything."""
    assert run_of({}, "fp32").check(world_size=4)[0].data_parallel_size == 4
    assert DiTConfig().supports == EVERYTHING
    everything = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    everything |= {"context_parallel_size": 2, "expert_model_parallel_size": 2}
    run_of(everything, "bf16", DiTConfig(num_experts=4)).check()


@pytest.mark.parametrize(
    ("data", "mixes"),
    [
        (MockData(shapes=["1x16x16"], max_tokens_per_pack=256), False),
        (MockData(shapes=["1x16x16", "1x16x8"]), True),
        (EnergonData(path="x", bucket_by_shape=True), False),
        (EnergonData(path="x"), True),
    ],
)
def test_unsupported_sample_shapes_are_refused(data: Any, mixes: bool) -> None:
    config = run_of({}, "fp32", data=data)
    config.training.micro_batch_size = 1 if getattr(data, "max_tokens_per_pack", None) else 2
    replace(config, model=DiTConfig()).check()
    if not mixes:
        config.check()
        return
    with pytest.raises(ConfigError, match=r"samples of different shapes in one micro-batch, which data=.*bucket_by"):
        config.check()
    config.training.micro_batch_size = 1
    config.check()
