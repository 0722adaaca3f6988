"""Random command lines of `launch.train`: wrong types, unknown names, near misses, huge numbers, injections."""

import contextlib
import random
import re
from functools import cache, reduce
from pathlib import Path
from typing import Any
from unittest import mock

from launch import dry_run, train
from launch.overrides import all_keys, value_of
from tests.faults.fuzz import SPRUNG, Ended, judge, run

RECIPES = (
    *("tiny_dit", "tiny_dit_cross", "tiny_ecdit", "tiny_flux", "tiny_imagen", "tiny_imagen_sr", "tiny_ldm_unet"),
    *("tiny_moviegen", "tiny_stdit", "tiny_wan", "tiny_ddpm_unet", "letters_dit", "pictogram_autoencoder"),
)
NUMBERS = (
    *("0", "1", "2", "3", "4", "7", "8", "16", "100", "-1", "-0", "0.5", "1e-4", "1e30", "-1e400", "1e400", "nan"),
    *("inf", "-inf", "2147483648", "9223372036854775808", "1" + 40 * "0", "0x10", "1_000", "٣", "½", "1,5", "+3"),
    *("--3", "1e", "1e999999999", "9" * 5000, "0" * 3000 + "1", "1/0", "2**62", "9**9**9**9", "10**100"),
)
WORDS = (
    *("none", "None", "null", "true", "False", "yes", "fp32", "fp16", "auto", "full", "fsdp", "a2a+p2p", "edm", "ddpm"),
    *("flow_matching", "cosine", "wsd", "constant", "x" * 10_000, "Größe", "模型", "🙂", "a b", "\t", "\n", "\\", "'"),
    *('"', "''", "'a", "[", "]", "[]", "[[]]", "[1,", "[1, 2]", "[1, x]", "['a']", "{}", "{a: 1}", "(", ")", "()", "="),
    *("#", "%s", "%(x)s", "{x}", "$HOME", "~", "-", "--yes", "..", "/", "../../etc/passwd", "/dev/zero", "\udcff"),
    *("lambda: 0", "*", "@", "!!python/object", "<b>", "\x1b[31m", "\u202e", "a\u0000b".replace("\0", "\x01")),
)
INJECTIONS = (
    "__import__('os').mkdir('{mark}')",
    "edm(p_mean=__import__('os').mkdir('{mark}'))",
    "[__import__('os').mkdir('{mark}')]",
    "$(mkdir {mark})",
    "`mkdir {mark}`",
    "; mkdir {mark}",
    "!!python/object/apply:os.mkdir ['{mark}']",
    "[{{path: !!python/object/apply:os.mkdir ['{mark}'], weight: 1}}]",
    "os.mkdir('{mark}')",
    "os.mkdir(path='{mark}')",
    "exec(\"open('{mark}', 'w')\")",
    'eval(\'open("{mark}", "w")\')',
    "pathlib.Path('{mark}').touch()",
    "subprocess.run(args=['mkdir', '{mark}'])",
    "().__class__.__base__.__subclasses__()",
    "{{__class__: os.mkdir, path: {mark}}}",
    "{{_target_: os.mkdir, path: {mark}}}",
)
PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "context_a2a_size"),
)
CHOICES = {
    "parallel.data_parallel": ("ddp", "distributed_optimizer", "fsdp"),
    "parallel.context_comm": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "parallel.sequence_parallel": ("True", "False"),
    "training.precision": ("fp32", "bf16", "fp16"),
    "training.recompute": ("none", "selective", "full"),
    "training.kernels": ("auto", "eager", "triton", "compile"),
}
PARTS = (
    *("edm", "ddpm", "ddpm(prediction='v')", "flow_matching", "autoencoding", "cosine", "wsd", "linear", "mock"),
    *("edm(p_mean=0", "edm(p_mean=-1.2, p_std=x)", "edm(edm)", "edm()()", "wsd(decay_steps=500)", "Config", "nothing"),
)
SIGNS = ("=", "=", "=", "=", "=", "=", "+=", "-=", "*=", "/=", "|=", "==", ":=", "=+")
MOST_WORDS = 4
TRACED_EVERY = 20


