"""Megatron-FSDP: runs, shards, reductions, and checkpoints that other layouts resume.

`test_layouts.py` compares its gradients with one rank. Runs train on packs of samples of three sizes.
"""

import pytest
import torch

from benchmarks.parallel_training import run_world
from tests.parallel.fsdp_worker import MICRO_BATCHES
from tests.support.ranks import others_selected, rows, selected

FSDP = {"data_parallel": "fsdp"}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
DDP = {"data_parallel": "ddp"}
HYBRID = {**FSDP, "num_distributed_optimizer_instances": 2}
RESUMED_ROW, RUN_ROW, BF16_ROW = ("resumed", "saved"), ("run_name",), ("bf16_kind",)
SHARDINGS = ("optim", "optim_grads", "optim_grads_params")
SMALL = ("awkward", "frozen", "joined")
SHAPES = ["1x8x8", "1x6x6", "1x4x6"]  # 16, 9 and 6 tokens: their padding depends on the layout
BF16_SHARDINGS = ("optim", "optim_grads_params")
# Two instances of two ranks: ranks 0 and 1 shard one copy, ranks 2 and 3 the other.
HYBRIDS = {"hybrid": HYBRID, "hybrid_optim": {**HYBRID, "fsdp_sharding": "optim"}}

SUM_RTOL = 1e-5  # fp32; sums are taken in another order
ADAM_RTOL = 1e-4  # Adam divides by the root of small gradients
NOISE_RTOL = 1e-3  # after steps on two layouts: the gradient of the keys' bias is rounding noise, which Adam scales up


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Numbers of each selected case, and of the runs that they resume; each world size starts once."""
    folder = tmp_path_factory.mktemp("fsdp")
    wanted = {"run_one", "run_fsdp2", "run_distributed2", "bf16_distributed2"}
    wanted |= {name for row in selected(request, RESUMED_ROW) for name in row}
    wanted |= {f"run_{name}" for (name,) in selected(request, RUN_ROW)}
    wanted |= {f"bf16_{part}{kind}" for (kind,) in selected(request, BF16_ROW) for part in ("", "distributed_")}
    others = others_selected(request, RESUMED_ROW, RUN_ROW, BF16_ROW)
    saves = {"steps": 1, "look_after": True, "save": True, "steps_after": 1}

    def run(name, parallel, **options):
        case = {"run_dir": folder / name, "parallel": parallel, "data": {"shapes": SHAPES}}
        return {"task": "tests.parallel.fsdp_worker:train", **case, **options}

    def resumes(name, parallel):  # and saves nothing
        return run(name, parallel, steps=1, look_before=True)

    def small(backbone, parallel):
        return {"task": "tests.parallel.fsdp_worker:gradients", "backbone": backbone, "parallel": parallel}

    def shards(parallel):
        case = {"parallel": parallel, "packed": True, "model": {"num_layers": 2}}
        return {"task": "tests.parallel.fsdp_worker:shards_and_traffic", **case}

    kinds = {kind: {**FSDP, "fsdp_sharding": kind} for kind in SHARDINGS}
    more = {
        2: {
            "run_fsdp2": run("fsdp2", FSDP, **saves),
            "run_distributed2": run("distributed2", DISTRIBUTED, **saves),
            "fsdp2_to_distributed2": resumes("fsdp2", DISTRIBUTED),
            "distributed2_to_fsdp2": resumes("distributed2", FSDP),
            "distributed2_to_fsdp2_optim": resumes("distributed2", kinds["optim"]),
            "bf16_distributed2": run("bf16", DISTRIBUTED, precision="bf16", steps=2, look_after=True),
            **{f"bf16_{k}": run("bf16", kinds[k], precision="bf16", steps=2, look_after=True) for k in BF16_SHARDINGS},
            **{f"{backbone}_{k}": small(backbone, p) for backbone in SMALL for k, p in kinds.items()},
            "instance_hybrid": shards(FSDP),
            "instance_hybrid_optim": shards(kinds["optim"]),
        },
        4: {
            "fsdp2_to_fsdp4": resumes("fsdp2", FSDP),
            "fsdp2_to_tp2_sp_fsdp2": resumes("fsdp2", {**FSDP, **TP2SP}),
            "fsdp2_to_hybrid2x2": resumes("fsdp2", HYBRID),
            "fsdp2_to_pp2_fsdp2": resumes("fsdp2", {**FSDP, **PP2}),
            "run_pp2_fsdp2": run("pp2_fsdp2", {**FSDP, **PP2}, **saves),
            **{
                f"bf16_{name}": run("bf16", {**kind, **PP2}, precision="bf16", steps=2, look_after=True)
                for name, kind in {"pp2": FSDP, "distributed_pp2": DISTRIBUTED}.items()
            },
            "run_hybrid2x2": run("hybrid2x2", HYBRID, **saves),
            "clipped_hybrid": {
                **run("clipped", HYBRID, steps=2, optimizer={"clip_grad": 1e-3}),
                "task": "tests.parallel.fsdp_worker:clipped",
            },
            "hybrid2x2_to_hybrid2x2": resumes("hybrid2x2", HYBRID),
            "hybrid2x2_to_fsdp4": resumes("hybrid2x2", FSDP),
            "bf16_hybrid": run("bf16", HYBRID, precision="bf16", steps=2, look_after=True),
            **{f"{backbone}_{k}": small(backbone, p) for backbone in SMALL for k, p in HYBRIDS.items()},
            **{f"shards_{k}": shards(p) for k, p in HYBRIDS.items()},
        },
        1: {
            "hybrid2x2_to_ddp1": resumes("hybrid2x2", DDP),
            "pp2_fsdp2_to_ddp1": resumes("pp2_fsdp2", DDP),
            "fsdp2_to_ddp1": resumes("fsdp2", DDP),
            "run_one": run("one", DDP, **saves),
            **{f"{backbone}_one": small(backbone, DDP) for backbone in SMALL},
            "frozen_fsdp1": small("frozen", FSDP),
        },
    }
    found = {}
    for world, named in more.items():  # in this order: some cases read checkpoints of earlier ones
        small_cases = [n for n in named if others and n not in RESUMED and not n.startswith(("run_", "bf16_"))]
        cases = {name: case for name, case in named.items() if name in wanted or name in small_cases}
        found |= zip(cases, run_world(world, list(cases.values()), folder / f"world{world}"))
    return found


def assert_close(given, expected, rtol):
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (given[name] - tensor).float().norm()
        assert error <= rtol * tensor.float().norm(), f"{name}: {error:.2e} off {tensor.float().norm():.2e}"


def assert_same(given, expected):
    assert given.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(given[name], expected[name])] == []


@pytest.mark.parametrize("kind", [*SHARDINGS, *HYBRIDS])
def test_every_gradient_is_reduced_under_every_layout(results, kind):
    """Parameters of the root module, modules that run in another order than registered, and unused modules."""
    one, many = results["awkward_one"], results[f"awkward_{kind}"]
    assert many["norm"] == pytest.approx(one["norm"], rel=SUM_RTOL)
    assert_close(many["gradients"], one["gradients"], SUM_RTOL)
    idle = {name for name, gradient in one["gradients"].items() if not gradient.any()}
    assert idle == {"unused.weight", "unused.bias"}


@pytest.mark.parametrize("kind", [*SHARDINGS, *HYBRIDS])
def test_bf16_gradients_are_summed_in_the_order_of_one_rank(results, kind):
    """Several layers read the same input several times, so another order of the bf16 sum changes its gradient."""
    one, many = results["joined_one"], results[f"joined_{kind}"]
    assert many["norm"] == pytest.approx(one["norm"], rel=SUM_RTOL)
    assert_close(many["gradients"], one["gradients"], SUM_RTOL)


def test_weights_are_freed_after_the_backward_pass_of_their_layer(results):
    """When the gradient of a layer's input is computed, only the layers before it have gathered weights."""
    found = results["joined_optim_grads_params"]["gathered"]
    assert found == {layer: list(range(layer)) for layer in range(6)}


