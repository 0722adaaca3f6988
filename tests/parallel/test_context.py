"""Context parallelism: tokens spread over ranks change no number."""

import pytest

from tests.parallel.world import run_world
from tests.unit.backends.attention_cases import AttentionCase

ATTENTION_RTOL = 2e-6  # fp32 sums of up to 33 terms in another order
A2A_P2P = {"context_comm": "a2a+p2p", "context_a2a_size": 2}
SCHEMES = {
    2: {comm: {"context_comm": comm} for comm in ("p2p", "all_gather", "a2a")},
    4: {**{comm: {"context_comm": comm} for comm in ("p2p", "all_gather", "a2a")}, "a2a+p2p": A2A_P2P},
}
# Samples shorter than the ranks are many leave some ranks with none of their tokens.
ATTENTION_CASES = [
    AttentionCase("dense", (16, 16, 16)),
    AttentionCase("one_sample", (32,)),
    AttentionCase("ragged_padded", (12, 5, 33, 5, 1), multiple_of_q=8, tail_q=8),
    AttentionCase("mostly_short", (1, 2, 3, 1), multiple_of_q=8),
    AttentionCase("long_tail", (7, 9), multiple_of_q=8, tail_q=24),
    AttentionCase("text", (8, 21, 8), (4, 7, 1), multiple_of_q=8, multiple_of_k=8, tail_q=8, tail_k=8),
]
GQA_CASES = [AttentionCase("gqa", (12, 5, 7), multiple_of_q=8, heads=8, kv_heads=4)]


def attention_cases():
    return [
        (world, name, split)
        for world, named in SCHEMES.items()
        for name in named
        for split in ("contiguous", "load_balanced")
    ]


@pytest.fixture(scope="module")
def attention_errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    found = {}
    for world, named in SCHEMES.items():
        keys = [key for key in attention_cases() if key[0] == world]
        cases = [
            {
                "task": "tests.parallel.context_worker:attention",
                "parallel": {"context_parallel_size": world, "context_split": split, **named[name]},
                "cases": [*ATTENTION_CASES, *GQA_CASES],
            }
            for _, name, split in keys
        ]
        found |= dict(zip(keys, run_world(world, cases, folder / str(world))))
    return found


@pytest.mark.parametrize(("world", "name", "split"), attention_cases())
def test_spread_attention_is_the_attention_of_whole_packs(attention_errors, world, name, split):
    for case, errors in attention_errors[world, name, split].items():
        for what, error in errors.items():
            assert error <= (0 if "padding" in what else ATTENTION_RTOL), f"{case}: {what} is off by {error:.2e}"
