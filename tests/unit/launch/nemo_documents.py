"""Training documents of NeMo's Imagen, as published and with changes, and how they are read."""

import copy
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Optional

import pytest
import yaml

from dit.config_record import to_record
from dit.errors import ConfigError
from launch import nemo_config
from launch.config_file import built
from launch.train import load_component

Changes = Mapping[str, Any]


ABSENT = Enum("Absent", "ABSENT").ABSENT  # not an object(): its name would differ between xdist's workers


COMMON = """
name: imagen-nemo
allow_tf32: True
trainer:
  devices: 1
  num_nodes: 1
  max_epochs: -1
  max_steps: 2500000
  logger: False
  precision: bf16
  accelerator: gpu
  log_every_n_steps: 5
  resume_from_checkpoint: null
  num_sanity_val_steps: 10
  enable_checkpointing: False
  accumulate_grad_batches: 1
  gradient_clip_val: 1.0
  benchmark: False
  enable_model_summary: True
exp_manager:
  exp_dir: runs
  name: ${name}
  create_wandb_logger: False
  wandb_logger_kwargs: {name: imagen-base64, project: imagen, group: nemo-imagen, resume: True}
  create_tensorboard_logger: True
  create_checkpoint_callback: True
  checkpoint_callback_params:
    monitor: reduced_train_loss
    save_top_k: 5
    every_n_epochs: 0
    every_n_train_steps: 1000
    filename: '${name}--{reduced_train_loss:.2f}-{step}-{consumed_samples}'
  resume_if_exists: True
  resume_ignore_no_checkpoint: True
  resume_from_checkpoint: ${model.resume_from_checkpoint}
  ema: {enable: True, decay: 0.9999, validate_original_weights: False, every_n_steps: 1, cpu_offload: False}
model:
  precision: ${trainer.precision}
  micro_batch_size: 48
  global_batch_size: 48
  inductor: False
  inductor_cudagraphs: False
  channels_last: True
  unet_type: base
  unet:
    embed_dim: 256
    image_size: 64
    channels: 3
    channel_mult: [1, 2, 3, 4]
    num_attn_heads: 4
    per_head_channels: 64
    attention_type: fused
    feature_pooling_type: attention
    learned_sinu_pos_emb_dim: 0
    use_null_token: False
    init_conv_kernel_size: 3
    gradient_checkpointing: False
    scale_shift_norm: True
    stable_attention: False
    flash_attention: True
  seed: 1234
  resume_from_checkpoint: null
  apex_transformer_log_level: 30
  gradient_as_bucket_view: True
  ddp_overlap: True
  preconditioning_type: EDM
  preconditioning: {loss_type: l2, sigma_data: 0.5, p_mean: -1.2, p_std: 1.2}
  conditioning:
    embed_dim: 1024
    token_length: 128
    drop_rate: 0.1
    precached_key: embeddings_t5_xxl
    out_key: t5_text
  data:
    num_workers: 16
    train:
      dataset_path: [dataset1.pkl, dataset2.pkl]
      augmentations: {resize_smallest_side: 64, center_crop_h_w: '64, 64', horizontal_flip: False}
      filterings: null
    webdataset:
      {use_webdataset: True, object_store: False, infinite_sampler: False, local_root_path: /datasets, verbose: False}
  optim:
    name: fused_adam
    lr: 0.0001
    eps: 1e-8
    betas: [0.9, 0.999]
    weight_decay: 0.01
    sched: {name: WarmupPolicy, warmup_steps: 10000, warmup_ratio: null}
"""


REGULAR = {
    "model.unet.num_res_blocks": 3,
    "model.unet.cond_dim": 512,
    "model.unet.attention_resolutions": [8, 16, 32],
    "model.unet.dropout": False,
    "model.unet.resblock_updown": False,
    "model.unet.resample_with_conv": True,
}


LARGER = {
    "model.unet.image_size": 256,
    "model.unet.embed_dim": 128,
    "model.data.train.augmentations": {"resize_smallest_side": 256, "center_crop_h_w": "256, 256"},
    "model.data.train.filterings": {"resolution": {"method": "larger", "value": 256}, "estimated_portion": 0.8},
    "model.data.train.target_resolutions": [64, 256],
    "model.data.webdataset.infinite_sampler": True,
}