@pytest.mark.parametrize("backbone", SMALL)
def test_all_layer_weights_are_freed_after_the_backward_pass(results, backbone):
    """This includes a first layer whose input needs no gradient because everything before it is frozen."""
    assert results[f"{backbone}_optim_grads_params"]["left"] == []


@pytest.mark.parametrize("kind", [*SHARDINGS, *HYBRIDS, "fsdp1"])
def test_gradients_of_a_model_with_frozen_parameters_are_reduced(results, kind):
    one, many = results["frozen_one"], results[f"frozen_{kind}"]
    assert not {"scale", "embed.weight"} & one["gradients"].keys()
    assert_close(many["gradients"], one["gradients"], SUM_RTOL)


@pytest.mark.parametrize(RUN_ROW, rows([("fsdp2",), ("hybrid2x2",), ("pp2_fsdp2",)], lambda name: name == "fsdp2"))
def test_an_fsdp_run_equals_a_distributed_optimizer_run(results, run_name):
    """Weights, average, moments, held-out loss and samples agree."""
    fsdp, other = results[f"run_{run_name}"], results["run_distributed2"]
    assert_same(fsdp["before"], other["before"])
    assert fsdp["grad_norms"] == pytest.approx(other["grad_norms"], rel=SUM_RTOL)
    assert_close(fsdp["at_end"], other["at_end"], NOISE_RTOL if run_name == "pp2_fsdp2" else ADAM_RTOL)
    assert fsdp["looks_after"]["held_out"] == pytest.approx(other["looks_after"]["held_out"], rel=ADAM_RTOL)
    for kind in ("averaged", "raw"):
        torch.testing.assert_close(fsdp["looks_after"][kind], other["looks_after"][kind], rtol=1e-4, atol=1e-4)


