"""Context parallelism: attention, samples, held-out losses, and logs of a run equal those of one rank."""

from pathlib import Path

import pytest
import torch

from benchmarks.parallel_training import run_world, tiny_model
from dit.objectives.ddpm import DDPM, LearnedVariance
from energon_data.mock import MockData
from tests.unit.kernels.attention_cases import AttentionCase

ATTENTION_RTOL = 2e-6  # fp32; another order of sums of up to 33 terms
SAMPLING_ATOL = 1e-5  # relative to the largest value; fp32 rounding of a few guided solver steps
WORKER = "tests.parallel.context_worker"
TWO_LEVEL = {"context_comm": "a2a+p2p", "context_a2a_size": 2}
SPLITS = ("contiguous", "load_balanced")
RUN = {
    "task": "tests.parallel.pipeline_cases:run_legs",
    "training": {"global_batch_size": 2, "log_interval": 2},
    "parts": {
        "model": tiny_model(num_layers=2, out_channels=8),
        "data": MockData(
            shapes=["1x8x8", "2x4x8", "1x4x6"], max_tokens_per_pack=48, validation_samples=6, num_streams=1
        ),
        "objective": DDPM(schedule="cosine", discrete_steps=50, variance=LearnedVariance(), min_snr_gamma=5.0),
    },
}


def cp(size: int, comm: str, split: str) -> dict:
    scheme = TWO_LEVEL if comm == "a2a+p2p" else {"context_comm": comm}
    return {"context_parallel_size": size, "context_split": split, **scheme}


