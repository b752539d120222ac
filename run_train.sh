#!/usr/bin/env bash
# Starts a training job: one line per node, the same one on each.
#
# One machine:
#   NGPU=4 CONFIG_FILE=recipes/debug_cpu.toml ./run_train.sh --training.steps 10
#
# Nodes with DIFFERENT numbers of GPUs: on each node the same line, in any order. `NGPU=gpu` means
# all that the node has; RDZV is one of the nodes, by a name that all of them resolve, and a free port.
# The plan's [[devices]] say which rank each process plays, so the order of start does not matter.
#   NNODES=2 RDZV=node-a:29500 NGPU=gpu CONFIG_FILE=recipes/multi_node.toml ./run_train.sh
# which runs, on a node with four GPUs and on one with two:
#   torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node-a:29500 --rdzv-id train \
#       -m zorselike.train --config recipes/multi_node.toml
#   torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node-a:29500 --rdzv-id train \
#       -m zorselike.train --config recipes/multi_node.toml
# Where c10d's rendezvous is not to your liking, torchrun's static one takes unequal nodes as well:
#   torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr node-a --master-port 29500 ...
#   torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr node-a --master-port 29500 ...
#
# Slurm, one kind of node a component (a heterogeneous job): see recipes/slurm_hetjob.sh.
#
# Also: LOG_RANK=0,1 shows the output of these local ranks only, with their numbers (TorchTitan's
# habit; errors of the others are then hidden). ZORSELIKE_NODE names the node in place of its hostname.
set -euo pipefail

if [ -z "${CONFIG_FILE:-}" ]; then
    CONFIG_FILE=recipes/debug_cpu.toml
    NGPU=${NGPU:-4} # as many as its plan is for
fi
NGPU=${NGPU:-gpu}
NNODES=${NNODES:-1}
PATH=$PATH:$(cd "$(dirname "$0")" && pwd)/.venv/bin # where README puts it, if no environment is active
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

launch=(torchrun --nnodes "$NNODES" --nproc-per-node "$NGPU")
if [ "$NNODES" = 1 ]; then
    launch+=(--standalone)
else
    launch+=(--rdzv-backend c10d --rdzv-endpoint "${RDZV:?say where the nodes meet, RDZV=host:port}")
    launch+=(--rdzv-id "${RDZV_ID:-train}")
fi
if [ -n "${LOG_RANK:-}" ]; then
    launch+=(--local-ranks-filter "$LOG_RANK" --role rank --tee 3)
fi

set -x
exec "${launch[@]}" -m zorselike.train --config "$CONFIG_FILE" "$@"
