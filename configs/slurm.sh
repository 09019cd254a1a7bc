#!/usr/bin/env bash
# slurm.sh - a batch job on two nodes of eight GPUs: sbatch configs/slurm.sh CONFIG.ini [--set ...]
# train.grad_accum must be a multiple of the 16 ranks. The signal comes two minutes before the time is over: the run
# saves and stops, and the same command goes on where it was.
#SBATCH --job-name=moetrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which srun no longer takes from sbatch by itself
exec srun --kill-on-bad-exit=1 build/moetrain "$@"
