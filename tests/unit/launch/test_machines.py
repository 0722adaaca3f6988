"""The Docker image and benchmarks/on_gpu.sh on a machine without a GPU: variables, commands and errors."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.gpu_stages import STAGES
from dit.errors import EXIT_CONFIG
from dit.parallel.dims import ParallelConfig
from launch import environment

REPOSITORY = Path(__file__).parents[3]
IMAGE = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ")
IMAGE_ENVIRONMENT = {
    name: value
    for line in re.findall(r"^ENV (.*)$", IMAGE, re.MULTILINE)
    for name, value in re.findall(r"(\w+)=(\S+)", line)
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "data_parallel": "fsdp"}],
    ids=["data parallel", "tensor parallel", "tensor parallel x FSDP"],
)
def test_a_layout_gets_the_same_variables_in_the_image_as_outside(settings: dict):
    """`launch.environment` only sets defaults: a variable of the image would apply to every layout."""
    outside: dict[str, str] = {}
    inside = dict(IMAGE_ENVIRONMENT)
    for environ in (outside, inside):
        environment.prepare(environ)
        environment.prepare_layout(ParallelConfig(**settings), environ)
    assert outside.items() <= inside.items()
    read_by_cuda = re.compile("CUDA|NCCL|PYTORCH")
    assert {n for n in inside if read_by_cuda.search(n)} == {n for n in outside if read_by_cuda.search(n)}


def test_the_default_command_of_the_image_lists_the_recipes(capsys: pytest.CaptureFixture):
    """The default command of both images is the installed program and needs no GPU."""
    assert "ENTRYPOINT" not in IMAGE
    [words] = set(re.findall(r"^CMD (.*)$", IMAGE, re.MULTILINE))
    program, *arguments = json.loads(words)
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[program].partition(":")
    assert getattr(import_module(module), function)(arguments) == 0
    assert "dit_xl2_imagenet" in capsys.readouterr().out


def test_the_image_contains_every_program_of_on_gpu():
    """The folders of the modules and tests that benchmarks/on_gpu.sh runs, of those that they start, and pytest."""
    images = (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")[1:]
    assert [image.splitlines()[0].rpartition(" AS ")[2] for image in images] == ["cpu", "cuda"]
    assert all(image.count("\nCMD ") == image.count("\nWORKDIR ") == 1 for image in images)
    words = [command.words for stage in STAGES.values() for command in stage.commands]
    started = {w[1].partition("/")[0] if w[0] == "pytest" else w[0].partition(".")[0] for w in words} | {"launch"}
    assert started == {"benchmarks", "launch", "tests"}
    for image in images:
        copied = set(re.findall(r"^COPY (\w+) ", image, re.MULTILINE))
        assert started <= copied
        assert copied == {"dit", "recipes", "energon_data", "launch", "benchmarks", "examples", "tests"}
    assert "pytest" in images[1]


BASE_PYTHON = """#!/bin/sh
case "$*" in
  "-m pip --python "*)
    printf '#!/bin/sh\\ntouch "$5"' >"${4%/python}/cyclonedx-py"
    chmod +x "${4%/python}/cyclonedx-py" ;;
  "-m pip install "*) [ "$PIP_BREAK_SYSTEM_PACKAGES" = 1 ] || { echo "externally-managed-environment" >&2; exit 1; } ;;
  "-m venv --without-pip "*) mkdir -p "$4/bin" ;;
  *) echo "the base image's Python cannot: $*" >&2; exit 1 ;;
esac
"""
"""Stand-in for Ubuntu's Python 3.12 without the package python3-venv, as in the base image since torch 2.10."""


def test_the_python_of_the_cuda_image_runs_the_build_commands(tmp_path: Path):
    """The base image's pip refuses to install outside of a virtual environment, and its `venv` has no pip to add."""
    for name in ("mkdir", "chmod", "rm", "touch"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "python3").write_text(BASE_PYTHON)
    (tmp_path / "python3").chmod(0o755)
    before, _, rest = IMAGE.partition("\nFROM ${BASE} AS cuda\n")[2].partition("\nRUN ")
    assert rest.count("\nRUN ") == 0, "the build has further commands"
    command = rest.partition("\n")[0].replace("/tmp/sbom", f"{tmp_path}/venv")
    command = command.replace("/sbom.cdx", f"{tmp_path}/sbom.cdx")
    environ = {"PATH": str(tmp_path), **dict(re.findall(r"^ENV (\w+)=(\S+)$", before, re.MULTILINE))}
    ended = subprocess.run(["/bin/sh", "-c", command], env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "sbom.cdx.json").is_file()
    assert not (tmp_path / "venv").exists()


def test_on_gpu_is_refused_at_once_without_a_gpu(tmp_path: Path):
    """The script writes one line and no result, and returns the code of a usage error."""
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["bash", str(REPOSITORY / "benchmarks" / "on_gpu.sh"), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, env=without, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (EXIT_CONFIG, "")
    [line] = ended.stderr.splitlines()
    assert "no GPU" in line
    assert "--dry" in line
    assert "benchmarks.step" in line
    assert not (tmp_path / "out").exists()
