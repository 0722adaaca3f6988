"""Table of the layouts that `test_layouts.py` compares with one rank.

A row is a model, a number of ranks, and words for the layout and the batches. `tests/laws` has rows of every backbone
on the basic layouts of two ranks.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks import parallel_training
from dit.kernels import compiled
from dit.layers.attention import WidthRMSNorm
from dit.models.lora_config import LoRAConfig
from dit.objectives.contrastive import ContrastiveFlowMatching
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import UncertaintyWeighting
from dit.objectives.mean_flow import MeanFlow
from tests.support.symmetric_memory import symmetric_memory_on_cpu

Row = tuple[str, int, str]
"""Model, ranks and layout."""


def as_operators(chunks: list) -> None:
    """Run compiled graphs with torch's operators, because code generation takes minutes."""
    compiled.BACKEND = "aot_eager"


PARALLEL: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp"},
    "distributed": {"data_parallel": "distributed_optimizer"},
    "overlap": {"overlap_grad_reduce": True},
    "gather": {"overlap_param_gather": True},
    "fsdp": {"data_parallel": "fsdp"},
    "hybrid": {"data_parallel": "fsdp", "num_distributed_optimizer_instances": 2},
    "optim": {"fsdp_sharding": "optim"},
    "optim_grads": {"fsdp_sharding": "optim_grads"},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4": {"tensor_model_parallel_size": 4},
    "sp": {"sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "vpp2": {"virtual_pipeline_model_parallel_size": 2},
    "uneven": {"pipeline_layers": [1, 3]},
    "cp2": {"context_parallel_size": 2},
    "cp4": {"context_parallel_size": 4},
    "all_gather": {"context_comm": "all_gather"},
    "a2a": {"context_comm": "a2a"},
    "two_level": {"context_comm": "a2a+p2p", "context_a2a_size": 2},
    "balanced": {"context_split": "load_balanced"},
    "cut": {"spatial_temporal_comm": "context"},
    "ep2": {"expert_model_parallel_size": 2},
    "ep4": {"expert_model_parallel_size": 4},
}
"""Settings of `ParallelConfig` by word; context parallelism without further words is a ring of contiguous parts."""
BATCHES: dict[str, dict[str, Any]] = {
    "dense": {"packed": False},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "recompute": {"initial_loss_scale": 64.0}},
    # The last two of a step's four packs are two samples of one token, so only the first context-parallel rank has
    # tokens of them.
    "one_token": {"one_token_packs": 2},
}
"""Settings that the row of one rank has, too. Without "dense", packs have samples of several sizes and padding."""
KERNELS: dict[str, dict[str, Any]] = {
    "selective": {"recompute": {"recompute": "selective"}},
    "full": {"recompute": {"recompute": "full"}},
    "full_one_layer": {"recompute": {"recompute": "full", "recompute_layers": 1}},
    # `break` changes the built model; FAULTS use it, too.
    "compiled": {"recompute": {"kernels": "compile"}, "break": as_operators},
    "overlapped": {"recompute": {"linears": "overlapped"}},
}
"""Settings that the row of one rank does not have."""

