#!/usr/bin/env bash
# Trains on the GPUs of this node, or on those of several nodes of which this is one.
#
#   launch/gpu_node.sh --config=configs/qwen1_5b.py --workdir=runs/qwen
#
# On two nodes, with a folder that both see and a port of the first one that both reach:
#
#   NODES=2 NODE=0 FIRST_NODE=gpu-0:8476 launch/gpu_node.sh --config=... --workdir=/shared/qwen
#   NODES=2 NODE=1 FIRST_NODE=gpu-0:8476 launch/gpu_node.sh --config=... --workdir=/shared/qwen
#
# One process per node, which has all its GPUs. PYTHON: the interpreter, .venv/bin/python.
set -euo pipefail
cd "$(dirname "$0")/.."

join=()
if [ "${NODES:-1}" -gt 1 ]; then
  join=(
    "--coordinator=${FIRST_NODE:?FIRST_NODE=HOST:PORT of node 0, the same on all nodes}"
    "--num_processes=$NODES"
    "--process_id=${NODE:?NODE=0 on the first node, 1 on the next, ...}"
  )
fi
exec "${PYTHON:-.venv/bin/python}" launch/train.py "$@" ${join[@]+"${join[@]}"}
