"""Import and export on the command line: wrong inputs are named, run no code, and leave no files."""

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.checkpoint import manifest
from dit.checkpoint.base_model import CheckpointStart, find_base
from dit.checkpoint.full_weights import write_imported
from dit.checkpoint.manifest import read_manifest
from dit.checkpoint.reader_lock import to_delete
from dit.checkpoint.reading import find_checkpoint, read_settings
from dit.convert.diffusers_dit import DiffusersDiT
from dit.convert.diffusers_format import TrainedModel, format_of_model, formats
from dit.convert.run_record import CONFIG_KEY, METADATA_KEY, build, from_record, name_of, objective_of, to_record
from dit.convert.sliced_weights import StoredTensors
from dit.convert.state_files import INDEX, read_json, read_tensors, write_diffusers, write_tensors
from dit.data_api import NoData
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.lora import merge_adapters
from dit.models.lora_config import LoRAConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.objective_checks import check_outputs
from dit.objectives import OBJECTIVES
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.run_config import RunConfig, check_sampling
from dit.settings import SamplingConfig
from launch import export, export_weights, import_weights
from recipes import registry
from tests.parity.public_dit import random_state
from tests.support.trap import Trap

SIZES = {"size": 48, "depth": 1, "inner": 192, "channels": 4, "out_channels": 4, "patch": 2, "classes": 3, "grid": 2}


def refuse(capsys: pytest.CaptureFixture, out: Path, source: Path, *words: str, kind: str = "dit") -> str:
    """Import, expect exit code 2 and nothing on the disk, and return the message."""
    arguments = ["--from", str(source), "--format", kind, "--out", str(out), *words]
    assert import_weights.main(arguments) == 2
    assert not out.exists()
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    return printed


def folder_of(path: Path, settings: dict, tensors: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    return path


def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path, capsys):
    torch.save({"weight": torch.zeros(2), "trap": Trap(tmp_path / "sprung")}, tmp_path / "evil.pt")
    assert "can run code" in refuse(capsys, tmp_path / "run", tmp_path / "evil.pt")
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "sprung").exists()  # the trap works


@pytest.mark.parametrize("name", ["cut.pt", "cut.safetensors", "empty.pt", "empty.safetensors"])
def test_a_damaged_file_is_refused(tmp_path, capsys, name):
    write_tensors(random_state(**SIZES), tmp_path / f"whole.{name[-3:].replace('ors', 'safetensors')}")
    whole = next(tmp_path.glob("whole.*")).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2] if name.startswith("cut") else b"")
    assert name in refuse(capsys, tmp_path / "run", tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(2), "has a Tensor, not tensors by name"),
        ({"a": torch.zeros(2), "b": 3.0}, "'b' is a float"),
        ({}, "has a dict, not tensors by name"),
    ],
)
def test_a_file_without_a_state_dict_is_refused(tmp_path, capsys, content, message):
    torch.save(content, tmp_path / "x.pt")
    assert message in refuse(capsys, tmp_path / "run", tmp_path / "x.pt")


def test_a_training_checkpoint_of_the_published_script_is_read(tmp_path):
    """The file has the command line, a Namespace, next to the weights; the averaged weights are read."""
    state = random_state(**SIZES)
    content = {"model": {"x": torch.zeros(1)}, "ema": state, "opt": {"state": {}}, "args": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "0050000.pt")
    assert read_tensors(tmp_path / "0050000.pt").keys() == state.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.0.mlp.fc2.bias"), "1 missing: blocks.0.mlp.fc2.bias [48]"),
        (lambda s: s.update(extra=torch.zeros(3)), "1 unknown: extra [3]"),
        (lambda s: s.update({"blocks.0.mlp.fc2.bias": torch.zeros(50)}), "blocks.0.mlp.fc2.bias is [50], needs [48]"),
        (lambda s: s.update({"pos_embed": s["pos_embed"] + 1e-3}), "not the fixed table"),
        (lambda s: s.pop("pos_embed"), "lacks pos_embed"),
    ],
    ids=["missing", "unknown", "shape", "positions", "no positions"],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, capsys, change, message):
    state = random_state(**SIZES)
    change(state)
    save_file(state, tmp_path / "x.safetensors")
    assert message in refuse(capsys, tmp_path / "run", tmp_path / "x.safetensors", "--num-attention-heads", "4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --num-attention-heads"),
        (("--num-attention-heads", "5"), "hidden_size=48 is not a multiple"),
        (("--num-attention-heads", "4", "--drop-variance"), "there is no variance to drop"),
    ],
)
def test_flags_that_do_not_fit_the_weights_are_refused(tmp_path, capsys, words, message):
    save_file(random_state(**SIZES), tmp_path / "x.safetensors")
    assert message in refuse(capsys, tmp_path / "run", tmp_path / "x.safetensors", *words)


