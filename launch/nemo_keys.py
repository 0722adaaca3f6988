"""Rules for the keys of a NeMo Imagen document: our settings, no effect, or an error.

The keys are those of NeMo 2.0, `examples/multimodal/text_to_image/imagen/conf`; defaults are those of its constructors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Optional

from dit.errors import ConfigError
from launch.nemo_rules import Rule, Settings, maps, nothing, one_of, only, switch, unused

UNetType = Literal["base", "sr-unet", "sr"]
Preconditioning = Literal["EDM", "DDPM"]
T5 = "google-t5/t5-11b"
PRECISIONS = {
    **{"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"},
    **{"32": "fp32", "32-true": "fp32"},
}
PREDICTIONS = {"noise": "noise", "x_start": "x0"}


def _resolutions(value: object) -> list[int]:
    """Read `[64, 256]`, or `64, 64`."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or len(entries) != 2 or not all(str(e).strip().isdecimal() for e in entries):
        raise ConfigError(f"{value!r} is not a pair of sizes in pixels")
    return [int(entry) for entry in entries]


def _attention_at(
    image_size: int, attention_resolutions: Sequence[int] = (8, 16, 32), channel_mult: Sequence[int] = ()
) -> Settings:
    sides = [image_size >> level for level in range(len(channel_mult))]
    unknown = [side for side in attention_resolutions if side not in sides]
    if unknown:
        raise ConfigError(f"no level works at {unknown[0]} pixels; the levels work at {', '.join(map(str, sides))}")
    return {"model.attention_levels": sorted(sides.index(side) for side in attention_resolutions)}


def _attention_enabled(atnn_enabled_at: Sequence[int], channel_mult: Sequence[int]) -> Settings:
    if len(atnn_enabled_at) != len(channel_mult):
        raise ConfigError(f"{len(atnn_enabled_at)} entries for the {len(channel_mult)} levels of channel_mult")
    return {"model.attention_levels": [level for level, enabled in enumerate(atnn_enabled_at) if enabled]}


def _blocks(num_res_blocks: object, channel_mult: Sequence[int]) -> Settings:
    same = isinstance(num_res_blocks, int)
    return {"model.num_res_blocks": [num_res_blocks] * len(channel_mult) if same else num_res_blocks}


def _heads(per_head_channels: int = 64, num_attn_heads: int = 4) -> Settings:
    size = None if per_head_channels == -1 else per_head_channels
    return {"model.head_size": size, "model.num_attention_heads": num_attn_heads}


def _attention_kernel(*, stable_attention: object = True, flash_attention: object = False) -> Settings:
    if switch(stable_attention) and switch(flash_attention):
        raise ConfigError("stable and flash attention exclude each other; set one of them to False")
    return {"model.stable_attention": stable_attention}


def _resampling(*, resblock_updown: object = False, resample_with_conv: object = True) -> Settings:
    outside_blocks = "conv" if switch(resample_with_conv) else "pool"
    return {"model.resampling": "block" if switch(resblock_updown) else outside_blocks}


def _dropout(value: object) -> object:
    if value is True:
        raise ConfigError("True is no share (NeMo's layer would drop everything); write one, such as 0.1")
    return float(value) if value is False else value


