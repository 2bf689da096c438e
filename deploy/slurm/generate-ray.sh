#!/bin/bash
# A data set on several nodes with one driver: Ray hands tasks to all GPUs, and goes on when a node fails.
#
#   sbatch deploy/slurm/generate-ray.sh MANIFEST MODEL DATASET [options of voxtune generate]
#
# Submit it again, with the same words, to draw what is missing. VOXTUNE and RAY are the commands, such as
# "apptainer exec --nv voxtune.sif voxtune" and "apptainer exec --nv voxtune.sif ray".
#SBATCH --job-name=voxtune-ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
# A node that fails does not end the job; one of the first node does, and then the job starts again.
#SBATCH --no-kill
#SBATCH --requeue
# Five minutes before the end: finish the volumes that are being drawn.
#SBATCH --signal=B:TERM@300
set -euo pipefail

if (($# < 3)); then
    echo "usage: sbatch $0 MANIFEST MODEL DATASET [options of voxtune generate]" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?submit this script with sbatch}" "${SLURM_JOB_NODELIST:?}"
manifest=$1 model=$2 dataset=$3
shift 3
read -r -a voxtune <<<"${VOXTUNE:-voxtune}"
read -r -a ray <<<"${RAY:-ray}"

# Whoever reaches a Ray cluster can run code in it: only those who know the token of this job can (Ray 2.52 and newer).
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
read -r address _ < <(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
resources=(--num-cpus "${SLURM_CPUS_PER_TASK:-1}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}")
resources+=(--object-store-memory 200000000 --disable-usage-stats --block)

jobs_of_ray=()
driver=
# shellcheck disable=SC2329  # by the traps
stop_ray() {
    for job in "${jobs_of_ray[@]}"; do
        kill -TERM "$job" 2>/dev/null || true
    done
    wait || true
}
# shellcheck disable=SC2329
finish() {
    if [[ -n $driver ]]; then
        kill -TERM "$driver" 2>/dev/null || true
    fi
}
trap stop_ray EXIT
trap finish TERM INT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    "${ray[@]}" start --head --include-dashboard=false --node-ip-address="$address" --port="$port" \
    "${resources[@]}" >"ray-${SLURM_JOB_ID}-head.log" 2>&1 &
jobs_of_ray+=($!)

ready=
for _ in {1..60}; do
    if "${ray[@]}" health-check --address "$address:$port" >/dev/null 2>&1; then
        ready=yes
        break
    fi
    sleep 2
done
if [[ -z $ready ]]; then
    echo "$0: Ray did not start on $head within two minutes; see ray-${SLURM_JOB_ID}-head.log" >&2
    exit 1
fi

others=$((${#nodes[@]} - 1))
if ((others > 0)); then
    srun --overlap --kill-on-bad-exit=0 --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --exclude="$head" \
        "${ray[@]}" start --address="$address:$port" "${resources[@]}" >"ray-${SLURM_JOB_ID}-workers.log" 2>&1 &
    jobs_of_ray+=($!)
    # The default number of workers is that of all GPUs that are there when the driver starts.
    sleep "${RAY_JOIN_SECONDS:-30}"
fi

"${voxtune[@]}" generate "$manifest" --model "$model" -o "$dataset" --engine ray --address "$address:$port" \
    --quiet "$@" &
driver=$!
# The first wait ends with the signal, the second one with the driver.
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
exit "$code"