def test_a_foreign_class_is_refused_with_the_known_ones(tmp_path, capsys):
    source = folder_of(tmp_path / "in", {"_class_name": "UNet2DModel"}, {"x": torch.zeros(1)})
    printed = refuse(capsys, tmp_path / "run", source, kind="diffusers")
    assert "_class_name='UNet2DModel'" in printed
    assert "DiTTransformer2DModel" in printed


def test_weights_of_another_size_than_the_settings_are_refused(tmp_path, capsys):
    """Small weights with the settings of DiT-XL/2: the message counts every tensor that differs."""
    source = folder_of(
        tmp_path / "in", {"_class_name": "DiTTransformer2DModel"}, {"proj_out_1.weight": torch.zeros(4, 2)}
    )
    printed = refuse(capsys, tmp_path / "run", source, kind="diffusers")
    assert "proj_out_1.weight is [4, 2], needs [2304, 1152]" in printed
    assert "538 tensors" in printed
    assert "537 missing" in printed
    assert "and 532 more" in printed


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../secret.safetensors"}, "only .safetensors files next to it"),
        ({"x": "part.bin"}, "only .safetensors files next to it"),
        ({"x": "part.safetensors", "y": "part.safetensors"}, "disagree on 1 tensors, such as y"),
        ({"x": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_with_outside_paths_is_refused(tmp_path, capsys, weight_map, message):
    source = folder_of(tmp_path / "in", {"_class_name": "DiTTransformer2DModel"}, {"x": torch.zeros(1)})
    (source / "diffusion_pytorch_model.safetensors").rename(source / "part.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert message in refuse(capsys, tmp_path / "run", source, kind="diffusers")


def test_a_pipeline_is_distinguished_from_its_transformer(tmp_path, capsys):
    (tmp_path / "pipe").mkdir()
    folder_of(tmp_path / "pipe" / "transformer", {}, {"x": torch.zeros(1)})
    assert "name its part" in refuse(capsys, tmp_path / "run", tmp_path / "pipe", kind="diffusers")
    assert "nowhere/config.json cannot" in refuse(capsys, tmp_path / "run", tmp_path / "nowhere", kind="diffusers")
    assert "nowhere does not exist" in refuse(capsys, tmp_path / "run", tmp_path / "nowhere")


MODEL = {"hidden_size": 48, "num_layers": 1, "num_attention_heads": 4, "num_classes": 3}


def a_record(**changes: Any) -> dict[str, Any]:
    """Return the record of a run whose weights have `SIZES`, with entries changed, or removed if the value is `...`."""
    trained = TrainedModel(DiTConfig(**MODEL), FlowMatching(), (1, 4, 4), {"solver": "heun"}, class_names=list("abc"))
    return {name: value for name, value in {**to_record(trained), **changes}.items() if value is not ...}


def with_record(path: Path, text: str) -> Path:
    save_file(random_state(**SIZES), path, metadata={METADATA_KEY: text})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_size": ...}, "must have model, objective, latent_size, sampling"),
        ({"extra": 1}, "has no setting extra"),
        ({"attributions": "A", "max_text_tokens": 1.5}, "cannot have max_text_tokens=1.5, attributions='A'"),
        ({"model": {**MODEL, "hidden_size": "48"}}, "cannot have hidden_size='48'"),
        ({"model": {**MODEL, "num_layers": True}}, "cannot have num_layers=True"),
        ({"model": {**MODEL, "_target_": "os.system"}}, "has no setting _target_"),
        ({"model": {**MODEL, "num_attention_heads": 5}}, "hidden_size=48 is not a multiple"),
        ({"model": ["os.system"]}, "must be settings by name"),
        ({"model": {**MODEL, "num_layers": 2}}, "missing: blocks.1"),
        (
            {"objective": {"name": "system"}},
            "'system' is unknown; use one of autoencoding, contrastive_flow_matching, ddpm, edm, flow_matching",
        ),
        (
            {"objective": {"name": "os.system"}},
            "'os.system', which is not in dit, energon_data, so it is not imported",
        ),
        ({"objective": "edm"}, "objective 'edm' is unknown"),
        ({"objective": {"name": ["ddpm"]}}, "is unknown"),
        ({"objective": {"name": "edm", "sigma_max": float("nan")}}, "cannot have sigma_max=nan"),
        ({"objective": {"name": "ddpm", "prediction": "eps"}}, "cannot have prediction='eps'"),
        ({"objective": {"name": "flow_matching", "time_shift": -1.0}}, "time_shift=-1.0 must be a finite number"),
        ({"objective": {"name": "edm", "sigma_max": 10**400}}, "an integer of 401 digits"),
        ({"sampling": 3}, "cannot have sampling=3"),
        ({"latent_size": [1, 4]}, "three positive integers"),
        ({"latent_size": [1, 4, -4]}, "three positive integers"),
        ({"latent_size": [1, 6, 6]}, "needs [1, 9, 48]"),
        ({"class_names": ["a", "b", "c", "d"]}, "must be at most 3 names"),
        ({"fps": 0}, "fps=0"),
        ({"reference_aspect": "wide"}, "reference_aspect='wide' must be one of"),
        ({"text_encoder": {}}, "cannot have text_encoder={}"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_record_from_an_unknown_source_is_checked(tmp_path, capsys, change, message):
    """Only fields of known classes are set, after a check of their types; anything else gives an error of one line."""
    source = with_record(tmp_path / "x.safetensors", json.dumps(a_record(**change)))
    assert message in refuse(capsys, tmp_path / "run", source)


@pytest.mark.parametrize("form", formats(), ids=lambda form: form.class_name)
def test_a_record_survives_json_for_each_format(form):
    """The data's class names are recorded only for a model that takes classes."""
    model = form.config_class(**({"num_classes": 3} if form.class_name == "DiTTransformer2DModel" else {}))
    sampling = SamplingConfig(prompts=["a", "b"])
    config = RunConfig(model=model, data=NoData(), objective=EDM(sigma_data=0.7), sampling=sampling)
    metadata = {"class_names": ["x", "y", "z"], "latent_size": [2, 8, 6], "fps": 12.5, "text_encoder": "some"}
    added = {"autoencoder": "vae", "max_text_tokens": 7, "attributions": ["by A"], "clean_parts": ["reference"]}
    added["reference_aspect"] = "square"
    trained = export_weights.trained_model(config, metadata | added)
    assert trained.class_names == (["x", "y", "z"] if form.class_name == "DiTTransformer2DModel" else None)
    again = from_record(json.loads(json.dumps(to_record(trained))), form.config_class)
    assert again == trained
    assert {name: getattr(again, name) for name in added} == added
    older = {name: value for name, value in to_record(trained).items() if name not in added}
    none: dict[str, Any] = {name: [] if isinstance(value, list) else None for name, value in added.items()}
    assert from_record(older, form.config_class) == replace(trained, **none)
    assert build(SamplingConfig, again.sampling, "sampling") == sampling
    assert from_record(to_record(trained) | {"notes": ["all is well"]}, form.config_class).notes == []


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[]"])
def test_an_invalid_record_is_refused(tmp_path, capsys, text):
    assert "export the run again" in refuse(capsys, tmp_path / "run", with_record(tmp_path / "x.safetensors", text))


def test_a_config_that_was_changed_after_its_export_is_refused(tmp_path, capsys):
    settings, _ = DiffusersDiT().write_settings(DiTConfig(**MODEL), (1, 4, 4))
    changed = {**settings, CONFIG_KEY: a_record(), "patch_size": 4}
    source = folder_of(tmp_path / "in", changed, {"x": torch.zeros(1)})
    printed = refuse(capsys, tmp_path / "run", source, kind="diffusers")
    assert "patch_size=4 (recorded: 2)" in printed
    assert "--objective" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flow", "no Objective of that name; did you mean flow_matching"),
        ("ddpm(prediction='eps')", "prediction='eps' is unknown; use one of noise, x0, v"),
        ("ddpm(p_mean=1)", "has no setting 'p_mean'; it has schedule, "),
        ("ddpm('v')", "is not an override"),
        ("ddpm(**{})", "is not an override"),
        ("edm(sigma_max=-1)", "sigma_max=-1.0; the paper's are 0.002 and 80\n"),
        ("__import__('os')", "no Objective of that name"),
        ("", "no Objective of that name"),
    ],
)
def test_an_impossible_objective_is_refused(tmp_path, capsys, text, message):
    save_file(random_state(**SIZES), tmp_path / "x.safetensors")
    words = ("--num-attention-heads", "4", "--objective", text)
    assert message in refuse(capsys, tmp_path / "run", tmp_path / "x.safetensors", *words)


def test_a_flag_precedes_the_record_which_precedes_the_publication(tmp_path):
    """A note states each assumption and the flag that changes it."""
    plain, recorded = tmp_path / "plain.safetensors", tmp_path / "recorded.safetensors"
    save_file(random_state(**SIZES), plain)
    with_record(recorded, json.dumps(a_record()))
    args = argparse.Namespace(num_attention_heads=4)
    own = import_weights.read_objective("edm(sigma_data=1.0)")
    found = {}
    for source, given in ((plain, None), (recorded, None), (plain, own), (recorded, own), (recorded, FlowMatching())):
        trained, notes = import_weights.settle(import_weights.read_original(source, args)[0], given)
        found[source.stem, given is own, given is None] = trained.objective, dict(trained.sampling), notes[0]
    published = DDPM(schedule="linear", discrete_steps=1000)
    assert found["plain", False, True][:2] == (
        published,
        {"solver": "ancestral", "num_steps": 250, "guidance_scale": 4.0, "guidance_channels": 3},
    )
    assert found["plain", False, True][2].startswith(f"assumed objective: {published}")
    assert "--objective" in found["plain", False, True][2]
    assert found["recorded", False, True][:2] == (FlowMatching(), {"solver": "heun"})
    assert found["recorded", False, False][:2] == (FlowMatching(), {"solver": "heun"})
    for name in ("plain", "recorded"):
        assert found[name, True, False][:2] == (EDM(sigma_data=1.0), {})
        assert found[name, True, False][2].startswith(f"--objective: {EDM(sigma_data=1.0)} is used, not")
    args.num_attention_heads = 6
    with pytest.raises(ConfigError, match="records 4; leave the flag out"):
        import_weights.read_original(recorded, args)


def test_weights_with_a_variance_are_imported_as_trained_with_one(tmp_path):
    """Objective and model match, so training can continue; sampling follows the authors' `sample.py`."""
    save_file(random_state(**{**SIZES, "out_channels": 8}), tmp_path / "sigma.safetensors")
    args = argparse.Namespace(num_attention_heads=4)
    trained, _ = import_weights.settle(import_weights.read_original(tmp_path / "sigma.safetensors", args)[0], None)
    assert trained.objective == DDPM(schedule="linear", discrete_steps=1000, variance=LearnedVariance())
    check_outputs(trained.objective, trained.model)
    sampling = build(SamplingConfig, trained.sampling, "the record's sampling")
    check_sampling(sampling, trained.objective, trained.model)
    expected = SamplingConfig(
        solver="ancestral", num_steps=250, variance="learned", guidance_scale=4.0, guidance_channels=3
    )
    assert sampling == expected


@dataclass(kw_only=True)
class Own(FlowMatching):
    """An objective of a user."""


def test_an_objective_of_a_user_is_recorded_by_its_class(monkeypatch):
    own = Own(time_shift=2.0)
    with pytest.raises(ConfigError, match=r"set the environment variable DIT_PACKAGES=tests"):
        objective_of({"name": name_of(own), **asdict(own)})
    monkeypatch.setenv("DIT_PACKAGES", "tests")
    assert objective_of({"name": name_of(own), **asdict(own)}) == own
    abstract = ("dit.objectives.base.Objective", "dit.objectives.autoencoding.Reconstruction")
    for name in (*abstract, "dit.settings.SamplingConfig", "dit.terminal.announce", "none"):
        with pytest.raises(ConfigError, match=r"objective '[\w.]+' is unknown"):
            objective_of({"name": name})


def test_the_names_of_objectives_are_those_of_recipes():
    """`--objective NAME` of an import also has the defaults of `objective=NAME`; records store every setting."""
    assert OBJECTIVES.keys() <= {entry.name for entry in registry.components()}
    assert import_weights.read_objective("ddpm") == DDPM(discrete_steps=1000)
    assert [name_of(objective_of({"name": name})) for name in OBJECTIVES] == list(OBJECTIVES)
    learned = {"name": "ddpm", "discrete_steps": 1000, "variance": {"vlb_weight": 0.5}}
    assert objective_of(learned) == DDPM(discrete_steps=1000, variance=LearnedVariance(vlb_weight=0.5))
    with pytest.raises(ConfigError, match="objective ddpm's variance has no setting vlb_wight"):
        objective_of({**learned, "variance": {"vlb_wight": 0.5}})


def test_large_models_are_written_in_shards_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("dit.convert.state_files.MAX_SHARD_BYTES", 900)
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(5)}
    write_diffusers({"a": 1}, tensors, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "config.json",
        *(f"diffusion_pytorch_model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
        INDEX,
    ]
    found = StoredTensors(tmp_path / "out").read_all()
    assert read_json(tmp_path / "out" / "config.json") == {"a": 1}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], x) for name, x in tensors.items())
    assert json.loads((tmp_path / "out" / INDEX).read_text())["metadata"]["total_size"] == 2000


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_tensors({"x": torch.zeros(2)}, folder / "x.safetensors"),
        lambda folder: write_tensors({"x": torch.zeros(2)}, folder / "x.pt"),
        lambda folder: write_diffusers({}, {"x": torch.zeros(2)}, folder / "out"),
    ],
    ids=["safetensors", "pt", "diffusers"],
)
def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch, write):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dit.convert.state_files.fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_checkpoints_is_not_overwritten(tmp_path):
    trained = TrainedModel(DiTConfig(**MODEL), FlowMatching(), (1, 4, 4), {})
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(trained.model).items()}
    write_imported(tmp_path, weights, trained, SamplingConfig(), "a test")
    with pytest.raises(ConfigError, match=r"has checkpoints of steps \[0\] and is not changed; choose another --out"):
        write_imported(tmp_path, weights, trained, SamplingConfig(), "a test")


