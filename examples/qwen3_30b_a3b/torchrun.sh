#!/usr/bin/env bash
# Without Slurm: torchrun.sh NODE_RANK CONFIG [a.b=c ...] on every learner node, after the servers were started with
#   python -m megatron_rlzero serve CONFIG --host ADDRESS --port 8000 rollout.token_file=... refit.interface=...
# The environment says NNODES, MASTER_ADDR and, if they differ from the defaults, GPUS_PER_NODE and MASTER_PORT.
set -euo pipefail

rank=${1:?usage: torchrun.sh NODE_RANK CONFIG [a.b=c ...]}
config=${2:?usage: torchrun.sh NODE_RANK CONFIG [a.b=c ...]}
shift 2
exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
  "--nnodes=${NNODES:?learner nodes}" "--node-rank=$rank" "--nproc-per-node=${GPUS_PER_NODE:-8}" \
  "--master-addr=${MASTER_ADDR:?address of node 0}" "--master-port=${MASTER_PORT:-29500}" \
  -m megatron_rlzero train "$config" "$@"
