"""Token routing matches the formulas of TREAD and SPRINT, computed in a loop over single samples."""

from dataclasses import replace
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.levels import with_levels
from dit.models.dit.config import DiTConfig
from dit.models.routing_config import RoutingConfig
from dit.models.token_routing import select_kept, shorter_layout
from dit.monitoring.flops import PackFlops
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from tests.conftest import BuildModel
from tests.parity import weights
from tests.parity.reference_dit import ReferenceDiT, normalise, silu
from tests.parity.reference_positions import Grid, patch_indices, position_features, turns
from tests.parity.test_dit import check_gradients, config, rows_of
from tests.support.batches import Sample, pack
from tests.support.reference import relative_error

RTOL = 1e-5  # float32 against float64, as without routing
ALONE_RTOL = 1e-6  # the same float32 operations, in matrix products of other sizes
TREAD = RoutingConfig(share=0.5, first_layers=1, last_layers=1)
SPRINT = RoutingConfig(share=0.75, first_layers=2, last_layers=1, rejoin="fused")
CASES = {
    "tread": TREAD,
    "tread to the head": replace(TREAD, first_layers=0, last_layers=0, share=0.3),
    "sprint": SPRINT,
    "sprint without middle": replace(SPRINT, path_dropout=1.0),
    "sprint with all tokens": replace(SPRINT, share=0.0),
}
SAMPLES = [Sample((1, 3, 4), label=2), Sample((2, 2, 3)), Sample((1, 1, 1), label=5), Sample((1, 5, 2), label=0)]
KEYS_S = torch.tensor([3, 2**62 + 11, 77, 2**40 + 5])


