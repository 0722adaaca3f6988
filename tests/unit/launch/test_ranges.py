"""Every numeric setting of every configuration class refuses invalid values by name, or the table allows the value."""

import copy
import inspect
import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Optional

import pytest

from dit.data_api import DataConfig
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.optimizer.schedules import Schedule
from dit.ranges import FINITE, SHARE_BELOW_1, Range, check_path, whole
from dit.run_config import RunConfig
from launch import config_file, dry_run
from launch.overrides import apply_overrides, load_component
from launch.train import call_recipe
from recipes import registry

HUGE = 10**30
NONSENSE = {int: (-1, 0, 0.5, HUGE), float: (-1.0, 0.0, math.inf, -math.inf, math.nan, 1e30)}

# Every configuration class once: recipe, overrides, and the parts that are tried.
SETTINGS = ("optimizer", "schedule", "parallel", "training", "checkpoint", "logging", "sampling")
SCHEDULES = (
    *(("constant",), ("cosine",), ("linear",), ("wsd",), ("inverse_sqrt",)),
    ("torch_one_cycle",),
)
BASES = {
    ("tiny_dit",): ("model", "data", "objective", *SETTINGS),
    ("tiny_dit", "objective=edm"): ("objective",),
    ("tiny_dit", "objective=ddpm"): ("objective",),
    ("tiny_dit", "objective=contrastive_flow_matching"): ("objective",),
    ("tiny_dit", "objective=mean_flow", "model.interval_conditioning=True"): ("objective",),
    **{("tiny_dit", f"schedule={name}", *more): ("schedule",) for name, *more in SCHEDULES},
    ("tiny_ecdit",): ("model",),
    ("tiny_dit_cross",): ("model",),
    ("tiny_moviegen",): ("model",),
    ("tiny_stdit",): ("model",),
    ("tiny_flux",): ("model",),
    ("tiny_flux", "model=chroma_9b"): ("model",),
    ("tiny_flux", "model=flux2_klein_4b"): ("model",),
    ("tiny_flux", "model=qwen_image_20b"): ("model",),
    ("tiny_flux", "model=sd3_5_medium"): ("model",),
    ("tiny_flux", "model=lumina2_2b"): ("model",),
    ("tiny_flux", "model=z_image_6b"): ("model",),
    ("tiny_prx",): ("model",),
    ("tiny_sana",): ("model",),
    ("tiny_hunyuan_video",): ("model",),
    ("tiny_wan",): ("model",),
    ("tiny_imagen",): ("model",),
    ("tiny_imagen_sr",): ("model",),
    ("letters_dit",): ("data",),
    ("pictogram_autoencoder",): ("model", "objective"),
    ("pictogram_vq_autoencoder",): ("model", "objective"),
    ("tiny_ddpm_unet",): ("model",),
    ("tiny_edm2",): ("model",),
    ("tiny_ldm_unet",): ("model",),
    ("tiny_sdxl_unet",): ("model",),
}

MAY_BE_ZERO = {
    *("optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay", "optimizer.clip_grad"),
    *("schedule.warmup_steps", "schedule.min_lr"),
    *("training.seed", "training.ema_decay", "training.ema_start_step"),
    *("training.validation_interval", "training.sample_interval"),
    "training.recheck_interval",
    *("checkpoint.interval", "checkpoint.keep_every", "checkpoint.keep_best"),
    *("sampling.guidance_scale", "sampling.seed", "sampling.guidance_rescale"),
    *("data.shuffle_buffer", "data.max_lost_samples", "data.min_aesthetic_score", "data.flip"),
    *("data.min_seconds", "data.max_seconds", "data.min_caption_length", "data.max_caption_length"),
    *("data.clean_first_frame", "data.frame_levels", "data.inpaint", "objective.min_time", "objective.contrast_weight"),
    *("objective.logit_mean", "objective.p_mean", "objective.kl_weight"),
    *("objective.instant_share", "objective.adaptive_power"),
    *("objective.augmentation_p_mean", "objective.noise_offset", "objective.beta"),
    *(
        "model.shift_factor",
        "model.num_single_layers",
        "model.num_dual_layers",
        "model.num_refiner_layers",
        "model.class_dropout",
        "model.context_dropout",
        "model.dropout",
        "model.time_frequency_shift",
        "model.mid_transformer_layers",
        "model.guidance",
    ),
}
MAY_BE_NEGATIVE = {
    *("sampling.guidance_scale", "objective.logit_mean", "objective.p_mean", "objective.augmentation_p_mean"),
    "data.min_aesthetic_score",
    "model.shift_factor",
}
MAY_BE_HUGE = {
    "checkpoint.save_timeout_s",
    *("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_grad", "sampling.guidance_scale"),
    *("objective.logit_mean", "objective.logit_std", "objective.time_shift", "training.spike_threshold"),
    *("objective.min_snr_gamma", "objective.kl_weight", "objective.beta"),
    *("model.scaling_factor", "model.shift_factor"),
    "objective.augmentation_p_mean",
    *("objective.p_mean", "objective.p_std", "objective.sigma_data", "objective.sigma_max", "objective.rho"),
    *("data.min_aesthetic_score", "data.max_aspect_ratio"),
    *("data.min_seconds", "data.max_seconds"),
    *("model.layernorm_epsilon", "model.time_scale", "model.guidance", "model.position_span"),
}


