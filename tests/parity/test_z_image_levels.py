"""Z-Image with clean tokens, against the modulation per token in diffusers' model for pictures to edit."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dit.layout import CLEAN
from dit.levels import with_levels
from dit.patchify import patchify
from dit.verify.public import CALLS
from tests.conftest import BuildModel
from tests.parity.convert_cases import assert_same_gradients, load, relative_error
from tests.parity.test_convert_streams import FAMILIES, RTOL, import_random, latents_and_texts, pack_of

SEGMENTS = [[(4, CLEAN), (11, 0)], [(6, 0), (9, CLEAN), (6, 0)]]
TIMES = torch.tensor([0.25, 0.75])


def with_clean_tokens(external: Any, clean_T: Tensor) -> list[Any]:
    """Modulate the clean tokens of diffusers' network with their own time 1; image tokens are first in all blocks."""

    def of_tokens(x_BTD: Tensor) -> Tensor:
        noised_BT = torch.ones(x_BTD.shape[:2], dtype=torch.long)
        noised_BT[:, : len(clean_T)] = (~clean_T).long()
        return noised_BT

    def clean(noisy_BC: Tensor) -> Tensor:
        return external.t_embedder(external.t_scale * torch.ones(len(noisy_BC)))

    def of_block(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, mask, frequencies, noisy_BC = args[:4]
        return x_BTD, mask, frequencies, None, of_tokens(x_BTD), noisy_BC, clean(noisy_BC)

    def of_head(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        noisy_BC = named["c"]
        return args, {"noise_mask": of_tokens(args[0]), "c_noisy": noisy_BC, "c_clean": clean(noisy_BC)}

    blocks = [*external.noise_refiner, *external.layers]
    hooks = [block.register_forward_pre_hook(of_block) for block in blocks]
    return [*hooks, external.all_final_layer["2-1"].register_forward_pre_hook(of_head, with_kwargs=True)]


def test_clean_tokens_equal_those_of_diffusers(build_model: BuildModel) -> None:
    """Compare a pack of two sizes with two calls: outputs of all tokens and gradients; texts have the noised time."""
    family = FAMILIES["z_image"]
    external, model, weights = import_random(family)
    latents, texts = latents_and_texts(model)
    batch = pack_of(model)
    batch = replace(batch, layout=with_levels(batch.layout, SEGMENTS))
    layout = batch.layout
    assert layout.levels is not None
    network = load(build_model(model), weights)
    actual_TC = network(batch.latents_TC, layout.per_level(TIMES).masked_fill(layout.levels.clean_L, 0.0), batch)
    parts = []
    for i, (out_TC, segments) in enumerate(zip(actual_TC.split(list(layout.lengths)), SEGMENTS)):
        clean_T = torch.cat([torch.full((n,), number == CLEAN) for n, number in segments])
        hooks = with_clean_tokens(external, clean_T)
        call = CALLS[family.form.class_name]
        (exact,) = call(external, latents[i][None], 1000 * TIMES[i : i + 1], {"context": texts[i]})
        for hook in hooks:
            hook.remove()
        parts.append(patchify(exact[0], 1, model.patch_spatial)[0])
        assert relative_error(out_TC.detach(), parts[i].detach()) <= RTOL
    assert_same_gradients(family.form, model, network, actual_TC, external, torch.cat(parts))
