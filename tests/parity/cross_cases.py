"""Packs of images and clips with texts, and what every backbone with cross-attention must do with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.conditions import Conditions, per_sample, per_text_token
from dit.layout import SequenceLayout
from dit.patchify import grid_positions
from tests.parity.reference_cross import CrossReference, Leaves

# float32 against float64: a few hundred roundings of 6e-8 each, seen at most 4e-6.
RTOL = 1e-5


@dataclass(frozen=True)
class Sample:
    """An image or clip: its grid, the number of its text tokens (None for no text), frame rate, class."""

    grid: tuple[int, int, int]
    text_tokens: Optional[int] = None
    fps: float = 30.0
    label: Optional[int] = None

    def text(self, width: int) -> Optional[Tensor]:
        if self.text_tokens is None:
            return None
        generator = torch.Generator().manual_seed(sum(self.grid) * 100 + self.text_tokens)
        return torch.randn(self.text_tokens, width, generator=generator)

    def pooled(self, width: int) -> Optional[Tensor]:
        """Return the text as one vector; it is no function of the tokens."""
        if self.text_tokens is None:
            return None
        return torch.randn(width, generator=torch.Generator().manual_seed(sum(self.grid) * 7 + self.text_tokens))


MIXED = [
    Sample((1, 4, 4), 5, label=1),
    Sample((3, 2, 2), None, fps=8.0),
    Sample((1, 2, 3), 1, label=0),
    Sample((2, 3, 4), 9, fps=24.0, label=2),
]
DENSE = [Sample((2, 2, 3), n, fps=12.0, label=n) for n in (2, 4, 1)]


def pooled_size(config: Any) -> Optional[int]:
    """Return the width of the pooled text that the model takes, None for none."""
    pooled = config.batch_spec().condition("pooled")
    return None if pooled is None else pooled.shape[0]


def pack(
    samples: list[Sample], config: Any, *, multiple_of: int = 1, tail: int = 0, context_multiple_of: int = 1
) -> PackedBatch:
    """Pack samples as the data side does; a sample without text gets a text that it must not be able to see."""
    lengths = [t * h * w for t, h, w in (sample.grid for sample in samples)]
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of)
    layout = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of, total_tokens=layout.total_tokens + tail)
    positions = torch.zeros(layout.total_tokens, 3, dtype=torch.long)
    for sample, start, length in zip(samples, layout.starts, layout.lengths):
        positions[start : start + length] = grid_positions(sample.grid)
    width = config.context_size
    texts = [torch.full((3, width), 1e3) if sample.text_tokens is None else sample.text(width) for sample in samples]
    context_layout = SequenceLayout.from_lengths([len(text) for text in texts], multiple_of=context_multiple_of)
    context = torch.full((context_layout.total_tokens, width), 1e3)
    for text, start in zip(texts, context_layout.starts):
        context[start : start + len(text)] = text
    dropped = torch.tensor([sample.text_tokens is None for sample in samples])
    conditions = Conditions(
        context=per_text_token(context, context_layout, dropped),
        fps=per_sample(torch.tensor([sample.fps for sample in samples])),
    )
    if config.num_classes is not None:
        labels = torch.tensor([config.num_classes if s.label is None else s.label for s in samples])
        conditions |= {"label": per_sample(labels)}
    if (size := pooled_size(config)) is not None:
        given = [sample.pooled(size) for sample in samples]
        vectors = torch.stack([torch.full((size,), 1e3) if x is None else x for x in given])
        conditions |= {"pooled": per_sample(vectors, dropped)}
    return PackedBatch(
        latents_TC=torch.zeros(layout.total_tokens, config.token_channels),
        positions_T3=positions,
        layout=layout,
        sample_ids_S=torch.arange(len(samples)),
        grids=tuple(sample.grid for sample in samples),
        keys=tuple(map(str, range(len(samples)))),
        conditions=conditions,
    ).validate()


def draw(batch: PackedBatch, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Draw inputs and times of a pack."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch.latents_TC.shape
    return torch.randn(shape, generator=generator), torch.rand(batch.layout.num_samples, generator=generator)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return |ours - exact| / |exact| in the Euclidean norm."""
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-12))


def check_against_reference(
    model: nn.Module,
    config: Any,
    samples: list[Sample],
    kind: Callable[[Any, Leaves], Any] = CrossReference,
    **padding: int,
) -> None:
    """Run the pack once through ours, each sample alone through the reference; compare outputs and all gradients."""
    batch, leaves = pack(samples, config, **padding), Leaves(model)
    reference = kind(config, leaves)
    inputs, time = draw(batch)
    out = model(inputs, time, batch)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    loss = torch.zeros((), dtype=torch.float64)
    for i, (sample, start, length) in enumerate(zip(samples, batch.layout.starts, batch.layout.lengths)):
        rows = slice(start, start + length)
        given: dict[str, Any] = {"fps": sample.fps, "label": sample.label}
        if (size := pooled_size(config)) is not None:
            given["pooled"] = sample.pooled(size)
        text = sample.text(config.context_size)
        exact = reference.run(inputs[rows], time[i : i + 1], sample.grid, text, **given)
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    loss.backward()
    valid = batch.layout.valid_T
    (out[valid] * cotangent[valid]).sum().backward()
    errors = {}
    for name, parameter in model.named_parameters():
        exact = leaves[name].grad
        assert exact is not None, f"the reference does not use {name}"
        assert exact.norm() > 0, f"{name} has no gradient, so the comparison shows nothing"
        errors[name] = relative_error(parameter.grad, exact)
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong


ROPE_FIELDS = {"rope_theta": 50.0, "rope_scaling": "linear", "rope_factors": None}
"""Another value of each, for a config whose `rope_factors` are `STRETCH`."""
STRETCH = [2.0, 3.0, 2.0]


def check_setting_acts(build: Any, config: Any, name: str, value: Any) -> None:
    """The same weights predict something else under another value of a setting that shapes no weight."""
    batch = pack(MIXED, config)
    models = [build(made, perturb=0.1) for made in (config, replace(config, **{name: value}))]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    one, other = (model(*draw(batch), batch) for model in models)
    assert relative_error(one, other.double()) > 10 * RTOL


def check_padding_is_never_read(build: Any, config: Any, garbage: float) -> None:
    """The padding of tokens and texts changes no output of real tokens and no gradient."""
    batch = pack(MIXED, config, multiple_of=8, tail=8, context_multiple_of=4)
    valid, context_valid = batch.layout.valid_T, batch.conditions["context"].layout.valid_T[:, None]
    inputs, time = draw(batch)
    runs = []
    for fill in (0.0, garbage):
        model = build(config, perturb=0.1)
        text = batch.conditions["context"]
        filled = replace(text, values=text.values.masked_fill(~context_valid, fill))
        given = replace(batch, conditions=batch.conditions | {"context": filled})
        out = model(inputs.masked_fill(~valid[:, None], fill), time, given)[valid]
        out.square().sum().backward()
        runs.append({"out": out.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    for name, expected in runs[0].items():
        assert expected.isfinite().all(), name
        assert torch.equal(expected, runs[1][name]), name


def check_missing_text_is_dropped_text(model: nn.Module, config: Any) -> None:
    """A batch without any text gives what a batch with every text dropped gives (guidance relies on it)."""
    samples = [Sample((2, 2, 2)), Sample((1, 3, 3))]
    dropped = pack(samples, config)
    inputs, time = draw(dropped)
    absent = replace(dropped, conditions=dropped.conditions.without("context"))
    torch.testing.assert_close(model(inputs, time, dropped), model(inputs, time, absent), rtol=1e-5, atol=1e-6)
