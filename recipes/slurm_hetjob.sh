#!/usr/bin/env bash
# A Slurm heterogeneous job: nodes with different numbers of GPUs, one component for each kind.
#   sbatch recipes/slurm_hetjob.sh
# One torchrun a node, as many processes as the node has GPUs. Edit the components, NNODES and the
# recipe; the plan's [[devices]] name the nodes, which is why --nodelist asks for them.
#SBATCH --job-name=zorselike
#SBATCH --time=24:00:00
# Warns two minutes before the end, so that the run ends at a step boundary.
#SBATCH --signal=TERM@120
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32 --nodelist=node-a
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=16 --nodelist=node-b
set -euo pipefail

export NNODES=2            # of all components together
export RDZV=$(hostname):29500  # this script runs on the first node of the first component
export RDZV_ID=$SLURM_JOB_ID
export NGPU=gpu
export CONFIG_FILE=${CONFIG_FILE:-recipes/multi_node.toml}

srun --het-group=0-1 --kill-on-bad-exit=1 ./run_train.sh "$@"