EXPERTS = {"num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
TOP_K = {"num_experts": 4, "moe_router": "top_k"}
MOVIEGEN = {"backbone": "moviegen", "num_query_groups": 2, "max_grid": [4, 5, 6]}
STREAMS = {"num_joint_layers": 2, "num_single_layers": 2, "ffn_hidden_size": 48, "rope_axes": [2, 4, 2]}
FLUX = {"backbone": "flux", **STREAMS, "pooled_size": 6}
PRX = {"backbone": "prx", "ffn_hidden_size": 48, "rope_axes": [0, 4, 4]}
SHALLOW = {"num_layers": 2}
INTERVALS = {**SHALLOW, "interval_conditioning": True, "time_scale": 1.0}
ALL_LINEARS = LoRAConfig(rank=3, alpha=6.0, targets=["*"])
MODELS: dict[str, dict[str, Any]] = {
    "deep dit": {},
    "dit": SHALLOW,
    "rotary dit": {"position_embedding": "rope_3d"},
    "value residual": {"num_layers": 3, "value_residual": True},
    # As large as the layers of a stage, so that the border between two data-parallel shards is inside them.
    "large embedders": {"num_classes": 500},
    "cross": {
        **{"backbone": "dit_cross", "num_query_groups": 2, "size_conditioning": True, "num_classes": 5},
        "control_channels": 3,
    },
    "rotary cross": {
        **{"backbone": "dit_cross", "position_embedding": "rope_3d", "rope_factors": [2.0, 1.0, 1.0]},
        **{"adaln_lora_rank": 4, "add_bias": True, "qk_layernorm": False},
    },
    "moviegen": {**MOVIEGEN, "ffn_hidden_size": 48},
    "wan": {"backbone": "wan", "ffn_hidden_size": 48},
    "sincos wan": {"backbone": "wan", "position_embedding": "sincos_3d", "ffn_hidden_size": 48},
    "expert choice": EXPERTS,
    # The coefficient is large, so that a balancing loss of the wrong scale changes the gradients.
    "top k": {**TOP_K, "num_layers": 2, "moe_top_k": 2, "moe_aux_loss_coeff": 0.5},
    # As EC-DiT-1B: text, and experts with gated MLPs.
    "moviegen experts": {**EXPERTS, **MOVIEGEN},
    "moviegen top k": {**TOP_K, **MOVIEGEN, "ffn_hidden_size": 48},
    "stdit": {"backbone": "stdit", "num_classes": 5, "position_span": 4.0},
    # It exchanges rotary positions, has grouped queries and mixes kinds of attention.
    "rotary stdit": {
        **{"backbone": "stdit", "layer_pattern": ["spatial+full+temporal"], "position_embedding": "rope_3d"},
        **{"num_query_groups": 2, "size_conditioning": True},
    },
    # The text is split over tensor-parallel ranks like the image, but replicated over context-parallel ranks. Stages
    # begin and end before, at and after the change from two streams to one.
    "flux": {**FLUX, "guidance": 3.5},
    "small flux": {**FLUX, "num_joint_layers": 1, "num_single_layers": 1},
    "chroma": {"backbone": "chroma", **STREAMS, "approximator": [8, 12, 2]},
    "flux2": {"backbone": "flux2", **STREAMS, "rope_axes": [2, 2, 2, 2], "guidance": 3.5},
    # One single block, so that all weights of the last joint block have a gradient.
    "qwen_image": {"backbone": "qwen_image", **STREAMS, "num_joint_layers": 3, "num_single_layers": 1},
    # Samples with and without glyph text and a picture; the second stage has no conditions.
    "hunyuan_video": {
        **{"backbone": "hunyuan_video", **STREAMS, "num_joint_layers": 3, "num_single_layers": 1, "patch_spatial": 2},
        **{"glyph_size": 10, "glyph_hidden_size": 24, "image_context_size": 6, "image_to_video": True},
    },
    # A second attention of the image, and a last block without text output. The text queries of this block are unused,
    # so their norm would have no gradient; `tests/laws` tests the norms.
    "sd3": {
        **{"backbone": "sd3", "num_joint_layers": 4, "num_dual_layers": 2, "pooled_size": 6, "position_crop": [24, 8]},
        "qk_layernorm": False,
    },
    "lumina2": {"backbone": "lumina2", **STREAMS, "num_query_groups": 2},
    # Every text and image has learned tokens, up to 32.
    "z_image": {"backbone": "z_image", **STREAMS, "num_joint_layers": 1, "num_single_layers": 1},
    # The text has keys and values, but no queries.
    "prx": {**PRX, "num_layers": 4},
    "shallow prx": {**PRX, **SHALLOW},
    "sana": {
        **{"backbone": "sana", "num_layers": 4, "num_cross_attention_heads": 2, "ffn_hidden_size": 48},
        **{"patch_spatial": 2, "qk_layernorm": True},
    },
    # Adapters of the blocks, after a frozen embedding; of every linear layer; of layers that read a text, which is
    # replicated under sequence parallelism; and of the linear layers of a UNet, whose convolutions have none.
    "adapted blocks": {**SHALLOW, "lora": LoRAConfig(rank=3)},
    "adapted linears": {**SHALLOW, "lora": ALL_LINEARS},
    # Adapters of one stage only.
    "adapted first": {**SHALLOW, "lora": LoRAConfig(rank=3, targets=["layers.0.*"])},
    "adapted last": {**SHALLOW, "lora": LoRAConfig(rank=3, targets=["layers.1.*"])},
    "adapted cross": {"backbone": "dit_cross", "lora": ALL_LINEARS},
    "adapted unet": {
        **{"backbone": "ldm_unet", "in_channels": 16, "block_out_channels": [8, 16], "transformer_layers": [1, 0]},
        **{"layers_per_block": 1, "norm_num_groups": 4, "lora": ALL_LINEARS},
    },
    "uncertainty": SHALLOW,
    "contrastive": SHALLOW,
    "cosine": SHALLOW,
    "mean flow": INTERVALS,
    "plain mean flow": INTERVALS,
}
"""Settings of `tiny_model`."""
# The head u(sigma) is on the last stage; each tensor-parallel rank has a copy, which processes all tokens. The
# contrastive negative of a sample has another size, and its tokens are on another context-parallel rank. MeanFlow
# divides a difference by its step, and so the rounding of a layout, too; the step is large, with a fitting time scale.
OBJECTIVES = {
    "uncertainty": EDM(weighting=UncertaintyWeighting()),
    "contrastive": ContrastiveFlowMatching(contrast_weight=0.3, shift_dimension=64),
    "cosine": FlowMatching(loss_kind="l2_cosine"),
    "mean flow": MeanFlow(
        instant_share=0.25, difference=0.1, shift_dimension=64, guidance_scale=2.0, adaptive_power=1.0
    ),
    "plain mean flow": MeanFlow(instant_share=0.0, difference=0.1),
}
"""Objectives by model; the others train by plain flow matching."""
TWO_STEPS = ("deep dit", "expert choice", "moviegen experts", "moviegen top k", "adapted linears")
"""Models that train a second step, with weights that the layout gathered after the first; the others train one."""


def on(ranks: int, models: str, *layouts: str) -> list[Row]:
    """Return the rows of models, separated by commas, under some layouts."""
    return [(model, ranks, layout) for model in models.split(", ") for layout in layouts]


QUICK = [
    *on(2, "dit", "tp2", "tp2 sp", "tp2 sp overlapped", "cp2", "cp2 all_gather balanced", "cp2 a2a balanced"),
    *on(2, "deep dit", "overlap gather", "pp2 ddp", "pp2 vpp2"),
    *on(2, "cross", "tp2 sp"),
    *on(2, "expert choice", "tp2 ep2 sp"),
    *on(2, "top k", "cp2 ep2"),
    *on(2, "expert choice", "ep2 overlap gather dense"),
    *on(2, "uncertainty", "tp2 sp", "pp2"),
    *on(2, "contrastive", "cp2 balanced"),
    *on(2, "mean flow", "cp2"),
    *on(2, "adapted last", "pp2"),
    *on(2, "adapted unet", "fsdp dense"),
    # Parameters have zero gradients on a rank without tokens, because overlapped reductions and FSDP wait for all.
    *on(2, "small flux", "cp2 ddp overlap one_token"),
    *on(2, "cross", "cp2 fsdp one_token"),
    *on(4, "dit", "tp2 cp2 sp balanced"),
    *on(4, "deep dit", "tp2 pp2 sp", "pp2 fsdp"),
    *on(4, "large embedders", "pp2 uneven"),
    *on(4, "expert choice", "hybrid"),
]
SLOW = [
    *on(1, "deep dit", "fsdp"),
    *on(2, "deep dit", "fsdp", "ddp"),
    *on(2, "moviegen, adapted cross", "tp2 sp"),
    *on(4, "dit", "cp4 two_level"),
    *on(2, "deep dit", "pp2 uneven"),
    *on(2, "cross", "tp2 sp overlapped"),
    *on(2, "sincos wan, contrastive", "tp2 sp"),
    *on(2, "expert choice", "cp2 ep2"),
    *on(2, "top k", "tp2 ep2 sp"),
    *on(2, "moviegen", "cp2 ddp overlap one_token"),
    *on(2, "dit", "cp2 all_gather balanced dense"),
    *on(2, "deep dit", "distributed", "ddp dense", "pp2 vpp2 dense", "fsdp dense", "fsdp optim_grads"),
    *on(2, "cross", "tp2", "cp2 overlap gather one_token"),
    *on(2, "rotary cross, moviegen, rotary dit, sincos wan", "cp2"),
    *on(2, "rotary dit", "tp2 sp"),
    *on(2, "expert choice, top k", "ep2", "ep2 dense"),
    *on(2, "moviegen experts", "tp2 ep2 sp", "cp2 ep2"),
    *on(2, "uncertainty", "cp2", "fsdp"),
    *on(2, "cosine", "tp2 sp"),
    *on(2, "mean flow", "overlap gather", "fsdp"),
    *on(2, "plain mean flow", "tp2 dense"),
    *on(2, "value residual", "tp2 compiled"),
    *on(2, "cross", "pp2 compiled"),
    *on(2, "dit", "cp2 dense compiled", "overlap gather compiled"),
    *on(2, "deep dit", "tp2 sp selective", "tp2 sp full", "pp2 vpp2 selective", "pp2 vpp2 full_one_layer"),
    *on(2, "deep dit", "cp2 selective", "overlap gather full", "fsdp selective", "fsdp full", "cp2 fsdp"),
    *on(2, "expert choice", "ep2 selective", "ep2 full"),
    *on(2, "adapted linears", "overlap gather", "tp2 sp", "pp2", "cp2", "fsdp"),
    *on(2, "sincos wan, shallow prx", "cp2 ddp overlap one_token"),
    *on(2, "moviegen, small flux", "cp2 fsdp one_token"),
    *on(2, "cross, shallow prx", "cp2 a2a balanced overlap one_token"),
    *on(2, "moviegen experts", "cp2 fsdp one_token", "cp2 overlap gather one_token", "cp2 ep2 overlap one_token"),
    *on(2, "flux, prx, wan", "tp2"),
    *on(2, "flux", "cp2 balanced dense", "cp2 all_gather", "cp2 a2a balanced"),
    *on(2, "chroma, flux2, hunyuan_video, sd3, lumina2, z_image, sana", "tp2"),
    *on(2, "stdit", "tp2", "tp2 sp", "cp2", "cp2 balanced", "cp2 cut", "cp2 cut all_gather balanced", "cp2 cut a2a"),
    *on(2, "rotary stdit", "tp2 sp", "cp2 cut", "cp2 selective"),
    *on(2, "stdit", "cp2 ddp overlap one_token", "cp2 cut overlap gather one_token"),
    *on(2, "adapted cross", "tp2 sp overlapped"),
    *on(2, "dit", "tp2 sp compiled overlapped", "tp2 sp full overlapped"),
    *on(4, "deep dit", "tp2 sp fsdp overlapped", "tp2 pp2 sp overlap gather overlapped"),
    *on(4, "dit", "tp4 sp overlapped"),
    *on(4, "dit", "tp2 sp", "tp4 sp", "cp4 balanced", "cp4 two_level balanced dense", "tp2 cp2 sp a2a"),
    *on(4, "dit", "pp2 cp2 all_gather balanced"),
    *on(4, "expert choice", "ep2", "tp2 ep2 sp", "tp2 cp2 ep2 sp", "ep2 fsdp"),
    *on(4, "top k", "tp2 ep2 sp", "pp2 ep2"),
    *on(4, "deep dit", "pp4", "pp2 vpp2 overlap gather", "tp2 sp fsdp", "hybrid", "hybrid optim"),
    *on(4, "deep dit", "pp2 vpp2 fsdp optim", "pp2 cp2 balanced fsdp"),
    *on(4, "adapted blocks", "tp2 sp fsdp"),
    *on(4, "adapted first, adapted last", "pp2 ddp overlap", "pp2 overlap gather", "pp2 fsdp"),
    *on(4, "flux, prx, wan", "tp2 cp2 sp"),
    *on(4, "flux", "tp2 cp2 sp dense"),
    *on(4, "flux, prx, chroma, hunyuan_video", "tp2 pp2 sp overlap"),
    *on(4, "sd3, sana", "tp2 cp2 sp balanced"),
    *on(4, "stdit", "cp4 balanced", "cp4 cut two_level", "pp2 cp2", "tp2 cp2 sp cut"),
]
LONG = [
    *on(2, "dit", "tp2 sp dense"),
    *on(2, "deep dit", "fsdp optim"),
    *on(2, "cross, adapted first", "pp2"),
    *on(2, "rotary cross", "tp2 sp"),
    *on(2, "expert choice", "ep2 fsdp optim"),
    *on(2, "cosine", "cp2"),
    *on(2, "expert choice, top k", "ep2 ddp"),
    *on(2, "plain mean flow", "ddp dense"),
    *on(2, "wan", "tp2 compiled"),
    *on(2, "deep dit", "tp2 sp full_one_layer", "pp2 vpp2 full", "cp2 full", "cp2 full_one_layer"),
    *on(2, "deep dit", "overlap gather selective", "overlap gather full_one_layer", "fsdp full_one_layer"),
    *on(2, "expert choice", "ep2 full_one_layer"),
    *on(2, "adapted unet", "overlap gather dense"),
    *on(2, "sincos wan, shallow prx, moviegen top k, stdit", "cp2 fsdp one_token"),
    *on(2, "small flux", "cp2 a2a balanced overlap one_token"),
    *on(2, "moviegen top k", "cp2 overlap gather one_token", "cp2 ep2 overlap one_token"),
    *on(2, "rotary stdit", "cp2 full"),
    *on(4, "dit", "cp2", "cp4 all_gather", "cp4 a2a balanced"),
    *on(4, "expert choice", "tp2 ep2 sp fsdp"),
    *on(4, "top k", "tp2 ep4 sp ddp"),
    *on(4, "deep dit", "pp2", "pp2 vpp2 fsdp", "pp2 fsdp optim_grads", "pp2 fsdp optim"),
    *on(4, "deep dit", "hybrid optim_grads", "cp2 hybrid"),
    *on(4, "adapted linears", "tp2 sp fsdp"),
    *on(2, "prx, wan", "cp2 balanced dense", "cp2 all_gather", "cp2 a2a balanced"),
    *on(2, "qwen_image", "tp2"),
    *on(4, "prx, wan", "tp2 cp2 sp dense"),
    *on(4, "flux2, qwen_image", "tp2 pp2 sp overlap"),
    *on(4, "lumina2, z_image", "tp2 cp2 sp balanced"),
    *on(4, "flux, prx, wan", "tp2 cp2 sp a2a"),
    *on(4, "flux, prx", "cp4 two_level", "pp4"),
    *on(4, "chroma, flux2, qwen_image, hunyuan_video", "tp2 cp2 sp balanced"),
    *on(4, "sd3, lumina2, z_image, sana", "tp2 pp2 sp overlap"),
    *on(4, "stdit", "cp4 cut", "cp2", "tp2 cp2 sp", "tp2 cp2 sp balanced"),
    *on(4, "rotary stdit", "tp2 cp2 sp"),
    *on(4, "stdit", "cp2 fsdp one_token", "cp4 balanced overlap gather one_token"),
    *on(8, "deep dit", "pp2 hybrid"),
    *on(8, "expert choice", "pp2 ep2 fsdp"),
]
HALF_QUICK = on(2, "adapted cross", "tp2 sp bf16")
HALF_SLOW = [
    *on(2, "adapted linears", "fsdp bf16", "overlap gather bf16", "tp2 sp bf16"),
    *on(2, "adapted first, adapted last", "pp2 bf16", "pp2 fp16"),
    *on(4, "adapted blocks, adapted linears", "tp2 sp fsdp bf16"),
]
"""Rows in half precision. Sums over tensor-parallel ranks add rounded parts; other layouts only change the order of
fp32 sums."""


def forget_sequence_parallel(chunks: list) -> None:
    """Clear `sequence_parallel`, the mark of gradients that cover only the tokens of one tensor-parallel rank."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.sequence_parallel = False


def forget_text_tokens(chunks: list) -> None:
    """Do not sum the gradient of the text embedding's bias over tensor-parallel ranks, as if each had all text rows."""
    chunks[0].embed_text.bias.sequence_parallel = False


def normalise_local_heads(chunks: list) -> None:
    """Normalise queries and keys over the heads of one rank instead of all."""
    for module in chunks[0].modules():
        if isinstance(module, WidthRMSNorm):
            module.provider = SimpleNamespace(sum_over_tensor_ranks=lambda x: x)
            module.width //= 2


def forget_conditioners(chunks: list) -> None:
    """Do not sum the gradients of the replicated embedders over stages."""
    chunks[0].config.has_cond_embedder = False


def share_buckets(chunks: list) -> None:
    """Let the distributed optimizer shard the copies of an embedder differently on every stage."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.shared_embedding = False


def count_copies(chunks: list) -> None:
    """Count every copy of an embedder in the gradient norm."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.shared = False


FAULTS: dict[str, tuple[Row, Callable[[list], None]]] = {
    "sequence parallel": (("dit", 2, "tp2 sp"), forget_sequence_parallel),
    "text tokens": (("flux", 2, "tp2 sp"), forget_text_tokens),
    "local heads": (("wan", 2, "tp2"), normalise_local_heads),
    "sum over stages": (("deep dit", 2, "pp2 ddp"), forget_conditioners),
    "buckets": (("large embedders", 4, "pp2 uneven"), share_buckets),
    "norm of copies": (("deep dit", 2, "pp2 ddp"), count_copies),
}
"""Rows with a change of the built model that the comparison must detect."""


def of_one_rank(row: Row) -> Row:
    """Return the row of one rank that a row is compared with."""
    model, _, layout = row
    return model, 1, " ".join(["ddp", *(word for word in layout.split() if word in BATCHES)])


def in_fp32(row: Row) -> Row:
    """Return the row without half precision."""
    model, ranks, layout = row
    return model, ranks, " ".join(word for word in layout.split() if word not in ("bf16", "fp16"))


def case_of(row: Row) -> dict[str, Any]:
    """Return the case of a row for `run_world`."""
    model, _, layout = row
    case: dict[str, Any] = {"task": f"{__name__}:train", "row": row}
    case |= {"packed": True, "parallel": {}, "recompute": {}, "model": MODELS[model]}
    if model in OBJECTIVES:
        case["objective"] = OBJECTIVES[model]
    if model not in TWO_STEPS:
        case["steps"] = 1
    for word in layout.split():
        if word in PARALLEL:
            case["parallel"] = {**case["parallel"], **PARALLEL[word]}
        else:
            settings = {**BATCHES, **KERNELS}[word]
            case |= {**settings, "recompute": {**case["recompute"], **settings.get("recompute", {})}}
    return case


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train a case and count the overlapped products.

    The traceback of an error names its row, because one failed case ends all cases of a world.
    """
    try:
        with symmetric_memory_on_cpu() as calls:
            return {**parallel_training.train(case), "overlapped": dict(calls)}
    except Exception as error:
        error.add_note(f"in the row {case['row']}")
        raise
