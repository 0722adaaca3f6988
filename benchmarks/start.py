"""Host memory that each rank needs to read its weights from a folder of diffusers (`checkpoint.start_from`).

`python -m benchmarks.start --gigabytes 6 --ranks 2`

A FLUX of random bf16 weights is written to a temporary folder. Tensor-parallel ranks build their parts without initial
weights, read them, and report the growth of their resident memory at its peak, from before the build on. Pages of the
mapped files count, too. A growth of 1.0 shards is the weights only.
"""

import argparse
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.errors import one_line_errors
from dit.terminal import echo
from launch import environment

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 1536
SHARD_BYTES = 500_000_000


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.4, help="size of the weights (default: 0.4)")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--folder", type=Path, help="disk to write to (default: the temporary one)")
    return parser


def write_network(folder: Path, size_bytes: float) -> None:
    """Write a FLUX of about this size, with random bf16 weights in shards; one shard is in memory at a time."""
    import torch
    from safetensors.torch import save_file

    from dit.convert.diffusers_flux import DiffusersFlux
    from dit.convert.state_files import CONFIG, INDEX, STEM, to_json
    from dit.models.flux.config import FluxConfig
    from dit.parallel.build import parameter_shapes

    def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
        model = FluxConfig(**_sizes(layers))
        return DiffusersFlux().rules(model, parameter_shapes(model), (1, 128, 128)).external_shapes()

    def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(2 * torch.Size(shape).numel() for shape in shapes.values())

    one, two = (size_of(shapes_of(layers)) for layers in (1, 2))
    layers = max(1, 1 + round((size_bytes - one) / (two - one)))
    settings, _ = DiffusersFlux().write_settings(FluxConfig(**_sizes(layers)), (1, 128, 128))
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(to_json(settings))
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map: dict[str, str] = {}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes_of(layers).items():
        if shards[-1] and size_of(shards[-1] | {name: shape}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    for i, shard in enumerate(shards, 1):
        file = f"{STEM}-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _repeated(numbers, shape) for name, shape in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(to_json({"metadata": {}, "weight_map": weight_map}))


def _repeated(numbers: "Tensor", shape: Sequence[int]) -> "Tensor":
    size = math.prod(shape)
    return numbers.repeat(-(-size // len(numbers)))[:size].view(*shape)


def _sizes(layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 12, "ffn_hidden_size": 4 * WIDTH, "context_size": 256}
    return {**sizes, "num_joint_layers": layers, "num_single_layers": 2 * layers}


def read_on_rank(folder: Path, rank: int, *, network: Path, ranks: int, port: int) -> None:
    """Read the weights of one rank, and write the measured memory into `folder`."""
    import torch

    from dit.backends import process_groups
    from dit.checkpoint.base_model import find_start
    from dit.checkpoint.diffusers_folder import read_network
    from dit.checkpoint.sharded_state import load_weights
    from dit.models.base import Backbone
    from dit.models.flux.config import FluxConfig
    from dit.parallel.build import TracedBuild, build_model
    from dit.parallel.dims import ParallelConfig
    from dit.settings import TrainingConfig

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launched.items()}
    parallel = ParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)
    groups = process_groups.initialize(parallel)
    model = read_network(network).trained.model

    def build(model: FluxConfig) -> list[Backbone]:
        traced = TracedBuild(None, torch.device("cpu"))  # without initial weights
        return build_model(model, parallel, TrainingConfig(precision="bf16"), groups, traced=traced)

    assert isinstance(model, FluxConfig)
    narrow = {"hidden_size": 64 * ranks, "num_attention_heads": ranks, "rope_axes": [16, 24, 24]}
    build(FluxConfig(**{**_sizes(1), **narrow}))  # its imports need memory, too
    weights = find_start(str(network)).weights(model)
    torch.distributed.barrier()
    before, began = _reset_peak_bytes(), time.perf_counter()
    chunks = build(model)  # some layers start as zeros, so building touches a part of the memory
    load_weights(weights, chunks, groups)
    growth, seconds = _peak_bytes() - before, time.perf_counter() - began
    shard = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
    record = {"shard_bytes": shard, "growth_bytes": growth, "seconds": seconds}
    (folder / f"memory_{rank}.json").write_text(json.dumps(record))
    process_groups.destroy()


def _reset_peak_bytes() -> int:
    """Reset the peak of this process's resident memory to its present size, and return that."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(folder: Path, size_bytes: float, ranks: int) -> list[dict[str, float]]:
    """Return bytes of the shard, growth of the memory and seconds of each rank."""
    from dit.safe_files import parse_json, read_bytes
    from dit.verify.ranks import free_port, run_ranks

    write_network(folder / "network", size_bytes)
    read = partial(read_on_rank, network=folder / "network", ranks=ranks, port=free_port())
    run_ranks(read, ranks, folder, timeout_s=3000)
    return [parse_json(read_bytes(folder / f"memory_{rank}.json")) for rank in range(ranks)]


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    environment.prepare()
    environment.quiet_libraries()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for rank, record in enumerate(measure(folder, args.gigabytes * 1e9, args.ranks)):
            shard, growth = record["shard_bytes"], record["growth_bytes"]
            echo(
                f"rank {rank}: shard {shard / 1e9:.3f} GB, growth {growth / 1e9:.3f} GB ({growth / shard:.3f} shards), "
                f"{record['seconds']:.1f} s"
            )
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