def test_sampling_with_the_average_restores_the_weights(results):
    """Samples with the averaged weights differ, and sampling does not change the state of the run."""
    run = results["run_fsdp2"]
    assert (run["looks_after"]["averaged"] - run["looks_after"]["raw"]).abs().max() > 1e-3
    assert_same(run["after_looking"], run["after"])


@pytest.mark.parametrize(
    BF16_ROW, rows([(kind,) for kind in (*BF16_SHARDINGS, "hybrid", "pp2")], lambda kind: kind in BF16_SHARDINGS)
)
def test_bf16_keeps_fp32_masters(results, bf16_kind):
    """Steps equal those of the distributed optimizer in bf16, with fp32 gradients, moments, weights and average."""
    other = results["bf16_distributed_pp2" if bf16_kind == "pp2" else "bf16_distributed2"]
    fsdp = results[f"bf16_{bf16_kind}"]
    assert_same(fsdp["before"], other["before"])
    assert fsdp["grad_norms"] == pytest.approx(other["grad_norms"], rel=SUM_RTOL)
    assert_close(fsdp["after"], other["after"], ADAM_RTOL)
    for seen in ("averaged", "raw"):
        torch.testing.assert_close(fsdp["looks_after"][seen], other["looks_after"][seen], rtol=1e-4, atol=1e-4)
    assert_same(fsdp["after_looking"], fsdp["after"])