@cache
def settings_of(recipe: str) -> dict[str, Any]:
    """Return every setting of a recipe with its value."""
    task = train.call_recipe(recipe)
    return {key: reduce(value_of, key.split("."), task) for key in all_keys(task)}


def misspelt(key: str, rng: random.Random) -> str:
    """Return a misspelt or nonsensical name."""
    at = rng.randrange(len(key))
    kinds = (
        lambda: key[:at] + key[at + 1 :],
        lambda: key[:at] + key[at] + key[at:],
        lambda: key[:at] + rng.choice("._[]=-xX é") + key[at:],
        lambda: key.upper(),
        lambda: key.rpartition(".")[2],
        lambda: f"{key}.{key}",
        lambda: f"{key}[{rng.choice(['0', '-1', '99', 'x', ''])}]",
        lambda: key.replace(".", "..", 1),
        lambda: rng.choice(["", ".", "..", "[0]", "__class__", "training.__class__.__name__", "modell.x", "x" * 500]),
        lambda: f"{key.partition('.')[0]}.__dict__",
    )
    return str(rng.choice(kinds)())


def value(rng: random.Random) -> str:
    """Return a value of any kind."""
    pool = rng.choices((NUMBERS, WORDS, INJECTIONS), (5, 3, 2))[0]
    text = rng.choice(pool)
    return text.format(mark=SPRUNG) if pool is INJECTIONS else text


def like(present: Any, rng: random.Random) -> str:
    """Return a value of the same type as a setting's present value."""
    if isinstance(present, bool):
        return rng.choice(("True", "False"))
    if isinstance(present, int | float):
        factor = rng.choice((0, 0.5, 1, 2, 3, 10, -1))
        return str(round(present * factor) if isinstance(present, int) else present * factor)
    if isinstance(present, list):
        return str(rng.choice((present, present[:-1], present * 2, present[::-1])))
    return str(present) if present is None or isinstance(present, str) else rng.choice(PARTS)


def override(recipe: str, rng: random.Random) -> str:
    """Return one override; half of them have a value of the right type, and one in five names no setting."""
    key = rng.choice(list(settings_of(recipe)))
    if rng.random() < 0.5:
        return f"{key}={like(settings_of(recipe)[key], rng)}"
    if rng.random() < 0.4:
        key = misspelt(key, rng)
    return f"{key}{rng.choice(SIGNS)}{value(rng)}"


def layout(rng: random.Random) -> list[str]:
    """Return sizes of a parallel layout, possible or not, and further choices."""
    words = [f"parallel.{name}={rng.choice((1, 2, 2, 3, 4, 8))}" for name in rng.sample(PARALLEL, rng.randint(1, 3))]
    words += [f"{key}={rng.choice(CHOICES[key])}" for key in rng.sample(sorted(CHOICES), rng.randint(0, 2))]
    words += [f"training.global_batch_size={rng.choice((1, 4, 6, 16))}"] * rng.randint(0, 1)
    return words + rng.choice(([], [], ["--world-size", rng.choice(("1", "2", "4", "6", "8", "64", "0", "x"))]))


def attempt(seed: int, number: int, folder: Path) -> Ended:
    """Check the run of a random command line; one in twenty is also traced, as `--dryrun` does."""
    rng = random.Random(f"overrides {seed} {number}")
    recipe = rng.choice(RECIPES)
    if rng.random() < 0.3:
        words = layout(rng)
    else:
        words = [override(recipe, rng) for _ in range(rng.choice((1, 1, 1, 2, 3, MOST_WORDS)))]
    names = [word.partition("=")[0].rstrip("+-*/|:") for word in words]
    # An error about a path may name only its first step that does not exist.
    causes = {step for name in names for step in re.split(r"[.\[\]]", name)}
    causes |= {"unknown flag" if word.startswith("-") else repr(word)[1:20] for word in words}
    untraced = mock.patch.object(dry_run, "cost_lines", return_value=[])
    with contextlib.nullcontext() if number % TRACED_EVERY == 0 else untraced:
        ended = run(train.main, ("--factory", recipe, "--dryrun", *words), folder)
    judge(ended, folder, codes=(2,), causes=sorted(causes - {""}))
    if list(folder.iterdir()):
        ended.wrong.append(f"a plan leaves {[path.name for path in folder.iterdir()]}")
    return ended
