"""Adding a new condition only takes a declaration and a module that reads it: both are in this file."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.condition_table import CONTROL
from dit.conditions import Condition
from dit.layers.embeddings import ScalarEmbedder
from dit.layers.tokens import PatchEmbedding
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit.model import DiT
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig
from dit.step.forward_step import training_forward_step
from energon_data.mock import MockData
from tests.conftest import BuildModel
from tests.support.batches import generate

MOOD = Condition(name="mood", axis="sample", description="mood", null=-2.0, stored_as=("mood",))


@dataclass(kw_only=True)
class MoodyConfig(DiTConfig):
    """A DiT conditioned on a number and a control picture of each sample."""

    model_path: ClassVar[Optional[str]] = f"{__name__}:Moody"

    def conditions(self) -> tuple[Condition, ...]:
        control = replace(CONTROL, shape=(3,), dropout=0.5, group="control")
        return (*super().conditions(), replace(MOOD, dropout=0.5), control)


class MoodyConditioner(nn.Module):
    def __init__(self, inner: nn.Module, size: int, provider: Any) -> None:
        super().__init__()
        self.inner, self.mood = inner, ScalarEmbedder(1, size, provider)

    def forward(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        return self.inner(time_S, batch) + self.mood(batch.conditions["mood"].values)


class Moody(DiT):
    def __init__(self, config: MoodyConfig, provider: Any, attention: Any, stage: Stage) -> None:
        super().__init__(config, provider, attention, stage)
        self.conditioner = MoodyConditioner(self.conditioner, config.hidden_size, provider)
        self.control = PatchEmbedding(3 * 4, config.token_channels, provider)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        control_TC = self.control(batch.conditions["control"].values, batch.layout)
        return super().forward(inputs_TC + control_TC, time_S, batch)


MODEL = MoodyConfig(hidden_size=32, num_layers=1, num_attention_heads=2, num_classes=3)
SPEC = MODEL.batch_spec(micro_batch_size=8)


def test_a_new_condition_is_trained_and_dropped(build_model: BuildModel) -> None:
    """Synthetic data include it, the step drops it by draws of its group, and its reader gets a gradient."""
    network = build_model(MODEL, perturb=0.1)
    stream = MockData(height=4, width=4).build_train(SPEC, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    seen = []
    network.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[2]))
    step = training_forward_step(FlowMatching(), MODEL, 7, 0)
    for _ in range(4):
        prediction_TC, loss_of = step(stream, network)
        (loss_of(prediction_TC)[0] / 100).backward()
    moods = torch.cat([batch.conditions["mood"].values for batch in seen])
    labels = torch.cat([batch.conditions["label"].values for batch in seen])
    controls = torch.cat([batch.layout.sum_per_sample(batch.conditions["control"].values.abs()) for batch in seen])
    no_mood_S, no_control_S = moods == -2, controls.sum(1) == 0
    assert 4 < int(no_mood_S.sum()) < 28
    assert 4 < int(no_control_S.sum()) < 28
    assert not torch.equal(no_mood_S, no_control_S), "a draw of their own"
    assert no_mood_S[labels == 3].all(), "one draw with the class, whose share is smaller"
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_new_condition_is_sampled_and_guided(build_model: BuildModel) -> None:
    network = build_model(MODEL, perturb=0.1)

    def drawn(scale: float, **given: Any) -> Tensor:
        batch = empty_pack(SPEC, (1, 4, 4), 1, torch.device("cpu"), {name: [x] for name, x in given.items()})
        options: dict[str, Any] = {"solver": "euler", "num_steps": 2, "seed": 0}
        return generate(network, FlowMatching(), batch, SPEC, SamplingConfig(guidance_scale=scale, **options))

    picture = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for given in ({"mood": 0.5}, {"control": picture}):
        assert (drawn(1.0, **given) - drawn(1.0)).abs().max() > 1e-3
        torch.testing.assert_close(drawn(0.0, **given), drawn(1.0))  # only the unconditional half
