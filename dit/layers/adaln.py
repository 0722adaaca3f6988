"""Adaptive layer norm: shift, scale and gate per sample from the conditioning vector.

Suffix S counts samples, or their noise levels if a sample has several (`SequenceLayout.levels`).
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from dit.backends.init import ONES, ZEROS, Init, xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import GradientCovers, replicate_on_all_stages
from dit.kernels.layer_kernels import LayerKernels, PendingResidual
from dit.kernels.modulation import NormModulation
from dit.layers.embeddings import timestep_features
from dit.layers.pre_hooks import run_pre_hooks
from dit.layout import SequenceLayout


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the token width (Zhang and Sennrich 2019), with or without a modulation after it."""

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        eps: float,
        gradient_covers: GradientCovers = "sequence_shard",
        init: Init = ONES,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = provider.parameter((hidden_size,), init, gradient_covers=gradient_covers)

    def forward(self, x_TD: Tensor) -> Tensor:
        return nn.functional.rms_norm(x_TD, x_TD.shape[-1:], self.weight, self.eps)

    def before(self, modulation: "SublayerModulation") -> "SublayerModulation":
        """Return `modulation` with this norm instead of a layer norm without affine parameters."""
        run_pre_hooks(self)
        return modulation._replace(weight_D=self.weight, eps=self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the token width (Ba et al. 2016), for sub-layers without modulation."""

    def __init__(self, hidden_size: int, provider: LayerProvider, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = provider.parameter((hidden_size,), ONES)
        self.bias = provider.parameter((hidden_size,), ZEROS)

    def forward(self, x_TD: Tensor) -> Tensor:
        return nn.functional.layer_norm(x_TD, x_TD.shape[-1:], self.weight, self.bias, self.eps)


class SublayerModulation(NamedTuple):
    """The modulation of one sub-layer: shift and scale before it, a gate after it (None for no gate), `[S, D]` each.

    Between two sub-layers f and g, one call adds the gated output of f to the residual, then normalises and modulates
    the sum for g (see `dit.kernels.modulation`):

        x --+--------------------------- + --+--------------------------- + --> x
            '- norm, modulate - f - gate '   '- norm, modulate - g - gate '
            |------ 1 ------|       |---------- 2 -----------|       |-3--|

        1 norm_modulate    2 gated_residual_then_norm    3 gated_residual

    At the end of a layer, `pending_residual` may replace 3: call 1 of the next layer then computes the sum, too.
    """

    shift_SD: Tensor
    scale_SD: Tensor
    gate_SD: Optional[Tensor]
    eps: float
    kernels: LayerKernels
    weight_D: Optional[Tensor] = None

    @property
    def norm(self) -> NormModulation:
        """Norm before the sub-layer, with shift and scale."""
        return NormModulation(self.shift_SD, self.scale_SD, self.eps, self.weight_D)

    def norm_modulate(self, x_TD: Tensor | PendingResidual, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Return x as the residual, and norm(x) * (1 + scale) + shift as the input of the sub-layer."""
        rows = layout.level_layout
        if isinstance(x_TD, PendingResidual) and x_TD.rows is rows:
            x_TD, y_TD, gate_SD, bias_D, _, kernels = x_TD
            return kernels.residual_norm_modulate(x_TD, y_TD, gate_SD, bias_D, self.norm, rows)
        # The fused call has one layout, for gate and norm, so a residual with another layout is added first.
        return self.kernels.norm_modulate(PendingResidual.added(x_TD), self.norm, rows)

    def gated_residual(self, x_TD: Tensor, y_TD: Tensor | PendingBias, layout: SequenceLayout) -> Tensor:
        """Return x + gate * y."""
        y_TD, bias_D = PendingBias.of(y_TD)
        return self.kernels.residual(x_TD, y_TD, self.gate_SD, bias_D, layout.level_layout)

    def pending_residual(
        self, x_TD: Tensor, y_TD: Tensor | PendingBias, layout: SequenceLayout
    ) -> Tensor | PendingResidual:
        """Return x + gate * y at the end of a layer, as a `PendingResidual` if `kernels.joins_layers`."""
        if not self.kernels.joins_layers:
            return self.gated_residual(x_TD, y_TD, layout)
        y_TD, bias_D = PendingBias.of(y_TD)
        return PendingResidual(x_TD, y_TD, self.gate_SD, bias_D, layout.level_layout, self.kernels)

    def gated_residual_then_norm(
        self, following: "SublayerModulation", x_TD: Tensor, y_TD: Tensor | PendingBias, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Return x + gate * y, and the input of the following sub-layer."""
        y_TD, bias_D = PendingBias.of(y_TD)
        into, rows = following.norm, layout.level_layout
        return self.kernels.residual_norm_modulate(x_TD, y_TD, self.gate_SD, bias_D, into, rows)

    def residual_then_norm(
        self, x_TD: Tensor, y_TD: Tensor | PendingBias, layout: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Return x + y for a previous sub-layer without a gate, and the input of this sub-layer."""
        return self._replace(gate_SD=None).gated_residual_then_norm(self, x_TD, y_TD, layout)


class Modulation(nn.Module):
    """Linear(SiLU(c)) to shift, scale and gate of each sub-layer, zero-initialised (adaLN-Zero).

    Args:
        num_sublayers: number of sub-layers, each with its own shift, scale and gate.
        condition_size: width of the conditioning vector; None for `hidden_size`.
        rank: factor the projection through this many features (adaLN-LoRA); None for a full matrix.
        gated: whether sub-layers have a gate.
        per_token: whether the conditioning vectors belong to the local tokens instead of samples. The projection is
            then replicated over tensor-parallel ranks, because under sequence parallelism their tokens differ.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2; adaLN-LoRA: NVIDIA 2025, arXiv:2501.03575, without its
    shared full-rank part.
    """

    def __init__(
        self,
        hidden_size: int,
        num_sublayers: int,
        provider: LayerProvider,
        *,
        condition_size: Optional[int] = None,
        bias: bool = True,
        eps: float = 1e-6,
        rank: Optional[int] = None,
        gated: bool = True,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.num_sublayers, self.eps, self.kernels = num_sublayers, eps, provider.kernels
        self.vectors = 3 if gated else 2
        self.down: Optional[nn.Module] = None
        features = condition_size or hidden_size
        if rank is not None:
            init = xavier_uniform(features, rank)
            self.down = provider.replicated_linear(features, rank, bias=False, init=init)
            features = rank
        linear = provider.replicated_linear if per_token else provider.gathered_linear
        self.linear: nn.Module = linear(features, self.vectors * num_sublayers * hidden_size, bias=bias, init=ZEROS)

    def forward(self, cond_SD: Tensor) -> list[SublayerModulation]:
        n, x_SD = self.vectors, nn.functional.silu(cond_SD)
        if self.down is not None:
            x_SD = self.down(x_SD)
        chunks = self.linear(x_SD).chunk(n * self.num_sublayers, dim=-1)
        gates = chunks[2::n] if n == 3 else [None] * self.num_sublayers
        triples = zip(chunks[0::n], chunks[1::n], gates)
        return [SublayerModulation(*triple, self.eps, self.kernels) for triple in triples]


class ScaleGateModulation(nn.Module):
    """Linear(c) to a scale and the argument of a tanh gate for each sub-layer, zero-initialised; no shift.

    Args:
        condition_size: width of the conditioning vector; None for neither scale nor gate, and no parameters.

    Source: Qin et al. 2025 (Lumina-Image 2.0), arXiv:2503.21758, and `transformer_lumina2.py` of diffusers.
    """

    def __init__(
        self,
        hidden_size: int,
        num_sublayers: int,
        provider: LayerProvider,
        *,
        condition_size: Optional[int],
        eps: float,
    ) -> None:
        super().__init__()
        self.size, self.num_sublayers, self.eps, self.kernels = hidden_size, num_sublayers, eps, provider.kernels
        self.linear: Optional[nn.Module] = None
        if condition_size is not None:
            rows = 2 * num_sublayers * hidden_size
            self.linear = provider.gathered_linear(condition_size, rows, bias=True, init=ZEROS)

    def forward(self, cond_SC: Tensor) -> list[SublayerModulation]:
        none_SD = cond_SC.new_zeros(len(cond_SC), self.size)
        if self.linear is None:
            return [SublayerModulation(none_SD, none_SD, None, self.eps, self.kernels)] * self.num_sublayers
        chunks = self.linear(cond_SC).chunk(2 * self.num_sublayers, dim=-1)
        pairs = zip(chunks[0::2], chunks[1::2])
        return [SublayerModulation(none_SD, scale, gate.tanh(), self.eps, self.kernels) for scale, gate in pairs]


class Approximator(nn.Module):
    """A network from the time and the index of a vector to this vector: shift, scale or gate of a sub-layer.

        cos, sin of t | cos, sin of 0 | cos, sin of the index -- Linear - (x + MLP(RMSNorm(x))) ... - Linear --> vector

    The index is embedded in float32 at a thousand times its value, so rounding is part of the published weights.
    Vectors are ordered by sub-layer; the last two are shift and scale of the head. All vectors begin as zeros.

    Args:
        num_sublayers: number of sub-layers with a gate.
        sizes: features, hidden size and number of blocks.

    Source: `transformer_chroma.py` of diffusers, where 0 is the guidance scale of FLUX.1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_sublayers: int,
        provider: LayerProvider,
        *,
        sizes: Sequence[int],
        time_scale: float,
        bias: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.features, width, count = sizes
        self.num_sublayers, self.time_scale, self.eps, self.kernels = num_sublayers, time_scale, eps, provider.kernels
        self.linear_in = provider.replicated_linear(
            self.features, width, bias=bias, init=xavier_uniform(self.features, width)
        )
        self.blocks = nn.ModuleList(_SiluBlock(width, provider, bias=bias) for _ in range(count))
        self.linear_out = provider.replicated_linear(width, hidden_size, bias=bias, init=ZEROS)

    def forward(self, time_S: Tensor) -> list[SublayerModulation]:
        times_F = [timestep_features(t, self.features // 4) for t in (time_S.double() * self.time_scale, 0 * time_S)]
        index_VF = index_features(3 * self.num_sublayers + 2, self.features // 2, time_S.device)
        per_sample = torch.cat(times_F, -1)[:, None].expand(-1, len(index_VF), -1)
        x_SVF = torch.cat([per_sample, index_VF.expand(len(time_S), -1, -1)], -1).to(self.linear_in.weight.dtype)
        x_SVF = self.linear_in(x_SVF)
        for block in self.blocks:
            x_SVF = block(x_SVF)
        *chunks, shift_SD, scale_SD = self.linear_out(x_SVF).unbind(1)
        triples = zip(chunks[0::3], chunks[1::3], chunks[2::3])
        mods = [SublayerModulation(*triple, self.eps, self.kernels) for triple in triples]
        return [*mods, SublayerModulation(shift_SD, scale_SD, None, self.eps, self.kernels)]


class _SiluBlock(nn.Module):
    """x + Linear(SiLU(Linear(RMSNorm(x))))."""

    def __init__(self, width: int, provider: LayerProvider, *, bias: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(width, provider, eps=torch.finfo(torch.float32).eps)  # the default of `nn.RMSNorm`
        init = xavier_uniform(width, width)
        self.linear_1, self.linear_2 = (
            provider.replicated_linear(width, width, bias=bias, init=init) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear_2(nn.functional.silu(self.linear_1(self.norm(x))))


def index_features(count: int, size: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of 1000 times the indices in float32, `[count, size]`, equal on all devices."""
    half = size // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=device) / half
    index_V1 = 1000 * torch.arange(count, dtype=torch.float32, device=device)[:, None]
    angle = (index_V1 * exponent.double().exp().float()).double()
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def shared_modulation(hidden_size: int, num_sublayers: int, provider: LayerProvider) -> nn.Sequential:
    """Return Linear(SiLU(c)), `[S, 3 * num_sublayers * D]`: shift, scale and gate of each sub-layer in turn.

    Every layer adds its table to it (`TableModulation`). It is replicated over pipeline stages; gradients are summed
    over the stages. It is zero-initialised like the tables, so every gated residual starts as the identity, as in
    adaLN-Zero.

    Source: adaLN-single, Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, section 2.3.
    """
    linear = provider.replicated_linear(hidden_size, 3 * num_sublayers * hidden_size, bias=True, init=ZEROS)
    replicate_on_all_stages(linear.parameters())
    return nn.Sequential(OrderedDict(silu=nn.SiLU(), linear=linear))


class TableModulation(nn.Module):
    """One layer's learned table, added to the output of `shared_modulation`."""

    def __init__(self, hidden_size: int, num_sublayers: int, provider: LayerProvider, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.kernels = eps, provider.kernels
        self.table = provider.parameter((3 * num_sublayers, hidden_size), ZEROS)

    def forward(self, shared_SD: Tensor) -> list[SublayerModulation]:
        chunks = (shared_SD.unflatten(-1, self.table.shape) + self.table).unbind(1)
        triples = zip(chunks[0::3], chunks[1::3], chunks[2::3])
        return [SublayerModulation(*triple, self.eps, self.kernels) for triple in triples]
