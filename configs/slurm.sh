#!/usr/bin/env bash
# slurm.sh - a batch job on two nodes of eight GPUs: sbatch configs/slurm.sh CONFIG.ini [--set ...]
# train.grad_accum must be a multiple of the 16 ranks. Slurm sends the signal two minutes before the time limit: the
# run saves and stops, and the same command continues it.
#SBATCH --job-name=moetrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer inherits this from sbatch
exec srun --kill-on-bad-exit=1 build/moetrain "$@"