def test_no_file_is_overwritten(tmp_path):
    write_tensors({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="not changed"):
        write_tensors({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], torch.zeros(2))


@pytest.mark.parametrize("make", [False, True])
def test_exporting_a_folder_without_a_run_is_a_checkpoint_error(tmp_path, capsys, make):
    if make:
        (tmp_path / "run").mkdir()
    arguments = ["--checkpoint", str(tmp_path / "run"), "--format", "dit", "--out", str(tmp_path / "x.pt")]
    assert export.main(arguments) == 5
    assert "neither a run folder" in capsys.readouterr().err


def adapter_run(tmp_path: Path) -> tuple[Path, Path]:
    """Write a run of adapters and its base; return their checkpoints."""
    save_file(random_state(**SIZES), tmp_path / "dit.safetensors")
    source = ["--from", str(tmp_path / "dit.safetensors"), "--num-attention-heads", "4"]
    assert import_weights.main([*source, "--format", "dit", "--out", str(tmp_path / "base")]) == 0
    base, _ = find_checkpoint(tmp_path / "base")
    config, metadata = read_settings(base)
    model = config.model.with_adapters(LoRAConfig(rank=1, targets=["*"]))
    shapes = parameter_shapes(model)
    adapters = {name: torch.ones(shapes[name]) for name in shapes.keys() - parameter_shapes(config.model).keys()}
    trained = replace(export_weights.trained_model(config, metadata), model=model)
    recorded = {"folder": str(base), "digest": CheckpointStart(base).digest(None)}
    write_imported(tmp_path / "run", adapters, trained, config.sampling, "a test", base=recorded)
    return find_checkpoint(tmp_path / "run")[0], base


def test_ranks_hash_each_file_of_a_base_once(tmp_path, one_rank_world, monkeypatch):
    """Ranks share the files, as those of a start: large files are not read once per rank."""
    run, base = adapter_run(tmp_path)
    hashed, hash_file = [], manifest.hash_file
    monkeypatch.setattr(manifest, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    with ExitStack() as reading:
        assert find_base(run, read_settings(run)[0], reading, one_rank_world) is not None
    assert sorted(hashed) == sorted(read_manifest(base).files)


def test_a_run_does_not_delete_a_checkpoint_and_its_base_during_their_export(tmp_path, monkeypatch):
    deletable, folders = [], adapter_run(tmp_path)

    def merge(*arguments):
        for folder in folders:
            with to_delete(folder) as is_unread:
                deletable.append(is_unread)
        return merge_adapters(*arguments)

    monkeypatch.setattr("dit.checkpoint.base_model.merge_adapters", merge)
    words = ["--checkpoint", str(tmp_path / "run"), "--format", "dit", "--out", str(tmp_path / "out.safetensors")]
    assert export.main(words) == 0
    assert deletable == [False, False]


def test_a_model_without_a_diffusers_class_is_refused():
    for config in (DiTCrossConfig(), MovieGenConfig()):
        with pytest.raises(ConfigError, match=f"has no model like {type(config).__name__}; backbones with one"):
            format_of_model(config)


@pytest.mark.parametrize(
    ("null_text", "notes"),
    [
        ("empty", ["embedding of the empty text: give --text-encoder"]),
        ("learned", ["text.null is imported as zeros: its pipelines embed the empty text"]),
        ("zeros", []),
    ],
)
def test_an_import_reports_the_unconditional_branch_of_guidance(
    tmp_path: Path, capsys: pytest.CaptureFixture, null_text: Any, notes: list[str]
) -> None:
    sizes = {"block_out_channels": [8], "transformer_layers": [1], "layers_per_block": 1, "num_attention_heads": 2}
    model = LDMUNetConfig(**sizes, norm_num_groups=4, context_size=6, null_text=null_text)
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(model).items()}
    names: dict[str, Any] = {"autoencoder": "models/vae", "max_text_tokens": 3, "reference_aspect": "square"}
    trained = TrainedModel(model, DDPM(discrete_steps=1000), (1, 8, 8), {}, **names)
    export_weights.write_diffusers_folder(trained, lambda: weights, tmp_path / "unet")
    arguments = ["--from", str(tmp_path / "unet"), "--format", "diffusers", "--out", str(tmp_path / "run")]
    assert import_weights.main(arguments) == 0
    printed = capsys.readouterr().err
    assert [note for note in notes if note not in printed] == []
    assert ("empty text" in printed) == bool(notes)
    assert names.items() <= read_settings(find_checkpoint(tmp_path / "run")[0])[1].items()
