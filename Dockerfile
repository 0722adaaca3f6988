# Two images: `docker build --target cuda -t megatron-dit .` (the default) and `--target cpu`, a small one without CUDA
# for data, plans, sampling and tests. The variables of CUDA and torch that depend on the layout are set by each run
# (launch/environment.py), not here.
# Each lists what is installed in it, with versions, in /sbom.cdx.json (CycloneDX).
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel

FROM python:3.12-slim AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /workspace/megatron-dit
RUN apt-get update \
 && apt-get install -y --no-install-recommends fonts-dejavu-core fonts-liberation git \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt hashes.txt README.md LICENSE ./
COPY dit dit
COPY recipes recipes
COPY energon_data energon_data
COPY launch launch
COPY benchmarks benchmarks
COPY examples examples
COPY tests tests
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --no-deps -r hashes.txt \
 && pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch \
 && pip install --no-cache-dir --no-deps --no-build-isolation . \
 && python -m venv /tmp/sbom && /tmp/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /tmp/sbom/bin/cyclonedx-py environment --output-format JSON --output-file /sbom.cdx.json "$(command -v python)" \
 && rm -r /tmp/sbom
ENV OMP_NUM_THREADS=1 \
    TQDM_DISABLE=1
CMD ["megatron-dit", "train", "--list"]

# Everything of the CPU image, plus Transformer Engine and flash-attn.
FROM ${BASE} AS cuda
WORKDIR /workspace/megatron-dit
COPY pyproject.toml README.md LICENSE ./
COPY dit dit
COPY recipes recipes
COPY energon_data energon_data
COPY launch launch
COPY benchmarks benchmarks
COPY examples examples
# What benchmarks/on_gpu.sh checks before it takes times.
COPY tests tests
# The base image has Ubuntu's Python: its pip refuses to install (PEP 668), and it has no ensurepip, so no `venv` with pip.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# The image's own torch stays; constraints.txt is for CPU installs. flash-attn and Transformer Engine build from source.
RUN python3 -m pip install --no-cache-dir "setuptools>=77" wheel ninja packaging pybind11 "pytest>=8" "pytest-timeout>=2.3" \
 && python3 -m pip install --no-cache-dir . \
 && MAX_JOBS=8 python3 -m pip install --no-cache-dir --no-build-isolation ".[gpu,encoders]" \
 && python3 -m venv --without-pip /tmp/sbom \
 && python3 -m pip --python /tmp/sbom/bin/python install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /tmp/sbom/bin/cyclonedx-py environment --output-format JSON --output-file /sbom.cdx.json "$(command -v python3)" \
 && rm -r /tmp/sbom
ENV OMP_NUM_THREADS=1 \
    TQDM_DISABLE=1
CMD ["megatron-dit", "train", "--list"]
