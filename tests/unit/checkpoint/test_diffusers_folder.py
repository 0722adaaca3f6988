"""Starting a run from a diffusers folder: every box equals the full conversion, and faults are one-line errors."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.boxes import Box, boxes_of_range
from dit.checkpoint.added_inputs import with_added_inputs
from dit.checkpoint.base_model import MAY_DIFFER, find_start, start_line
from dit.checkpoint.diffusers_folder import local_path, read_network
from dit.checkpoint.full_weights import read_all
from dit.checkpoint.state_files import read_full
from dit.convert import sliced_weights
from dit.convert.diffusers_format import format_of_settings
from dit.convert.diffusers_sampling import scheduler_config
from dit.convert.rules import POINTWISE, ByHead, Rule, RuleBook, SwappedHalves
from dit.convert.run_record import CONFIG_KEY, to_record
from dit.convert.sliced_weights import StoredTensors
from dit.convert.state_files import INDEX, STEM
from dit.errors import CheckpointError, ConfigError, UserError
from dit.models.lora_config import LoRAConfig
from dit.models.registry import BACKBONES, config_class
from dit.parallel.build import parameter_shapes
from launch.config_file import built
from recipes.finetune import finetune
from tests.support.published import NETWORKS, save_network

HEADS = "transformer_blocks.1.attn.to_q.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    for name in NETWORKS:
        save_network(name, root / name, torch.bfloat16 if name == "wan" else torch.float32)
    return root


def random_box(shape: tuple[int, ...], generator: random.Random) -> Box:
    starts = [generator.randrange(size) for size in shape]
    return Box(tuple(starts), tuple(generator.randint(1, size - start) for size, start in zip(shape, starts)))


def assert_reads(weights: Any, key: str, box: Box, expected: torch.Tensor) -> None:
    """Check that a box of a tensor has the expected values, to the bit, and that nothing outside of it is written."""
    memory = torch.full((box.numel + 2,), 7.0)
    weights.read(key, expected.shape, [(box, memory[1:-1].view(box.sizes))])
    assert torch.equal(memory[1:-1].view(box.sizes), expected[box.slices_in(Box.of(expected.shape))]), key
    assert memory[0] == memory[-1] == 7


FURTHER = ("chroma", "flux2", "qwen_image", "z_image", "sd3", "hunyuan_video")
"""Networks whose rules have only forms that the rules of other networks have."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in FURTHER)) for n in NETWORKS])
def test_every_box_equals_that_of_the_full_conversion(
    folders: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is read in pieces, as half of the tensors are."""
    tensors = StoredTensors(folders / name).read_all()
    network = read_network(folders / name)
    assert len(list((folders / name).glob("*.safetensors"))) > 1
    full = network.rules(network.trained.model).from_external(tensors)
    weights, generator = network.weights(network.trained.model), random.Random(0)
    assert weights.shapes == {key: tuple(x.shape) for key, x in full.items()}
    for key, expected in full.items():
        monkeypatch.setattr(sliced_weights, "PIECE_ELEMENTS", generator.choice((4 << 20, 300)))
        stop = generator.randint(1, expected.numel())
        boxes = [Box.of(expected.shape), random_box(tuple(expected.shape), generator)]
        boxes += boxes_of_range(expected.shape, generator.randrange(stop), stop)  # as with a distributed optimizer
        for box in boxes:
            assert_reads(weights, key, box, expected)


@pytest.mark.parametrize(("name", "layer"), [("flux", "embed.linear"), ("unet", "conv_in")])
def test_the_inputs_of_a_control_picture_start_as_zeros(folders: Path, name: str, layer: str) -> None:
    """They come after the inputs of the latent; all other boxes are read from the folder."""
    network = read_network(folders / name)
    model = replace(network.trained.model, control_channels=3)
    stored, weights, generator = network.weights(network.trained.model), network.weights(model), random.Random(0)
    assert {n: weights.shapes[n] for n in weights.shapes} == parameter_shapes(model)
    assert [n for n in weights.shapes if weights.shapes[n] != stored.shapes[n]] == [f"{layer}.weight"]
    for key, expected in read_all(stored).items():
        shape = weights.shapes[key]
        if key == f"{layer}.weight":
            expected = torch.cat(
                [expected, expected.new_zeros(len(expected), shape[1] - expected.shape[1], *shape[2:])], 1
            )
        boxes = [Box.of(shape), random_box(shape, generator), *boxes_of_range(shape, 1, expected.numel() - 2)]
        for box in boxes:
            assert_reads(weights, key, box, expected)
    assert f"zeros for the control picture in {layer}.weight" in str(weights)


def test_stored_inputs_of_a_control_picture_are_neither_cut_nor_extended(folders: Path) -> None:
    """The shapes stay different, which a start refuses."""
    network = read_network(folders / "flux")
    stored = network.weights(replace(network.trained.model, control_channels=3))
    for channels in (2, 4):
        assert with_added_inputs(stored, replace(network.trained.model, control_channels=channels)) is stored


def test_an_embedding_of_intervals_starts_at_zero(folders: Path) -> None:
    """MeanFlow continues published weights of flow matching."""
    network = read_network(folders / "dit")
    model = replace(network.trained.model, interval_conditioning=True)
    weights = network.weights(model)
    assert weights.shapes == parameter_shapes(model)
    read = read_all(weights)
    assert not read["conditioner.interval.linear_2.weight"].any()
    assert torch.equal(read["conditioner.interval.linear_1.weight"], read["conditioner.time.linear_1.weight"])
    assert str(weights).endswith("an embedding of time intervals that starts at zero")


def test_adapters_without_the_inputs_of_the_control_picture_are_refused(folders: Path) -> None:
    """The base model would ignore the control picture."""
    network = read_network(folders / "flux")
    model = replace(network.trained.model, control_channels=4)
    cure = r"embed\.linear are zeros, which no adapter changes; add 'embed\.linear' to model\.lora\.targets=\['layers"
    with pytest.raises(ConfigError, match=cure):
        network.weights(model.with_adapters(LoRAConfig()))
    unet = read_network(folders / "unet")
    with pytest.raises(ConfigError, match="conv_in are zeros, which no adapter changes; train all weights"):
        unet.weights(replace(unet.trained.model, control_channels=4, lora=LoRAConfig(targets=["*"])))
    network.weights(model.with_adapters(LoRAConfig(targets=["embed.*"])))


def test_a_published_network_of_control_pictures_is_read(folders: Path) -> None:
    """FLUX.1 Canny and Depth have twice as many input channels as output channels. Source: their `config.json`."""
    settings = json.loads((folders / "flux" / "config.json").read_text()) | {"in_channels": 32, "out_channels": 16}
    model: Any = format_of_settings(settings).read_settings(settings).model
    assert (model.in_channels, model.control_channels, model.out_channels) == (4, 4, None)


@pytest.mark.parametrize(("name", "inputs", "outputs"), [("flux", 96, 16), ("wan", 9, 4)])
def test_networks_that_read_other_inputs_are_refused(folders: Path, name: str, inputs: int, outputs: int) -> None:
    """FLUX.1 Fill, and Wan 2.2 A14B from pictures. Source: their `config.json`."""
    settings = json.loads((folders / name / "config.json").read_text())
    settings |= {"in_channels": inputs, "out_channels": outputs}
    with pytest.raises(ConfigError, match=f"in_channels={inputs} is above out_channels={outputs}: this network also"):
        format_of_settings(settings).read_settings(settings)


def test_a_box_reads_only_its_slices(tmp_path: Path) -> None:
    """Rows of its heads from a fused projection; two ranges from permuted chunks. All other numbers are NaN."""
    for form, rows, expected in (
        (ByHead(4, (2, 2)), slice(4, 8), [[(2, 4)], [(2, 4)]]),
        (ByHead(4, (2, 2), fused=True), slice(4, 8), [[(2, 4), (10, 12)]]),
        (SwappedHalves(), slice(6, 10), [[(0, 2), (14, 16)]]),
        (POINTWISE, slice(3, 5), [[(3, 5)]]),
    ):
        full = torch.randn(16, 3)
        tensors = {}
        for part, ranges in zip(form.to_external(full), expected, strict=True):
            used = torch.zeros(len(part), *[1] * (part.dim() - 1), dtype=torch.bool)
            for start, stop in ranges:
                used[start:stop] = True
            tensors[f"part{len(tensors)}"] = part.where(used, torch.nan).contiguous()
        save_file(tensors, tmp_path / f"{STEM}.safetensors")
        rules = RuleBook({"weight": (16, 3)}, [Rule("weight", tuple(tensors), form)])
        target = torch.zeros(4, 3)[: rows.stop - rows.start]
        box = Box((rows.start, 0), tuple(target.shape))
        sliced_weights.SlicedWeights(rules, StoredTensors(tmp_path)).read("weight", (16, 3), [(box, target)])
        assert torch.equal(target, full[rows]), form


SIZES = ["num_attention_heads", "attention_head_dim", "num_layers", "in_channels", "patch_size"]
OLD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "flux": (
        {"_diffusers_version": "0.30.0.dev0"},
        [
            *(*SIZES, "num_single_layers", "joint_attention_dim", "pooled_projection_dim", "guidance_embeds"),
            "axes_dims_rope",  # not in FLUX.1, which has the default
        ],
    ),
    "sana": (
        {"_diffusers_version": "0.32.0.dev0", "dropout": 0.0, "interpolation_scale": None},
        [
            *(*SIZES, "num_cross_attention_heads", "cross_attention_head_dim", "cross_attention_dim"),
            *("caption_channels", "mlp_ratio", "out_channels", "sample_size", "norm_elementwise_affine", "norm_eps"),
        ],
    ),
    "pixart": (
        {
            **{"_class_name": "Transformer2DModel", "_diffusers_version": "0.22.0.dev0", "attention_type": "default"},
            **{"double_self_attention": False, "num_vector_embeds": None, "use_linear_projection": False},
        },
        [
            *(*SIZES, "activation_fn", "attention_bias", "caption_channels", "cross_attention_dim", "norm_type"),
            *("norm_elementwise_affine", "norm_eps", "num_embeds_ada_norm", "out_channels", "sample_size"),
        ],
    ),
    "unet": (
        {"_diffusers_version": "0.2.2"},
        [
            *("act_fn", "attention_head_dim", "block_out_channels", "center_input_sample", "cross_attention_dim"),
            *("down_block_types", "downsample_padding", "flip_sin_to_cos", "freq_shift", "in_channels", "norm_eps"),
            *("layers_per_block", "mid_block_scale_factor", "norm_num_groups", "out_channels", "sample_size"),
            "up_block_types",
        ],
    ),
}
"""Settings and names of settings in `config.json` of FLUX.1, SANA 1.6B, PixArt-alpha and Stable Diffusion 1.4."""


@pytest.mark.parametrize("name", OLD)
def test_a_folder_of_an_older_diffusers_is_read(folders: Path, tmp_path: Path, name: str) -> None:
    changes, names = OLD[name]
    folder = copy(folders, tmp_path, name)
    settings = json.loads((folder / "config.json").read_text())
    old = {"_class_name": settings["_class_name"], **changes, **{n: settings[n] for n in names}}
    assert len(settings) > len(old)
    (folder / "config.json").write_text(json.dumps(old))
    network, expected = read_network(folder), read_network(folders / name)
    assert network.trained == expected.trained
    weights, full = (read_all(x.weights(expected.trained.model)) for x in (network, expected))
    assert weights.keys() == full.keys()
    assert all(torch.equal(weights[key], full[key]) for key in full)


def copy(folders: Path, out: Path, name: str = "flux") -> Path:
    return Path(shutil.copytree(folders / name, out / name))


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def as_pickle(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    torch.save({}, folder / "diffusion_pytorch_model.bin")


def rename(folder: Path) -> None:
    rewrite(shard_of(folder, HEADS), lambda tensors: tensors.update({"other": tensors.pop(HEADS)}))
    edit(folder / INDEX, lambda index: index["weight_map"].update({"other": index["weight_map"].pop(HEADS)}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda folder: shard_of(folder, HEADS).unlink(),
        r"-of-\d+\.safetensors cannot be read: No such file.*download it again",
    ),
    "truncated shard": (
        lambda folder: shard_of(folder, HEADS).write_bytes(shard_of(folder, HEADS).read_bytes()[:-9]),
        r"-of-\d+\.safetensors cannot be read: .*download it again",
    ),
    "class": (
        lambda folder: edit(folder / "config.json", lambda c: c.update(_class_name="UnknownTransformer2DModel")),
        r"config\.json: _class_name='UnknownTransformer2DModel' is not supported; supported classes are AutoencoderKL",
    ),
    "unknown setting": (
        lambda folder: edit(folder / "config.json", lambda c: c.update(depth=3)),
        r"config\.json: .*unknown: depth=3",
    ),
    "keys": (rename, rf"flux do not fit its config\.json .*1 missing: {HEADS} \[64, 64\]; 1 unknown: other \[64, 64\]"),
    "shape": (
        lambda folder: rewrite(shard_of(folder, HEADS), lambda tensors: tensors.update({HEADS: torch.zeros(64, 63)})),
        rf"of another shape: {HEADS} is \[64, 63\], needs \[64, 64\]",
    ),
    "index": (
        lambda folder: edit(folder / INDEX, lambda index: index["weight_map"].pop(HEADS)),
        "and its shards disagree on 1 tensors",
    ),
    "pickle": (as_pickle, "weights as a pickle .diffusion_pytorch_model.bin., .*python -m launch.import_weights"),
    "no weights": (lambda folder: [as_pickle(folder), *map(Path.unlink, folder.glob("*.bin"))], "download the folder"),
    "quantised": (
        lambda folder: rewrite(shard_of(folder, HEADS), lambda x: x.update({HEADS: x[HEADS].to(torch.float8_e4m3fn)})),
        "weights of F8_E4M3; quantised weights are not read",
    ),
    "not finite": (
        lambda folder: rewrite(shard_of(folder, HEADS), lambda x: x[HEADS].view(-1)[5:7].fill_(float("nan"))),
        rf"linear_qkv\.weight cannot be read from .*: {HEADS} has 2 numbers that are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_folder_is_one_line(folders: Path, tmp_path: Path, fault: str) -> None:
    folder = copy(folders, tmp_path)
    change, message = FAULTS[fault]
    change(folder)
    with pytest.raises(UserError, match=message) as raised:
        read_all(read_network(folder).weights(read_network(folders / "flux").trained.model))
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, CheckpointError if fault == "not finite" else ConfigError)


def test_the_only_variant_is_read(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder and from the hub; next to other variants or other weights, no variant is selected."""
    expected = StoredTensors(folders / "flux").read_all()
    (tmp_path / "model_index.json").write_text("{}")
    folder = Path(shutil.copytree(folders / "flux", tmp_path / "transformer"))
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    save_file(expected, folder / "diffusion_pytorch_model.fp16.safetensors", metadata={"format": "pt"})
    assert torch.equal(StoredTensors(folder).read(HEADS), expected[HEADS])
    network = read_network(folder)
    count = sum(x.numel() for x in expected.values())
    assert str(network.weights(network.trained.model)).startswith(f"{count:,} parameters of {folder}")
    downloads: list[list[str]] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        downloads.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("dit.hub.check_reachable", lambda repository: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_path("hf://owner/name") == tmp_path
    assert "downloading hf://owner/name, with weights, to" in capsys.readouterr().err
    variant = "transformer/diffusion_pytorch_model.fp16.safetensors"
    first, last = ([p for p in patterns if fnmatch(variant, p)] for patterns in (downloads[0], downloads[-1]))
    assert (first, len(last)) == ([], 1)
    for name in ("diffusion_pytorch_model.bf16.safetensors", "diffusion_pytorch_model.bin"):
        (folder / name).touch()
        with pytest.raises(ConfigError, match=r"only variants .*bf16.safetensors, .*rename one|weights as a pickle"):
            network.weights(network.trained.model)


def test_the_only_variant_is_read_in_shards(folders: Path, tmp_path: Path) -> None:
    expected = StoredTensors(folders / "flux").read_all()
    folder = Path(shutil.copytree(folders / "flux", tmp_path / "transformer"))
    for path in folder.glob("*.safetensors"):
        path.rename(path.with_name(path.name.replace("model-", "model.fp16-")))
    index = (folder / INDEX).read_text().replace("model-", "model.fp16-")
    (folder / INDEX).unlink()
    (folder / INDEX.replace("json", "fp16.json")).write_text(index)
    assert torch.equal(StoredTensors(folder).read(HEADS), expected[HEADS])
    network = read_network(folder)
    count = sum(x.numel() for x in expected.values())
    assert str(network.weights(network.trained.model)).startswith(f"{count:,} parameters of {folder}")
    (folder / INDEX.replace("json", "bf16.json")).write_text(index)
    with pytest.raises(ConfigError, match=r"only variants .*rename one"):
        StoredTensors(folder)


def test_embedders_of_blocks_that_differ_are_refused(folders: Path, tmp_path: Path) -> None:
    folder = copy(folders, tmp_path, "dit")
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.bias"
    rewrite(shard_of(folder, name), lambda tensors: tensors[name].add_(1))
    network = read_network(folder)
    with pytest.raises(CheckpointError, match="copies of one tensor differ"):
        read_full(network.weights(network.trained.model), "conditioner.time.linear_1.bias")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "flux",
            {"hidden_size": 32, "num_attention_heads": 2},
            "has hidden_size=64, num_attention_heads=4, but the model",
        ),
        (
            "flux",
            {"num_attention_heads": 2, "rope_axes": [8, 12, 12]},
            "but the model of the run has num_attention_heads=2",
        ),
        (
            "unet",
            {"num_attention_heads": 4},
            "num_attention_heads=2, but the model of the run has num_attention_heads=4",
        ),
        ("pixart", {"out_channels": None}, "has out_channels=8, but the model of the run has out_channels=None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_sizes_are_refused_in_one_line_with_both_sizes_and_the_cure(
    folders: Path, name: str, changes: dict, message: str
) -> None:
    network = read_network(folders / name)
    with pytest.raises(ConfigError, match=message) as raised:
        network.weights(replace(network.trained.model, **changes))
    assert f"--factory \"finetune(base='{folders / name}')\"" in str(raised.value)


def test_settings_that_no_shape_depends_on_are_compared(folders: Path) -> None:
    """In a dry run, too; tests/unit/checkpoint/test_train_state.py starts runs."""
    config = built(finetune(base=str(folders / "flux")))
    same = replace(config.model, guidance=1.0, context_dropout=0.5, control_channels=4, rope_factors=[1.0, 2.0, 2.0])
    assert "parameters of" in start_line(replace(config, model=same))
    message = r"has rope_axes=\[4, 6, 6\], but .* has rope_axes=\[8, 4, 4\]; .*accept_changes=\[\"model\.rope_axes\"\]"
    with pytest.raises(ConfigError, match=message):
        start_line(replace(config, model=replace(config.model, rope_axes=[8, 4, 4])))


def test_a_start_without_weights_yet_is_named(tmp_path: Path) -> None:
    for path, missing in ((tmp_path, "has no checkpoint yet"), (tmp_path / "pixart", "does not exist yet")):
        config = built(finetune())
        config.checkpoint.start_from = str(path)
        assert start_line(config) == f"{path}, which {missing}"


def test_the_settings_that_may_differ_exist() -> None:
    names = {field.name for name in BACKBONES for field in fields(config_class(name))}
    assert set(MAY_DIFFER) <= names


def test_another_backbone_is_named(folders: Path) -> None:
    with pytest.raises(
        ConfigError, match="is of WanTransformer3DModel, our WanConfig, but the model of the run is FluxC"
    ):
        read_network(folders / "wan").weights(read_network(folders / "flux").trained.model)


def test_settings_of_training_may_differ(folders: Path) -> None:
    """A learned null token is not in the folder and starts as zeros."""
    network = read_network(folders / "pixart")
    weights = network.weights(replace(network.trained.model, null_text="learned", context_dropout=0.3))
    assert not read_full(weights, "text.null").any()
    assert any("text.null starts as zeros" in note for note in weights.notes)


def test_a_pipeline_has_its_network(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "flux", tmp_path / "pipe" / "transformer")
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    start = find_start(str(tmp_path / "pipe"))
    assert start.folder == tmp_path / "pipe" / "transformer"
    assert start.digest(None) == find_start(str(folders / "flux")).digest(None)
    rewrite(shard_of(start.folder, HEADS), lambda tensors: tensors[HEADS].mul_(2))
    assert start.digest(None) != find_start(str(folders / "flux")).digest(None)


def test_an_exported_pipeline_that_was_moved_has_its_own_encoders(folders: Path, tmp_path: Path) -> None:
    """The options of the record are kept; a note says that a changed scheduler is not read."""
    root, line = tmp_path / "pipe", "text={}/text_encoder_2:padded:max_tokens=40,pooled={}/text_encoder"
    shutil.copytree(folders / "flux", root / "transformer")
    trained = replace(read_network(root / "transformer").trained, text_encoder=line.format("/old", "/old"), notes=[])
    edit(root / "transformer/config.json", lambda c: c.update({CONFIG_KEY: to_record(trained)}))
    for name in ("text_encoder", "text_encoder_2", "scheduler"):
        (root / name).mkdir()
        (root / name / "config.json").write_text("{}")
    (root / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    scheduler = root / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(scheduler_config(trained.objective)))
    network = read_network(root)
    assert network.trained == replace(trained, text_encoder=line.format(root, root))
    edit(scheduler, lambda c: c.update(shift=7.0, use_dynamic_shifting=False))
    changed = read_network(root).trained
    assert replace(changed, notes=[]) == network.trained
    assert "time_shift=7.0" in changed.notes[0]
