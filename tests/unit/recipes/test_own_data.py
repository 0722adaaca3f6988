"""The recipe `own_data` reads the model's settings from a folder of data, and trains on these data unchanged."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import fiddle
import nemo_run as run
import pytest
from PIL import Image

from dit.batch import PackedBatch
from dit.convert.diffusers_format import TrainedModel, format_of_model
from dit.convert.diffusers_pipeline import pipeline_of
from dit.errors import ConfigError, DataError
from dit.models.dit.config import DiTConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.unet.config import UNetConfig
from dit.models.wan.config import WanConfig
from energon_data.contents import Contents
from energon_data.media_files import video_bytes
from launch.config_file import built
from launch.planned_sample import Sample, planned_sample
from launch.train import call_recipe
from tests.support.encoders import T5_WIDTH, save_clip, save_t5, save_vae
from tests.unit.energon_data.preparations import as_file, folder_of, noise
from tests.unit.energon_data.preparations import run as prepare

SIDES = ((64, 64), (64, 96), (48, 32))


def fill(folder: Path, count: int = 12, clips: int = 0) -> Path:
    """Write pictures of three sizes with captions, and clips of four frames."""
    files: dict[str, bytes | str] = {}
    for i in range(count):
        files[f"p{i}.png"] = as_file(Image.new("RGB", SIDES[i % 3], (20 * i, 40, 30)))
        files[f"p{i}.txt"] = ("a red circle", "a blue square")[i % 2]
    for i in range(clips):
        frames = [Image.new("RGB", (32, 32), (40 * t, 0, 0)) for t in range(4)]
        files |= {f"c{i}.mp4": video_bytes(frames, 8.0), f"c{i}.txt": "a red left"}
    return folder_of(folder, files)


def prepared_folder(tmp_path: Path, *words: str, command: str = "images") -> Path:
    assert prepare(tmp_path / "in", tmp_path / "data", "--multiple-of", "8", *words, command=command) == 0
    return tmp_path / "data"


def recipe(folder: Path, **arguments: Any) -> run.Partial:
    settings = ", ".join(f"{name}={str(value)!r}" for name, value in {"data": folder, **arguments}.items())
    return call_recipe(f"own_data({settings})")


def first_packs(task: run.Partial, count: int = 6) -> list[PackedBatch]:
    """Run every check of a training run that needs the data, and read some packs of all streams."""
    config = built(task)
    config.check(1)
    spec = fiddle.build(task.model).batch_spec(micro_batch_size=1)
    config.data.validate(spec, 1, 2)
    config.data.background, config.data.shuffle_buffer, config.data.packing_buffer_size = False, 0, 12
    stream = config.data.build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None, micro_batches_per_step=2)
    try:
        return list(islice(stream, count))
    finally:
        stream.close()


def lengths(packs: list[PackedBatch]) -> set[int]:
    return {length for pack in packs for length in pack.layout.lengths}


def test_stored_latents_with_texts_are_trained(tmp_path):
    """The autoencoder leaves 16 x 24 positions in 4 channels, so 96 patches; a pack has room for 32 times that."""
    fill(tmp_path / "in")
    vae, t5 = save_vae(tmp_path / "vae"), save_t5(tmp_path / "t5")
    task = recipe(prepared_folder(tmp_path, "--vae", str(vae), "--text-encoder", str(t5)))
    model = fiddle.build(task.model)
    assert isinstance(model, STDiTConfig)
    assert (model.in_channels, model.patch_spatial, model.context_size) == (4, 2, T5_WIDTH)
    assert (model.layer_pattern, model.position_span, model.null_text) == (["full"], 10.0, "empty")
    assert task.data.max_tokens_per_pack == 32 * 96
    assert sorted(task.sampling.prompts) == ["a blue square", "a red circle"]
    packs = first_packs(task)
    assert lengths(packs) == {64, 96, 24}
    assert max(sum(pack.layout.lengths) for pack in packs) <= 32 * 96


def test_pixels_with_classes_are_trained(tmp_path):
    for name in ("cats", "dogs"):
        fill(tmp_path / "in" / name, 3)
    task = recipe(prepared_folder(tmp_path, "--labels"))
    model = fiddle.build(task.model)
    assert isinstance(model, DiTConfig)
    assert (model.in_channels, model.patch_spatial, model.num_classes, model.context_size) == (3, 4, 2, None)
    assert task.sampling.prompts is None
    assert lengths(first_packs(task)) == {256, 384, 96}


def test_classes_without_names_are_counted(tmp_path):
    fill(tmp_path / "in", 3)
    rows = [{"file_name": f"p{i}.png", "label": i + 2} for i in range(3)]
    (tmp_path / "in" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = recipe(prepared_folder(tmp_path))
    assert task.model.num_classes == 5
    first_packs(task)


def test_a_class_of_one_sample_gives_no_class_conditional_model(tmp_path):
    """Captions without embeddings are refused by name, as without any class."""
    fill(tmp_path / "in", 3)
    (tmp_path / "in" / "p1.json").write_text('{"label": "3"}')
    folder = prepared_folder(tmp_path)
    with pytest.raises(ConfigError, match="has captions and no embeddings of them"):
        recipe(folder)
    assert recipe(folder, text_encoder="none").model.num_classes is None


def test_pictures_and_clips_of_one_folder_share_packs(tmp_path, capsys):
    fill(tmp_path / "in", 6, clips=6)
    t5 = save_t5(tmp_path / "t5")
    task = recipe(prepared_folder(tmp_path, "--text-encoder", str(t5), command="folder"))
    assert "left out" not in capsys.readouterr().out
    assert fiddle.get_callable(task.model) is WanConfig
    task.model = recipe(tmp_path / "data", backbone="dit").model
    assert (task.model.position_embedding, task.model.fps_conditioning) == ("sincos_3d", True)
    assert {grid[0] for pack in first_packs(task) for grid in pack.grids} == {1, 4}


def test_clips_are_refused_by_the_model_of_a_folder_of_pictures(tmp_path):
    """The positions of its model are those of a picture, the same in every frame."""
    fill(tmp_path / "in", 4, clips=4)
    words = ("--text-encoder", "identity")
    clips = prepared_folder(tmp_path, *words, command="folder").rename(tmp_path / "both")
    task = recipe(prepared_folder(tmp_path, *words))
    first_packs(task)
    task.data.blend = [{"path": str(tmp_path / "data")}, {"path": str(clips)}]
    with pytest.raises(ConfigError, match=r"both has clips of 4 frames, .*model.position_embedding=sincos_2d"):
        first_packs(task)
    with pytest.raises(ConfigError, match=r"both has clips of 4 frames, .*UNets"):
        fiddle.build(task.data).validate(UNetConfig(context_size=257).batch_spec(), 1, 2)
    task.model.position_embedding = "sincos_3d"
    first_packs(task)
    assert DiTConfig(position_embedding="rope_3d").orders_frames
    assert not DiTConfig(position_embedding="rope_3d", rope_axes=[0, 32, 32]).orders_frames


def leaves(task: run.Partial) -> str:
    """Return the diffusers pipeline that can run the exported model, or the model class if there is none."""
    model = fiddle.build(task.model)
    trained = TrainedModel(model, fiddle.build(task.objective), (1, 16, 24), {})
    form = format_of_model(model)
    form.write_settings(model, trained.latent_size)
    try:
        return pipeline_of(form, trained).class_name
    except ConfigError:
        return form.class_name


def test_edits_are_trained_with_their_references(tmp_path):
    fill(tmp_path / "in")
    task = recipe(
        prepared_folder(tmp_path, "--reference", str(fill(tmp_path / "originals")), "--text-encoder", "identity")
    )
    assert fiddle.get_callable(task.model) is WanConfig
    assert task.training.sample_interval == (500 if task.training.validation_interval else 0)
    packs = first_packs(task)
    about = json.loads((tmp_path / "data/dataset.json").read_text())
    for held_out, interval in ((0, 0), (4, 500)):
        counts = about | {"samples": {"train": 8, "val": held_out}}
        (tmp_path / "data/dataset.json").write_text(json.dumps(counts))
        assert recipe(tmp_path / "data").training.sample_interval == interval
    assert len(lengths(packs)) > 1
    assert lengths(packs) <= {2 * width * height // 4**2 for width, height in SIDES}
    assert all(pack.layout.levels is not None for pack in packs)


def test_references_may_be_larger_than_the_pictures(tmp_path):
    """Packs have room for both, and the patch divides the sides of both."""
    fill(tmp_path / "in")
    for path in fill(tmp_path / "originals").glob("*.png"):
        Image.new("RGB", (120, 96)).save(path)
    folder = prepared_folder(tmp_path, "--reference", str(tmp_path / "originals"), "--text-encoder", "identity")
    assert Contents.read(folder).reference_shapes == ((3, 1, 96, 120),)
    assert lengths(first_packs(recipe(folder))) <= {(width * height + 120 * 96) // 4**2 for width, height in SIDES}
    described = json.loads((folder / "dataset.json").read_text())
    described |= {"shapes": {"3x1x512x512": 12}, "reference_shapes": {"3x1x520x1040": 12}}
    (folder / "dataset.json").write_text(json.dumps(described))
    task = recipe(folder)
    assert (task.model.patch_spatial, task.data.max_tokens_per_pack) == (8, 12_608)  # 4,096 + 8,450 and padding
    assert planned_sample(fiddle.build(task.data), fiddle.build(task.model)).tokens == 4096 + 8450
    del described["reference_shapes"]  # of a folder that an earlier version prepared
    (folder / "dataset.json").write_text(json.dumps(described))
    assert recipe(folder).data.max_tokens_per_pack == 4096


def test_the_default_model_of_each_kind_of_data_exports_to_diffusers(tmp_path):
    """Pictures with texts, clips with texts, pictures with classes; T5 or BERT embeds the captions."""
    t5 = save_t5(tmp_path / "t5")
    fill(tmp_path / "in")
    assert leaves(recipe(prepared_folder(tmp_path), text_encoder=t5)) == "PixArtAlphaPipeline"
    assert leaves(recipe(tmp_path / "data", text_encoder="all-minilm-l6-v2")) == "PixArtAlphaPipeline"
    assert leaves(recipe(tmp_path / "data", text_encoder=t5, backbone="wan")) == "WanPipeline"
    with pytest.raises(ConfigError, match="no model like DiTCrossConfig"):
        leaves(recipe(tmp_path / "data", text_encoder=t5, backbone="dit"))
    with pytest.raises(ConfigError, match=r"backbone='flux'.* reads a pooled text"):
        recipe(tmp_path / "data", text_encoder=t5, backbone="flux")
    with pytest.raises(ConfigError, match=r"backbone='dot'.*the backbones are pixart, wan, flux, dit"):
        recipe(tmp_path / "data", text_encoder=t5, backbone="dot")
    with pytest.raises(ConfigError, match="only dit needs no texts"):
        recipe(tmp_path / "data", text_encoder="none", backbone="pixart")
    both = f"text={t5},pooled={save_clip(tmp_path / 'clip')}"
    flux = recipe(tmp_path / "data", text_encoder=both, backbone="flux", vae=save_vae(tmp_path / "vae"))
    assert leaves(flux) == "FluxPipeline"
    built(flux).check(1)


def test_classes_are_exported_to_diffusers(tmp_path):
    for name in ("cats", "dogs"):
        fill(tmp_path / "in" / name, 3)
    assert leaves(recipe(prepared_folder(tmp_path, "--labels"))) == "DiTPipeline"


def test_data_encoded_during_training_has_the_sizes_of_the_encoders(tmp_path):
    fill(tmp_path / "in")
    folder, vae, t5 = prepared_folder(tmp_path), save_vae(tmp_path / "vae"), save_t5(tmp_path / "t5")
    task = recipe(folder, vae=vae, text_encoder=t5)
    assert (task.model.in_channels, task.model.context_size) == (4, T5_WIDTH)
    assert task.data.max_tokens_per_pack == 32 * 96
    assert task.data.online_vae == str(vae)
    assert lengths(first_packs(task)) == {64, 96, 24}


def test_captions_without_an_encoder_are_refused(tmp_path):
    fill(tmp_path / "in")
    folder = prepared_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"prepare it with --text-encoder .* or embed them while training: .*none"):
        recipe(folder)
    task = recipe(folder, text_encoder="none")
    assert (task.data.online_text_encoder, task.model.context_size) == (None, None)
    first_packs(task)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--text-encoder identity", ""),
        ("--labels", ""),
        ("", ", text_encoder='all-minilm-l6-v2'"),
        ("--reference originals", ", text_encoder='all-minilm-l6-v2'"),
    ],
)
def test_prepare_prints_a_command_that_trains_on_its_folder(tmp_path, monkeypatch, capsys, words, arguments):
    monkeypatch.chdir(tmp_path)
    for folder in ("in/cats", "in/dogs", "originals/cats", "originals/dogs"):
        fill(tmp_path / folder, 3)
    task = f"own_data(data='{prepared_folder(tmp_path, *words.split())}'{arguments})"
    *_, line = capsys.readouterr().out.splitlines()
    assert line == f'  train on it: python -m launch.train --yes --factory "{task}"'
    built(call_recipe(task)).check(1)


def test_a_large_picture_of_pixels_gets_a_larger_patch(tmp_path):
    """A picture of 256 x 256 pixels has 1,024 tokens of 8 x 8, and the longest pack has four pictures."""
    folder_of(tmp_path / "in", {f"{i}.png": as_file(noise(256, 256, i)) for i in range(3)})
    task = recipe(prepared_folder(tmp_path))
    assert (task.model.patch_spatial, task.data.max_tokens_per_pack) == (8, 4096)
    assert planned_sample(fiddle.build(task.data), fiddle.build(task.model)) == Sample((1, 32, 32), pack=4096)
    assert task.sampling.guidance_scale == 1.0  # the data have no condition


def test_held_out_samples_are_validated_on(tmp_path):
    fill(tmp_path / "in", 40)
    folder, words = tmp_path / "data", ["--validation", "0.3"]
    assert prepare(tmp_path / "in", folder, *words, "--labels") != 0  # the pictures are not in class folders
    assert prepare(tmp_path / "in", folder, *words) == 0
    assert recipe(folder, text_encoder="none").training.validation_interval == 500


def test_a_missing_folder_can_be_planned(tmp_path):
    assert Contents.read(tmp_path / "absent") is None
    task = recipe(tmp_path / "absent")
    built(task).check(2)
    assert planned_sample(fiddle.build(task.data), fiddle.build(task.model)).assumed == "shape"


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"latent_shape": [1, 2]}', '{"shapes": {"1x2": 3}}'])
def test_a_folder_without_a_description_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset\.json does not describe the data .* energon_data\.prepare"):
        recipe(tmp_path)
