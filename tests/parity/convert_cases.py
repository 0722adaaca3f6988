"""Run our packed models on dense images or clips, to compare them with modules of other code bases."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.condition_table import CONTROL, LOW_RESOLUTION
from dit.conditions import Conditions, Entry
from dit.convert.diffusers_format import DiffusersFormat
from dit.convert.rules import Shape
from dit.data_api import sample_id
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.parallel.build import parameter_shapes
from dit.patchify import grid_positions, patchify, unpatchify
from dit.verify.public import gradient_errors


def packed(model: ModelConfig, latents: Sequence[Tensor], texts: Optional[list[Tensor]] = None) -> PackedBatch:
    """Return a pack of latents `[C, T, H, W]` of any sizes."""
    tokens, grids = zip(*(patchify(x, model.patch_temporal, model.patch_spatial) for x in latents))
    batch = PackedBatch(
        latents_TC=torch.cat(tokens),
        positions_T3=torch.cat([grid_positions(grid) for grid in grids]),
        layout=SequenceLayout.from_lengths([len(x) for x in tokens]),
        sample_ids_S=torch.arange(len(tokens)),
        grids=tuple(grids),
        keys=tuple(map(str, range(len(tokens)))),
        conditions=Conditions({}),
    )
    if texts is not None:
        context_layout = SequenceLayout.from_lengths([len(text) for text in texts])
        batch.conditions |= {"context": Entry("text", torch.cat(texts), context_layout)}
    return batch


def pictures_of(batch: PackedBatch, x_TC: Tensor, patch: int) -> Tensor:
    """Return the pictures of a pack of equal sizes, `[N, C, H, W]`."""
    parts = zip(x_TC.split(list(batch.layout.lengths)), batch.grids)
    return torch.stack([unpatchify(x, grid, 1, patch)[:, 0] for x, grid in parts])


@torch.no_grad()
def load(network: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Copy weights into a network by name; the names must be equal."""
    parameters = dict(network.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    return network


def random_weights(shapes: dict[str, Shape], *, scale: float = 0.1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def predict(
    network: nn.Module,
    model: ModelConfig,
    latents: Tensor,
    time_B: Tensor,
    *,
    labels_B: Optional[Tensor] = None,
    texts: Optional[list[Tensor]] = None,
    others: Optional[dict[str, Tensor]] = None,
    control: Optional[Tensor] = None,
    low: Optional[Tensor] = None,
) -> Tensor:
    """Return the prediction `[B, C, T, H, W]` for latents `[B, C, T, H, W]`; `others` are per sample."""
    pt, ps = model.patch_temporal, model.patch_spatial
    batch = packed(model, list(latents), texts)
    layout, grids = batch.layout, batch.grids
    batch.conditions |= {name: Entry("sample", values) for name, values in (others or {}).items()}
    if labels_B is not None:
        batch.conditions |= {"label": Entry("sample", labels_B)}
    if control is not None:
        batch.conditions |= {"control": CONTROL.pack(list(control), layout, (pt, ps))}
    if low is not None:
        batch.conditions |= {"low_resolution": LOW_RESOLUTION.pack(list(low), layout, (pt, ps))}
    out = network(batch.latents_TC, time_B, batch)
    parts = out.split(list(layout.lengths))
    return torch.stack([unpatchify(x, grid, pt, ps) for x, grid in zip(parts, grids)])


@torch.no_grad()
def run(network: nn.Module, model: ModelConfig, latents: Tensor, time_B: Tensor, **given: Any) -> Tensor:
    """Run `predict` without gradients."""
    return predict(network, model, latents, time_B, **given)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def assert_round_trip(form: DiffusersFormat[Any], external: Mapping[str, Any]) -> None:
    """Check that our settings of a diffusers model give its settings again, without notes."""
    imported = form.read_settings(external)
    settings, notes = form.write_settings(imported.model, imported.latent_size)
    assert notes == []
    assert plain(settings) == plain(external)
    assert form.read_settings(settings) == imported


GRADIENT_RTOL = 1e-4


def assert_same_gradients(
    form: DiffusersFormat[Any],
    model: ModelConfig,
    network: nn.Module,
    actual_TC: Tensor,
    external: nn.Module,
    exact_TC: Tensor,
) -> None:
    """Compare the gradients of a random cotangent of the outputs of our network and of the one of diffusers."""
    cotangent_TC = torch.randn(exact_TC.shape, generator=torch.Generator().manual_seed(6))
    exact_TC.backward(cotangent_TC)
    actual_TC.backward(cotangent_TC)
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    rules = form.rules(model, parameter_shapes(model), (1, 8, 8))
    errors = gradient_errors(rules, gradients, dict(external.named_parameters()))
    assert len(errors) > 30
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_RTOL} == {}


def start_noise(seed: int) -> Tensor:
    """Return the initial standard normal noise of `launch.sample` for two latents of 8 x 8, `[2, 4, 8, 8]`."""
    ids = torch.tensor([sample_id(f"generated {i}") for i in range(2)])
    noise_TC = AddressedNoise(seed, 0, ids, SequenceLayout.from_lengths([64, 64])).normal_TC("start", 4)
    return torch.stack([x.T.reshape(4, 8, 8) for x in noise_TC.split(64)])


def page_blocks(adapters: Path, base: Path) -> list[dict[str, Any]]:
    """Run each code block of the README in a folder of exported adapters; return the variables of each block.

    Args:
        base: the diffusers pipeline that the adapters modify.
    """
    text = (adapters / "README.md").read_text().replace("BASE", str(base)).replace("THIS_FOLDER", str(adapters))
    namespaces = []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        namespaces.append(namespace)
    return namespaces


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a diffusers model, with lists in place of tuples."""
    return {n: list(v) if isinstance(v, tuple) else v for n, v in config.items() if n[0] != "_"}
