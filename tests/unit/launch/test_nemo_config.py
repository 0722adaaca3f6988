"""A training document of NeMo's Imagen becomes a recipe: every key is mapped, named as without effect, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit.errors import ConfigError
from energon_data.mock import MockData
from launch import nemo_config, nemo_keys, train
from launch.config_file import built
from launch.train import call_recipe, load_component
from tests.parity.test_imagen import num_parameters
from tests.unit.launch.nemo_documents import (
    ABSENT,
    BASES,
    CORRUPTED,
    CORRUPTION,
    DOCUMENTS,
    EFFICIENT,
    REGULAR,
    SR_UNET,
    Changes,
    document,
    flat,
    published,
    record,
    refusal,
)
from tests.unit.launch.pages import blocks, run_line, shown_commands


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_published_document_gives_the_published_network(name: str, tmp_path: Path) -> None:
    """To the parameter; and where the registry has this model, its model, objective, optimizer and schedule."""
    changes, recipe, count = DOCUMENTS[name]
    path = tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(document(changes), sort_keys=False))
    task, _ = nemo_config.load(path, load_component)
    config = built(task)
    config.check()
    assert num_parameters(config.model) == count
    if getattr(config.model, "low_resolution_factor", None) is not None:
        assert config.model.low_resolution_kernel == "opencv"
    if recipe is not None:
        same = built(call_recipe(recipe))
        heads = {"num_attention_heads": same.model.num_attention_heads}  # which are not read: there is a head size
        assert config.model.padded_text_tokens == 128
        assert replace(config.model, **heads, padded_text_tokens=None) == same.model  # recipes count real tokens
        assert (config.objective, config.optimizer, config.schedule) == (same.objective, same.optimizer, same.schedule)
        data = {key: value for key, value in flat(same).items() if key.startswith("data.")}
        if CORRUPTION in changes:  # which no release of NeMo has, nor the recipes
            data["data.corrupt_low_resolution"] = True
        assert {key: flat(config)[key] for key in data} == data


CUT = "model.data.train.augmentations"
SAVED = "exp_manager.checkpoint_callback_params"
FILTER = "model.data.train.filterings.resolution"
TEXT_64 = {"data.max_text_tokens": 64, "model.padded_text_tokens": 64}
MAPPED: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("base", "trainer.max_steps", 7, {"training.num_steps": 7}),
    ("base", "trainer.precision", 32, {"training.precision": "fp32"}),
    ("base", "trainer.precision", 16, {"training.precision": "fp16"}),
    ("base", "trainer.precision", "16-mixed", {"training.precision": "fp16"}),
    ("base", "model.native_amp_init_scale", 1024, {"training.initial_loss_scale": 1024.0}),
    ("base", "model.native_amp_growth_interval", 500, {"training.loss_scale_window": 500}),
    ("base", "trainer.log_every_n_steps", 3, {"training.log_interval": 3}),
    ("base", "trainer.gradient_clip_val", 0.5, {"optimizer.clip_grad": 0.5}),
    ("base", "trainer.gradient_clip_val", None, {"optimizer.clip_grad": 0.0}),
    ("base", "exp_manager.exp_dir", "/data", {"training.run_dir": "/data/imagen-nemo"}),
    ("base", "exp_manager.name", "own", {"training.run_dir": "runs/own"}),
    ("base", "exp_manager.create_wandb_logger", True, {"logging.wandb": True}),
    ("base", "exp_manager.wandb_logger_kwargs.project", "own", {"logging.wandb_project": "own"}),
    ("base", "exp_manager.wandb_logger_kwargs.name", "own", {"logging.wandb_name": "own"}),
    ("base", "exp_manager.wandb_logger_kwargs.group", "own", {"logging.wandb_group": "own"}),
    ("base", "exp_manager.create_tensorboard_logger", False, {"logging.tensorboard": False}),
    ("base", "exp_manager.create_checkpoint_callback", False, {"checkpoint.interval": 0}),
    ("base", f"{SAVED}.every_n_train_steps", 9, {"checkpoint.interval": 9}),
    ("base", f"{SAVED}.save_top_k", 3, {"checkpoint.keep_last": 3}),
    ("base", f"{SAVED}.save_top_k", -1, {"checkpoint.keep_last": 2, "checkpoint.keep_every": 1}),
    ("base", f"{SAVED}.monitor", "val_loss", {"checkpoint.keep_last": 2, "checkpoint.keep_best": 5}),
    ("base", "exp_manager.resume_if_exists", False, {"checkpoint.resume": "never"}),
    ("base", "exp_manager.resume_ignore_no_checkpoint", False, {"checkpoint.resume": "must"}),
    ("base", "exp_manager.ema.enable", False, {"training.ema_decay": None}),
    ("base", "exp_manager.ema.decay", 0.5, {"training.ema_decay": 0.5}),
    ("base", "exp_manager.ema.cpu_offload", True, {"training.ema_offload": True}),
    ("base", "model.micro_batch_size", 24, {"training.micro_batch_size": 24}),
    ("base", "model.global_batch_size", 96, {"training.global_batch_size": 96}),
    ("base", "model.inductor", True, {"training.kernels": "compile"}),
    ("base", "model.seed", 7, {"training.seed": 7}),
    ("base", "model.ddp_overlap", False, {"parallel.overlap_grad_reduce": False}),
    ("base", "model.unet.embed_dim", 512, {"model.hidden_size": 512}),
    ("base", "model.unet.channels", 4, {"model.in_channels": 4}),
    ("base", "model.unet.channel_mult", [1, 2, 3, 5], {"model.channel_multipliers": [1, 2, 3, 5]}),
    ("base", "model.unet.per_head_channels", 32, {"model.head_size": 32}),
    ("base", "model.unet.per_head_channels", -1, {"model.head_size": None}),
    ("base", "model.unet.num_attn_heads", 2, {"model.num_attention_heads": 2}),
    ("base", "model.unet.attention_type", "stacked", {"model.attention_type": "stacked"}),
    ("base", "model.unet.feature_pooling_type", "mean", {"model.text_pooling": "mean"}),
    ("base", "model.unet.learned_sinu_pos_emb_dim", ABSENT, {"model.learned_time_features": 16}),
    ("base", "model.unet.use_null_token", True, {"model.null_token": True}),
    ("base", "model.unet.init_conv_kernel_size", 7, {"model.init_kernel_size": 7}),
    ("base", "model.unet.gradient_checkpointing", True, {"training.recompute": "full"}),
    ("base", "model.unet.scale_shift_norm", False, {"model.scale_shift_norm": False}),
    (
        "stable",
        "model.unet.stable_attention",
        True,
        {"model.stable_attention": True},
    ),
    (
        "narrow",
        "model.unet.image_size",
        128,
        {"model.attention_levels": [2]},
    ),
    ("base", "model.unet.attention_resolutions", [64], {"model.attention_levels": [0]}),
    ("base", "model.unet.num_res_blocks", 2, {"model.num_res_blocks": [2, 2, 2, 2]}),
    ("base", "model.unet.cond_dim", 1024, {"model.condition_size": 1024}),
    ("base", "model.unet.dropout", 0.1, {"model.dropout": 0.1}),
    ("base", "model.unet.resblock_updown", True, {"model.resampling": "block"}),
    ("base", "model.unet.resample_with_conv", False, {"model.resampling": "pool"}),
    ("sr", "model.unet.atnn_enabled_at", [1, 0, 0, 0, 1], {"model.attention_levels": [0, 4]}),
    ("sr", "model.unet.num_resblocks", [1] * 5, {"model.num_res_blocks": [1] * 5}),
    ("sr", "model.unet.skip_connection_scaling", ABSENT, {"model.skip_scaling": False}),
    ("sr", "model.noise_cond_aug", True, {"model.noise_augmentation": True}),
    ("sr", "model.data.train.target_resolutions", [32, 256], {"model.low_resolution_factor": 8}),
    ("sr-unet", "model.data.train.target_resolutions", [32, 256], {"model.low_resolution_factor": 8}),
    ("base", "model.preconditioning.loss_type", "huber", {"objective.loss_kind": "huber"}),
    ("base", "model.preconditioning.sigma_data", 0.6, {"objective.sigma_data": 0.6}),
    ("base", "model.preconditioning.p_mean", 0.3, {"objective.p_mean": 0.3}),
    ("base", "model.preconditioning.p_std", 1.0, {"objective.p_std": 1.0}),
    ("ddpm", "model.preconditioning.pred_objective", "x_start", {"objective.prediction": "x0"}),
    ("ddpm", "model.preconditioning.noise_schedule", "linear", {"objective.schedule": "linear"}),
    ("ddpm", "model.preconditioning.timesteps", 250, {"sampling.num_steps": 250}),
    ("base", "model.conditioning.embed_dim", 4096, {"model.context_size": 4096}),
    ("base", "model.conditioning.token_length", 64, TEXT_64),
    ("base", "model.conditioning.drop_rate", 0.2, {"model.context_dropout": 0.2}),
    (
        "base",
        "model.conditioning.online_encoding",
        True,
        {"data.online_text_encoder": "text=google-t5/t5-11b", "data.online_precision": "bf16"},
    ),
    ("online", "model.conditioning.encoder_path", "/t5", {"data.online_text_encoder": "text=/t5"}),
    ("base", f"{CUT}.resize_smallest_side", 96, {"data.resize_side": 96}),
    ("base", f"{CUT}.center_crop_h_w", "32, 48", {"data.crop_size": [32, 48]}),
    ("base", CUT, {"resize_smallest_side": 64, "random_crop_h_w": "64, 64"}, {"data.random_crop": True}),
    ("base", f"{CUT}.horizontal_flip", True, {"data.flip": 0.5}),
    ("sr", CORRUPTION, CORRUPTED[CORRUPTION], {"data.corrupt_low_resolution": True}),
    ("sr", f"{FILTER}.value", 300, {"data.min_side": 300}),
    ("sr", f"{FILTER}.method", "smaller", {"data.min_side": None, "data.max_side": 256}),
    ("base", "model.optim.lr", "2e-4", {"optimizer.lr": 2e-4}),
    ("base", "model.optim.eps", "1e-6", {"optimizer.eps": 1e-6}),
    ("base", "model.optim.betas", [0.8, 0.99], {"optimizer.beta1": 0.8, "optimizer.beta2": 0.99}),
    ("base", "model.optim.weight_decay", 0.0, {"optimizer.weight_decay": 0.0}),
    ("base", "model.optim.sched.warmup_steps", 500, {"schedule.warmup_steps": 500}),
]
"""Documents, a key of them, its new value, and all settings that it changes."""


@pytest.mark.parametrize(
    ("base", "key", "value", "expected"), MAPPED, ids=[f"{key}={value}" for _, key, value, _ in MAPPED]
)
def test_a_key_changes_its_setting_and_nothing_else(
    base: str, key: str, value: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    before, after = published(base, tmp_path.parent), record(tmp_path, *BASES[base], {key: value})
    assert {name: new for name, new in after.items() if new != before[name]} == expected


def test_every_key_that_is_mapped_is_changed_by_a_test(tmp_path: Path) -> None:
    """And each that every published document has is in its table."""
    path = tmp_path / "nemo.yaml"
    mapped: set[str] = set()
    for changes, _, _ in DOCUMENTS.values():
        values = document(changes)
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        _, rows = nemo_config.load(path, load_component)
        leaves = dict(nemo_keys.leaves(values))
        selects = {"model.unet_type", "model.preconditioning_type"}
        nulls = {key for key, value in leaves.items() if value is None or "resume_from_checkpoint" in key}
        assert {key for row in rows for key in row.given} == leaves.keys() - selects - nulls
        mapped |= {key for row in rows for key in row.given if row.settings}
    implied = {"model.precision", "model.unet.flash_attention", "model.unet.low_res_cond"}
    implied |= {key for key in mapped if key.startswith(f"{CORRUPTION}.")}
    assert mapped - implied <= {key for _, key, _, _ in MAPPED}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model.unet.embed_dimm": 3},
            "model.unet.embed_dimm=3: no such key is known; did you mean model.unet.embed_dim?",
        ),
        ({f"{CUT}.resize_samllest_side": 64}, f"did you mean {CUT}.resize_smallest_side?"),
        ({"max_steps": 5}, "max_steps=5: no such key is known; did you mean trainer.max_steps?"),
        ({"model.first_stage_config": {"target": "x.VAE"}}, "model.first_stage_config.target=x.VAE: no such key"),
        ({"defaults": [{"unet": "base"}]}, "defaults=[{'unet': 'base'}]: no such key is known"),
        ({"model.unet_type": "srr"}, "model.unet_type=srr is none of base, sr-unet, sr"),
        ({"model.preconditioning_type": ABSENT}, "model.preconditioning_type=missing is none of EDM, DDPM"),
        ({"model.unet.embed_dim": ABSENT}, "model.unet.embed_dim is missing"),
        ({"model.unet.embed_dim": "wide"}, "model.unet.embed_dim=wide: model.hidden_size=wide is not a whole number"),
        ({"model.unet.attention_resolutions": 8}, "attention_resolutions=8: a value of another type is expected"),
        ({"model.unet.attention_resolutions": [12]}, "no level works at 12 pixels; the levels work at 64, 32, 16, 8"),
        ({"model.unet.stable_attention": True}, "stable and flash attention exclude each other"),
        ({"model.unet.dropout": True}, "True is no share"),
        ({"model.unet.stride": 2}, "it is of unet_type sr, not of base; remove the key"),
        ({"model.unet.low_res_cond": True}, "unet_type: base has no small picture; use sr-unet or sr"),
        ({"model.noise_cond_aug": True}, "unet_type: base has no small picture"),
        ({"model.data.train.target_resolutions": [64, 256]}, "unet_type: base has no small picture; remove the key"),
        ({"model.preconditioning.timesteps": 9}, "preconditioning_type: EDM has no such constant"),
        ({"model.preconditioning.loss_type": "l3"}, "objective.loss_kind=l3 is not one of l2, l1, huber"),
        (
            {"trainer.precision": 64, "model.precision": ABSENT},
            "64 is not offered here; use one of bf16, bf16-mixed, 16, 16-mixed, 32",
        ),
        ({"model.precision": 32}, "trainer.precision=bf16 and model.precision=32 disagree"),
        ({"trainer.max_epochs": 3}, "the length of a run is trainer.max_steps; remove the key or set it to -1"),
        ({"trainer.accumulate_grad_batches": 2}, "remove the key or set it to 1"),
        ({"trainer.resume_from_checkpoint": "a.ckpt"}, "checkpoints of NeMo are not resumed"),
        (
            {"exp_manager.create_wandb_logger": "yes please"},
            "exp_manager.create_wandb_logger=yes please: logging.wandb=",
        ),
        (
            {"exp_manager.ema.enable": 1},
            "exp_manager.ema.enable=1, exp_manager.ema.decay=0.9999: 1 is neither true nor false",
        ),
        ({"exp_manager.name": "${nam}"}, "exp_manager.name=${nam}: nam is no key"),
        ({"exp_manager.name": "${exp_manager.name}"}, "exp_manager.name is its own value"),
        ({"optim": {"lr": 1.0}}, "optim.lr=1.0: no such key is known; did you mean model.optim.lr?"),
        ({"model.conditioning.encoder_path": "???"}, "model.conditioning.encoder_path=??? is left open"),
        ({CUT: {"horizontal_flip": True, "resize_smallest_side": 64}}, "resized, then cut, then mirrored"),
        ({f"{CUT}.random_crop_h_w": "64, 64"}, "one crop is made"),
        ({f"{CUT}.center_crop_h_w": "64"}, "'64' is not a pair of sizes in pixels"),
        ({"model.data.train.filterings": {"resolution": {"value": 3}}}, "a filter has a method and a value"),
        ({"model.data.webdataset.object_store": True}, "shards are files"),
        ({"model.optim.name": "sgd"}, "the optimizer is AdamW"),
        ({"model.optim.betas": [0.9]}, "[0.9] is not two numbers"),
        ({"model.optim.sched.name": "CosineAnnealing"}, "the schedule is a linear warm-up, then constant"),
        ({"model.optim.sched.warmup_ratio": 0.1}, "a warm-up has warmup_steps; remove the key"),
    ],
    ids=str,
)
def test_a_key_that_cannot_be_read_is_refused_by_name(changes: Changes, says: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, REGULAR, changes)
    assert text.splitlines()[0].endswith("1 refused")
    assert says in text.splitlines()[1]


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        (SR_UNET, {"model.unet.low_res_cond": False}, "a super-resolution model has low_res_cond: True"),
        (
            SR_UNET,
            {"model.data.train.target_resolutions": ABSENT},
            "sides of the small and the large picture are missing",
        ),
        (SR_UNET, {"model.data.train.target_resolutions": [48, 256]}, "256 is no multiple of the small one, 48"),
        (EFFICIENT, {"model.unet.cond_dim": 512}, "it is of unet_type base and sr-unet, not of sr"),
        (EFFICIENT, {"model.unet.stride": 1}, "each level but the last halves the size; remove the key or set it to 2"),
        (EFFICIENT, {"model.unet.atnn_enabled_at": [0, 1]}, "2 entries for the 5 levels"),
        (
            {**EFFICIENT, **CORRUPTED},
            {f"{CORRUPTION}.jpeg.add_random_compression": True},
            "1 of 22 differ, jpeg.add_random_compression=True first; write jpeg.add_random_compression=False",
        ),
        (
            {**EFFICIENT, **CORRUPTED},
            {f"{CORRUPTION}.noise": ABSENT},
            "9 of 22 differ, noise.add_random_noise=missing first; write noise.add_random_noise=True",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_super_resolution_is_refused_likewise(base: Changes, changes: Changes, says: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, base, changes)
    assert text.splitlines()[0].endswith("1 refused")
    assert says in text


def test_sections_of_other_documents_are_read(tmp_path: Path) -> None:
    """The optimizer at the top of the document, held-out data, and open values that have no effect."""
    values = document(REGULAR)
    section = {"dataset_path": ["held_out.pkl"], "filterings": {"resolution": {"method": "larger", "value": 64}}}
    values["model"]["data"] |= {"validation": section, "test": section}
    values["model"]["data"]["webdataset"]["local_root_path"] = "???"
    values["trainer"]["val_check_interval"] = 500
    values["optim"] = values["model"].pop("optim")
    values["optim"]["lr"] = 3e-4
    path = tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    task, rows = nemo_config.load(path, load_component)
    assert flat(built(task)) == {**record(tmp_path, REGULAR), "optimizer.lr": 3e-4}
    assert "  model.data.test: energon_data.prepare splits the data" in nemo_config.table(rows)


@pytest.mark.parametrize("changes", [REGULAR, SR_UNET], ids=["base", "sr"])
def test_synthetic_data_are_those_of_this_project(changes: Changes, tmp_path: Path) -> None:
    """Of the size and text length of the document; other keys of the data have no effect."""
    path = tmp_path / "nemo.yaml"
    synthetic = {"model.data.synthetic_data": True, "model.data.synthetic_data_length": 800}
    path.write_text(yaml.safe_dump(document(changes, synthetic, {"model.conditioning.token_length": 9})))
    task, rows = nemo_config.load(path, load_component)
    data = built(task).data
    side = changes.get("model.unet.image_size", 64)
    assert data == MockData(height=side, width=side, text_tokens=9, dataset_size=800)
    assert built(task).model.padded_text_tokens == 9
    built(task).check()
    assert "synthetic_data=True" in nemo_config.table(rows)


@pytest.mark.parametrize("changes", [REGULAR, SR_UNET, EFFICIENT], ids=["base", "sr-unet", "sr"])
def test_a_document_trains_the_network_that_is_imported_by_it(changes: Changes, tmp_path: Path) -> None:
    """Padding of texts included: otherwise, imported weights would compute something else from the first step on."""
    values, path = document(changes, {"model.conditioning.token_length": 64}), tmp_path / "nemo.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    trained, _ = nemo_config.load(path, load_component)
    imported, _ = nemo_config.load_network(values, path, load_component)
    assert built(trained).model == built(imported).model
    assert built(trained).model.padded_text_tokens == 64


def test_each_refused_key_has_a_line(tmp_path: Path) -> None:
    wrong = {"trainer.max_stepz": 3, "model.optim.name": "sgd", "model.unet.embed_dim": "x"}
    lines = refusal(tmp_path, REGULAR, wrong).splitlines()
    assert lines[0].endswith("3 refused")
    assert [next(key for key in wrong if key in line) for line in lines[1:]]
    assert len(lines) == 4


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "model: 3", "model: !!python/object/apply:os.getcwd []"])
def test_a_file_that_is_no_such_document_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "nemo.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read|has no section `model`"):
        nemo_config.load(tmp_path / "nemo.yaml", load_component)


def test_the_command_prints_the_table_and_takes_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They come last; `--to-yaml` writes a file that starts the same run."""
    (tmp_path / "nemo.yaml").write_text(yaml.safe_dump(document(REGULAR), sort_keys=False))
    arguments = [
        "--nemo-config",
        str(tmp_path / "nemo.yaml"),
        "optimizer.lr=3e-4",
        "--to-yaml",
        str(tmp_path / "own.yaml"),
    ]
    assert train.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  model.unet.embed_dim=256 -> model.hidden_size=256" in lines
    assert "  model.optim.weight_decay=0.01 -> optimizer.weight_decay=0.01  (not of biases and norms)" in lines
    assert any(line.startswith("  model.data.num_workers=16: data.background") for line in lines)
    written = train.resolve(train.cli.parse(["--yaml", str(tmp_path / "own.yaml")]))
    expected = {**record(tmp_path, REGULAR), "optimizer.lr": 3e-4}
    assert flat(built(written)) == expected


def test_one_source_selects_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--nemo-config", "a.yaml", "--yaml", "b.yaml", "--yes"]) == 2
    assert "--yaml and --nemo-config both select the run" in capsys.readouterr().err
    assert train.main(["--nemo-config", str(tmp_path / "none.yaml"), "--yes"]) == 2
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err
    assert train.main(["--nemo-config", "a.yaml", "--yes", "optimizer.lrr=1"]) == 2
    assert "did you mean optimizer.lr?" in capsys.readouterr().err


def test_the_first_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    page = Path("docs/nemo.md")
    shown = {block.language: block.text for block in blocks(page)}
    (tmp_path / "imagen.yaml").write_text(shown["yaml"])
    planned, written, trained, *_ = shown_commands(page)
    # Planning all of it takes a minute.
    small = "model.channel_multipliers=[1] model.num_res_blocks=[1] model.attention_levels=[0]"
    assert run_line(f"{planned} {small}", tmp_path).code == 0
    out = run_line(written, tmp_path).out
    printed = shown["text"].partition("  ...")[0]
    assert out.startswith(printed)
    assert (tmp_path / "imagen_here.yaml").exists()
    assert trained.startswith("python -m launch.train --yes")  # tests/integration/test_loop_options.py runs it
