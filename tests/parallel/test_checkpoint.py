"""Checkpoints: ranks write equal shares, copy at most one parameter, and move states to other layouts."""

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.boxes import Part
from dit.checkpoint.sharded_state import MIN_SHARE_ELEMENTS, share_of_copy
from dit.checkpoint.state_files import checkpoint_bytes
from dit.errors import DataError

DDP = {"data_parallel": "ddp"}
FSDP = {"data_parallel": "fsdp"}
EP2 = {"expert_model_parallel_size": 2}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
OVERLAP = {"virtual_pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS = {"hidden_size": 96, "num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 192, "moe_capacity_factor": 1.5}
DENSE = {"hidden_size": 64}
LAYOUTS = {
    4: {
        "distributed4": {},
        "ep2_ddp4": {**EP2, **DDP},
        "tp2_pp2": {**PP2, **TP2SP},
        "tp2_fsdp2": {**FSDP, **TP2SP},
    },
    1: {},
    2: {"ddp2": DDP, "fsdp2": FSDP, "distributed2": {}},
}
MOVED_EXPERTS = {"num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_capacity_factor": 1.5}
MOVED = {
    4: {
        "saved_on_four": ("save", {**EP2, **TP2SP}, "from_four"),
        "saved_on_fsdp4": ("save", {**EP2, **FSDP}, "from_fsdp4"),
        "stages_saved": ("save", {**PP2, **TP2SP}, "stages"),
        "stages_on_four": ("load", {**PP2, **OVERLAP}, "stages"),
    },
    1: {
        "loaded_on_one": ("load", DDP, "from_four"),
        "fsdp4_on_one": ("load", DDP, "from_fsdp4"),
        "saved_on_one": ("save", DDP, "from_one"),
        "stages_on_one": ("load", DDP, "stages"),
    },
    2: {
        "loaded_on_two": ("load", EP2, "from_one"),
        "loaded_on_two_pp": ("load", PP2, "from_four"),
        "stages_on_two": ("load", {**PP2, "pipeline_layers": [1, 3]}, "stages"),
    },
}
"""Task, layout and folder of checkpoints of experts, or of four layers without experts, by ranks and name."""
IN_MODEL = {"weight": "model", "ema": "averaged"}
NAMES = [name for named in LAYOUTS.values() for name in named]
ERRORS = (OSError(5, "Input/output error", "/data/mine"), DataError("no shard"))
SHARE_RTOL = 0.1  # headers and names; stages of one layer also have the head or the embedding


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results by name; each world size starts once. States move from four ranks to one, and from one to two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for world, named in LAYOUTS.items():
        cases = {
            name: {
                "task": "tests.parallel.checkpoint_tasks:cost",
                "folder": folder / name,
                "parallel": parallel,
                "model": EXPERTS if name.startswith("ep2") else DENSE,
            }
            for name, parallel in named.items()
        }
        if world == 2:
            two = {"parallel": {}, "folder": folder / "two_precisions"}
            cases["saved in two precisions"] = {**two, "task": "tests.parallel.checkpoint_tasks:save_two_precisions"}
            cases["loaded in two precisions"] = {
                **two,
                "task": "tests.parallel.checkpoint_tasks:load_two_precisions",
                "parallel": DDP,
            }
            failing = {"task": "tests.parallel.checkpoint_tasks:fail_on_the_first_rank"}
            cases |= {f"fails with {type(error).__name__}": {**failing, "error": error} for error in ERRORS}
        for name, (task, parallel, moved) in MOVED[world].items():
            moving = {"task": f"benchmarks.parallel_checkpoints:{task}", "parallel": parallel, "packed": True}
            cases[name] = {**moving, "model": {} if moved == "stages" else MOVED_EXPERTS, "folder": folder / moved}
        found |= dict(zip(cases, run_world(world, list(cases.values()), folder / f"world_{world}")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_saving_makes_no_copy_of_the_state(results, name):
    """Ranks write views of the shards they own; only the exchange of names allocates a few bytes."""
    index_bytes = 50_000 * len(results[name]["saving"])  # names that the ranks send for the index
    assert max(results[name]["saving"]) <= index_bytes
    assert index_bytes < min(results[name]["owned"]) / 2


@pytest.mark.parametrize("name", NAMES)
def test_loading_makes_a_copy_of_one_parameter_at_most(results, name):
    for made, largest in zip(results[name]["loading"], results[name]["largest"], strict=True):
        assert made <= 1.2 * largest


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tp2_fsdp2"])  # Megatron-FSDP's shards are uneven
def test_every_rank_writes_an_even_share(results, name):
    written = results[name]["written"]
    even = sum(written) / len(written)
    assert [size / even for size in written] == pytest.approx([1.0] * len(written), rel=SHARE_RTOL)


def test_one_replica_writes_all_small_ranges():
    """The other copies write nothing; the name selects the writer, so that writers differ between parameters."""
    small, large = (Part((n,), (n,), (0,), 0, n) for n in (4 * MIN_SHARE_ELEMENTS - 1, 4 * MIN_SHARE_ELEMENTS))
    writers = set()
    for name in map(str, range(40)):
        sizes = [share.stop - share.start for share in (share_of_copy(small, name, i, 4) for i in range(4))]
        assert sorted(sizes) == [0, 0, 0, small.stop]
        writers.add(sizes.index(small.stop))
        assert {share_of_copy(large, name, i, 4).stop for i in range(4)} == {
            MIN_SHARE_ELEMENTS * i for i in range(1, 5)
        }
    assert writers == {0, 1, 2, 3}


@pytest.mark.parametrize("name", NAMES)
def test_replicated_tensors_are_written_once(results, name):
    """All files together have the size of one state, as the dry run computes it, plus names."""
    state = checkpoint_bytes(results[name]["parameters"], averages=1)
    assert state < sum(results[name]["written"]) <= (1 + SHARE_RTOL) * state


def test_an_error_of_the_first_rank_ends_all_ranks_with_its_message(results):
    """Rank 0 raises the error itself; the others raise the same class if users can cause it, else `RuntimeError`."""
    disk = "[Errno 5] Input/output error: '/data/mine'"
    other = ["RuntimeError", f"rank 0 failed: OSError: {disk}"]
    assert results["fails with OSError"]["errors"] == [["OSError", disk], other]
    assert results["fails with DataError"]["errors"] == [["DataError", "no shard"]] * 2


def test_parameters_of_two_precisions_keep_their_names(results):
    """fp32 norms in a bf16 model with the distributed optimizer, because Megatron-Core reorders them in its groups."""
    saved, loaded = results["saved in two precisions"], results["loaded in two precisions"]
    assert saved["drifted"] == loaded["drifted"] == []
    weights = {name: value for name, value in saved.items() if name.startswith("weight.")}
    assert len(weights) > 20
    for name, value in weights.items():
        assert torch.equal(loaded[name], value), name
        assert torch.equal(loaded[name.replace("weight.", "model.", 1)].float(), value.bfloat16().float()) or (
            "layernorm" in name and torch.equal(loaded[name.replace("weight.", "model.", 1)], value)
        ), name
    assert saved["step"] == loaded["step"] == 7


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("saved_on_four", "loaded_on_one"),
        ("saved_on_one", "loaded_on_two"),
        ("saved_on_four", "loaded_on_two_pp"),
        ("saved_on_four", "saved_on_one"),
        ("saved_on_fsdp4", "fsdp4_on_one"),
        *(("stages_saved", f"stages_on_{ranks}") for ranks in ("four", "one", "two")),
    ],
)
def test_checkpoints_move_between_layouts_bitwise_unchanged(results, written, read):
    """Weights, average, Adam's state, fingerprint, and weights and average in the model are equal."""
    before, after = results[written], results[read]
    for name, value in before.items():
        equal = torch.equal(after[name], value) if isinstance(value, torch.Tensor) else after[name] == value
        assert equal, name
        slot, _, parameter = name.partition(".")
        model = after.get(f"{IN_MODEL.get(slot)}.{parameter}")
        assert (model is not None) == (slot in IN_MODEL and read != "saved_on_one"), name
        assert model is None or torch.equal(model, value), name
    assert before["step"] == 7
    assert before["drifted"] == []
    assert any("mlp.experts.3." in name for name in before) == ("stages" not in written)
