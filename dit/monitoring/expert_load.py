"""Load balance of the experts of each layer, for the log."""

import re
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from dit.layers.moe import MoE
from dit.models.base import Backbone


def expert_layers(model: nn.Module) -> Iterator[tuple[int, MoE]]:
    """Yield (global layer index, mixture of experts) for each layer with experts."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            index = re.search(r"layers\.(\d+)\.", name)
            assert index is not None, f"{name} is in no numbered layer"
            yield int(index[1]), module


def expert_load(chunks: Sequence[Backbone], device: torch.device) -> dict[str, float]:
    """Return the load of the experts over all ranks since the last call (collective).

    Returns:
        For each layer, under `experts/layer_i/`: `max_load`, the tokens of the most loaded expert divided by the mean
        (1 is even); `never_chosen`, the fraction of real tokens without an expert; `per_token`, the mean number of
        experts per token; with a balancing loss, its mean `aux_loss` (1 is even). Empty for a model without experts.
    """
    layers = {index: layer for chunk in chunks for index, layer in expert_layers(chunk)}
    if not layers:
        return {}
    num_experts = next(iter(layers.values())).load.num_experts
    counts = torch.zeros(chunks[0].config.num_layers, num_experts + 3, dtype=torch.float64, device=device)
    for index, layer in layers.items():
        counts[index] = layer.load.take(device)
    # Every token is local to exactly one of the ranks that have a layer.
    dist.all_reduce(counts)
    values = {}
    for index, (*loads, tokens, never, aux_loss) in enumerate(counts.tolist()):
        if not tokens:
            continue
        name = f"experts/layer_{index}"
        values[f"{name}/max_load"] = max(loads) * len(loads) / max(1.0, sum(loads))
        values[f"{name}/never_chosen"] = never / tokens
        values[f"{name}/per_token"] = sum(loads) / tokens
        if aux_loss:
            values[f"{name}/aux_loss"] = aux_loss / tokens
    return values
