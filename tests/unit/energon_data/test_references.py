"""Samples with a clean reference image: in packs, in training, and in sampling."""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import LOW_RESOLUTION
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.layout import CLEAN
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.mean_flow import MeanFlow
from dit.patchify import grid_positions, patchify
from dit.run_config import RunConfig
from dit.settings import SamplingConfig, TrainingConfig
from energon_data.indexed import Sample, Samples
from tests.conftest import BuildModel

MODEL = DiTConfig(
    **{"patch_spatial": 2, "num_classes": 3, "hidden_size": 32, "num_layers": 1, "num_attention_heads": 4},
    position_embedding="sincos_3d",
)
SPEC = MODEL.batch_spec()
LATENTS = [torch.randn(4, t, h, w, generator=torch.Generator().manual_seed(t)) for t, h, w in ((1, 8, 4), (3, 4, 4))]
REFERENCES = [
    [torch.randn(4, 1, h, w, generator=torch.Generator().manual_seed(h)) for h, w in sizes]
    for sizes in (((4, 8),), ((6, 4), (2, 8)))
]


@dataclass(kw_only=True)
class Edits(Samples):
    """A picture with a reference, a clip with two, all of other shapes; every third sample has none."""

    num_streams: Any = 1
    background: bool = False
    max_tokens_per_pack: Any = 64
    references: bool = True

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        if index == 2:
            return Sample(LATENTS[0], {"label": 2})
        return Sample(LATENTS[index], {"label": index, **dict(zip(("reference", "reference-1"), REFERENCES[index]))})


def packs(count: int, **settings: Any) -> list[PackedBatch]:
    data = Edits(**settings)
    data.validate(SPEC, 1, 1)
    stream = data.build_train(SPEC, dp_rank=0, dp_size=1, seed=3, log_dir=None)
    return [batch.validate(SPEC.conditions) for batch in islice(stream, count)]


def rows(batch: PackedBatch, i: int) -> slice:
    return slice(batch.layout.starts[i], batch.layout.starts[i] + batch.layout.lengths[i])


def test_the_tokens_of_references_follow_those_of_their_sample() -> None:
    seen = set()
    for batch in packs(6):
        levels = batch.layout.levels
        for i, key in enumerate(batch.keys):
            number = int(key.split("/")[-1])
            tokens, grid = patchify(LATENTS[number % 2], *SPEC.patch)
            expected, positions = [tokens], [grid_positions(grid)]
            for place, reference in enumerate(REFERENCES[number] if number < 2 else []):
                clean, clean_grid = patchify(reference, *SPEC.patch)
                expected.append(clean)
                positions.append(grid_positions(clean_grid) + torch.tensor([grid[0] + place, 0, 0]))
            assert batch.grids[i] == grid
            assert torch.equal(batch.latents_TC[rows(batch, i)], torch.cat(expected))
            assert torch.equal(batch.positions_T3[rows(batch, i)], torch.cat(positions))
            noised = batch.layout.noised_T[rows(batch, i)]
            assert noised.tolist() == [True] * len(tokens) + [False] * (len(noised) - len(tokens))
            seen.add(number)
        assert levels is None or set(levels.numbers) <= {CLEAN, 0}
    assert seen == {0, 1, 2}


def test_clips_may_have_a_reference_and_a_clean_first_frame() -> None:
    for batch in packs(4, clean_first_frame=1.0):
        assert batch.layout.levels is not None
        for i, key in enumerate(batch.keys):
            if int(key.split("/")[-1]) == 1:
                first, last = sum(batch.layout.levels.counts[:i]), sum(batch.layout.levels.counts[: i + 1])
                assert batch.layout.levels.numbers[first:last] == (CLEAN, 0, CLEAN)
                assert batch.layout.levels.layout.lengths[first:last] == (4, 8, 10)


def test_without_the_setting_references_are_not_read() -> None:
    assert all(batch.layout.levels is None for batch in packs(3, references=False))


def test_references_reach_the_network_clean(build_model: BuildModel) -> None:
    """They change the prediction, and do not contribute to the loss."""
    batch = next(x for x in packs(6) if x.layout.levels is not None)
    network = build_model(MODEL, perturb=0.3)
    prepared = FlowMatching().prepare(batch, AddressedNoise(1, 0, batch.sample_ids_S, batch.layout))
    clean_T = batch.layout.valid_T & ~batch.layout.noised_T
    assert torch.equal(prepared.inputs_TC[clean_T], batch.latents_TC[clean_T])
    changed = torch.where(clean_T[:, None], prepared.inputs_TC + 1, prepared.inputs_TC)
    one, two = (network(x, prepared.time_S, batch) for x in (prepared.inputs_TC, changed))
    assert (one - two)[batch.layout.noised_T].abs().max() > 1e-3
    _, count, _ = FlowMatching().loss(one, prepared, batch.layout)
    assert int(count) == sum(t * h * w for t, h, w in batch.grids)


def test_samples_are_drawn_with_references(build_model: BuildModel) -> None:
    """Drawn samples have the size of the sample, not of the reference, and depend on the reference."""
    config = RunConfig(model=MODEL, data=Edits(), objective=FlowMatching(), sampling=SamplingConfig(num_steps=3))
    metadata = {"class_names": None, "latent_size": [1, 8, 4]}
    generator = Generator(config, metadata, build_model(MODEL, perturb=0.3), 0)
    seen: list[Tensor] = []
    network = generator.network

    def watched(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        seen.append(inputs_TC[(~batch.layout.noised_T) & batch.layout.valid_T])
        return network(inputs_TC, time_S, batch)  # type: ignore[no-any-return]

    generator.network = watched  # type: ignore[assignment]
    drawn = generator.generate(labels=[0, 1], references=REFERENCES)
    assert drawn.shape == (2, 4, 1, 8, 4)
    clean_TC = torch.cat([patchify(x, *SPEC.patch)[0] for several in REFERENCES for x in several])
    assert all(torch.equal(x[: len(clean_TC)], clean_TC) for x in seen)
    other = generator.generate(labels=[0, 1], references=[REFERENCES[0], [REFERENCES[1][0], REFERENCES[1][1] + 1]])
    torch.testing.assert_close(other[0], drawn[0])
    assert (other[1] - drawn[1]).abs().max() > 1e-3


def test_models_without_references_are_refused() -> None:
    run = RunConfig(model=MODEL, data=Edits(), objective=FlowMatching())
    run.check()
    with pytest.raises(ConfigError, match=r"data\.references=True needs several noise levels"):
        replace(
            run,
            model=replace(MODEL, interval_conditioning=True),
            objective=MeanFlow(),
            training=TrainingConfig(precision="fp32"),
        ).check()
    spec = replace(SPEC, conditions=(*SPEC.conditions, LOW_RESOLUTION))
    with pytest.raises(ConfigError, match=r"data\.references=True adds tokens .* low_resolution"):
        Edits().check_settings(spec, 1, 1)
