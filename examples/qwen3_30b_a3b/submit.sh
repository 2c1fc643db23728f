#!/usr/bin/env bash
# Submits one job that trains and serves: submit.sh [--dry-run] CONFIG [a.b=c ...]; run it in the repository's root.
# Sizes come from the environment: LEARNER_NODES, ROLLOUT_NODES, GPUS_PER_NODE, GPUS_PER_SERVER, INTERFACE, TOKEN_FILE.
set -euo pipefail

dry_run=
if [[ ${1:-} == --dry-run ]]; then dry_run=1; shift; fi
export CONFIG=${1:?usage: submit.sh [--dry-run] CONFIG [a.b=c ...]}
shift
export LEARNER_NODES=${LEARNER_NODES:-8} ROLLOUT_NODES=${ROLLOUT_NODES:-2}
export GPUS_PER_NODE=${GPUS_PER_NODE:-8} GPUS_PER_SERVER=${GPUS_PER_SERVER:-4}
export INTERFACE=${INTERFACE:-eth0} TOKEN_FILE=${TOKEN_FILE:-$PWD/.rollout-token}
for name in LEARNER_NODES ROLLOUT_NODES GPUS_PER_NODE GPUS_PER_SERVER; do
  [[ ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "$name = ${!name}: give a number of 1 or more" >&2; exit 2; }
done
[[ -f $CONFIG ]] || { echo "$CONFIG: no such file; name a YAML file" >&2; exit 2; }
script=$(dirname "$0")/slurm.sh
command=(sbatch --requeue "--nodes=$((LEARNER_NODES + ROLLOUT_NODES))" "--gpus-per-node=$GPUS_PER_NODE" --export=ALL "$script" "$@")

if [[ -n $dry_run ]]; then
  printf '%q ' "${command[@]}"; echo
  learners=$(seq -f 'learner-%g' -s ' ' 0 $((LEARNER_NODES - 1)))
  rollouts=$(seq -f 'rollout-%g' -s ' ' 0 $((ROLLOUT_NODES - 1)))
  DRY_RUN=1 NODES="$learners $rollouts" bash "$script" "$@"
  exit
fi
if [[ ! -e $TOKEN_FILE ]]; then (umask 077; openssl rand -hex 32 > "$TOKEN_FILE"); fi
"${command[@]}"
