#!/usr/bin/env bash
# Wheels for a GPU machine without network: bash benchmarks/gpu_bundle.sh [FOLDER]
# The machine has Python 3.12, torch 2.11 with CUDA, triton and numpy. Copy the repository and FOLDER there, and install:
#   python3 -m pip install --no-index --no-deps --target .gpu wheels/*.whl
#   PYTHON=python3 PYTHONPATH=$PWD/.gpu bash benchmarks/on_gpu.sh values
# Versions are those of constraints.txt. Megatron-Energon reads data, which the stages do not: they need synthetic data
# only, so most of its dependencies are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-wheels}
limit_mib=64

names=(
  megatron-core megatron-energon nemo_run # and what importing them takes:
  absl-py annotated-doc annotated-types anyio attrs bcrypt bracex catalogue certifi cffi charset-normalizer click
  cloudpickle contextlib2 cryptography decorator Deprecated deprecation dill docstring_parser exceptiongroup fabric
  fastapi fiddle graphviz h11 h2 hpack httpcore httpx huggingface_hub hyperframe idna importlib_metadata inquirerpy
  invoke isal lazy-importer ledoc-ui leptonai libcst loguru markdown-it-py mdurl mypy_extensions omegaconf
  opentelemetry-api packaging
  paramiko pfzy pillow platformdirs prometheus-fastapi-instrumentator prometheus_client prompt_toolkit protobuf psutil
  pydantic pydantic_core Pygments PyNaCl pyre-extensions python-dateutil python-multipart PyYAML regex requests rich
  safetensors shellingham six sniffio starlette tabulate toml torchx tqdm typer typing-inspect typing-inspection urllib3
  uvicorn wcwidth wrapt zipp einops
  contourpy cycler fonttools kiwisolver matplotlib pyparsing # pictures of samples
  iniconfig pluggy pytest pytest-timeout # tests/gpu
)
pinned=()
for name in "${names[@]}"; do
  pin=$(grep -ix "$name==.*" constraints.txt) || { echo "error: constraints.txt has no $name; correct the name" >&2; exit 2; }
  pinned+=("$pin")
done

platforms=()
for glibc in 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
  --dest "$folder" "${pinned[@]}"

bytes=$({ git ls-files -z | xargs -0 stat --format %s; stat --format %s "$folder"/*.whl; } | awk '{n += $1} END {print n}')
echo "$(find "$folder" -name '*.whl' | wc -l) wheels in $folder; with the repository $((bytes / 1048576)) MiB of $limit_mib"
[[ $bytes -le $((limit_mib * 1048576)) ]] || { echo "error: more than $limit_mib MiB; leave wheels out" >&2; exit 1; }