class ReferenceRouted(ReferenceDiT):
    """The layers for one sample; the middle layers process only the tokens `kept`."""

    def __init__(self, model: DiTConfig) -> None:
        assert model.routing is not None
        size, self.routing = model.hidden_size, model.routing
        super().__init__(
            **{"size": size, "depth": model.num_layers, "heads": model.num_attention_heads, "inner": model.ffn_size},
            **{"patch_in": model.token_channels, "patch_out": model.output_features, "classes": model.num_classes},
            **{"positions": model.position_embedding, "rope": model, "token": model.teacher_token_size},
            value_residual=model.value_residual,
        )
        if self.routing.rejoin == "fused":
            self.mask, self.both = nn.Parameter(torch.zeros(size)), nn.Linear(2 * size, size)
        self.double()

    def one(
        self,
        patches: Tensor,
        time: Tensor,
        grid: Grid,
        label: Optional[int],
        kept: list[int],
        token_F: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the prediction of each patch, followed by that of the token, which is in the middle, too."""
        cond = self.condition(time[None], [label], None)
        x, by = self.patch(patches[None]), None
        if self.positions == "rope_3d":
            by = turns(patch_indices(grid), self.head_size, self.rope)
        else:
            x = x + position_features(grid, self.size, self.positions).to(patches.dtype)
        if token_F is not None:
            kept = [*kept, x.shape[1]]
            x = torch.cat([x, self.token_norm(self.token(token_F))[None, None]], 1)
            by = None if by is None else torch.cat([by, torch.ones_like(by[:1])])
        first, last = self.routing.first_layers, len(self.blocks) - self.routing.last_layers
        for i, block in enumerate(self.blocks[:first]):
            x = block(x, cond, by, *self.first_values(i))
        middle = x[:, kept]
        for i, block in enumerate(self.blocks[first:last], first):
            v_1 = [(share, values[:, kept]) for share, values in self.first_values(i)]
            middle = block(middle, cond, None if by is None else by[kept], *v_1)
        rows = []
        for i in range(x.shape[1]):
            missing = x[0, i] if self.routing.rejoin == "unchanged" else self.mask
            is_missing = i not in kept or self.routing.path_dropout == 1
            rows.append(missing if is_missing else middle[0, kept.index(i)])
        y = torch.stack(rows)[None]
        x = y if self.routing.rejoin == "unchanged" else self.both(torch.cat([x, y], 2))
        for i, block in enumerate(self.blocks[last:], last):
            x = block(x, cond, by, *self.first_values(i))
        shift, scale = self.final_modulation(silu(cond))[:, None].chunk(2, dim=-1)
        out = self.final(normalise(x, self.eps) * (1 + scale) + shift)[0]
        if token_F is None:
            return out
        return torch.cat([out[:-1, : self.patch_out], out[-1:, self.patch_out :].expand(len(out) - 1, -1)], 1)


def kept_tokens(layout: SequenceLayout, routing: RoutingConfig) -> list[list[int]]:
    """Return the kept tokens of each sample."""
    kept_P = select_kept(KEYS_S, layout, routing.share)
    return [kept_P[rows].nonzero()[:, 0].tolist() for rows in rows_of(layout)]


def routed_pack(model: DiTConfig, keys_S: Optional[Tensor] = KEYS_S) -> PackedBatch:
    return replace(pack(SAMPLES, model, multiple_of=4, tail=3), draw_keys_S=keys_S)


def drawn(batch: PackedBatch, others: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random inputs, times and a cotangent, which has `others` more columns."""
    generator = torch.Generator().manual_seed(5)
    rows, channels = batch.latents_TC.shape
    inputs, cotangent = (torch.randn(rows, channels + n, generator=generator) for n in (0, others))
    return inputs, torch.rand(len(batch.keys), generator=generator), cotangent


@pytest.mark.parametrize(
    ("positions", "token", "values"),
    [("sincos_2d", None, False), ("rope_3d", None, False), ("rope_3d", 7, False), ("rope_3d", 7, True)],
)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_samples(
    build_model: BuildModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    positions: Any,
    token: Optional[int],
    values: bool,
) -> None:
    """With the teacher's token, the middle layers see it in all samples; values are those of the first layer."""
    routing = replace(CASES[name], first_layers=max(CASES[name].first_layers, int(values)))
    model_config = config(num_layers=4, routing=routing, position_embedding=positions, teacher_token_size=token)
    model_config.value_residual = values
    model_config.validate()
    model, reference = build_model(model_config, perturb=0.1), ReferenceRouted(model_config)
    monkeypatch.setattr(weights, "_DIRECT", {**weights._DIRECT, "routing.fuse": "both", "routing.mask": "mask"})
    weights.copy_weights(model, reference, model_config.num_attention_heads)
    batch = routed_pack(model_config)
    inputs, time, cotangent = drawn(batch, token or 0)
    tokens_SF = torch.randn(len(SAMPLES), token or 0, generator=torch.Generator().manual_seed(7))
    batch.conditions |= {"teacher_token": Entry("sample", tokens_SF)}
    out, loss = model(inputs, time, batch), torch.zeros((), dtype=torch.float64)
    kept = kept_tokens(batch.layout, routing)
    for i, (sample, rows) in enumerate(zip(SAMPLES, rows_of(batch.layout))):
        noised_F = None if token is None else tokens_SF[i].double()
        exact = reference.one(inputs[rows].double(), time[i], sample.grid, sample.label, kept[i], noised_F)
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    loss.backward()
    (out * cotangent)[batch.layout.valid_T].sum().backward()
    check_gradients(model, reference, model_config.num_attention_heads)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_a_pack_equals_a_pack_of_one_sample(build_model: BuildModel, name: str) -> None:
    model_config = config(num_layers=4, routing=CASES[name])
    model, batch = build_model(model_config, perturb=0.1), routed_pack(model_config)
    inputs, time, _ = drawn(batch)
    with torch.no_grad():
        together = model(inputs, time, batch)
        for i, (sample, rows) in enumerate(zip(SAMPLES, rows_of(batch.layout))):
            one = replace(pack([sample], model_config), draw_keys_S=KEYS_S[i : i + 1])
            alone = model(inputs[rows], time[i : i + 1], one)
            assert relative_error(together[rows], alone) <= ALONE_RTOL


def test_validation_and_sampling_use_all_tokens(build_model: BuildModel) -> None:
    """With TREAD, outputs equal those of the model without routing; SPRINT fuses both paths for every token."""
    batches = {}
    for routing in (None, TREAD):
        model_config = config(num_layers=4, routing=routing)
        model, batch = build_model(model_config, perturb=0.1), routed_pack(model_config, None)
        batches[routing is None] = model(*drawn(batch)[:2], batch)
    assert torch.equal(batches[True], batches[False])
    fused = [replace(SPRINT, share=share, path_dropout=share) for share in (0.0, 0.75)]
    batch = routed_pack(config())
    outputs = [
        build_model(config(num_layers=4, routing=routing), perturb=0.1)(
            *drawn(batch)[:2], replace(batch, draw_keys_S=keys_S)
        )
        for routing, keys_S in zip(fused, (KEYS_S, None))
    ]
    assert torch.equal(*outputs)


def test_every_sample_keeps_its_share_and_every_token_is_kept_equally_often() -> None:
    draws, lengths = 600, (1, 2, 7, 12)
    layout = SequenceLayout.from_lengths(lengths, multiple_of=4, total_tokens=40)
    kept = torch.stack([select_kept(torch.arange(4) + 4 * i + (i << 40), layout, 0.75) for i in range(draws)]).float()
    for rows, length in zip(rows_of(layout), lengths):
        count = -(-length // 4)
        assert (kept[:, rows].sum(1) == count).all()
        share = count / length
        error = (share * (1 - share) / draws) ** 0.5
        assert ((kept[:, rows].mean(0) - share).abs() <= 4 * error).all()
    assert not kept[:, ~layout.valid_T].any()
    assert shorter_layout(layout, 0.75, 2, 3).lengths == (1, 1, 2, 3)
    assert shorter_layout(layout, 0.75, 2, 3).total_tokens == 12


def test_a_share_of_the_samples_skips_the_middle(build_model: BuildModel) -> None:
    samples, share = 200, 0.3
    outputs = []
    for path_dropout in (share, 1.0, 0.0):
        model_config = config(num_layers=4, routing=replace(SPRINT, path_dropout=path_dropout))
        model = build_model(model_config, perturb=0.1)
        batch = pack([Sample((1, 2, 2), label=0)] * samples, model_config)
        batch = replace(batch, draw_keys_S=torch.arange(samples) << 31)
        inputs, time, _ = drawn(batch)
        with torch.no_grad():
            outputs.append(model(inputs, time, batch).unflatten(0, (samples, -1)))
    skipped, ran = ((outputs[0] == other).flatten(1).all(1) for other in outputs[1:])
    assert (skipped ^ ran).all()
    assert abs(skipped.float().mean() - share) <= 4 * (share * (1 - share) / samples) ** 0.5


def test_every_noise_level_of_a_sample_keeps_its_share() -> None:
    layout = SequenceLayout.from_lengths([10, 6], multiple_of=4)
    layout = with_levels(layout, [[(2, -1), (8, 0)], []])
    shorter = shorter_layout(layout, 0.5, 1, 1)
    for draw in range(20):
        kept_P = select_kept(torch.tensor([draw, draw << 33]), layout, 0.5)
        assert [int(kept_P[a:b].sum()) for a, b in ((0, 2), (2, 10), (12, 18))] == [1, 4, 3]
    assert shorter.lengths == (5, 3)
    assert shorter.levels is not None
    assert (shorter.levels.layout.lengths, shorter.levels.numbers) == ((1, 4, 3), (-1, 0, 0))


def test_every_training_step_draws_different_tokens(build_model: BuildModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model_config = config(num_layers=4, routing=TREAD)
    model, keys = build_model(model_config), []
    forward = model.forward

    def recorded(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        keys.append(batch.draw_keys_S)
        return forward(inputs_TC, time_S, batch)

    monkeypatch.setattr(model, "forward", recorded)
    for seed, step in ((7, 0), (7, 1), (8, 0)):
        training_forward_step(FlowMatching(), model_config, seed, step)(iter([routed_pack(model_config)]), model)
    assert len(torch.cat(keys).unique()) == 3 * len(SAMPLES)


def test_a_fused_middle_is_on_one_pipeline_stage() -> None:
    model, training = config(num_layers=6, routing=SPRINT), TrainingConfig(global_batch_size=4)

    def check(model: DiTConfig, layers: Optional[list[int]]) -> None:
        stages = 2 if layers is None else len(layers)
        layout = ParallelConfig(pipeline_model_parallel_size=stages, pipeline_layers=layers)
        check_parallel(model, layout, training, stages)

    with pytest.raises(ConfigError, match=r"stages of \[3, 3\] layers cut layers 2 to 4, .* \(such as \[2, 3, 1\]\)"):
        check(model, None)
    check(model, [2, 3, 1])
    check(model, [2, 4])
    check(config(num_layers=6, routing=TREAD), None)


def test_quantised_products_need_a_pack_without_padding_of_the_layout() -> None:
    model, training = (
        config(hidden_size=64, num_layers=6, routing=TREAD),
        TrainingConfig(global_batch_size=4, fp8="mxfp8"),
    )
    layouts = (
        ParallelConfig(context_parallel_size=2),
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    )
    for layout in layouts:
        with pytest.raises(ConfigError, match=r"sequence_parallel=(True|False) pad the shorter pack of model\.routing"):
            check_parallel(model, layout, training, 2)
    check_parallel(replace(model, routing=None), ParallelConfig(context_parallel_size=2), training, 2)
    check_parallel(model, ParallelConfig(), training, 1)


def test_counted_operations_are_those_of_the_kept_tokens() -> None:
    grid, kept = (1, 6, 4), (1, 3, 2)

    def flops(model: DiTConfig, grid: Grid) -> int:
        layout = SequenceLayout.from_lengths([grid[0] * grid[1] * grid[2]])
        return PackFlops(model).forward(layout, [grid])

    layer = flops(config(num_layers=3), kept) - flops(config(num_layers=2), kept)
    routed = config(num_layers=7, routing=replace(TREAD, share=0.75))
    assert flops(routed, grid) == flops(config(num_layers=2), grid) + 5 * layer


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (replace(TREAD, share=1.0), r"model\.routing\.share=1\.0 must be"),
        (replace(TREAD, first_layers=2), "first_layers=2 and last_layers=1 leave no middle of num_layers=3"),
        (replace(TREAD, path_dropout=0.1), r"path_dropout=0\.1 has no effect with rejoin=unchanged"),
        (replace(TREAD, rejoin="dropped"), "rejoin='dropped' is unknown"),
    ],
)
def test_settings_without_effect_are_refused(routing: RoutingConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(num_layers=3, routing=routing).validate()
