# CUDA image: everything of the CPU install, plus Transformer Engine and flash-attn.
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}

WORKDIR /workspace/megatron-dit
COPY pyproject.toml README.md LICENSE ./
COPY dit dit
COPY recipes recipes
COPY energon_data energon_data
COPY launch launch
COPY benchmarks benchmarks
# What benchmarks/on_gpu.sh checks before it takes times.
COPY tests tests

# The image's own torch stays; constraints.txt is for CPU installs. flash-attn and Transformer Engine build from source.
RUN pip install --no-cache-dir "setuptools>=77" wheel ninja packaging pybind11 "pytest>=8" "pytest-timeout>=2.3" \
 && pip install --no-cache-dir . \
 && MAX_JOBS=8 pip install --no-cache-dir --no-build-isolation ".[gpu,encoders]"

# Nothing that CUDA or torch reads: each run sets that itself, by its layout (launch/environment.py).
ENV OMP_NUM_THREADS=1 \
    TQDM_DISABLE=1

CMD ["megatron-dit", "train", "--list"]
