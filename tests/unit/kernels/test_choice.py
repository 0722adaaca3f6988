"""`auto` selects an op's first implementation that can run and needs no opt-in; errors and the table have reasons."""

import re
from dataclasses import fields, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from torch.nn.attention import list_flash_attention_impls
from torch.overrides import TorchFunctionMode

from dit.backends.deterministic import deterministic
from dit.backends.provider import LINEARS
from dit.errors import ConfigError
from dit.kernels.attention import varlen_attention
from dit.kernels.choice import (
    SLOW_START,
    UNTRIED,
    UNVERIFIED,
    Implementation,
    Op,
    Target,
    choose,
    head_sizes,
    installed,
    on_cuda,
    table,
)
from dit.kernels.resolve import ATTENTION, ATTENTION_BLOCKS, LAYERS
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.implementations import OPS, implementations, target_of
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from launch.kernels import main
from tests.laws.backbones import config_of, pack
from tests.support.repository import REPOSITORY

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF, FULL = torch.bfloat16, torch.float32

# In order of preference; "new" is not verified, "fast" needs CUDA and small heads.
NEW = Implementation("new", lambda: "N", (installed("torch"),), UNVERIFIED)
FAST = Implementation("fast", lambda: "F", (on_cuda, head_sizes(multiple_of=4, largest=8)))
ANY = Implementation("any", lambda: "A")
TOY = Op("toy", (NEW, FAST, ANY), "training.toy")


@pytest.mark.parametrize(
    ("device", "head_size", "asked", "expected"),
    [
        (GPU, None, "auto", "fast"),
        (GPU, 8, "auto", "fast"),
        (GPU, 12, "auto", "any"),
        (GPU, 6, "auto", "any"),
        (CPU, 8, "auto", "any"),
        (CPU, 8, "new", "new"),
        (GPU, 8, "any", "any"),
    ],
)
def test_the_first_available_or_the_requested_implementation_is_selected(device, head_size, asked, expected):
    assert choose(TOY, Target(device, HALF, frozenset({head_size} - {None})), asked).name == expected


