#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: values first, then times. Results go to benchmarks/results/.
#   bash benchmarks/on_gpu.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
out=${OUT:-benchmarks/results}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
unset DIT_DEVICE

# On a CPU the layers below would take hours.
device=$($python -c 'from dit.backends.device import describe, use_cuda; print(describe() if use_cuda() else "")') || exit 2
if [[ -z $device ]]; then
  cat >&2 <<END
error: $python sees no GPU, and nothing else is timed here; for a CPU: $python -m benchmarks.step --factory tiny_dit
END
  exit 2
fi
mkdir -p "$out"
echo "== device: $device"

echo "== values: attention on every path against the fp32 reference, fused kernels against formulas in float64"
$python -m pytest tests/gpu -p no:cacheprovider -q 2>&1 | tee "$out/gpu_tests.log" | tail -n 25

echo "== values: the loop trains and resumes on this device"
run=$(mktemp -d)
$python -m launch.train --yes --factory tiny_dit training.run_dir="$run" training.precision=bf16 | tail -n 3
$python -m launch.train --yes --factory tiny_dit training.run_dir="$run" training.precision=bf16 \
  training.num_steps=30 | tail -n 3
rm -rf "$run"

echo "== times: attention"
$python -m benchmarks.attention --out "$out/attention.jsonl"

echo "== times: fused kernels alone, as bandwidth, beside what is modelled for this kind of device"
$python -m benchmarks.kernels --out "$out/kernels.jsonl"

echo "== times: optimizer steps"
step() { $python -m benchmarks.step --out "$out/step.jsonl" "$@" | tail -n 1; }
step --factory letters_dit --shape 1x16x16
step --factory dit_s2_imagenet training.micro_batch_size=256 training.precision=bf16
step --factory dit_b2_imagenet training.micro_batch_size=256 training.precision=bf16
step --factory dit_l2_imagenet training.micro_batch_size=128 training.global_batch_size=128 training.precision=bf16
step --factory dit_xl2_imagenet training.micro_batch_size=128 training.global_batch_size=128 training.precision=bf16

echo "== times: fused kernels of the layers, beside the rows above and below"
step --factory dit_xl2_imagenet training.micro_batch_size=128 training.global_batch_size=128 training.precision=bf16 \
  training.kernels=triton
for recompute in none selective; do
  step --factory bench_dit7b_8k_1gpu_L4 training.kernels=triton training.recompute="$recompute"
  step --factory bench_dit7b_8k_1gpu_L8 training.kernels=triton training.recompute="$recompute"
done

echo "== times: DiT-7B layers; the difference of two depths is the time of four layers"
for recompute in none selective full; do
  step --factory bench_dit7b_8k_1gpu_L4 training.recompute="$recompute"
  step --factory bench_dit7b_8k_1gpu_L8 training.recompute="$recompute"
done
step --steps 5 --warmup 2 --factory bench_dit7b_74k_1gpu_L4
step --steps 5 --warmup 2 --factory bench_dit7b_74k_1gpu_L8

echo "== times: other backbones"
step --factory mock_stdit_s
step --steps 5 --warmup 2 --factory bench_stdit_hybrid_cp1
