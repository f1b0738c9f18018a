#!/bin/bash
#SBATCH --job-name=trainstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:30:00
#
# One task a node starts that node's ranks. Submit from the repository's root:
#
#   sbatch src/trainstep/parallel/templates/slurm.sh -m benchmarks parallel --ranks 16 --batch 16
set -euo pipefail
export NODES="$SLURM_NNODES"
export RANKS_PER_NODE="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
export JOB="$SLURM_JOB_ID"
# A port of the job's own, so that two jobs may share the first node.
export RENDEZVOUS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((10000 + SLURM_JOB_ID % 50000))"
srun sh "$SLURM_SUBMIT_DIR/src/trainstep/parallel/templates/torchrun.sh" "$@"