SR_UNET = {
    **REGULAR,
    **LARGER,
    "model.unet_type": "sr-unet",
    "model.unet.low_res_cond": True,
    "model.unet.num_res_blocks": [2, 2, 3, 4, 3],
    "model.unet.channel_mult": [1, 2, 4, 6, 6],
    "model.unet.attention_resolutions": [32, 16],
    "model.micro_batch_size": 16,
    "model.global_batch_size": 16,
}


EFFICIENT = {
    **LARGER,
    "model.unet_type": "sr",
    "model.unet.num_resblocks": [2, 4, 8, 8, 8],
    "model.unet.channel_mult": [1, 2, 4, 8, 8],
    "model.unet.atnn_enabled_at": [0, 0, 0, 1, 1],
    "model.unet.num_attn_heads": 8,
    "model.unet.stride": 2,
    "model.unet.skip_connection_scaling": True,
    "model.micro_batch_size": 32,
    "model.global_batch_size": 32,
}


DDPM = {
    "model.preconditioning_type": "DDPM",
    "model.preconditioning": {
        "loss_type": "l2",
        "pred_objective": "noise",
        "noise_schedule": "cosine",
        "timesteps": 1000,
    },
}


STACKED = {"model.unet.attention_type": "stacked"}


NOISED = {"model.noise_cond_aug": True}


CROSS = {
    **EFFICIENT,
    "model.unet.image_size": 1024,
    "model.unet.attention_type": "cross",
    "model.unet.stable_attention": True,
    "model.unet.flash_attention": False,
    "model.data.train.augmentations.resize_smallest_side": 1024,
    "model.data.train.filterings.resolution.value": 1024,
}


CORRUPTION = "model.data.train.corruption_aug"


CORRUPTED: Changes = {
    "model.data.train.target_resolutions": ABSENT,
    CORRUPTION: {
        "target_resolution": [64, 256],
        "kernel_radius_dict": {8: 1, 16: 2, 32: 3, 64: 6},
        "blur": {
            "add_random_blur": True,
            "blur_prob1": 0.2,
            "blur_prob2": 0.2,
            "blur_sigma_dict": {8: 0.25, 16: 0.5, 32: 0.75, 64: 1.5},
        },
        "resize": {
            "add_random_resize": True,
            "resize_prob1": {"up": 0.2, "down": 0.2, "keep": 0.6},
            "resize_prob2": {"up": 0.2, "down": 0.2, "keep": 0.6},
            "resize_range1": [0.8, 1.2],
            "resize_range2": [0.8, 1.2],
        },
        "noise": {
            "add_random_noise": True,
            "gaussian_noise_prob1": 1.0,
            "gaussian_noise_prob2": 1.0,
            "gray_noise_prob1": 0.0,
            "gray_noise_prob2": 0.0,
            "gaussian_sigma_range1": [0, 3],
            "gaussian_sigma_range2": [0, 2.5],
            "poisson_scale_range1": [0.005, 3],
            "poisson_scale_range2": [0.005, 2.5],
        },
        "jpeg": {"add_random_compression": False, "jpeg_range1": [75, 95], "jpeg_range2": [75, 95]},
    },
}


LAST_LEVEL = {"model.unet.atnn_enabled_at": [0, 0, 0, 0, 1]}


