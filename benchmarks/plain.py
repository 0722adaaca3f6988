"""Time our optimizer step and that of a plain PyTorch DiT, interleaved: `python -m benchmarks.plain`, on CPU.

The plain step is hand-written for one process: the network of Peebles and Xie 2023 from torch modules, flow matching on
a fixed dense batch, gradient clipping, torch's fused AdamW and an average in one fused call. Ours is the step of
training, data included. In a third step, diffusers' `DiTTransformer2DModel` replaces the network, if it is installed.
Times are process times on one thread; ratios are medians over rounds in which each step runs once.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.step import build_parser as step_parser
from benchmarks.step import config_of, revision
from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment

if TYPE_CHECKING:
    from dit.backends.process_groups import ProcessGroups

CLASSES, DROPOUT = 26, 0.1
FREQUENCIES = 256
DECAY, RATE, CLIP = 0.995, 1e-3, 1.0


@dataclass(frozen=True)
class Case:
    """Sizes of a comparison.

    Attributes:
        side: of the picture in tokens; a batch has `batch` of them.
        ragged: our pictures have many sizes, in padded packs with the number of tokens of the dense batch.
    """

    hidden: int
    layers: int
    heads: int
    side: int
    batch: int
    ragged: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        kind = "ragged packs of as many tokens" if self.ragged else "dense"
        return f"hidden {self.hidden}, {self.layers} layers, {self.side**2} tokens, batch {self.batch}, {kind}"


CASES = [
    Case(128, 6, 4, 4, 64),
    Case(128, 6, 4, 4, 64, ragged=True),
    Case(384, 12, 6, 16, 1),
    Case(384, 12, 6, 16, 1, ragged=True),
]
PATCH = 4


class Block(nn.Module):
    """Attention and MLP, each with a preceding norm that is scaled and shifted, and a gate (adaLN-Zero)."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(size, 6 * size)
        self.norm = nn.LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))

    def forward(self, x_BTD: Tensor, cond_BD: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(silu(cond_BD))[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm(x_BTD) * (1 + scale_1) + shift_1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + gate_1 * self.out(attended)
        return x_BTD + gate_2 * self.mlp(self.norm(x_BTD) * (1 + scale_2) + shift_2)


class PlainDiT(nn.Module):
    """The class-conditional DiT on tokens, without frills.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        size, channels = case.hidden, PATCH**2
        self.first, self.last = nn.Linear(channels, size), nn.Linear(size, channels)
        self.positions = nn.Buffer(torch.randn(case.side**2, size))
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, size), nn.SiLU(), nn.Linear(size, size))
        self.label = nn.Embedding(CLASSES + 1, size)
        self.blocks = nn.ModuleList(Block(size, case.heads) for _ in range(case.layers))
        self.norm = nn.LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(size, 2 * size)

    def forward(self, x_BTC: Tensor, time_B: Tensor, label_B: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(FREQUENCIES // 2) * (-9.21034 / (FREQUENCIES // 2)))
        angles = 1000 * time_B[:, None] * frequencies
        cond_BD = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.label(label_B)
        x_BTD = self.first(x_BTC) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD, cond_BD)
        shift, scale = self.modulation(silu(cond_BD))[:, None].chunk(2, -1)
        out: Tensor = self.last(self.norm(x_BTD) * (1 + scale) + shift)
        return out


class Diffusers(nn.Module):
    """diffusers' class-conditional DiT, on pictures."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from diffusers import DiTTransformer2DModel

        self.side = case.side
        self.network = DiTTransformer2DModel(
            num_attention_heads=case.heads,
            attention_head_dim=case.hidden // case.heads,
            in_channels=1,
            num_layers=case.layers,
            sample_size=case.side * PATCH,
            patch_size=PATCH,
            num_embeds_ada_norm=CLASSES,
        )

    def forward(self, x_BTC: Tensor, time_B: Tensor, label_B: Tensor) -> Tensor:
        pictures = x_BTC.view(len(x_BTC), 1, self.side * PATCH, self.side * PATCH)
        out: Tensor = self.network(pictures, 1000 * time_B, label_B.clamp(max=CLASSES - 1)).sample
        return out.reshape(x_BTC.shape)


def plain_step(network: nn.Module, case: Case) -> Callable[[], None]:
    """Return the step of a training loop written by hand."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    average = [p.detach().clone() for p in parameters]
    x0_BTC = torch.randn(case.batch, case.side**2, PATCH**2)
    label_B = torch.randint(CLASSES, (case.batch,))

    def step() -> None:
        noise_BTC, time_B = torch.randn_like(x0_BTC), torch.randn(case.batch).sigmoid()
        t = time_B[:, None, None]
        dropped_B = torch.where(torch.rand(case.batch) < DROPOUT, CLASSES, label_B)
        out_BTC = network(x0_BTC + t * (noise_BTC - x0_BTC), time_B, dropped_B)
        (out_BTC - (noise_BTC - x0_BTC)).square().mean().backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - DECAY)

    return step


def our_step(case: Case, folder: str, groups: "ProcessGroups") -> tuple[Callable[[], None], int]:
    """Return the step of a run, and the number of its parameters."""
    from dit.parallel.build import count_parameters
    from dit.training.pretrain import Run

    batch = 1 if case.ragged else case.batch  # packs, or samples
    words = [
        *(f"model.hidden_size={case.hidden}", f"model.num_layers={case.layers}"),
        *(f"model.num_attention_heads={case.heads}", f"model.patch_spatial={PATCH}"),
        *(f"training.ema_decay={DECAY}", f"training.global_batch_size={batch}", f"training.micro_batch_size={batch}"),
    ]
    pixels = case.side * PATCH
    config = config_of(
        step_parser().parse_args(["--factory", "letters_dit", "--shape", f"1x{pixels}x{pixels}", *words]), folder
    )
    if case.ragged:
        config = replace(config, data=replace(config.data, **ragged(case)))
    dims, spec = config.check_here()
    run = Run(config, dims, spec, groups, quiet=True)
    sums = torch.zeros(len(config.objective.logged) + 1)

    def step() -> None:
        run.step(sums)
        run.batches.reset()

    return step, count_parameters(config.model)


def ragged(case: Case) -> dict[str, Any]:
    """Return data settings: sides of a half, three quarters and all, in packs padded to the tokens of the batch."""
    sides = [case.side * share // 4 * PATCH for share in (2, 3, 4)]
    shapes = [f"1x{height}x{width}" for height in sides for width in sides]
    return {"shapes": shapes, "max_tokens_per_pack": case.batch * case.side**2, "pack_multiple_of": 1}


def measure(case: Case, rounds: int, warmup: int) -> dict[str, Any]:
    """Time the steps of one case and return its row."""
    from dit.backends import process_groups
    from dit.parallel.dims import ParallelConfig

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        groups = process_groups.initialize(ParallelConfig())
        our_step_of_case, parameters = our_step(case, folder, groups)
        networks: dict[str, nn.Module] = {"plain": PlainDiT(case)}
        if find_spec("diffusers"):
            networks["diffusers"] = Diffusers(case)
        steps = {"ours": our_step_of_case}
        steps |= {name: plain_step(network, case) for name, network in networks.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(warmup + rounds):
            for name, step in steps.items():
                began = time.process_time()
                step()
                if number >= warmup:
                    seconds[name].append(time.process_time() - began)
        process_groups.destroy()
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    row: dict[str, Any] = {"case": case.name, "milliseconds": {n: 1e3 * median(s) for n, s in seconds.items()}}
    row["parameters"] = {"ours": parameters} | counts
    row["ratio"] = {name: _ratio(seconds["ours"], seconds[name]) for name in networks}
    return row


def _ratio(seconds: Sequence[float], reference_seconds: Sequence[float]) -> float:
    """Return the median over rounds, in which each ran once."""
    return median(a / b for a, b in zip(seconds, reference_seconds, strict=True))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| case | ours, ms | plain, ms | diffusers, ms | ours / plain | ours / diffusers |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        times, ratio = row["milliseconds"], row["ratio"]
        cells = [f"{times[name]:,.1f}" if name in times else "-" for name in ("ours", "plain", "diffusers")]
        cells += [f"{ratio[name]:.2f}" if name in ratio else "-" for name in ("plain", "diffusers")]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plain", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="timed steps of each (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before (%(default)s)")
    numbers = range(len(CASES))
    parser.add_argument("--only", type=int, nargs="+", choices=numbers, default=numbers, help="numbers of the cases")
    parser.add_argument("--out", type=Path, help="append a line of JSON to this file")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Time the steps and print the table."""
    args = build_parser().parse_args(argv)
    if args.rounds < 1 or args.warmup < 0:
        raise ConfigError(f"--rounds={args.rounds} must be at least 1 and --warmup={args.warmup} at least 0")
    environment.prepare()
    torch.set_num_threads(1)
    rows = [measure(case, args.rounds, args.warmup) for i, case in enumerate(CASES) if i in args.only]
    echo(table(rows))
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"revision": revision(), "torch": torch.__version__, "rows": rows}) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
