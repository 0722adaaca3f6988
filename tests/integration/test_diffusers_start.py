"""A run starts directly from a diffusers folder, with the bits of the converted copy, on every layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from dit.checkpoint.base_model import read_run
from dit.checkpoint.diffusers_folder import read_network
from dit.checkpoint.reading import read_settings
from dit.convert.state_files import INDEX, read_json
from launch import export, import_weights
from tests.integration import actions
from tests.integration.runs import SLOTS, assert_same_bits, checkpoint, loss_values, overrides, read_tensors
from tests.support.published import save_network
from tests.support.ranks import Job, call, run_jobs, selected

pytestmark = pytest.mark.slow

STEPS = 2
LARGEST_GROWTH = 1.2  # of a rank's resident memory, relative to its shard of the weights
TP = {"parallel__tensor_model_parallel_size": 2}
PP = {"parallel__pipeline_model_parallel_size": 2}
CP = {"parallel__context_parallel_size": 2}
FSDP = {"parallel__data_parallel": "fsdp"}
SP = {**TP, "parallel__sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "wan_tp2_bf16": ("wan", 2, {**TP, "training__precision": "bf16"}),
    "pixart_pp2": ("pixart", 2, PP),
    "dit_tp2": ("dit", 2, TP),
    "unet_distributed_optimizer2": ("unet", 2, {"data__text_tokens": 8}),
    "sd3_tp2": ("sd3", 2, SP),
    "prx_tp2": ("prx", 2, SP),
    "chroma_tp2": ("chroma", 2, SP),
    "chroma_pp2": ("chroma", 2, PP),
    "sana_tp2": ("sana", 2, SP),
    "flux2_fsdp2": ("flux2", 2, FSDP),
    "qwen_image_pp2": ("qwen_image", 2, PP),
    "z_image_tp2": ("z_image", 2, SP),
    "lumina2_tp2": ("lumina2", 2, SP),
    "hunyuan_video_tp2": ("hunyuan_video", 2, SP),
    "hunyuan_video_pp2": ("hunyuan_video", 2, PP),
    "flux_tp2": ("flux", 2, SP),
    "flux_pp2": ("flux", 2, PP),
    "flux_fsdp2": ("flux", 2, FSDP),
    "flux_tp2_cp2": ("flux", 4, {**SP, **CP}),
    "flux_distributed_optimizer2": ("flux", 2, {"parallel__data_parallel": "distributed_optimizer"}),
}
"""Network, ranks and settings of each layout."""
LONG = ("chroma_pp2", "lumina2_tp2", "z_image_tp2", "hunyuan_video_pp2", "flux_pp2")
"""Layouts that `make test-long` tests: the same layouts as in other rows, with other families."""
STEPPED = ("flux_fsdp2", "flux_tp2_cp2")
"""Layouts on which two steps are compared as well; on the others, equal states imply equal steps."""


def arguments(recipe: str, base: Path, run_dir: Path, **settings: Any) -> list[str]:
    shared = {
        **{"data": "mock", "data__num_streams": 2, "data__height": 8, "data__width": 8, "optimizer__lr": 1e-3},
        **{"training__num_steps": STEPS, "training__log_interval": 1, "training__precision": "fp32"},
        **{"training__global_batch_size": 4, "logging__tensorboard": False, "training__ema_decay": 0.9},
    }
    words = overrides(run_dir, **{**shared, **settings})
    return ["--yes", "--factory", recipe, f"checkpoint.start_from={base}", *words]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    names = {name for (name,) in selected(request, ("layout",))} | {*STEPPED}
    layouts = {name: row for name, row in LAYOUTS.items() if name in names}
    for name in dict.fromkeys(network for network, *_ in layouts.values()):
        save_network(name, folder / name, torch.bfloat16 if name == "wan" else torch.float32)
        words = ["--from", folder / name, "--format", "diffusers", "--out", folder / f"imported_{name}"]
        assert import_weights.main(list(map(str, words))) == 0
    (folder / "pipeline").mkdir()
    shutil.copytree(folder / "flux", folder / "pipeline" / "transformer")
    (folder / "pipeline" / "model_index.json").write_text("{}")
    shutil.copytree(folder / "flux", folder / "gone")

    def train(name: str, base: str, ranks: int = 1, recipe: str = "finetune", **settings: Any) -> Job:
        return call(actions.train, *arguments(recipe, folder / base, folder / name, **settings), ranks=ranks)

    jobs = {}
    for layout, (network, ranks, settings) in layouts.items():
        words = arguments("finetune", folder / network, folder / "unused", **settings)
        jobs[f"start {layout}"] = call(actions.state_at_start, *words, ranks=ranks, folder=folder / f"start_{layout}")
        for base in (network, f"imported_{network}") if layout in STEPPED else ():
            jobs[f"{layout} {base}"] = train(f"run_{layout}_{base}", base, ranks, **settings)
    for base in ("pipeline", "imported_flux"):
        jobs[f"lora {base}"] = train(f"lora_{base}", base, 2, "finetune_lora", **SP)
    jobs |= {
        "gone 1": train("gone_run", "gone", 1, training__stop_at_step=1),
        "remove": Job(remove_weights, {"folder": folder / "gone"}),
        "gone 2": train("gone_run", "gone"),
        "alone": train("alone", "flux"),
        "other sizes": train("other", "flux", recipe="tiny_dit", data__num_streams=1),
        "other heads": train("other", "flux", model__num_attention_heads=2, model__rope_axes="[8,12,12]"),
    }
    return run_jobs(folder / "world", jobs)


def remove_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def codes(ended: dict[str, Any], name: str) -> set[int]:
    return {rank.code for rank in (ended[name] if isinstance(ended[name], list) else [ended[name]])}


def imported(folder: Path, network: str) -> dict[str, torch.Tensor]:
    tensors = read_tensors(checkpoint(folder / f"imported_{network}", 0))
    return {name.removeprefix("weight."): x for name, x in tensors.items()}


@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.long if x in LONG else ()) for x in LAYOUTS])
def test_weights_and_average_start_as_the_imported_weights(ended: dict[str, Any], folder: Path, layout: str) -> None:
    tensors, expected = read_tensors(folder / f"start_{layout}"), imported(folder, LAYOUTS[layout][0])
    for slot in ("weight", "ema"):
        found = {n.removeprefix(f"{slot}."): x for n, x in tensors.items() if n.startswith(f"{slot}.")}
        assert_same_bits(found, expected)


@pytest.mark.parametrize("layout", STEPPED)
def test_two_steps_equal_those_from_the_imported_checkpoint(ended: dict[str, Any], folder: Path, layout: str) -> None:
    network = LAYOUTS[layout][0]
    runs = [folder / f"run_{layout}_{base}" for base in (network, f"imported_{network}")]
    for base in (network, f"imported_{network}"):
        assert codes(ended, f"{layout} {base}") == {0}, ended[f"{layout} {base}"]
    assert loss_values(runs[0]) == loss_values(runs[1])
    found, expected = (read_tensors(checkpoint(run, STEPS)) for run in runs)
    assert {name.partition(".")[0] for name in found} == set(SLOTS)
    assert_same_bits(found, expected)
    start = imported(folder, network)
    assert any(not torch.equal(x, start[n.removeprefix("weight.")]) for n, x in found.items() if n[:6] == "weight")


def test_adapters_train_on_the_folder_of_a_pipeline(ended: dict[str, Any], folder: Path) -> None:
    runs = [folder / f"lora_{base}" for base in ("pipeline", "imported_flux")]
    for base in ("pipeline", "imported_flux"):
        assert codes(ended, f"lora {base}") == {0}, ended[f"lora {base}"]
    assert loss_values(runs[0]) == loss_values(runs[1])
    found, expected = (read_tensors(checkpoint(run, STEPS)) for run in runs)
    assert all("lora_" in name for name in found)
    assert_same_bits(found, expected)
    merged = [read_run(checkpoint(run, STEPS), read_settings(checkpoint(run, STEPS))[0], "ema") for run in runs]
    assert_same_bits(*merged)


def test_a_resumed_run_does_not_read_the_weights_again(ended: dict[str, Any], folder: Path) -> None:
    assert codes(ended, "gone 1") == {75}
    assert codes(ended, "gone 2") == {0}, ended["gone 2"].err
    assert not list((folder / "gone").glob("*.safetensors"))
    assert_same_bits(*(read_tensors(checkpoint(folder / run, STEPS)) for run in ("gone_run", "alone")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other sizes", ["is of FluxTransformer2DModel, our FluxConfig, but the model of the run is DiTConfig"]),
        ("other heads", ["has num_attention_heads=4", "but the model of the run has num_attention_heads=2"]),
    ],
)
def test_other_sizes_end_with_one_line(ended: dict[str, Any], name: str, words: list[str]) -> None:
    assert codes(ended, name) == {2}
    assert all(word in ended[name].err for word in [*words, "finetune(base="]), ended[name].err


def test_diffusers_loads_an_exported_run_in_shards(
    ended: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dit.convert.state_files.MAX_SHARD_BYTES", 60_000)
    run = folder / "run_flux_tp2_cp2_flux"
    words = ["--checkpoint", run, "--format", "diffusers", "--out", tmp_path / "out"]
    assert export.main(list(map(str, words))) == 0
    assert len(set(read_json(tmp_path / "out" / INDEX)["weight_map"].values())) > 5
    network, info = FluxTransformer2DModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"README.md", "scheduler_config.json"}
    config, _ = read_settings(checkpoint(run, STEPS))
    rules = read_network(tmp_path / "out").rules(config.model)
    assert_same_bits(rules.from_external(network.state_dict()), read_run(checkpoint(run, STEPS), config, "ema"))


@pytest.mark.parametrize("num_layers", [2])
def test_a_rank_needs_little_more_host_memory_than_its_part(tmp_path: Path, num_layers: int) -> None:
    """Reading fills the memory of the part for the first time; two layers are 0.6 GB of bf16, with a growth of 1.12.

    With `num_layers=20` (6.3 GB, 8 minutes), memory grew by 1.01 times the part.
    """
    sizes = {"num_single_layers": 2 * num_layers, "num_attention_heads": 12, "joint_attention_dim": 256}
    with torch.device("meta"):
        network = FluxTransformer2DModel(num_layers=num_layers, **sizes).bfloat16()
    for parameter in network.to_empty(device="cpu").parameters():
        torch.nn.init.normal_(parameter)
    network.save_pretrained(tmp_path / "network", max_shard_size="300MB")
    del network
    job = Job(actions.host_memory, {"network": tmp_path / "network"}, ranks=2)
    for part, growth in run_jobs(tmp_path / "world", {"memory": job})["memory"]:
        assert part > 100e6 * num_layers
        assert 0.5 * part < growth < LARGEST_GROWTH * part