DOCUMENTS: dict[str, tuple[Changes, Optional[str], int]] = {
    "base64-500m": (
        {
            **REGULAR,
            "trainer.limit_val_batches": 0,
            "model.data.synthetic_data": False,
            "model.data.synthetic_data_length": 800_000,
        },
        "imagen_500m_res_64",
        524_897_540,
    ),
    "base64-500m-edm": (
        {**REGULAR, "model.unet.flash_attention": False, "model.channels_last": ABSENT, "model.ddp_overlap": ABSENT},
        "imagen_500m_res_64_edm",
        524_897_540,
    ),
    "base64-500m_online_encoding": (
        {
            **REGULAR,
            **DDPM,
            "model.unet.stable_attention": True,
            "model.unet.flash_attention": False,
            "model.conditioning.online_encoding": True,
            "model.conditioning.encoder_path": None,
        },
        "imagen_500m_res_64_ddpm_online",
        524_897_540,
    ),
    "base64-2b": (
        {**REGULAR, "model.unet.embed_dim": 512, "model.unet.cond_dim": 2048},
        "imagen_2b_res_64",
        2_171_162_116,
    ),
    "sr256-400m": ({**SR_UNET, **NOISED}, "imagen_400m_res_256", 408_350_468),
    "sr256-400m without noise": (SR_UNET, None, 408_021_764),
    "400m_res_256, 429M": (
        {**SR_UNET, **NOISED, "model.unet.num_res_blocks": [2, 4, 4, 4, 3]},
        "imagen_400m_res_256_doc429m",
        428_948_228,
    ),
    "sr256-400m-edm": ({**SR_UNET, **CORRUPTED}, None, 408_021_764),
    "sr256-450m-edm": ({**SR_UNET, **STACKED, **CORRUPTED}, "imagen_450m_res_256_stacked", 568_675_844),
    "sr256-600m": ({**EFFICIENT, **NOISED}, "imagen_600m_res_256", 646_023_428),
    "sr256-600m without noise": (EFFICIENT, None, 645_694_724),
    "sr256-600m-edm": ({**EFFICIENT, **STACKED, **CORRUPTED}, "imagen_600m_res_256_stacked", 700_281_604),
    "sr256-600m-edm-noise": (
        {
            **EFFICIENT,
            **STACKED,
            **NOISED,
            "model.data.train.target_resolutions": ABSENT,
            CORRUPTION: {"target_resolution": [64, 256]},
        },
        None,
        700_610_308,
    ),
    "sr1024-600m": ({**CROSS, **NOISED}, "imagen_600m_res_1024", 639_193_348),
    "400m_res_1024": (
        {
            **CROSS,
            **DDPM,
            **LAST_LEVEL,
            "model.unet.stable_attention": False,
            "model.unet.channel_mult": [1, 1, 2, 4, 8],
            "model.unet.num_resblocks": [1, 2, 4, 8, 8],
        },
        "imagen_400m_res_1024",
        287_789_828,
    ),
    "400m_res_1024, 427M": (
        {
            **CROSS,
            **LAST_LEVEL,
            "model.unet.stable_attention": False,
            "model.unet.channel_mult": [1, 2, 4, 6, 8],
            "model.unet.num_resblocks": [3, 4, 4, 6, 8],
        },
        "imagen_400m_res_1024_doc427m",
        427_050_500,
    ),
}


"""Of the published documents: what they change, the recipe of the same model, and the published count."""


def document(*changes: Changes) -> dict[str, Any]:
    """Return the common document with keys changed, in this order; `ABSENT` removes one."""
    values: dict[str, Any] = yaml.safe_load(COMMON)
    for key, value in (item for some in changes for item in some.items()):
        *sections, name = key.split(".")
        section = values
        for part in sections:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        if value is ABSENT:
            section.pop(name, None)
        else:
            section[name] = copy.deepcopy(value)
    return values


def record(folder: Path, *changes: Changes) -> dict[str, Any]:
    """Return every setting that a document gives, by its dotted path."""
    path = folder / "nemo.yaml"
    path.write_text(yaml.safe_dump(document(*changes), sort_keys=False))
    task, _ = nemo_config.load(path, load_component)
    return flat(built(task))


@cache
def published(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a document whose keys are changed."""
    return record(folder, *BASES[name])


def flat(config: Any) -> dict[str, Any]:
    return {
        f"{part}.{name}": value for part, fields in to_record(config.parts()).items() for name, value in fields.items()
    }


def refusal(folder: Path, *changes: Changes) -> str:
    with pytest.raises(ConfigError) as refused:
        record(folder, *changes)
    return str(refused.value)


ONLINE = {"model.conditioning.online_encoding": True}


BASES: dict[str, tuple[Changes, ...]] = {
    "base": (REGULAR,),
    "stable": (REGULAR, {"model.unet.flash_attention": False}),
    "narrow": (REGULAR, {"model.unet.attention_resolutions": [32]}),
    "online": (REGULAR, ONLINE),
    "ddpm": (REGULAR, DDPM),
    "sr-unet": (SR_UNET,),
    "sr": (EFFICIENT,),
}
