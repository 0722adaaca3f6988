#!/bin/bash
# Train a recipe on Slurm: sbatch [flags of sbatch] launch/train.sh --factory RECIPE key=value ...
#
# One task per node, which is torchrun; all meet at the first node. The command line is resolved before any of them
# starts. The exit code is that of the run (docs/runs.md): a preempted run (75) is requeued and resumes, a lost peer or an
# unexpected error (70) too, MAX_RESTARTS times, which a file in the run's folder counts; everything else ends the job.
# Ranks that were killed before they could write a record, such as by a preemption while Python imports, count as 70.
# `scancel` ends this script, so that a cancelled run is not requeued.
#
# Flags of sbatch's command line win over those below. Read from the environment:
#   RANKS_PER_NODE  processes of a node (the GPUs that Slurm allocated there)
#   NUMA            node, socket, exclusive or core-complex: each rank runs on the cores near its GPU; needs numactl
#   PORT            of the rendezvous on the first node (from the job's number)
#   MAX_RESTARTS    after unexpected errors (3)
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] ||
  fail "launch/train.sh runs as a job of Slurm, sbatch launch/train.sh $*; elsewhere start torchrun (launch/README.md)"
if [[ -f .venv/bin/activate ]]; then . .venv/bin/activate; fi

ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
[[ $ranks =~ ^[1-9][0-9]*$ ]] ||
  fail "the job has no GPUs (SLURM_GPUS_ON_NODE='$ranks'); give sbatch --gpus-per-node=N, or set RANKS_PER_NODE=N"
numa=()
if [[ -n ${NUMA:-} ]]; then
  command -v numactl >/dev/null || fail "NUMA=$NUMA needs numactl, which $(hostname) does not have; install it or unset NUMA"
  numa=(--numa-binding "$NUMA")
fi

# A mistake ends here with its code, before nodes wait for each other. What it resolves to says where the run is.
config=$(mktemp --suffix=.yaml)
DIT_EXIT_CODE_FILE=$(mktemp)
export DIT_EXIT_CODE_FILE
trap 'rm -f "$config" "$DIT_EXIT_CODE_FILE"' EXIT
python -m launch.train "$@" --to-yaml "$config" || exit $?
run_dir=$(python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["training"]["run_dir"])' "$config") || exit $?
rm -f "$run_dir/exit.json" # of an earlier attempt

# Slurm sends USR1 180 s before the limit, to the tasks of srun alone; torchrun passes it on and waits for its ranks.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-170}
torch=$(python -c 'from importlib.util import find_spec; print(find_spec("torch").submodule_search_locations[0])')
grep -q -e --shutdown-timeout "$torch/distributed/run.py" || # as in torch 2.11
  echo "warning: this torchrun ignores TORCH_ELASTIC_SHUTDOWN_TIMEOUT and kills ranks 30 s after a signal; if saving takes" \
    "longer, install a newer torch, or end the run before the limit by training.time_limit (launch/README.md)" >&2
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  --rdzv-endpoint "$head_node:${PORT:-$((20000 + SLURM_JOB_ID % 20000))}" \
  --signals-to-handle SIGTERM,SIGINT,SIGUSR1 "${numa[@]}" -m launch.train --yes "$@"
code=$?

# torchrun ends with 1 for every failure; the record has the code of the rank that failed first. A rank that is refused
# because another run uses the folder writes no record, but its code into DIT_EXIT_CODE_FILE.
recorded=$(sed -n 's/^ *"code": \([0-9]*\),$/\1/p' "$run_dir/exit.json" 2>/dev/null)
refused=$(<"$DIT_EXIT_CODE_FILE")
if ((code != 0)); then code=${refused:-${recorded:-70}}; fi
again=false
if ((code == 75)); then
  again=true
elif ((code == 70)); then # Slurm's own count has the preemptions, too
  counted=$run_dir/restarts.$SLURM_JOB_ID
  restarts=$(cat "$counted" 2>/dev/null)
  [[ $restarts =~ ^[0-9]+$ ]] || restarts=0
  if ((restarts < ${MAX_RESTARTS:-3})) && mkdir -p "$run_dir" && [[ ! -L $counted ]] && echo $((restarts + 1)) >"$counted"; then
    again=true
  fi
fi
if $again; then
  echo "ended with $code; requeued" >&2
  # One task of an array has the number of the array, with which Slurm would requeue all of its tasks.
  scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
fi
exit "$code"
