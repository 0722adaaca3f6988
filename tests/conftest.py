"""Fixtures shared by the CPU tests: one Megatron-Core world of a single rank, and models built on it."""

import contextlib
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from dit.backends import init
from dit.backends.process_groups import ProcessGroups
from dit.backends.provider import LayerProvider
from dit.models.base import Backbone, ModelConfig
from dit.models.registry import build_backbone
from dit.verify.ranks import FORKS
from energon_data.workers import background
from tests.left_out import pytest_deselected, pytest_terminal_summary, pytest_testnodedown  # noqa: F401
from tests.support.repository import REPOSITORY, changed, outputs

if TYPE_CHECKING:
    from dit.planner.trace import Tracer

background.PRELOAD.append("tests.preload")
FORKS.set_forkserver_preload(background.PRELOAD)
if "PYTEST_XDIST_WORKER" in os.environ:  # the controller collects no tests, so nothing would enable it again
    gc.disable()  # until all modules are imported

BuildModel = Callable[..., Backbone]
DRAW = lru_cache(maxsize=4096)(init.draw)
"""Cached, because models of different tests have the same initial weights."""


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collections, and make these rare.

    A full collection starts when new objects are a quarter of the objects that are not frozen, which are few after the
    freeze. With the default thresholds, full collections take a tenth of the time of the tests.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _session_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run module fixtures in a temporary folder; fail if outputs in the clone changed."""
    before = outputs(REPOSITORY)
    folder = tmp_path_factory.mktemp("tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("session"))
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        patch.setenv("COUNTED_OPERATIONS", str(tmp_path_factory.mktemp("counts")))
        yield folder
    names = changed(before, outputs(REPOSITORY))
    assert not names, f"{names[:9]} in {REPOSITORY} changed during the tests: a test wrote there, or a command of yours"


@pytest.fixture(autouse=True)
def _working_folder(request: pytest.FixtureRequest, _session_folder: Path) -> Iterator[None]:
    """Run each test in a temporary folder, so that relative paths such as `data/letters` are outside the clone.

    Tests without `tmp_path` share a folder, because a new one takes longer than most of them.
    """
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else _session_folder
    with contextlib.chdir(folder):
        yield
    if folder is _session_folder and os.listdir(folder):
        shutil.rmtree(folder)
        folder.mkdir()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a folder that the tests of a module share."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="session")
def one_rank_world() -> Iterator[ProcessGroups]:
    """Start a world of one rank on CPU, even if there is a GPU; CUDA calls of this process stay redirected."""
    from dit.backends import process_groups
    from dit.parallel.dims import ParallelConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIT_DEVICE", "cpu")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield process_groups.initialize(ParallelConfig())
        process_groups.destroy()


@pytest.fixture(scope="module")
def one_tracer() -> Iterator["Tracer"]:
    """Trace all plans of a module in one process, which keeps the results of operations."""
    from dit.planner.trace import Tracer

    with Tracer() as tracer, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dit.planner.plan.trace", tracer)
        yield tracer


@pytest.fixture
def provider_of(one_rank_world: ProcessGroups) -> Callable[..., LayerProvider]:
    """Return the layers of one rank in fp32, from sizes of a `TransformerConfig`."""
    from megatron.core.transformer import TransformerConfig

    def build(**sizes: Any) -> LayerProvider:
        config = TransformerConfig(
            **{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, **sizes},
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            params_dtype=torch.float32,
        )
        return LayerProvider(config, one_rank_world.collection)

    return build


@pytest.fixture
def provider(provider_of: Callable[..., LayerProvider]) -> LayerProvider:
    """The layers of a small transformer."""
    return provider_of()


@pytest.fixture
def build_model(provider_of: Callable[..., LayerProvider]) -> BuildModel:
    """Build a full fp32 model on one rank from its config, with counter-based initial weights.

    `perturb` is the standard deviation of seeded noise added to all parameters, including zeros and ones.
    """
    from dit.kernels.attention import segment_sdpa
    from dit.models.base import Stage

    def build(model_config: ModelConfig, *, seed: int = 3, perturb: float = 0.0) -> Backbone:
        sizes = model_config.megatron_sizes()
        provider = provider_of(**sizes.arguments())
        model = build_backbone(model_config, provider, segment_sdpa, Stage(range(sizes.num_layers)))
        with mock.patch.object(init, "draw", DRAW):
            init.initialize_weights(model, seed, tp_rank=0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters() if perturb else ():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=perturb)
        return model

    return build