def _low_resolution(
    target_resolutions: object = None, target_resolution: object = None, low_res_cond: object = True
) -> Settings:
    if not switch(low_res_cond):
        raise ConfigError("a super-resolution model has low_res_cond: True; unet_type: base has no small picture")
    if target_resolutions is None and target_resolution is None:
        raise ConfigError("the sides of the small and the large picture are missing, such as [64, 256]")
    small, large = _resolutions(target_resolution if target_resolutions is None else target_resolutions)
    if small < 1 or large % small:
        raise ConfigError(f"the large side {large} is no multiple of the small one, {small}")
    return {"model.low_resolution_factor": large // small, "model.low_resolution_kernel": "opencv"}


def _no_low_resolution(low_res_cond: object = False, noise_cond_aug: object = False) -> Settings:
    if switch(low_res_cond) or switch(noise_cond_aug):
        raise ConfigError("unet_type: base has no small picture; use sr-unet or sr")
    return {}


def _augmentations(**steps: object) -> Settings:
    """Read the steps in the order of the document, which is the order in which NeMo takes them."""
    order = ("resize_smallest_side", "center_crop_h_w", "random_crop_h_w", "horizontal_flip")
    names = [name for name, value in steps.items() if value]
    if names != sorted(names, key=order.index):
        raise ConfigError(
            f"{', '.join(names)}: pictures are resized, then cut, then mirrored; write them in this order"
        )
    if {"center_crop_h_w", "random_crop_h_w"} <= set(names):
        raise ConfigError("one crop is made, at the centre or at random; remove one of the two")
    crop = steps.get("center_crop_h_w") or steps.get("random_crop_h_w")
    settings: dict[str, object] = {"data.flip": 0.5 if switch(steps.get("horizontal_flip") or False) else 0.0}
    if "resize_smallest_side" in names:
        settings["data.resize_side"] = steps["resize_smallest_side"]
    if crop:
        settings |= {"data.crop_size": _resolutions(crop), "data.random_crop": "random_crop_h_w" in names}
    return settings


def _filter(method: Optional[str] = None, value: object = None) -> Settings:
    if (method is None) != (value is None):
        raise ConfigError("a filter has a method and a value; write both")
    return {} if method is None else {one_of({"larger": "data.min_side", "smaller": "data.max_side"})(method): value}


def _corruption(**section: object) -> Settings:
    """Read the corruption of the small picture, which is drawn here with the published probabilities and ranges."""
    published = dict(leaves(PUBLISHED_CORRUPTION))
    values = dict(leaves(section))
    different = [key for key, value in published.items() if values.get(key) != value]
    if different:
        key = different[0]
        raise ConfigError(
            f"data.corrupt_low_resolution draws with the published values, of which {len(different)} of "
            f"{len(published)} differ, {key}={values.get(key, 'missing')} first; write {key}={published[key]}, "
            "or remove the section"
        )
    return {"data.corrupt_low_resolution": True}


def _synthetic(
    *,
    synthetic_data: object = True,
    synthetic_data_length: object = None,
    center_crop_h_w: object = None,
    random_crop_h_w: object = None,
    token_length: object = 128,
) -> Settings:
    crop = center_crop_h_w or random_crop_h_w
    height, width = _resolutions(crop) if crop else (64, 64)
    return {
        "data": "mock",
        "data.height": height,
        "data.width": width,
        "data.text_tokens": token_length,
        "data.dataset_size": synthetic_data_length,
        "model.padded_text_tokens": token_length,
    }


def _text_length(token_length: object = 128) -> Settings:
    return {"data.max_text_tokens": token_length, "model.padded_text_tokens": token_length}


def _average(enable: object = False, decay: object = 0.9999) -> Settings:
    return {"training.ema_decay": decay if switch(enable) else None}


def _run_dir(exp_dir: str = "nemo_experiments", name: str = "default") -> Settings:
    return {"training.run_dir": f"{exp_dir}/{name}"}


def _best(save_top_k: object = None, monitor: str = "val_loss") -> Settings:
    if not save_top_k:
        return {}
    if save_top_k == -1:
        return {"checkpoint.keep_every": 1}
    losses = {"reduced_train_loss": "checkpoint.keep_last", "val_loss": "checkpoint.keep_best"}
    return {one_of(losses)(monitor): save_top_k}


def _checkpoints(*, create_checkpoint_callback: object = True, every_n_train_steps: object = None) -> Settings:
    if not switch(create_checkpoint_callback):
        return {"checkpoint.interval": 0}
    return {} if every_n_train_steps is None else {"checkpoint.interval": every_n_train_steps}


def _resume(*, resume_if_exists: object = None, resume_ignore_no_checkpoint: object = False) -> Settings:
    if resume_if_exists is None:
        return {}
    if not switch(resume_if_exists):
        return {"checkpoint.resume": "never"}
    return {"checkpoint.resume": "auto" if switch(resume_ignore_no_checkpoint) else "must"}


def _betas(betas: Sequence[float] = (0.9, 0.999)) -> Settings:
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"{betas!r} is not two numbers")
    return {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}


