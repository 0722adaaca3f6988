"""The Triton kernels run in Triton's interpreter, in a separate process, and compile for GPUs that are not present."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from dit.errors import ConfigError
from dit.kernels.choice import Target, choose
from dit.kernels.group_norm import Groups
from dit.kernels.layer_kernels import fused
from dit.kernels.modulation import NormModulation
from dit.kernels.resolve import LAYERS
from dit.kernels.rope import HeadNorm, Heads, Rotation
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from tests.support.calls import CallCounter
from tests.support.ranks import rows
from tests.support.repository import REPOSITORY

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, from the extra `dev`")

BF16, FP32, INT32, INT64, NUMBER = "bf16", "fp32", "int32", "int64", "number"


def interpret(*arguments: str) -> None:
    """Run `tests/interpreted` in one process, because starting a process takes longer than most of its files."""
    folder = str(REPOSITORY / "tests" / "interpreted")
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments, folder],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_kernel_equals_its_formula_in_the_interpreter():
    interpret()


PARTS = {"GATE": 1, "BIAS": 1, "NORM": 1, "WEIGHT": 0}
ROWS = {"RMS": 0, **PARTS}
TOKENS = dict.fromkeys(("x", "y", "gate", "bias", "shift", "scale", "weight", "out", "normed"), BF16)
STATISTICS = {"statistics": FP32, "table": INT32, "offsets": INT32, "sums": FP32}
GRADIENTS = dict.fromkeys(("grad_normed", "grad_out", "grad_x", "grad_y"), BF16)
MODULATIONS = dict.fromkeys(("grad_shift", "grad_scale", "grad_gate", "grad_bias", "grad_weight"), BF16)
HEADS = dict.fromkeys(("x", "weight_q", "weight_k", "q", "k", "grad_q", "grad_k", "grad_v", "grad_x"), BF16)
HEADS |= dict.fromkeys(("cos", "sin", "bias_sums", "weight_sums"), FP32)
HEAD = {"P": 1, "KEY": 1, "NORM": 1, "ROPE": 1, "HALF": 64, "TOKENS": 16, "GROUPS": 4}
MLP = {**dict.fromkeys(("x", "bias", "out", "grad", "grad_x"), BF16), "sums": FP32}
ADAMW = {"addresses": INT64, "chunks": INT32, "clip": FP32, "rates": FP32}
PICTURES = dict.fromkeys(("x", "out", "grad", "grad_x", "scale", "shift", "grad_scale", "grad_shift"), BF16)
PICTURES |= dict.fromkeys(("sums", "weight", "bias", "factors", "rest", "grad_weights"), FP32)
NOISE = {**dict.fromkeys(("x0",), BF16), **dict.fromkeys(("first", "second", "pairs"), FP32), "seeds": "none"}
NOISE |= dict.fromkeys(("segments", "tokens_of_sample", "ids", "step"), INT64)

# Kernel, tensors, constants, warps, and programs per multiprocessor, which share 65,536 registers.
CASES = {
    **{
        f"residual_norm-{width + rest}": (
            "residual_norm.residual_norm_kernel",
            {**TOKENS, **STATISTICS},
            {"WIDTH": width, "REST": rest, "RESIDUAL": 1, **ROWS},
            warps,
            programs,
        )
        for width, rest, warps, programs in ((1024, 128, 2, 8), (2048, 1024, 8, 2), (4096, 0, 16, 1), (8192, 0, 16, 1))
    },
    **{
        f"residual_norm_backward-{width + rest}": (
            "residual_norm.residual_norm_backward_kernel",
            {**TOKENS, **STATISTICS, **GRADIENTS},
            {"WIDTH": width, "REST": rest, "STAGES": 3, "PASSED": 1, **ROWS, **changes},
            warps,
            programs,
        )
        for width, rest, warps, programs, changes in (
            (1024, 128, 2, 4, {}),
            (2048, 1024, 8, 1, {}),
            (4096, 0, 16, 1, {}),
            (4096, 1024, 16, 1, {"BIAS": 0}),
            (8192, 0, 16, 1, {"BIAS": 0, "STAGES": 1}),
        )
    },
    "residual_backward": (
        "residual_norm.residual_norm_backward_kernel",
        {**TOKENS, **STATISTICS, **GRADIENTS},
        {"WIDTH": 512, "REST": 0, "STAGES": 3, "PASSED": 1, **ROWS, "NORM": 0},
        2,
        8,
    ),
    "segment_sums": (
        "segment_sums.segment_sums_kernel",
        {**TOKENS, **STATISTICS, **MODULATIONS},
        {"COLUMNS": 64, "BLOCKS": 32, **PARTS},
        4,
        2,
    ),
    "heads": ("heads.heads_kernel", HEADS, HEAD, 4, 4),
    "heads_backward": ("heads.heads_backward_kernel", HEADS, {**HEAD, "VALUE": 1, "BIAS": 0}, 4, 2),
    "heads_bias_backward": (
        "heads.heads_backward_kernel",
        HEADS,
        {**HEAD, "VALUE": 1, "BIAS": 1, "NORM": 0, "ROPE": 0},
        4,
        2,
    ),
    "gelu": ("activations.activation_kernel", MLP, {"GATED": 0, "BIAS": 1, "COLUMNS": 1024, "ROWS": 16}, 4, 8),
    "gelu_backward": ("activations.activation_backward_kernel", MLP, {"GATED": 0, "BIAS": 1, "COLUMNS": 1024}, 4, 8),
    "geglu": ("activations.activation_kernel", MLP, {"GATED": 2, "BIAS": 0, "COLUMNS": 2048, "ROWS": 16}, 4, 8),
    "swiglu": ("activations.activation_kernel", MLP, {"GATED": 1, "BIAS": 0, "COLUMNS": 2048, "ROWS": 16}, 4, 8),
    "adamw": (
        "adamw.adamw_kernel",
        ADAMW,
        {"AVERAGE": 1, "MODEL": 1, "HALF": 0, "ALIGNED": 1, "BLOCK": 512, "CHUNK": 16384},
        4,
        8,
    ),
    "add_gradients": (
        "gradients.add_gradients_kernel",
        ADAMW,
        {"HALF": 0, "ALIGNED": 1, "BLOCK": 1024, "CHUNK": 16384},
        4,
        8,
    ),
    **{
        f"{name}-{width}": (
            f"group_norm.{name}_kernel",
            PICTURES,
            {"WIDTH": width, "ROWS": max(1, 2048 // width), "ACTIVATE": 1},
            warps,
            programs,
        )
        for width, warps in ((128, 4), (512, 4), (2048, 8))
        for name, programs in (
            ("group_sums", 6 if warps == 4 else 3),
            ("norm_groups", 7 if warps == 4 else 3),
            ("group_gradient_sums", 5 if warps == 4 else 2),
            ("norm_groups_backward", 5 if warps == 4 else 2),
        )
    },
    "noise": (
        "noise.mix_kernel",
        NOISE,
        {"CHANNELS": 16, "BLOCKS": 4, "SEEDS": 0, "SECOND": 1, "COUNTERS": 256},
        4,
        8,
    ),
    "geglu_backward": ("activations.activation_backward_kernel", MLP, {"GATED": 2, "BIAS": 0, "COLUMNS": 2048}, 4, 8),
    "swiglu_backward": ("activations.activation_backward_kernel", MLP, {"GATED": 1, "BIAS": 0, "COLUMNS": 2048}, 4, 8),
}
QUICK = ("residual_norm_backward-1152", "heads_backward", "swiglu", "adamw", "norm_groups_backward-512", "noise")
WIDTHS_64 = {"adamw": 7 + 1, "add_gradients": 3, "group_sums-512": 1, "noise": 2 + 4}
"""Accesses of 64 bits, where a program has no more: the row of a table of addresses, and four elements as bf16; the
first position of a block; latents of four channels, and whole numbers that say whose they are."""
SPILLS = {"norm_groups_backward-128": 2, "norm_groups_backward-512": 2, "residual_norm_backward-8192": 4}
"""Instructions by which the ptxas of Triton 3.9 gains a program on sm_90; a limit of registers makes sm_100 spill."""
REGISTERS = 65536
"""Of a multiprocessor of both GPUs; a thread gets them in eights."""


@pytest.mark.parametrize(
    ("case", "capability"),
    rows(
        product(CASES, (90, 100)),
        quick=lambda case, capability: case in QUICK and (capability == 90 or case == "noise"),
        long=lambda case, _: case in QUICK,
    ),
)
def test_a_kernel_compiles_without_spills_and_reads_128_bits_at_once(case: str, capability: int):
    """Enough registers are left for the occupancy that the kernel needs."""
    from tests.support.ahead_of_time import compiled

    kernel, types, flags, warps, programs = CASES[case]
    module, name = kernel.split(".")
    module = import_module(f"dit.kernels.fused.gpu.{module}")
    limit = module.MAX_REGISTERS if name == "heads_backward_kernel" else None
    made = compiled(getattr(module, name), types, flags, num_warps=warps, maxnreg=limit, capability=capability)
    assert made.spills <= SPILLS.get(case, 0)
    assert -(-made.registers // 8) * 8 * 32 * warps * programs <= REGISTERS, f"{made.registers} registers"
    # Scalars per row and final sums of a program use 32 bits; 64 bits would mean tokens read in halves.
    assert set(made.accesses) <= {16, 32, 64, 128}
    if not flags.get("REST"):
        assert made.accesses.get(64, 0) == WIDTHS_64.get(case, 0)
    assert made.accesses[128] >= (2 if kernel == "group_norm.group_sums_kernel" else 3)
    if flags.get("STAGES", 1) > 1:  # two rows before the loop and one inside it, for both gradients, x and y
        copies = 3 * (2 * flags["NORM"] + flags["PASSED"] + flags["GATE"])
        assert made.copies[128] == copies * flags["WIDTH"] // (8 * 32 * warps)
        if flags["REST"]:
            assert made.copies[16 * flags["REST"] // (32 * warps)] >= copies


@pytest.mark.parametrize(
    ("capability", "kib", "size", "rows"),
    [
        (120, 99, 4096, 1),
        pytest.param(80, 163, 6144, 1, marks=pytest.mark.slow),
        pytest.param(90, 227, 6144, 2, marks=pytest.mark.slow),
    ],
)
def test_rows_copied_in_advance_fit_into_the_shared_memory_of_the_device(monkeypatch, capability, kib, size, rows):
    """In fp32, the widest rows; Triton refuses a kernel that needs more than the device has."""
    from dit.kernels.fused.gpu import residual_norm as gpu
    from tests.support.ahead_of_time import compiled

    utils = SimpleNamespace(get_device_properties=lambda index: {0: {"max_shared_mem": kib * 1024}}[index])
    monkeypatch.setattr(gpu, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    shared = gpu.shared_bytes.__wrapped__(torch.device("cuda", 0))
    width, rest = gpu.tiles(size)
    stages = gpu.stages(width + rest, 4 * 4, shared)
    types = {name: FP32 if kind == BF16 else kind for name, kind in {**TOKENS, **STATISTICS, **GRADIENTS}.items()}
    flags = {"WIDTH": width, "REST": rest, "STAGES": stages, "PASSED": 1, **ROWS, "BIAS": 0}
    warps = gpu.warps(width, rest)
    made = compiled(gpu.residual_norm_backward_kernel, types, flags, num_warps=warps, capability=capability)
    assert stages == 1 + rows
    assert rows * size * 4 * 4 < made.shared_bytes <= kib * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_adds_the_gradients_of_all_parameters(dtype):
    """Gradients in fp32 are added by torch, also in one kernel."""
    from dit.kernels.fused.gpu.gradients import CHUNK
    from dit.kernels.fused.gradients import add_gradients
    from tests.support.ahead_of_time import record_launches

    sizes = (8, CHUNK, CHUNK + 8)
    with record_launches() as launches, CallCounter() as calls:
        add_gradients([torch.zeros(n) for n in sizes], [torch.ones(n, dtype=dtype) for n in sizes])
    fused = [("add_gradients_kernel", 4)] if dtype == torch.bfloat16 else []
    assert [(launch.name, launch.grid) for launch in launches] == fused
    assert calls.by_operation["_foreach_add_"] == 1 - len(fused)
    main = torch.zeros(8)
    with record_launches() as launches:  # two programs would add to one parameter at the same time
        add_gradients([main, main], [torch.ones(8, dtype=dtype)] * 2)
    assert not launches
    assert torch.equal(main, torch.full((8,), 2.0))


def launches_of(lengths, side):
    """Return the launches of every fused kernel of a layer for a pack, and of a group norm for a picture."""
    from dit.kernels.fused.noise import mix
    from tests.support.ahead_of_time import record_launches

    layout, kernels = SequenceLayout.from_lengths(lengths), fused()
    T, S, D = layout.total_tokens, layout.num_samples, 64

    def leaf(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    with record_launches() as launches:
        into = NormModulation(leaf(S, D), leaf(S, D), 1e-6, leaf(D))
        rotation = Rotation(torch.zeros(T, 1, 8), torch.zeros(T, 1, 8))
        outs = [
            *kernels.residual_norm_modulate(leaf(T, D), leaf(T, D), leaf(S, D), leaf(D), into, layout),
            *kernels.split_heads(leaf(T, 192), 4, Heads(1), HeadNorm(leaf(16), leaf(16), 1e-6), rotation, leaf(192)),
            kernels.gelu_tanh(leaf(T, D), leaf(D)),
            kernels.norm_groups(leaf(1, D, side, side), Groups(leaf(D), leaf(D), 8, 1e-6), leaf(1, D), leaf(1, D)),
        ]
        torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
        mix(AddressedNoise(3, 11, torch.arange(S), layout, None, mix), torch.zeros(T, 4), [(1.0, 1.0)], None)
    return launches


def test_a_kernel_is_compiled_once_for_packs_and_pictures_of_all_sizes():
    """Triton compiles a kernel again if a number is 1, or becomes a multiple of 16, unless it is told not to."""
    packs = launches_of([16, 16], 4), launches_of([3], 1)
    assert len({launch.name for launch in packs[0]}) == 15
    for one, other in zip(*packs, strict=True):
        assert one.name == other.name
        changed = {name for name, value in one.sizes.items() if value != other.sizes[name]}
        assert changed <= set(one.kernel.do_not_specialize), one.name


def test_the_auto_setting_runs_eager_everywhere_until_a_gpu_has_passed():
    for device in ("cpu", "cuda"):
        target = Target(torch.device(device), torch.bfloat16)
        assert choose(LAYERS, target).name == "eager"
        assert choose(LAYERS, replace(target, device=torch.device("cuda")), "triton").load().adds_bias
    with pytest.raises(ConfigError, match="='triton' needs CUDA, not cpu"):
        choose(LAYERS, Target(torch.device("cpu"), torch.bfloat16), "triton")
