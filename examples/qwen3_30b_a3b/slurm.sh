#!/usr/bin/env bash
# One Slurm job: the first LEARNER_NODES nodes train, the others serve rollouts. submit.sh hands it to sbatch.
#SBATCH --job-name=rlzero-qwen3-30b-a3b
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
set -euo pipefail

: "${CONFIG:?the YAML file}" "${LEARNER_NODES:?}" "${GPUS_PER_NODE:?}" "${GPUS_PER_SERVER:?}" "${INTERFACE:?}" "${TOKEN_FILE:?}"
PYTHON=${PYTHON:-.venv/bin/python}
# DRY_RUN=1 prints what would start; NODES then stands for what Slurm would allocate.
show() { printf '%q ' "$@"; echo; }
mapfile -t nodes < <(if [[ -n ${DRY_RUN:-} ]]; then printf '%s\n' $NODES; else scontrol show hostnames "$SLURM_JOB_NODELIST"; fi)
learners=("${nodes[@]:0:LEARNER_NODES}")
rollouts=("${nodes[@]:LEARNER_NODES}")
overrides=("rollout.token_file=$TOKEN_FILE" "refit.interface=$INTERFACE" "$@")
# torch's own groups over sockets take the same interface as the refits.
export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE

servers=() urls=()
for node in "${rollouts[@]}"; do
  for ((first = 0; first + GPUS_PER_SERVER <= GPUS_PER_NODE; first += GPUS_PER_SERVER)); do
    port=$((8000 + first))
    urls+=("http://$node:$port")
    devices=$(seq -s , "$first" $((first + GPUS_PER_SERVER - 1)))
    command=(srun --overlap --nodes=1 --ntasks=1 "--nodelist=$node" env "CUDA_VISIBLE_DEVICES=$devices"
      "$PYTHON" -m megatron_rlzero serve "$CONFIG" --host "$node" --port "$port" "${overrides[@]}")
    if [[ -n ${DRY_RUN:-} ]]; then show "${command[@]}"; else "${command[@]}" & servers+=($!); fi
  done
done
# The run ends by itself when a server dies; the servers end with the run.
trap 'if ((${#servers[@]})); then kill "${servers[@]}" 2>/dev/null || true; fi' EXIT

list=$(IFS=,; echo "${urls[*]}")
command=(srun --overlap "--nodes=$LEARNER_NODES" --ntasks-per-node=1 "--nodelist=$(IFS=,; echo "${learners[*]}")"
  "$PYTHON" -m torch.distributed.run "--nnodes=$LEARNER_NODES" "--nproc-per-node=$GPUS_PER_NODE"
  --rdzv-backend=c10d "--rdzv-endpoint=${learners[0]}:29500" "--rdzv-id=${SLURM_JOB_ID:-dry-run}"
  -m megatron_rlzero train "$CONFIG" "rollout.urls=[$list]" "${overrides[@]}")
if [[ -n ${DRY_RUN:-} ]]; then show "${command[@]}"; else "${command[@]}"; fi