RESUMED = {
    "fsdp2_to_ddp1": "run_fsdp2",
    "fsdp2_to_distributed2": "run_fsdp2",
    "fsdp2_to_fsdp4": "run_fsdp2",
    "fsdp2_to_tp2_sp_fsdp2": "run_fsdp2",
    "distributed2_to_fsdp2": "run_distributed2",
    "distributed2_to_fsdp2_optim": "run_distributed2",
    "fsdp2_to_hybrid2x2": "run_fsdp2",
    "hybrid2x2_to_hybrid2x2": "run_hybrid2x2",
    "hybrid2x2_to_fsdp4": "run_hybrid2x2",
    "hybrid2x2_to_ddp1": "run_hybrid2x2",
    "fsdp2_to_pp2_fsdp2": "run_fsdp2",
    "pp2_fsdp2_to_ddp1": "run_pp2_fsdp2",
}
QUICK_RESUMED = ("fsdp2_to_distributed2", "distributed2_to_fsdp2_optim")
RESUMED_CASES = rows(RESUMED.items(), lambda name, saved: name in QUICK_RESUMED)


@pytest.mark.parametrize(RESUMED_ROW, RESUMED_CASES)
def test_checkpoints_are_read_bitwise_equal_on_another_layout(results, resumed, saved):
    """Weights, average, both moments and Adam's step count; the next step equals that of the uninterrupted run."""
    run, other = results[saved], results[resumed]
    assert other["resumed_at"] == 1
    assert_same(other["before"], run["after"])
    assert other["grad_norms"] == pytest.approx(run["grad_norms"][1:], rel=SUM_RTOL)
    assert_close(other["after"], run["at_end"], NOISE_RTOL)


@pytest.mark.parametrize(RESUMED_ROW, RESUMED_CASES)
def test_samples_and_held_out_loss_equal_those_of_the_saving_run(results, resumed, saved):
    seen, expected = results[resumed]["looks_before"], results[saved]["looks_after"]
    assert seen["held_out"] == pytest.approx(expected["held_out"], rel=SUM_RTOL)
    for kind in ("averaged", "raw"):
        torch.testing.assert_close(seen[kind], expected[kind], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(RESUMED_ROW, RESUMED_CASES)
def test_a_resumed_run_on_packs_of_several_sizes_equals_one_rank(results, resumed, saved):
    """After the save it trains on the same samples as the run of one rank and ends in the same state."""
    one, other = results["run_one"], results[resumed]
    assert results[saved]["samples"] == one["samples"]
    assert sorted(one["samples"] + other["samples"]) == one["samples_at_end"]
    assert other["grad_norms"] == pytest.approx(one["grad_norms"][1:], rel=SUM_RTOL)
    assert_close(other["after"], one["at_end"], NOISE_RTOL)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_ranks_of_an_instance_have_the_shards_of_fsdp_on_the_instance(results, kind):
    """Ranges, bytes of weights, gradients and moments, and checkpoint size are equal; every rank writes a part."""
    instance, ranks = results[f"instance_{kind}"], results[f"shards_{kind}"]
    for quantity in ("ranges", "bytes"):
        assert [rank[quantity] for rank in ranks] == 2 * [rank[quantity] for rank in instance]
    written = [sum(rank["written"] for rank in side) for side in (instance, ranks)]
    assert written[0] == written[1]
    assert all(rank["written"] for rank in ranks)


def test_rounding_of_one_instance_in_the_gradient_norm_leaves_the_copies_equal(results):
    """All ranks clip with the same norm, so copies of weights stay equal."""
    first, second, *others = results["clipped_hybrid"]
    assert first["norms"] == second["norms"]
    assert min(first["norms"]) > 1e-2  # every step is clipped
    for one, other in zip((first, second), others, strict=True):
        assert other["norms"] == one["norms"]
        assert_same(other["weights"], one["weights"])


@pytest.mark.parametrize(("kind", "times"), [("hybrid", MICRO_BATCHES), ("hybrid_optim", 1)])
def test_gradients_are_scattered_inside_an_instance_and_summed_once_over_instances(results, kind, times):
    """For n bytes of fp32 gradients in a shard, a rank sends n inside the instance and 2 n / 2 across instances."""
    for rank in results[f"shards_{kind}"]:
        shard = rank["gradient_bytes"]
        assert rank["inside"]["reduce_scatter_tensor"] == times * shard
        assert rank["across"] == {"all_reduce": shard}
