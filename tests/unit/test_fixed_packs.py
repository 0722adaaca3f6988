"""Packs of fixed size give the same numbers as the packs that they are made from, also without lengths."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dit import philox
from dit.backends import process_groups
from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.batch import PackedBatch
from dit.conditions import Conditions
from dit.context_parallel.shard_batch import shard
from dit.errors import BatchError
from dit.fixed_packs import PackMaxima, without_lengths
from dit.joint_layout import joint_layout
from dit.kernels.attention import _segments_with_padding, padded_segments
from dit.kernels.fused.blocks import blocks_of, multiprocessors
from dit.layout import SequenceLayout
from dit.models.base import Backbone, ModelConfig
from dit.objectives.flow_matching import FlowMatching
from dit.pack_copy import move
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.cuda_graph import inputs_of
from dit.step.forward_step import training_forward_step
from dit.verify.ranks import run_world
from dit.verify.trial import disturb_constants
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from launch.config_file import built
from launch.train import call_recipe
from tests.conftest import BuildModel
from tests.laws.backbones import NAMES, config_of, pack
from tests.support.replays import record

FIXING = {
    name: config_of(name)
    for name in NAMES
    if config_of(name).supports.fixed_packs and config_of(name).megatron_sizes().num_moe_experts is None
}
FIXING["sizes"] = replace(config_of("dit_cross"), size_conditioning=True)
FIXING["pixart"] = replace(config_of("stdit"), layer_pattern=["full"], position_span=8.0)
PACKS = [0, 1, 2, 3], [3, 4, 2], [2]
"""Numbers of the samples of packs. Sample 4 is short, so that the first of several ranks has other tokens, too."""
ULYSSES = {"context_parallel_size": 2, "context_comm": "a2a", "spatial_temporal_comm": "context"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": ULYSSES,
    "context balanced": {**ULYSSES, "context_split": "load_balanced"},
    "ring": {**ULYSSES, "context_comm": "p2p"},
    "rings of pairs": {"context_parallel_size": 4, "context_comm": "a2a+p2p", "context_a2a_size": 2},
    "gathered keys, balanced": {**ULYSSES, "context_comm": "all_gather", "context_split": "load_balanced"},
}
MAXIMA = PackMaxima(tokens=200, samples=7, text_tokens=64)
OBJECTIVE = FlowMatching(shift_by_tokens=[0.5, 1.15, 4, 64])
"""The times of a sample depend on its length."""
SEED = 8
"""With it, the texts of some samples are dropped, and those of empty samples are not."""
RTOL = 2e-6
"""Relative error of each gradient in fp32."""


def numbers_of(model: Backbone, config: ModelConfig, batch: PackedBatch) -> dict[str, Tensor]:
    """Return the loss, its logged sums, the number of tokens, and every gradient of a training step."""
    model.zero_grad(set_to_none=True)
    prediction_TC, loss_of = training_forward_step(OBJECTIVE, config, SEED, 0)(iter([batch]), model)
    total, count, logs = loss_of(prediction_TC)
    total.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), "tokens": count.float(), **logs, **gradients}


def disturbed(build_model: BuildModel, groups: ProcessGroups, name: str) -> tuple[Backbone, ModelConfig]:
    """Return a model in which no parameter is zero."""
    config = FIXING.get(name) or config_of(name)
    model = build_model(config)
    disturb_constants([model], groups)
    return model, config


@pytest.mark.parametrize("name", FIXING)
def test_a_padded_pack_has_the_numbers_of_the_pack(
    build_model: BuildModel, one_rank_world: ProcessGroups, name: str
) -> None:
    model, config = disturbed(build_model, one_rank_world, name)
    batch = pack(config, [0, 1, 2, 3], multiple_of=4)
    padded = MAXIMA.pad(batch)
    assert (padded.layout.num_samples, len(padded.latents_TC), len(padded.keys)) == (7, 200, 7)
    expected, numbers = numbers_of(model, config, batch), numbers_of(model, config, padded)
    assert numbers.keys() == expected.keys()
    for key, value in expected.items():
        assert (numbers[key] - value).norm() <= RTOL * value.norm(), key
    assert numbers["tokens"] == batch.layout.valid_tokens


@pytest.mark.parametrize("name", FIXING)
def test_passes_without_lengths_have_the_numbers_of_the_pack_whose_tables_they_read(
    build_model: BuildModel, one_rank_world: ProcessGroups, name: str
) -> None:
    """Copy packs with other samples into the tensors of the first pack."""
    model, config = disturbed(build_model, one_rank_world, name)
    first, *others = (MAXIMA.pad(pack(config, numbers, multiple_of=4)) for numbers in PACKS)
    numbers_of(model, config, first)  # computes the tables
    sizes = {(x.shape, x.dtype) for x in inputs_of([first], [first])}
    for other in others:
        torch._foreach_copy_(inputs_of([first], [first]), inputs_of([other], [first]))
        numbers = numbers_of(model, config, without_lengths([first])[0])
        expected = numbers_of(model, config, other)
        assert all(torch.equal(numbers[key], value) for key, value in expected.items())
    assert len(sizes) > 6


def replay_on_a_rank(case: dict[str, Any]) -> list[list[str]]:
    """Return the names of the numbers that differ between passes of a rank, and how many were compared.

    They are compared between eager and replayed passes, and under context parallelism between packs and padded packs:
    relative to the largest norm of any rank, because a gradient may be 0 on a rank. Rank 3 of 4 has only queries of a
    dropped text, whose tokens are equal, so attention to it does not depend on queries and keys.
    """
    config = FIXING[case["name"]]
    packs = [pack(config, numbers, multiple_of=4) for numbers in PACKS]
    # Both ranks have tokens of samples, and sequence parallelism pads the texts.
    maxima = replace(MAXIMA, tokens=packs[0].layout.total_tokens + 8, text_tokens=63)
    parallel = ParallelConfig(**LAYOUTS[case["layout"]])
    groups = process_groups.initialize(parallel)

    def local(batch: PackedBatch) -> PackedBatch:
        return shard(batch, groups.cp.rank(), groups.cp.size(), parallel.context_split)

    try:
        model = build_model(config, parallel, TrainingConfig(precision="fp32"), groups)[0]
        disturb_constants([model], groups)
        first, *others = (local(maxima.pad(batch)) for batch in packs)
        padded = numbers_of(model, config, first)  # computes the tables
        plain = numbers_of(model, config, local(packs[0])) if groups.cp.size() > 1 else padded
        norms = torch.stack([x.norm() for x in plain.values()])
        torch.distributed.all_reduce(norms, torch.distributed.ReduceOp.MAX)
        differing = [key for key, norm in zip(plain, norms) if (padded[key] - plain[key]).norm() > RTOL * norm]
        with mock.patch.object(philox, "ten_rounds", philox._rounds):
            hidden = without_lengths([first])[0]
            replayed, replay = record(lambda: numbers_of(model, config, hidden))
            for other in others:
                torch._foreach_copy_(inputs_of([first], [first]), inputs_of([other], [first]))
                replay()
                expected = numbers_of(model, config, other)
                differing += [key for key, value in expected.items() if not torch.equal(replayed[key], value)]
        return gather_objects([*differing, str(len(replayed))])
    finally:
        process_groups.release()


FEW = ("dit", "dit_cross", "flux")
"""Backbones of the quick tests of layouts whose tables differ little from those of `sequence`."""


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *(pytest.param(x, FIXING if x == "sequence" else FEW, id=x) for x in LAYOUTS),
        pytest.param("context", {*FIXING} - {*FEW}, id="context, others", marks=pytest.mark.slow),
        *(
            pytest.param(x, {*FIXING} - {*FEW, *refused}, id=f"{x}, others", marks=pytest.mark.long)
            for x, *refused in (("context balanced",), ("ring", "stdit"), ("gathered keys, balanced", "stdit"))
        ),
    ],
)
def test_replays_on_several_ranks_have_the_numbers_of_eager_passes(
    layout: str, names: Collection[str], tmp_path: Path
) -> None:
    """Each rank has a part of the tokens, which are other parts of other samples in each pack."""
    task, size = f"{__name__}:{replay_on_a_rank.__name__}", LAYOUTS[layout].get("context_parallel_size", 2)
    cases = [{"task": task, "name": name, "layout": layout} for name in names]
    for name, ranks in zip(names, run_world(size, cases, tmp_path, timeout_s=300)):
        for *differing, count in ranks:
            assert not differing, name
            assert int(count) > 10


def test_passes_that_read_lengths_are_an_error(build_model: BuildModel, one_rank_world: ProcessGroups) -> None:
    model, config = disturbed(build_model, one_rank_world, "dit")
    first = MAXIMA.pad(pack(config, [0, 1]))
    numbers_of(model, config, first)

    def read(model: Backbone, inputs: Any) -> None:
        max(inputs[-1].layout.lengths)

    model.register_forward_pre_hook(read)
    with pytest.raises(BatchError, match=r"^training.cuda_graph=True: the model reads the lengths .*; use data of one"):
        numbers_of(model, config, without_lengths([first])[0])
    layout = without_lengths([first])[0].layout
    reads: list[Any] = [sum, max, list, set, hash]
    reads += [lambda x: x == (), lambda x: x[0], lambda x: x[1:], lambda x: [n for n in x]]
    for read in reads:
        for lengths in (layout.lengths, layout.padded_lengths):
            with pytest.raises(BatchError):
                read(lengths)
    assert (len(layout.lengths), layout.kind, layout.max_seqlen, layout.uniform_length) == (7, "ragged", 200, None)


def test_the_texts_and_images_of_joint_layouts_have_no_lengths(
    build_model: BuildModel, one_rank_world: ProcessGroups
) -> None:
    model, config = disturbed(build_model, one_rank_world, "flux")
    first = MAXIMA.pad(pack(config, [0, 1]))
    numbers_of(model, config, first)
    [hidden] = without_lengths([first])
    text = hidden.conditions.layout("context")
    assert text is not None
    joint = joint_layout(text, hidden.layout)
    for layout in (joint.text, joint.image, joint.local_image):
        with pytest.raises(BatchError, match="the model reads the lengths"):
            sum(layout.lengths)


def test_texts_and_tokens_of_one_size_have_their_own_tables() -> None:
    """The packs have two texts, and as many text tokens as tokens; copies of the packs keep their tables."""
    batch = pack(config_of("dit"), [0, 1, 2, 3])
    text = batch.conditions["context"]
    shorter = replace(text, layout=SequenceLayout.from_lengths([1, 2, 1, 2], total_tokens=len(text.values)))
    batch = replace(batch, conditions=Conditions({"context": text, "context_2": shorter}))
    for padded in (MAXIMA.pad(batch), replace(MAXIMA, text_tokens=200).pad(batch)):
        for one in (padded, move(padded, torch.device("cpu"))):
            layout = one.layout
            for keys in (layout, *(entry.layout for entry in one.conditions.values() if entry.layout is not None)):
                assert torch.equal(_segments_with_padding(layout, keys)[1], padded_segments(layout, keys)[1])
            assert len(layout.tables) == 3  # none is computed again after the copy


def test_larger_packs_are_an_error() -> None:
    batch = pack(config_of("dit"), [0, 1, 2, 3])
    for maxima in (PackMaxima(10, 7, 64), PackMaxima(200, 3, 64), PackMaxima(200, 7, 1)):
        with pytest.raises(BatchError, match=r"a pack has 4 samples and \d+ (text )?tokens, and packs are padded to"):
            maxima.pad(batch)


def tables_of(batch: PackedBatch) -> list[Tensor]:
    """Return the tables that GPU kernels read."""
    layout, texts = batch.layout, batch.conditions.layout("context")
    assert texts is not None
    segments = [_segments_with_padding(layout, keys)[i] for keys in (layout, texts) for i in (0, 1)]
    parts = layout, layout.shard(0, 2), layout.shard(1, 2)
    blocks = [table for part in parts for table in (blocks_of(part, 8).table, blocks_of(part, 8).offsets)]
    return [*blocks, *(part.noised_T for part in parts), *segments]


def test_tables_for_kernels_are_inputs() -> None:
    first, other = (MAXIMA.pad(pack(config_of("dit"), numbers)) for numbers in ([0, 1, 2, 3], [3, 1]))
    assert len(tables_of(first)) == 13
    torch._foreach_copy_(inputs_of([first], [first]), inputs_of([other], [first]))
    for table, expected in zip(tables_of(without_lengths([first])[0]), tables_of(other)):
        assert torch.equal(table, expected)


@pytest.mark.parametrize("multiple_of", [8, 16])
def test_the_maxima_of_data_bound_every_pack(multiple_of: int) -> None:
    """The shortest sample has 8 tokens, so that packs of 64 tokens have up to 8 samples."""
    options = {"max_tokens_per_pack": 64, "pack_multiple_of": multiple_of}
    data = MockData(shapes=["1x4x8"], text_tokens=3, num_streams=1, **options)
    spec = config_of("dit").batch_spec(micro_batch_size=1, multiple_of=1)
    stream = data.build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    maxima, samples = data.pack_maxima(), 64 // multiple_of
    assert maxima == PackMaxima(64, samples, 3 * samples)
    packs = [next(stream) for _ in range(4)]
    assert {pack.layout.num_samples for pack in packs} == {samples}
    for batch in packs:
        maxima.pad(batch)
    assert EnergonData(path="x", max_text_tokens=5, **options).pack_maxima() == PackMaxima(64, samples, 5 * samples)
    assert EnergonData(path="x", max_text_tokens=None, **options).pack_maxima() == PackMaxima(64, samples, None)
    assert MockData().pack_maxima() is None


def test_tables_of_packs_of_one_size_have_one_size() -> None:
    """For the tables of row blocks and of segments, with short and with long samples."""
    config = built(call_recipe("tiny_dit")).model
    layouts = [MAXIMA.pad(pack(config, numbers)).layout for numbers in ([0], [1, 2, 3, 0], [3] * 7)]
    blocks = [blocks_of(layout, 8) for layout in layouts]
    assert {len(x.table) for x in blocks} == {200 // 8 + 7}
    for layout, block in zip(layouts, blocks):
        used = block.table[: block.offsets[-1]]
        assert used[:, 1].sum() == 200
        assert not block.table[block.offsets[-1] :].any()
        cu_q, cu_k, *longest = _segments_with_padding(layout, layout)
        assert (len(cu_q), len(cu_k), longest) == (22, 22, [200, 200])
        assert cu_q[-1] == cu_k[-1] == 200


def test_tables_that_the_host_prepares_are_divided_for_the_gpu(monkeypatch):
    """The first pack's tables are computed on the device, those of later packs on the host."""
    monkeypatch.delenv("DIT_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=148))
    counts = [multiprocessors.__wrapped__(torch.device(name)) for name in ("cpu", "cuda:0", "meta")]
    assert counts == [148, 148, 132]
