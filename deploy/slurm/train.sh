#!/bin/bash
# Training on several nodes, started again from the last checkpoint when a process or a node is lost.
#
#   sbatch deploy/slurm/train.sh RUN [options of voxtune train]
#
# Submit it again, with the same words, to continue the run. TORCHRUN is the command, such as
# "apptainer exec --nv voxtune.sif torchrun".
#SBATCH --job-name=voxtune-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
# Five minutes before the end: write a checkpoint.
#SBATCH --signal=TERM@300
set -euo pipefail

if (($# < 1)) || [[ $1 == -* ]]; then
    echo "usage: sbatch $0 RUN [options of voxtune train]" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?submit this script with sbatch}" "${SLURM_JOB_NODELIST:?}" "${SLURM_JOB_NUM_NODES:?}"
run=$1
shift
read -r -a torchrun <<<"${TORCHRUN:-torchrun}"

# A run that exists is continued with its own settings.
if [[ -f $run/train.json ]]; then
    words=(--resume "$run")
else
    words=(-o "$run" "$@")
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
exec srun "${torchrun[@]}" \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${nodes[0]}:${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" \
    --max-restarts="${MAX_RESTARTS:-3}" \
    -m voxtune train "${words[@]}"
