#!/usr/bin/env bash
# Measure on one GPU, in stages of less than 8 minutes: bash benchmarks/on_gpu.sh [--dry] [STAGE ...]
#   PYTHON   program to use (python)
# benchmarks/gpu_stages.py lists the stages; docs/performance.md describes them.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TQDM_DISABLE=1
exec "${PYTHON:-python}" -m benchmarks.gpu_stages "$@"
