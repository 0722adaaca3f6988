"""Every layout computes the losses, gradients and weights of one rank."""

import pytest
import torch

from benchmarks.parallel_world import run_world
from dit.models.lora_config import LoRAConfig
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import UncertaintyWeighting
from dit.objectives.mean_flow import MeanFlow
from dit.verify.compare import SUM_RTOL, relative_errors
from tests.support.ranks import rows, selected
from tests.support.reference import assert_equal_training

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    2: {
        "dp2": {"data_parallel": "ddp"},
        "distributed_optimizer2": {},
        "distributed_optimizer2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        "tp2": {"tensor_model_parallel_size": 2},
        "tp2_sp": TP2SP,
    },
    4: {
        "tp2_sp_distributed_optimizer2": TP2SP,
        "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    },
}
# Bytes sent in one step of four micro-batches of 40 tokens, by the tiny model of 4 layers; other cases have 2 layers.
TRAFFIC = {
    "tp4_sp": LAYOUTS[4]["tp4_sp"],
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2_tp2_sp": {"pipeline_model_parallel_size": 2, **TP2SP},
}
TOKENS, SAMPLES, HIDDEN, LAYERS, MICRO_BATCHES, OUT_CHANNELS, FP32_BYTES = 40, 2, 32, 4, 4, 16, 4
# The head u(sigma) is on the last stage, with a copy on each tensor-parallel rank, which processes all tokens. The
# contrastive negative of a sample has another size, and its tokens are on another context-parallel rank. The difference
# of MeanFlow divides rounding, which depends on the layout, by its step; the model has a time scale for a large step.
OBJECTIVES = {
    "uncertainty": EDM(weighting=UncertaintyWeighting()),
    "contrastive": ContrastiveFlowMatching(contrast_weight=0.3, shift_dimension=64),
    "cosine": FlowMatching(loss_kind="l2_cosine"),
    "mean_flow": MeanFlow(
        instant_share=0.25, difference=0.1, shift_dimension=64, guidance_scale=2.0, adaptive_power=1.0
    ),
    "mean_flow_dense": MeanFlow(instant_share=0.0, difference=0.1),
}
SHALLOW = {"num_layers": 2}
INTERVALS = {"interval_conditioning": True, "time_scale": 1.0}
OBJECTIVE_LAYOUTS = {
    "uncertainty": {
        **{"tp2_sp": TP2SP, "pp2": {"pipeline_model_parallel_size": 2}, "cp2": {"context_parallel_size": 2}},
        "fsdp2": {"data_parallel": "fsdp"},
    },
    "contrastive": {
        **{"distributed_optimizer2": {}, "tp2_sp": TP2SP, "cp2": {"context_parallel_size": 2}},
        "cp2_contiguous": {"context_parallel_size": 2, "context_split": "contiguous"},
    },
    "cosine": {"tp2_sp": TP2SP, "cp2": {"context_parallel_size": 2}},
    "mean_flow": {
        **{"distributed_optimizer2_overlap": LAYOUTS[2]["distributed_optimizer2_overlap"], "tp2_sp": TP2SP},
        **{"cp2": {"context_parallel_size": 2}, "fsdp2": {"data_parallel": "fsdp"}},
    },
    "mean_flow_dense": {"dp2": {"data_parallel": "ddp"}, "tp2": {"tensor_model_parallel_size": 2}},
}
OBJECTIVE_CASES = [(objective, name) for objective, named in OBJECTIVE_LAYOUTS.items() for name in named]
# Adapters of the blocks, after a frozen embedding; of every linear layer; of layers that read a text, which is
# replicated under sequence parallelism; and of modulations that all stages share.
ALL = LoRAConfig(rank=3, alpha=6.0, targets=["*"])
ADAPTERS = {
    "blocks": {**SHALLOW, "lora": LoRAConfig(rank=3)},
    "all": {**SHALLOW, "lora": ALL},
    "text": {"backbone": "dit_cross", "lora": ALL},
    "streams": {
        **{"backbone": "flux2", "num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48},
        **{"rope_axes": [2, 2, 2, 2], "lora": ALL},
    },
    "unet": {
        **{"backbone": "ldm_unet", "in_channels": 16, "block_out_channels": [8, 16], "transformer_layers": [1, 0]},
        **{"layers_per_block": 1, "norm_num_groups": 4, "lora": ALL},
    },
}
UNPACKED = ("unet",)  # its pictures have one size
ADAPTED = {
    2: {
        "dp2": {"data_parallel": "ddp"},
        "distributed_optimizer2_overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        "tp2_sp": TP2SP,
        "pp2": {"pipeline_model_parallel_size": 2},
        "cp2": {"context_parallel_size": 2},
        "fsdp2": {"data_parallel": "fsdp"},
    },
    4: {"tp2_sp_fsdp2": {"data_parallel": "fsdp", **TP2SP}},
}
DATA_PARALLEL = ("dp2", "distributed_optimizer2_overlap", "fsdp2")
ADAPTED_CASES = [
    (world, name, kind)
    for world, named in ADAPTED.items()
    for name in named
    for kind in ADAPTERS
    if {
        "blocks": world == 4 or name == "pp2",
        "text": name == "tp2_sp",
        "streams": name in ("tp2_sp", "pp2"),
        "unet": name in DATA_PARALLEL,
    }.get(kind, True)
]
ADAPTED_ROW = ("world", "name", "kind")
ADAPTED_QUICK = {
    *((2, "tp2_sp", "text"), (2, "pp2", "blocks"), (2, "fsdp2", "all"), (2, "fsdp2", "unet")),
    (4, "tp2_sp_fsdp2", "blocks"),
}
# In bf16, sums over tensor-parallel ranks add rounded parts; other layouts only change the order of fp32 sums.
BF16_ADAPTED = {2: ("distributed_optimizer2_overlap", "tp2_sp", "fsdp2"), 4: ("tp2_sp_fsdp2",)}
BF16_CASES = [(world, name, "all") for world, named in BF16_ADAPTED.items() for name in named]
BF16_CASES += [(2, "tp2_sp", "text"), (4, "tp2_sp_fsdp2", "blocks")]
BF16_ROW = ("bf16_world", "bf16_name", "bf16_kind")
BF16_QUICK = {(2, "tp2_sp", "text"), (2, "fsdp2", "all"), (4, "tp2_sp_fsdp2", "blocks")}
BF16_TP_RTOL = 3e-2  # of one gradient; four units of bf16, 2^-7 each; measured 1.7e-2
BF16_TP_LOSS_RTOL = 2e-3  # of means over tokens; a quarter unit; measured 2e-4 for losses, 1.1e-3 for norms
BF16_TP_FURTHER = 1.25  # ratio of errors against fp32 gradients, layout to one rank; measured 0.92 to 1.10
CASES = [(world, name, packed) for world, named in LAYOUTS.items() for name in named for packed in (False, True)]
ROW = ("world", "name", "packed")


def forget_sequence_parallel(chunks: list) -> None:
    """Clear `sequence_parallel`, the mark of gradients that cover only the tokens of one tensor-parallel rank."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.sequence_parallel = False


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case and of one rank; each world size starts once."""
    wanted, wanted_bf16 = selected(request, ADAPTED_ROW), selected(request, BF16_ROW)
    plain = selected(request, ROW)
    folder = tmp_path_factory.mktemp("worlds")
    found = {}
    kinds = {packed: {"packed": packed, "model": SHALLOW} for packed in (False, True)}
    for name, objective in OBJECTIVES.items():
        model = INTERVALS if objective.takes_intervals else {}
        kinds[name] = {"packed": not name.endswith("dense"), "objective": objective, "model": {**SHALLOW, **model}}
    one = [{"parallel": {"data_parallel": "ddp"}, **kind} for kind in kinds.values()]
    for name, model in ADAPTERS.items():
        kinds[name] = {"packed": name not in UNPACKED, "model": model}
        one.append({"parallel": {"data_parallel": "ddp"}, **kinds[name]})
    for name in {kind for _, _, kind in wanted_bf16}:
        kinds["bf16", name] = {**kinds[name], "precision": "bf16"}
        one.append({"parallel": {"data_parallel": "ddp"}, **kinds["bf16", name]})
    for kind, result in zip(kinds, run_world(1, one, folder / "1")):
        found["one", kind] = result
    for world, named in LAYOUTS.items():
        keys = [
            (name, packed) for name in named for packed in (False, True) if packed or (world, name, packed) in plain
        ]
        cases = [{"parallel": named[name], **kinds[packed]} for name, packed in keys]
        if world == 2:
            keys.append("without marks")
            cases.append({"parallel": TP2SP, "break": forget_sequence_parallel, **kinds[True]})
            keys += [(name, objective) for objective, name in OBJECTIVE_CASES]
            cases += [{"parallel": OBJECTIVE_LAYOUTS[o][name], **kinds[o]} for o, name in OBJECTIVE_CASES]
        if world == 4:
            keys += [("traffic", name) for name in TRAFFIC]
            cases += [{"task": "tests.parallel.traffic:of_a_step", "parallel": p} for p in TRAFFIC.values()]
        adapted = [(name, kind) for ranks, name, kind in sorted(wanted) if ranks == world]
        adapted += [(name, ("bf16", kind)) for ranks, name, kind in sorted(wanted_bf16) if ranks == world]
        keys += adapted
        cases += [{"parallel": ADAPTED[world][name], **kinds[kind]} for name, kind in adapted]
        found |= dict(zip(keys, run_world(world, cases, folder / str(world))))
    return found


@pytest.mark.parametrize(ROW, rows(CASES, lambda world, name, packed: packed or name in ("dp2", "tp2_sp")))
def test_layout_equals_one_rank(results, world, name, packed):
    assert_equal_training(results["one", packed], results[name, packed])


@pytest.mark.parametrize(("objective", "name"), OBJECTIVE_CASES)
def test_objective_equals_one_rank(results, name, objective):
    assert_equal_training(results["one", objective], results[name, objective])
    if objective == "uncertainty":
        assert results["one", objective]["gradients"]["uncertainty.weight"].any()
    elif objective in ("contrastive", "cosine"):
        assert results["one", objective]["losses"] != results["one", True]["losses"]
    else:
        assert results["one", objective]["gradients"]["conditioner.interval.linear_2.weight"].any()


@pytest.mark.parametrize(ADAPTED_ROW, rows(ADAPTED_CASES, lambda *case: case in ADAPTED_QUICK))
def test_adapters_equal_those_of_one_rank(results, world, name, kind):
    """Compare the gradients of every A and B, and no others; `compare_training` reports zero gradients."""
    assert_equal_training(results["one", kind], results[name, kind])
    gradients = results[name, kind]["gradients"]
    assert all("lora_" in parameter for parameter in gradients)
    if kind == "blocks":
        assert len(gradients) == 2 * 4 * 2  # in two layers: qkv, proj, fc1 and fc2; A and B


@pytest.mark.parametrize(BF16_ROW, rows(BF16_CASES, lambda *case: case in BF16_QUICK))
def test_adapters_in_bf16_equal_those_of_one_rank(results, bf16_world, bf16_name, bf16_kind):
    """Within fp32 summation error for data parallelism and FSDP; with TP + SP, as close to fp32 as one rank."""
    exact, one = results["one", bf16_kind], results["one", ("bf16", bf16_kind)]
    many = results[bf16_name, ("bf16", bf16_kind)]
    assert many["drifted"] == []
    assert many["gradients"].keys() == one["gradients"].keys() == exact["gradients"].keys()
    split = "tp2" in bf16_name
    for kind in ("losses", "grad_norms"):
        assert many[kind] == pytest.approx(one[kind], rel=BF16_TP_LOSS_RTOL if split else SUM_RTOL), kind
    errors = relative_errors(one["gradients"], many["gradients"])
    bound = BF16_TP_RTOL if split else SUM_RTOL
    assert {name: error for name, error in errors.items() if not error <= bound} == {}
    ours, theirs = (
        torch.stack([(side["gradients"][name] - g).norm() for name, g in exact["gradients"].items()]).norm()
        for side in (many, one)
    )
    assert theirs > 0
    assert ours <= (BF16_TP_FURTHER if split else 1 + SUM_RTOL) * theirs


@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_release_their_process_groups(results, world):
    """Process groups are released before the next layout, so that connections and threads do not add up."""
    keys = [(name, packed) for name in LAYOUTS[world] for packed in (False, True)]
    counts = [results[key]["connections"] for key in keys if key in results]
    assert max(counts[1:]) <= counts[0] + 8, counts


def test_gradients_are_wrong_without_the_sequence_parallel_marks(results):
    one, broken = results["one", True]["gradients"], results["without marks"]["gradients"]
    wrong = {name for name, expected in one.items() if (broken[name] - expected).norm() > 0.1 * expected.norm()}
    assert {name for name in one if name.startswith(("embed.", "head.", "conditioner."))} <= wrong
    split = ("linear_qkv.weight", "modulation.linear.weight")  # sharded, so the rank has the complete gradient
    assert not any(name.endswith(split) for name in wrong)


def tensor_parallel_bytes(tp: int, layers: int, *, head: bool) -> dict[str, float]:
    """Return the bytes that a rank sends in one step.

    Per sub-layer: a gather and a scatter in each direction, and a gather to recompute an input. Per layer: a gather of
    six modulations of each sample, and a scatter of their gradients.
    """
    share = MICRO_BATCHES * FP32_BYTES * (tp - 1) / tp
    unit, modulations = share * TOKENS, layers * share * SAMPLES * 6 * HIDDEN
    gathers, scatters = 3 * 2 * layers * unit * HIDDEN, 2 * 2 * layers * unit * HIDDEN
    return {
        "tp all_gather_into_tensor": gathers + modulations + head * unit * OUT_CHANNELS,
        "tp reduce_scatter_tensor": scatters + modulations,
    }


def test_tensor_parallel_ranks_send_ten_collectives_per_layer(results):
    """TP + SP: each of the 10 collectives sends T h (t - 1) / t numbers; the prediction is gathered once."""
    expected = {**tensor_parallel_bytes(4, LAYERS, head=True), "pp p2p": 0}
    assert results["traffic", "tp4_sp"] == [expected] * 4


def test_stages_send_activations_forward_and_gradients_backward(results):
    """T h numbers per stage boundary, direction and micro-batch, divided among the tensor-parallel ranks."""
    boundary = MICRO_BATCHES * TOKENS * HIDDEN * FP32_BYTES
    assert [sent["pp p2p"] for sent in results["traffic", "pp4"]] == [boundary, 2 * boundary, 2 * boundary, boundary]
    for rank, sent in enumerate(results["traffic", "pp2_tp2_sp"]):
        last = rank >= 2
        assert sent == {**tensor_parallel_bytes(2, LAYERS // 2, head=last), "pp p2p": boundary / 2}