COMMS = {2: ("p2p", "all_gather", "a2a"), 4: ("p2p", "all_gather", "a2a", "a2a+p2p")}
SCHEMES = [(size, comm, split) for size, comms in COMMS.items() for comm in comms for split in SPLITS]
# With a sample that has fewer tokens than there are ranks, some ranks have none of its tokens.
ATTENTION_CASES = [
    AttentionCase("dense", (16, 16, 16)),
    AttentionCase("one_sample", (32,)),
    AttentionCase("ragged_padded", (12, 5, 33, 5, 1), multiple_of_q=8, tail_q=8),
    AttentionCase("mostly_short", (1, 2, 3, 1), multiple_of_q=8),
    AttentionCase("long_tail", (7, 9), multiple_of_q=8, tail_q=24),
    AttentionCase("text", (8, 21, 8), (4, 7, 1), multiple_of_q=8, multiple_of_k=8, tail_q=8, tail_k=8),
    AttentionCase("gqa", (12, 5, 7), multiple_of_q=8, heads=8, kv_heads=4),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all cases by name; each world size starts once."""
    folder, found = tmp_path_factory.mktemp("worlds"), {}
    for world in (1, 2, 4):
        cases = dict(_cases(world, folder))
        found |= zip(cases, run_world(world, list(cases.values()), folder / str(world), timeout_s=600))
    return found


def _cases(world: int, folder: Path):
    def call(function: str, parallel: dict, **options) -> dict:
        return {"task": f"{WORKER}:{function}", "parallel": parallel, **options}

    if world < 4:
        parallel = {"context_parallel_size": world}
        yield ("run", world), {**RUN, "folder": folder / f"run_{world}", "legs": [(parallel, 2)]}
        yield ("worst", world), call("worst_samples", parallel, model={"num_layers": 1}, steps=1)
        yield ("sampling", world), call("sample_and_validate", parallel, splits=SPLITS[:world])
    if world > 1:
        most = cp(world, COMMS[world][-1], SPLITS[0])
        schemes = [(comm, split) for comm in COMMS[world] for split in SPLITS]
        yield ("attention", world), call("attention", most, cases=ATTENTION_CASES, schemes=schemes)
    if world == 2:
        packs = [case for case in ATTENTION_CASES if case.lengths_k is None]
        yield "one_segment", call("attention", most, cases=packs, schemes=schemes[:1], one_segment=True)
    if world == 4:
        yield "placement", call("placement", cp(2, "p2p", "contiguous"))


@pytest.mark.parametrize(("size", "comm", "split"), SCHEMES)
def test_context_parallel_attention_equals_attention_of_full_packs(results, size, comm, split):
    """Outputs and gradients, with exact zeros in padding; text is replicated over ranks."""
    for case, errors in results["attention", size][comm, split].items():
        for what, error in errors.items():
            assert error <= (0 if "padding" in what else ATTENTION_RTOL), f"{case}: {what} is off by {error:.2e}"


def test_ignored_sample_boundaries_are_detected(results):
    """If each pack is treated as one sample, the comparison above fails for every pack with several samples."""
    for case, errors in results["one_segment"]["p2p", "contiguous"].items():
        assert (errors["out"] <= ATTENTION_RTOL) == (case == "one_sample")
        assert case == "one_sample" or min(errors[name] for name in ("out", "grad_q", "grad_k", "grad_v")) > 0.1


@pytest.mark.parametrize("split", SPLITS)
def test_sampling_equals_one_rank(results, split):
    """Equal noise gives equal latents in token order, also for padded samples.

    One case has churn noise and rescaled guidance that ends at some noise level.
    """
    for name in ("latents", "churned"):
        one, two = (results["sampling", n][key][name] for n, key in ((1, SPLITS[0]), (2, split)))
        assert one.std() > 0.1
        torch.testing.assert_close(two, one, rtol=0, atol=SAMPLING_ATOL * float(one.abs().max()))


@pytest.mark.parametrize("split", SPLITS)
def test_held_out_loss_equals_one_rank(results, split):
    """In total and by noise level, so that no token counts twice; also with offset noise and 2 x 2 patches."""
    for name in ("losses", "offset"):
        one, two = (results["sampling", n][key][name] for n, key in ((1, SPLITS[0]), (2, split)))
        assert two == pytest.approx(one, rel=1e-5)


def test_the_samples_with_the_largest_losses_are_those_of_one_rank(results):
    """A mean loss covers all tokens of a sample, which the ranks of one context share."""
    [one], two = results["worst", 1], results["worst", 2]
    assert len({loss for _, loss in one}) == 4
    for worst in two:
        assert [key for key, _ in worst] == [key for key, _ in one]
        assert [loss for _, loss in worst] == pytest.approx([loss for _, loss in one], rel=1e-5)


def test_ranks_of_one_context_read_the_same_samples(results):
    """Adjacent ranks share samples; a data-parallel group has the ranks with the same part of different samples."""
    assert results["placement"] == [(0, 0, [0, 2]), (0, 1, [1, 3]), (1, 0, [0, 2]), (1, 1, [1, 3])]


def test_a_run_logs_the_numbers_of_one_rank(results):
    """Losses, held-out losses, and counts of samples, tokens and FLOPs do not depend on context parallelism."""
    one, two = results["run", 1], results["run", 2]
    scalars = [[line for line in lines if line["kind"] == "scalars"] for lines in (one, two)]
    assert len(scalars[0]) == len(scalars[1]) == 2
    for a, b in zip(*scalars):
        assert a["consumed_samples"] == b["consumed_samples"] > 0
        names = ("loss", "loss_simple", "loss_vlb", "grad_norm", *(name for name in a if name.startswith("held_out/")))
        for name in (name for name in names if name in a):
            assert b[name] == pytest.approx(a[name], rel=1e-5), name
    a, b = scalars[0][0], scalars[1][0]
    for name, ranks in (("tokens_per_s", 1), ("padded_tokens_per_s_per_rank", 2), ("tflops_per_rank", 2)):
        per_sample = [line[name] / line["samples_per_s"] for line in (a, b)]
        assert per_sample[1] * ranks == pytest.approx(per_sample[0]), name
    assert sorted(line["kind"] for line in one) == sorted(line["kind"] for line in two)
