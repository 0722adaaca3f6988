"""Fine-tuning end to end: import weights, train adapters or all weights on five captioned pictures, and export.

The base is a diffusers PixArt with random weights. No command writes to its run folder.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, loss_values, read_tensors, training
from tests.parity.convert_cases import random_weights, relative_error
from tests.support.encoders import T5_WIDTH, save_t5
from tests.support.ranks import Job, call, run_jobs, selected

pytestmark = pytest.mark.slow  # test_fine_tuning_page.py runs the page's commands
STEPS, LONG = 6, 40
ROUNDING = 1e-5  # relative, fp32: sums in another order
MERGED = 1e-3  # W + B A rounds differently from W x + B (A x); at high noise, DDPM's x0 has 150 times that error
LAYOUTS = {
    "tp2_sp": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    "fsdp2": {"parallel__data_parallel": "fsdp"},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
}
REQUEST = {"count": 2, "num_steps": 5, "guidance_scale": 1.5, "conditions": {"context": [torch.ones(2, T5_WIDTH)] * 2}}


def pictures(folder: Path, count: int, colour: tuple[int, int, int]) -> Path:
    """Write noisy pictures of one colour, without captions."""
    folder.mkdir()
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 40, (16, 16, 3))
        Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(folder / f"{i}.png")
    return folder


def published(folder: Path) -> None:
    """Save a PixArt for pictures of 16 x 16 pixels with diffusers."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 48}
    inputs = {"in_channels": 3, "out_channels": 3, "sample_size": 16, "patch_size": 4, "caption_channels": T5_WIDTH}
    model = PixArtTransformer2DModel(**sizes, **inputs)
    model.load_state_dict(random_weights({n: tuple(x.shape) for n, x in model.state_dict().items()}))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    published(folder / "published")
    encoder, other = f"text={save_t5(folder / 't5')}", save_t5(folder / "other_t5", layers=1)
    text = ["--text-encoder", encoder]
    lora = ["--format", "lora", "--base", folder / "base"]
    pictures(folder / "subject_in", 5, (200, 30, 30)), pictures(folder / "class_in", 8, (30, 30, 200))

    def prepare(name: str, caption: str) -> Job:
        read = ["--in", folder / f"{name}_in", "--out", folder / name, "--caption", caption, "--multiple-of", 16]
        return call(actions.prepare, "images", *read, *text, "--validation", 0, "--processes", 1)

    def train(recipe: str, name: str, ranks: int = 1, base: str = "base", **settings: Any) -> Job:
        own = {
            **{"data__path": folder / "subject", "data__num_streams": 2, "data__shuffle_buffer": 8},
            **{"data__background": False},
            **{"training__num_steps": STEPS, "training__log_interval": 1, "training__precision": "fp32"},
            **{"training__micro_batch_size": 2, "training__global_batch_size": 4, "optimizer__lr": 1e-2},
            **{"logging__tensorboard": False, "model__context_dropout": 0.2},
        }
        return training(f"{recipe}(base='{folder / base}')", folder / name, ranks, **{**own, **settings})

    def export(run: str, form: str, out: str, *words: str) -> Job:
        return call(actions.export, "--checkpoint", folder / run, "--format", form, "--out", folder / out, *words)

    def import_weights(source: str, out: str, *words: object) -> Job:
        more = words or ("--format", "diffusers", *text)
        return call(actions.import_weights, "--from", folder / source, "--out", folder / out, *more)

    def sample(run: str) -> Job:
        return Job(actions.sample, {"run_dir": folder / run, "requests": [REQUEST]})

    blend = f"[{{path: {folder}/subject, weight: 1}}, {{path: {folder}/class, weight: 1}}]"
    long = {"training__num_steps": LONG, "training__global_batch_size": 8}
    # Both ranks read the base when they start, so an earlier world makes the base, and another one re-imports adapters.
    made = {
        "subject": prepare("subject", "a red circle"),
        "class": prepare("class", "a circle"),
        "import": import_weights("published", "base"),
        "files before": Job(actions.contents, {"folder": folder / "base"}),
    }
    jobs = {
        "adapters": train("finetune_lora", "adapters"),
        "first half": train("finetune_lora", "halves", training__stop_at_step=STEPS // 2),
        "second half": train("finetune_lora", "halves"),
        **{
            layout: train("finetune_lora", layout, 2, **LAYOUTS[layout])
            for (layout,) in sorted(selected(request, ("layout",)))
        },
        "long": train("finetune_lora", "long", **long, model__lora__rank=4),
        "full": train("finetune", "full", optimizer__lr=1e-3, training__ema_decay="none"),
        "dreambooth": train("dreambooth", "dreambooth", data__blend=blend, optimizer__lr=1e-3, **long),
        "files after": Job(actions.contents, {"folder": folder / "base"}),
        "merged": export("adapters", "diffusers", "merged"),
        "lora": export("adapters", "diffusers-lora", "lora"),
        "comfyui": export("adapters", "comfyui-lora", "comfyui.safetensors"),
        "back": import_weights("merged", "back"),
        "lora back": import_weights("lora", "lora_back", *lora),
        "lora out again": export("lora_back", "diffusers-lora", "lora_again", "--raw-weights"),
        "lora on a folder": import_weights("lora", "on_folder", "--format", "lora", "--base", folder / "published"),
        "lora out of it": export("on_folder", "diffusers-lora", "lora_of_folder", "--raw-weights"),
        "lora on lora": import_weights("lora", "none", "--format", "lora", "--base", folder / "adapters"),
        "full as adapters": export("full", "diffusers-lora", "none", "--raw-weights"),
        "no base": train("finetune_lora", "no_base", checkpoint__start_from="none"),
        "other texts": train("finetune_lora", "other_texts", data__online_text_encoder=str(other)),
        "on adapters": train("finetune_lora", "on_adapters", base="adapters", model__lora="none"),
        "other base": train("finetune_lora", "halves", checkpoint__start_from=folder / "back", training__num_steps=9),
        **{f"sample {run}": sample(run) for run in ("base", "adapters", "back", "lora_back")},
    }
    later = {
        "go on": train("finetune_lora", "go_on", base="lora_back"),
        "go on resumed": train("finetune_lora", "go_on", base="lora_back", training__num_steps=STEPS + 1),
        "go on in two": train("finetune_lora", "go_on_tp2", 2, base="lora_back", **LAYOUTS["tp2_sp"]),
        "other rank": train("finetune_lora", "other_rank", base="lora_back", model__lora__rank=3),
        "sample go_on": sample("go_on"),
    }
    made_first = {**run_jobs(folder / "made", made), **run_jobs(folder / "world", jobs)}
    return {**made_first, **run_jobs(folder / "later", later)}


def code(ended: dict[str, Any], name: str) -> Any:
    result = ended[name]
    return [rank.code for rank in result] if isinstance(result, list) else result.code


WORKS = (
    *("subject", "class", "import", "adapters", "second half", "long", "full", "dreambooth", "merged", "lora", "back"),
    *("lora back", "lora out again", "lora on a folder", "lora out of it", "go on", "go on resumed"),
)


@pytest.mark.parametrize("name", WORKS)
def test_every_command_succeeds(ended: dict[str, Any], name: str) -> None:
    assert code(ended, name) == 0, ended[name].err


def test_the_base_is_neither_changed_nor_copied(ended: dict[str, Any], folder: Path) -> None:
    """No file of the base changes. A run with adapters samples with the base's bits, and saves only adapters."""
    assert ended["files before"] == ended["files after"]
    base, adapted = ended["sample base"][0], ended["sample adapters"][0]
    assert_same_bits({name: x for name, x in adapted.items() if "lora_" not in name}, base)
    saved = read_tensors(checkpoint(folder / "adapters", STEPS))
    assert {name.partition(".")[0] for name in saved} == {"weight", "ema", "exp_avg", "exp_avg_sq"}
    assert all("lora_" in name for name in saved)
    assert saved["weight.layers.1.mlp.linear_fc2.lora_B.weight"].any()
    assert not torch.equal(ended["sample adapters"][1][0], ended["sample base"][1][0])


def test_a_resumed_run_is_bitwise_equal(ended: dict[str, Any], folder: Path) -> None:
    assert code(ended, "first half") == 75
    assert loss_values(folder / "halves") == loss_values(folder / "adapters")
    assert_same_bits(*(read_tensors(checkpoint(folder / name, STEPS)) for name in ("halves", "adapters")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_is_read_on_every_layout(ended: dict[str, Any], folder: Path, layout: str) -> None:
    assert code(ended, layout) == [0, 0], ended[layout][0].err
    assert loss_values(folder / layout) == pytest.approx(loss_values(folder / "adapters"), rel=ROUNDING)


@pytest.mark.parametrize("name", ["long", "dreambooth"])
def test_the_loss_falls(ended: dict[str, Any], folder: Path, name: str) -> None:
    """`long` trains adapters on five pictures; DreamBooth trains all weights, also on eight pictures of the class."""
    assert code(ended, name) == 0
    losses = loss_values(folder / name)
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


def test_the_first_loss_equals_that_of_the_base(ended: dict[str, Any], folder: Path) -> None:
    """New adapters have no effect, so the first loss equals that of full fine-tuning to the bit."""
    assert loss_values(folder / "adapters")[:1] == loss_values(folder / "full")[:1]


def test_merged_weights_draw_the_samples_of_the_adapters(ended: dict[str, Any], folder: Path) -> None:
    """So do the adapters exported for diffusers: W + B A equals the merged weight."""
    (here,), (there,) = ended["sample adapters"][1], ended["sample back"][1]
    assert relative_error(there, here) <= MERGED
    base = load_file(folder / "published" / "diffusion_pytorch_model.safetensors")
    merged = load_file(folder / "merged" / "diffusion_pytorch_model.safetensors")
    adapters = load_file(folder / "lora" / "pytorch_lora_weights.safetensors")

    def changed(name: str) -> Tensor:
        layer = f"transformer.{name.removesuffix('.weight')}"
        a, b = (adapters.get(f"{layer}.lora_{kind}.weight") for kind in "AB")
        return base[name] if a is None or b is None else base[name] + b @ a

    assert len(adapters) == 2 * 10 * 2  # A and B of q, k, v, out twice and the MLP's two, in two blocks
    for name, weight in merged.items():
        torch.testing.assert_close(weight, changed(name), rtol=1e-5, atol=1e-6)
    assert "merged into the weights" in ended["merged"].err


def test_reimported_adapters_are_equal(ended: dict[str, Any], folder: Path) -> None:
    """Adapters are equal to the bit after export, import and export, draw the same samples, and train on any layout."""
    names = ("lora", "lora_again", "lora_of_folder")
    there, *others = (load_file(folder / name / "pytorch_lora_weights.safetensors") for name in names)
    for again in others:
        assert_same_bits(again, there)
    here, back = (ended[f"sample {run}"] for run in ("adapters", "lora_back"))
    assert_same_bits(back[0], here[0])
    assert torch.equal(back[1][0], here[1][0])
    first, trained = loss_values(folder / "go_on")[0], loss_values(folder / "adapters")[0]
    assert first != trained  # `trained` is the first loss of new adapters
    assert code(ended, "go on in two") == [0, 0], ended["go on in two"][0].err
    assert loss_values(folder / "go_on_tp2") == pytest.approx(loss_values(folder / "go_on")[:STEPS], rel=ROUNDING)
    base = ended["sample go_on"][0]
    assert_same_bits({name: x for name, x in base.items() if "lora_" not in name}, ended["sample base"][0])


def test_comfyui_gets_the_layers_of_the_original_code(ended: dict[str, Any], folder: Path) -> None:
    """tests/parity/test_convert_lora.py tests the values."""
    assert code(ended, "comfyui") == 0, ended["comfyui"].err
    tensors = load_file(folder / "comfyui.safetensors")
    assert tensors["diffusion_model.blocks.1.attn.qkv.lora_up.weight"].shape == (144, 16)
    assert tensors["diffusion_model.blocks.0.cross_attn.kv_linear.alpha"] == 16


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full as adapters", ["has a full model and no adapters"]),
        ("no base", ["model.lora trains adapters of", "checkpoint.start_from=RUN_DIR"]),
        (
            "other texts",
            [
                "was trained with the text encoder",
                "/other_t5', which is of another kind, size or scale",
                '=["checkpoint.start_from"]',
            ],
        ),
        ("on adapters", ["has only adapters (LoRA) for the weights of", "/base/"]),
        ("other rank", ["lora_A.weight", "finetune_lora(base='"]),
        ("lora on lora", ["already has adapters"]),
        ("other base", ["has adapters (LoRA) for the weights of", "checkpoint.start_from="]),
    ],
)
def test_incompatible_settings_are_refused(ended: dict[str, Any], name: str, said: list[str]) -> None:
    assert code(ended, name) == 2
    assert all(words in ended[name].err for words in said), ended[name].err