@pytest.mark.parametrize(
    ("head_size", "device", "asked", "words"),
    [
        (8, CPU, "fast", "training.toy='fast' needs CUDA, not cpu; or use 'auto'"),
        (12, GPU, "fast", "'fast' needs a head size that is a multiple of 4 up to 8, not 12; or use 'auto'"),
        (8, CPU, "fats", "training.toy='fats' is unknown; use one of auto, new, fast, any"),
    ],
)
def test_an_unavailable_implementation_is_refused_with_the_reason(head_size, device, asked, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        choose(TOY, Target(device, HALF, frozenset({head_size})), asked)


def test_the_table_states_why_others_are_not_selected():
    target = Target(GPU, HALF, frozenset({12}))
    by_itself, asked = (table([TOY], target, asked)["toy"] for asked in ({}, {"training.toy": "new"}))
    heads = "needs a head size that is a multiple of 4 up to 8, not 12"
    assert (by_itself.name, by_itself.others) == ("any", {"new": UNVERIFIED, "fast": heads})
    assert (asked.name, asked.others) == ("new", {"fast": heads, "any": "training.toy=new"})
    assert table([TOY], Target(GPU, HALF), {})["toy"].others["any"] == "fast comes first"


def test_auto_selects_a_verified_implementation():
    """Only for the op that was verified, and only if the requirements are met."""
    target = Target(GPU, HALF, frozenset({8}), frozenset({"toy.new"}))
    assert choose(TOY, target).name == "new"
    assert table([TOY], target, {})["toy"].others == dict.fromkeys(("fast", "any"), "new comes first")
    assert choose(TOY, replace(target, verified=frozenset({"other.new"}))).name == "fast"
    assert (
        choose(replace(TOY, implementations=(replace(NEW, requires=(on_cuda,)), ANY)), replace(target, device=CPU))
        == ANY
    )


def test_every_op_has_an_implementation_that_runs_everywhere():
    """Even with every package installed, `auto` only selects implementations of other packages if verified."""
    for op in OPS:
        assert op.implementations[-1] == replace(op.implementations[-1], requires=(), opt_in_reason=None), op.name
    opt_in = {
        one.name: one.opt_in_reason for op in (ATTENTION, LAYERS) for one in op.implementations if one.opt_in_reason
    }
    packages = ("transformer_engine", "flash_attn_4", "flash_attn_3", "flash_attn", "triton")
    assert opt_in == {**dict.fromkeys(packages, UNVERIFIED), "compile": SLOW_START}
    assert [one.opt_in_reason for one in LINEARS.implementations] == [UNTRIED, UNTRIED, None]


def test_kernels_that_may_not_be_deterministic_are_not_selected_in_deterministic_runs(monkeypatch):
    monkeypatch.setattr("dit.kernels.choice.find_spec", lambda name: name)
    target = Target(GPU, HALF, frozenset({64}), frozenset({"attention.transformer_engine"}))
    assert choose(ATTENTION, target).name == "transformer_engine"
    with deterministic(True):
        assert choose(ATTENTION, target).name == "varlen"


@pytest.mark.parametrize(
    ("major", "head_size", "verified", "expected"),
    [
        (10, 128, {"flash_attn_3", "flash_attn_4"}, "flash_attn_4"),
        (10, 160, {"flash_attn_3", "flash_attn_4"}, "varlen"),
        (9, 128, {"flash_attn_3"}, "flash_attn_3"),
        (10, 128, {"flash_attn_3"}, "varlen"),
        (8, 128, {"flash_attn_3", "flash_attn_4", "flash_attn"}, "flash_attn"),
        (8, 320, {"flash_attn", "transformer_engine"}, "sdpa"),
        (9, 128, set(), "varlen"),
        (7, 64, {"flash_attn"}, "sdpa"),
    ],
)
def test_flash_attention_is_selected_by_the_device(monkeypatch, major, head_size, verified, expected):
    """FlashAttention 3 on Hopper, 4 on Hopper and Blackwell, 2 from Ampere on, each only if verified and for its heads.

    Packages raise an error in the first step for other devices and heads.
    """
    monkeypatch.setattr("dit.kernels.choice.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    target = Target(GPU, HALF, frozenset({head_size}), frozenset(f"attention.{name}" for name in verified))
    assert choose(ATTENTION, target).name == expected


@pytest.mark.parametrize(("name", "version"), [("flash_attn_3", "FA3"), ("flash_attn_4", "FA4")])
def test_flash_attention_is_activated_in_torch(monkeypatch, name, version):
    """It is activated by torch's name for it; packs then call torch's operators."""
    activated = []
    monkeypatch.setattr("dit.kernels.attention.activate_flash_attention_impl", activated.append)
    one = next(one for one in ATTENTION.implementations if one.name == name)
    assert one.load() is varlen_attention
    assert activated == [version]
    assert version in list_flash_attention_impls()


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "attention", "blocks"),
    [
        (CPU, HALF, 64, "sdpa", "eager"),
        (GPU, FULL, 64, "sdpa", "eager"),
        (GPU, HALF, 64, "varlen", "flash"),
        (GPU, torch.float16, 72, "varlen", "flash"),
        (GPU, HALF, 12, "sdpa", "eager"),
        (GPU, HALF, 512, "sdpa", "eager"),
    ],
)
def test_attention_is_selected_by_device_precision_and_head_size(device, dtype, head_size, attention, blocks):
    """torch's packed kernels support half precision on CUDA, and head sizes that are multiples of 8 up to 256."""
    target = Target(device, dtype, frozenset({head_size}))
    assert (choose(ATTENTION, target).name, choose(ATTENTION_BLOCKS, target).name) == (attention, blocks)


def test_every_head_size_must_be_supported():
    assert choose(TOY, Target(GPU, HALF, frozenset({4, 8}))).name == "fast"
    with pytest.raises(ConfigError, match="multiple of 4 up to 8, not 12"):
        choose(TOY, Target(GPU, HALF, frozenset({8, 12})), "fast")