def _online(online_encoding: object = False, encoder_path: Optional[str] = None) -> Settings:
    if not switch(online_encoding):
        return {}
    return {"data.online_text_encoder": f"text={encoder_path or T5}", "data.online_precision": "bf16"}


def _network(unet_type: UNetType) -> list[Rule]:
    """Return the rules of `model.unet`, and of what belongs to the small picture."""
    unet, train = "model.unet", "model.data.train"
    rules = [
        maps(f"{unet}.embed_dim", "model.hidden_size", required=True),
        maps(f"{unet}.channels", "model.in_channels", default=3),
        maps(f"{unet}.channel_mult", "model.channel_multipliers", required=True),
        Rule((f"{unet}.per_head_channels", f"{unet}.num_attn_heads"), _heads),
        maps(f"{unet}.attention_type", "model.attention_type", default="fused"),
        maps(f"{unet}.feature_pooling_type", "model.text_pooling", default="attention"),
        maps(f"{unet}.learned_sinu_pos_emb_dim", "model.learned_time_features", lambda n: n or None, default=16),
        maps(f"{unet}.use_null_token", "model.null_token", default=False),
        maps(f"{unet}.init_conv_kernel_size", "model.init_kernel_size", default=3),
        maps(
            f"{unet}.gradient_checkpointing",
            "training.recompute",
            lambda on: "full" if switch(on) else "none",
            default=False,
        ),
        maps(f"{unet}.scale_shift_norm", "model.scale_shift_norm", default=True),
        Rule(
            (f"{unet}.stable_attention", f"{unet}.flash_attention"),
            _attention_kernel,
            "training.attention selects the kernel of the other attention, auto the fastest here; numbers are the same",
        ),
    ]
    if unet_type == "sr":
        rules += [
            Rule((f"{unet}.atnn_enabled_at", f"{unet}.channel_mult"), _attention_enabled, required=True),
            maps(f"{unet}.num_resblocks", "model.num_res_blocks", required=True),
            maps(f"{unet}.skip_connection_scaling", "model.skip_scaling", default=False),
            only(f"{unet}.stride", 2, why="each level but the last halves the size"),
            *unused(f"{unet}.image_size", "this network takes any size; data.crop_size is that of the training"),
        ]
        others = "num_res_blocks cond_dim attention_resolutions dropout resblock_updown resample_with_conv"
        why = "is of unet_type base and sr-unet"
    else:
        levels = tuple(f"{unet}.{name}" for name in ("image_size", "attention_resolutions", "channel_mult"))
        rules += [
            Rule(levels, _attention_at, required=True),
            Rule((f"{unet}.num_res_blocks", f"{unet}.channel_mult"), _blocks, required=True),
            maps(f"{unet}.cond_dim", "model.condition_size", default=512),
            maps(f"{unet}.dropout", "model.dropout", _dropout, default=False),
            Rule((f"{unet}.resblock_updown", f"{unet}.resample_with_conv"), _resampling),
        ]
        others, why = "num_resblocks atnn_enabled_at stride skip_connection_scaling", "is of unet_type sr"
    rules += [only(f"{unet}.{name}", why=f"it {why}, not of {unet_type}") for name in others.split()]
    sides = (f"{train}.target_resolutions", f"{train}.corruption_aug.target_resolution")
    if unet_type == "base":
        no_picture = "unet_type: base has no small picture"
        return [
            *rules,
            Rule((f"{unet}.low_res_cond", "model.noise_cond_aug"), _no_low_resolution, no_picture),
            *(only(key, why=no_picture) for key in sides),
        ]
    condition = (f"{unet}.low_res_cond",) if unet_type == "sr-unet" else ()
    return [
        *rules,
        *([] if condition else [only(f"{unet}.low_res_cond", True, why="this network always has a small picture")]),
        Rule((*sides, *condition), _low_resolution, "made from the large picture, bicubically, with NeMo's kernel"),
        maps("model.noise_cond_aug", "model.noise_augmentation", default=False),
    ]


