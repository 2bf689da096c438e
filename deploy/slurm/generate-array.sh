#!/bin/bash
# A data set on many GPUs, one array task and one shard for each: tasks need no connection to each other.
#
#   sbatch --array=1-16 deploy/slurm/generate-array.sh MANIFEST MODEL DATASET [options of voxtune generate]
#
# Submit it again, with the same words, until every task exits with 0. VOXTUNE is the command, such as
# "apptainer run --nv voxtune.sif".
#SBATCH --job-name=voxtune-generate
#SBATCH --array=1-16
#SBATCH --gpus-per-task=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
# Three minutes before the end: finish the volumes that are being drawn.
#SBATCH --signal=B:TERM@180
set -euo pipefail

if (($# < 3)); then
    echo "usage: sbatch --array=1-COUNT $0 MANIFEST MODEL DATASET [options of voxtune generate]" >&2
    exit 2
fi
if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    echo "$0: submit an array, such as sbatch --array=1-16 $0" >&2
    exit 2
fi
# The tasks of an array are those of the data set if there are as many as its last number says.
if [[ -z ${SHARDS:-} && ${SLURM_ARRAY_TASK_COUNT:-1} != "${SLURM_ARRAY_TASK_MAX:-1}" ]]; then
    echo "$0: the array is not 1-COUNT; set SHARDS to the number of all shards" >&2
    exit 2
fi
manifest=$1 model=$2 dataset=$3
shift 3
read -r -a voxtune <<<"${VOXTUNE:-voxtune}"

shards=${SHARDS:-${SLURM_ARRAY_TASK_MAX:-1}}
# exec: the signal reaches the command.
exec "${voxtune[@]}" generate "$manifest" --model "$model" -o "$dataset" \
    --shard "$SLURM_ARRAY_TASK_ID/$shards" --quiet "$@"