@cache
def base(recipe: str, *overrides: str) -> Any:
    task = call_recipe(recipe)
    apply_overrides(task, list(overrides))
    return task


def number(annotation: Any) -> Optional[tuple[type, bool]]:
    """Return the numeric type of a field, and whether the field is a list; None for any other field."""
    accepted = (annotation, *typing.get_args(annotation))
    return next(((kind, list[kind] in accepted) for kind in NONSENSE if {kind, list[kind]} & {*accepted}), None)


def cases() -> Iterator[tuple[tuple[str, ...], str, str, Any]]:
    for words, parts in BASES.items():
        for part in parts:
            target = getattr(base(*words), part).__fn_or_cls__
            for name, annotation in typing.get_type_hints(target).items():
                if name not in {field.name for field in fields(target)}:
                    continue
                if found := number(annotation):
                    kind, several = found
                    yield from ((words, part, name, [x] * 3 if several else x) for x in NONSENSE[kind])
                if typing.Literal in map(typing.get_origin, (annotation, *typing.get_args(annotation))):
                    yield words, part, name, "another"


def may_be(words: tuple[str, ...], key: str, value: Any) -> bool:
    if (words, key) == (("pictogram_vq_autoencoder",), "model.shift_factor"):
        return False
    if words[-1] in ("model=lumina2_2b", "model=z_image_6b") and key == "model.num_single_layers":
        return False  # text and image meet only there
    if words[-1] == "model=chroma_9b" and key == "model.guidance":
        return False  # its modulations come from the time only
    if "objective=mean_flow" in words and key == "objective.min_snr_gamma":
        return False  # this weight is that of a given velocity
    table = {-1: MAY_BE_NEGATIVE, 0: MAY_BE_ZERO, HUGE: MAY_BE_HUGE, 1e30: MAY_BE_HUGE}
    return not isinstance(value, list) and key in table.get(value, ())


def test_every_nonsense_value_is_refused_by_name_or_listed():
    """About a thousand cases. The accepted values of data settings are planned together, once for each recipe."""
    wrong = []
    planned: dict[tuple[str, ...], Any] = {}
    built = {words: config_file.built(base(*words)) for words in BASES}
    for words, part, name, value in cases():
        key, refused = f"{part}.{name}", ""
        try:
            changed = replace(getattr(built[words], part), **{name: value})
            replace(built[words], **{part: changed}).check()
        except ConfigError as error:
            refused = str(error)
        if bool(refused) == may_be(words, key, value) or (refused and name not in refused):
            wrong.append(f"{words}: {key}={value}: {refused or 'accepted'}")
        elif not refused and part == "data":
            setattr(planned.setdefault(words, copy.deepcopy(base(*words))).data, name, value)
    for task in planned.values():
        dry_run.report(task, world_size=None)
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_configuration_class_is_tried():
    """All classes that recipes contain, objectives and data included."""
    tried = {getattr(base(*words), part).__fn_or_cls__ for words, parts in BASES.items() for part in parts}
    for entry in registry.components():
        load_component(entry.name)
    kinds = [*ModelConfig.__subclasses__(), *Objective.__subclasses__(), *DataConfig.__subclasses__()]
    kinds += Schedule.__subclasses__()
    for middle in kinds:  # to which those below it are added
        kinds += middle.__subclasses__()
    ours = {
        kind
        for kind in kinds
        if kind.__module__.startswith(("dit.", "energon_data."))
        and is_dataclass(kind)
        and fields(kind)
        and not (inspect.isabstract(kind) or (issubclass(kind, ModelConfig | DataConfig) and kind.__subclasses__()))
    }
    assert tried >= ours | set(typing.get_type_hints(RunConfig).values()) - {
        ModelConfig,
        Objective,
        DataConfig,
        Schedule,
    }


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (whole(1, 9), (1, 9), (0, 10, 1.0), "a whole number of at least 1 and at most 9"),
        (SHARE_BELOW_1, (0, 0.0, 0.999), (1, 1.0, -0.1, math.nan), "a finite number of at least 0 and below 1"),
        (FINITE, (-1e300, 0, 7), (math.inf, -math.inf, math.nan), "a finite number"),
        (Range(0, math.inf, open_low=True), (1e-300, math.inf), (0, -1), "a finite number above 0"),
    ],
)
def test_closed_ranges_include_their_ends(allowed, inside, outside, words):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == words


@pytest.mark.parametrize("path", ["", "  ", "a\0b"])
def test_an_invalid_path_is_refused(path):
    with pytest.raises(ConfigError, match=r"training\.run_dir=.*is not a path"):
        check_path("training.run_dir", path)