def _objective(preconditioning: Preconditioning) -> list[Rule]:
    section = "model.preconditioning"
    edm = [maps(f"{section}.{name}", f"objective.{name}") for name in ("sigma_data", "p_mean", "p_std")]
    ddpm = [
        maps(f"{section}.pred_objective", "objective.prediction", one_of(PREDICTIONS), default="noise"),
        maps(f"{section}.noise_schedule", "objective.schedule", default="cosine"),
        maps(f"{section}.timesteps", "sampling.num_steps", note="training has continuous time; of sampling"),
    ]
    rules, other_rules = (edm, ddpm) if preconditioning == "EDM" else (ddpm, edm)
    return [
        maps(f"{section}.loss_type", "objective.loss_kind", default="l2"),
        *rules,
        *(
            only(*rule.keys, why=f"preconditioning_type: {preconditioning} has no such constant")
            for rule in other_rules
        ),
    ]


_TRAINER = [
    *unused("trainer.devices trainer.num_nodes", "torchrun starts the ranks: --nproc-per-node, --nnodes"),
    only("trainer.max_epochs", -1, why="the length of a run is trainer.max_steps"),
    maps("trainer.max_steps", "training.num_steps", required=True),
    *(
        maps(f"{part}.precision", "training.precision", one_of(PRECISIONS), note="weights are stored in fp32, too")
        for part in ("trainer", "model")
    ),
    maps("model.native_amp_init_scale", "training.initial_loss_scale", float, note="of fp16"),
    maps("model.native_amp_growth_interval", "training.loss_scale_window", note="of fp16"),
    *unused("model.hysteresis", "of fp16: the first overflow halves the loss scale"),
    *unused("trainer.accelerator", "training is on the machine's GPUs, or on its CPU"),
    *unused("trainer.logger trainer.enable_checkpointing trainer.enable_model_summary", "exp_manager says it"),
    *unused("trainer.benchmark allow_tf32", "torch's default"),
    maps("trainer.log_every_n_steps", "training.log_interval"),
    only("trainer.accumulate_grad_batches", 1, why="micro-batches follow from micro_batch_size and the ranks"),
    maps("trainer.gradient_clip_val", "optimizer.clip_grad", default=0.0),
    *unused(
        "trainer.num_sanity_val_steps trainer.limit_val_batches trainer.val_check_interval",
        "NeMo's Imagen has no validation; training.validation_interval for ours",
    ),
]
_RESUME = [
    only(
        f"{part}.resume_from_checkpoint",
        why="checkpoints of NeMo are not resumed; their weights are imported by launch.import_weights, for "
        "checkpoint.start_from",
    )
    for part in ("trainer", "exp_manager", "model")
]
_EXPERIMENT = [
    *unused("name", "exp_manager.name names the run"),
    Rule(("exp_manager.exp_dir", "exp_manager.name"), _run_dir),
    maps("exp_manager.create_wandb_logger", "logging.wandb", default=False),
    maps("exp_manager.wandb_logger_kwargs.project", "logging.wandb_project"),
    maps("exp_manager.wandb_logger_kwargs.name", "logging.wandb_name"),
    maps("exp_manager.wandb_logger_kwargs.group", "logging.wandb_group"),
    *unused("exp_manager.wandb_logger_kwargs.resume", "a resumed run continues its page"),
    maps("exp_manager.create_tensorboard_logger", "logging.tensorboard", default=True),
    Rule(
        (
            "exp_manager.create_checkpoint_callback",
            "exp_manager.checkpoint_callback_params.every_n_train_steps",
        ),
        _checkpoints,
        "the last step has a checkpoint, too",
    ),
    only("exp_manager.checkpoint_callback_params.every_n_epochs", 0, why="a run has steps, not epochs"),
    Rule(
        ("exp_manager.checkpoint_callback_params.monitor", "exp_manager.checkpoint_callback_params.save_top_k"),
        _best,
        "the newest checkpoints are retained, too, and in place of those of the lowest training loss",
    ),
    *unused("exp_manager.checkpoint_callback_params.filename", "a checkpoint is called by its step"),
    Rule(("exp_manager.resume_if_exists", "exp_manager.resume_ignore_no_checkpoint"), _resume),
    Rule(("exp_manager.ema.enable", "exp_manager.ema.decay"), _average, "in fp32, sharded as the master weights"),
    *unused("exp_manager.ema.every_n_steps", "the average is updated after every step"),
    *unused("exp_manager.ema.validate_original_weights", "the loss of the average is measured"),
    maps("exp_manager.ema.cpu_offload", "training.ema_offload"),
]
_ENGINE = [
    maps("model.micro_batch_size", "training.micro_batch_size", required=True, note="at most"),
    maps("model.global_batch_size", "training.global_batch_size", required=True),
    maps(
        "model.inductor",
        "training.kernels",
        lambda compiles: "compile" if compiles else "auto",
        default=False,
        note="the residual blocks are compiled, not all",
    ),
    only("model.inductor_cudagraphs", False, why="no CUDA graphs are recorded"),
    *unused("model.channels_last", "pictures are always channels-last in memory; numbers are the same"),
    maps("model.seed", "training.seed"),
    maps("model.ddp_overlap", "parallel.overlap_grad_reduce"),
    *unused("model.apex_transformer_log_level model.gradient_as_bucket_view", "of NeMo's engine"),
]
_CONDITIONS = [
    maps("model.conditioning.embed_dim", "model.context_size", required=True),
    maps("model.conditioning.drop_rate", "model.context_dropout", default=0.0),
]
_CONDITIONING = [
    *_CONDITIONS,
    *unused(
        "model.conditioning.precached_key model.conditioning.out_key",
        "energon_data.prepare writes embeddings under the name of the condition, text",
    ),
    Rule(
        ("model.conditioning.online_encoding", "model.conditioning.encoder_path"),
        _online,
        "without online encoding the data have the embeddings",
    ),
]
CORRUPTION = "model.data.train.corruption_aug"
PUBLISHED_CORRUPTION: dict[str, dict[str, Any]] = {
    "blur": {"add_random_blur": True, "blur_prob1": 0.2, "blur_prob2": 0.2},
    "resize": {
        "add_random_resize": True,
        **{f"resize_prob{i}": {"up": 0.2, "down": 0.2, "keep": 0.6} for i in (1, 2)},
        **{f"resize_range{i}": [0.8, 1.2] for i in (1, 2)},
    },
    "noise": {
        "add_random_noise": True,
        **{f"gaussian_noise_prob{i}": 1.0 for i in (1, 2)},
        **{f"gray_noise_prob{i}": 0.0 for i in (1, 2)},
        "gaussian_sigma_range1": [0, 3],
        "gaussian_sigma_range2": [0, 2.5],
        "poisson_scale_range1": [0.005, 3],
        "poisson_scale_range2": [0.005, 2.5],
    },
    "jpeg": {"add_random_compression": False},
}
"""The values of the published documents that `energon_data.corruption.Corruption` has."""
_DATA = [
    Rule(
        ("model.conditioning.token_length",),
        _text_length,
        "shorter texts are not padded; pooling and norms compute what they would with zeros",
    ),
    *unused("model.data.synthetic_data model.data.synthetic_data_length", "data.path names the data"),
    *unused("model.data.num_workers", "data.background reads every stream in a separate process"),
    *unused(
        "model.data.validation model.data.test",
        "energon_data.prepare splits the data; training.validation_interval measures the loss of the split val",
    ),
    Rule(
        tuple(f"{CORRUPTION}.{section}" for section in PUBLISHED_CORRUPTION),
        lambda **sections: _corruption(**sections) if sections else {},
        "probabilities and ranges are NeMo's; the order and what a radius means are ours, since no release of NeMo has "
        "the code (docs/data.md)",
    ),
    *unused(f"{CORRUPTION}.kernel_radius_dict", "a blur has a radius of 1 to 3 pixels"),
    *unused(
        "model.data.train.dataset_path",
        "pickled lists of shards are not read: energon_data.prepare webdataset, then data.path=FOLDER or data.blend",
    ),
    Rule(
        tuple(
            f"model.data.train.augmentations.{name}"
            for name in ("resize_smallest_side", "center_crop_h_w", "random_crop_h_w", "horizontal_flip")
        ),
        _augmentations,
        "held-out pictures are cut at the centre and not mirrored",
    ),
    Rule(
        ("model.data.train.filterings.resolution.method", "model.data.train.filterings.resolution.value"),
        _filter,
        "of the stored picture, both sides",
    ),
    *unused("model.data.train.filterings.estimated_portion", "a run has steps, not epochs"),
    only("model.data.webdataset.use_webdataset", True, why="data are read from WebDataset shards"),
    only("model.data.webdataset.object_store", False, why="shards are files"),
    *unused("model.data.webdataset.infinite_sampler", "samples never end, each as often as the others"),
    *unused("model.data.webdataset.local_root_path model.data.webdataset.verbose", "data.path is the folder"),
    only("model.data.pbss_checkpoint_saving.enable", False, why="checkpoints are files"),
    *unused(
        "model.data.pbss_checkpoint_saving.pbss_credentials_file model.data.pbss_checkpoint_saving.save_frequency",
        "checkpoints are files",
    ),
]
_OPTIMIZER = [
    only("model.optim.name", "fused_adam", "adamw", why="the optimizer is AdamW"),
    maps("model.optim.lr", "optimizer.lr", required=True),
    maps("model.optim.eps", "optimizer.eps"),
    Rule(("model.optim.betas",), _betas),
    maps("model.optim.weight_decay", "optimizer.weight_decay", note="not of biases and norms"),
    only("model.optim.sched.name", "WarmupPolicy", why="the schedule is a linear warm-up, then constant"),
    maps("model.optim.sched.warmup_steps", "schedule.warmup_steps"),
    only("model.optim.sched.warmup_ratio", why="a warm-up has warmup_steps"),
]
_SYNTHETIC = "model.data.synthetic_data"
_CROPS = [f"model.data.train.augmentations.{name}" for name in ("center_crop_h_w", "random_crop_h_w")]
_SYNTHETIC_KEYS = (_SYNTHETIC, f"{_SYNTHETIC}_length", *_CROPS, "model.conditioning.token_length")
_SYNTHETIC_DATA = [
    Rule(_SYNTHETIC_KEYS, _synthetic, "random pictures"),
    *(
        Rule((key,), nothing, "the data are synthetic")
        for rule in _DATA
        for key in rule.keys
        if key not in _SYNTHETIC_KEYS
    ),
]
SECTIONS = (
    *("model.data.validation", "model.data.test"),
    *(f"{CORRUPTION}.{part}" for part in (*PUBLISHED_CORRUPTION, "kernel_radius_dict")),
)
"""Keys whose values are read as one object."""
KINDS = {"model.unet_type": UNetType, "model.preconditioning_type": Preconditioning}
"""The keys that select the network and the objective, and their values."""


def leaves(node: Mapping[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a document by their dotted keys."""
    for name, value in node.items():
        key = f"{section}.{name}" if section else str(name)
        if isinstance(value, dict) and value and key not in SECTIONS:
            yield from leaves(value, key)
        else:
            yield key, None if value == {} else value


def network_rules(unet_type: UNetType, preconditioning: Preconditioning) -> list[Rule]:
    """Return the rules of the keys that the network, its objective and sampling follow."""
    length = maps("model.conditioning.token_length", "model.padded_text_tokens", required=True)
    return [*_network(unet_type), *_objective(preconditioning), *_CONDITIONS, length]


def rules(unet_type: UNetType, preconditioning: Preconditioning, *, synthetic: bool) -> list[Rule]:
    """Return the rules of every key of a document, in the order of its sections."""
    return [
        *_TRAINER,
        *_EXPERIMENT,
        *_RESUME,
        *_ENGINE,
        *_network(unet_type),
        *_objective(preconditioning),
        *_CONDITIONING,
        *(_SYNTHETIC_DATA if synthetic else _DATA),
        *_OPTIMIZER,
    ]
