"""The deterministic mode is only set inside the context; settings that contradict it are refused."""

import os

import pytest
import torch

from dit.backends.deterministic import TRANSFORMER_ENGINE, WORKSPACE, deterministic
from dit.errors import ConfigError
from dit.settings import TrainingConfig


def present() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    flags = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    return *flags, os.environ.get(WORKSPACE), os.environ.get(TRANSFORMER_ENGINE)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WORKSPACE, TRANSFORMER_ENGINE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # must be switched off and on again


def test_deterministic_mode_ends_with_its_context() -> None:
    before = present()
    with deterministic(True):
        assert present() == (True, True, False, ":4096:8", "0")
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert present() == before
    with pytest.raises(KeyError), deterministic(True):
        raise KeyError
    assert present() == before
    with deterministic(False):
        assert present() == before


def test_workspace_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic(True):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize(("name", "value"), [(WORKSPACE, ":0:0"), (TRANSFORMER_ENGINE, "1")])
def test_an_environment_that_contradicts_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"needs {name}=.* but the environment has '{value}'"), deterministic(True):
        pass
    with deterministic(False):
        pass


@pytest.mark.parametrize(
    "setting",
    [
        {"attention": "transformer_engine"},
        {"linears": "transformer_engine"},
        {"linears": "overlapped"},
        {"kernels": "compile"},
    ],
)
def test_kernels_that_select_by_themselves_are_refused(setting: dict[str, object]) -> None:
    TrainingConfig(**setting).validate()
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"deterministic=True does not work with training\.{name}="):
        TrainingConfig(deterministic=True, **setting).validate()
    TrainingConfig(deterministic=True, attention="flash_attn", kernels="triton").validate()


def test_bitwise_comparisons_require_determinism() -> None:
    TrainingConfig(recheck_interval=5, deterministic=True).validate()
    with pytest.raises(ConfigError, match=r"recheck_interval=5 .*set training\.deterministic=True"):
        TrainingConfig(recheck_interval=5).validate()