class AttentionHeads(TorchFunctionMode):
    """Collects the head sizes of attention."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.sizes.add(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


UNETS = ("ddpm_unet", "edm2_unet", "ldm_unet", "sdxl_unet", "imagen", "efficient_unet")


@pytest.mark.parametrize("name", ["dit", "wide head", "sana", "lumina2", *UNETS])
def test_a_target_has_the_head_sizes_of_every_attention_of_the_model(name, build_model):
    config = config_of(name)
    if name == "sana":
        config = replace(config, num_cross_attention_heads=config.num_attention_heads // 2)
    step = training_forward_step(FlowMatching(), config, 8, 0)
    with AttentionHeads() as heads:
        step(iter([pack(config, [0, 1])]), build_model(config))
    assert heads.sizes == target_of(config, "bf16", GPU).head_sizes


def test_the_target_equals_that_of_the_model():
    model = DiTConfig(hidden_size=96, num_attention_heads=8, num_layers=1, in_channels=4)
    assert target_of(model, "bf16", GPU) == Target(GPU, HALF, frozenset({12}))
    training = TrainingConfig(precision="fp32", attention="sdpa", linears="megatron")
    found = implementations(model, training)
    assert (found["attention"].name, found["linears"].name) == ("sdpa", "megatron")
    for name, value, words in (
        ("attention", "transformer_engine", "needs bf16 or fp16 on CUDA, not float32 on cpu"),
        ("linears", "transformer_engine", "needs CUDA"),
        ("linears", "overlapped", "needs CUDA, not cpu"),
    ):
        with pytest.raises(ConfigError, match=f"training.{name}='{value}' {words}"):
            implementations(model, replace(training, **{name: value}))


def test_overlapped_linears_need_torchs_operations(monkeypatch):
    assert choose(LINEARS, Target(GPU, HALF), "overlapped").name == "overlapped"
    assert choose(LINEARS, Target(GPU, HALF)).name == "megatron"
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace())
    with pytest.raises(ConfigError, match=r"'overlapped' needs torch.ops.symm_mem.fused_matmul_reduce_scatter, which"):
        choose(LINEARS, Target(GPU, HALF), "overlapped")


@pytest.mark.parametrize(("op", "package"), [(ATTENTION, "flash_attn"), (LINEARS, "transformer_engine")])
def test_a_package_that_is_not_installed_is_named(op, package):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=f"{op.setting}='{package}' needs {package}, which is not installed; pip"):
        choose(op, Target(GPU, HALF), package)


def test_settings_name_the_implementations():
    """A setting accepts `auto` and the implementations of its op."""
    types = get_type_hints(TrainingConfig)
    for op in (ATTENTION, LINEARS, LAYERS):
        values = get_args(types[str(op.setting).removeprefix("training.")])
        assert (values[0], set(values[1:])) == ("auto", {one.name for one in op.implementations})


def test_every_function_that_layers_call_is_an_op():
    """Layers and models import only types from these modules; functions come with the set that a run selects."""
    sources = [path.read_text() for room in ("layers", "models") for path in (REPOSITORY / "dit" / room).rglob("*.py")]
    lines = [
        line for text in sources for line in re.findall(r"from dit\.kernels\.(?:modulation|rope) import (.*)", text)
    ]
    assert not {name for line in lines for name in line.split(", ") if name.islower()}
    for one in LAYERS.implementations:  # fused kernels load without a GPU, because they are compiled when they run
        kernels = one.load()
        given = {field.name: getattr(kernels, field.name) for field in fields(kernels)}
        functions = {name: value for name, value in given.items() if not isinstance(value, bool)}
        assert {name: function.__name__ for name, function in functions.items()} == {name: name for name in functions}


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture):
    assert main(["--precision", "fp32"]) == 0
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["CPU,", "fp32"]
    assert ["attention", "sdpa", "selected"] in lines
    assert ["varlen", "needs", "bf16 or fp16 on CUDA, not float32 on cpu"] in lines
    assert {line[0] for line in lines if line[-1] == "selected"} == {op.name for op in OPS}
