#!/usr/bin/env bash
# Submits one job with this model's sizes: submit.sh [--dry-run] CONFIG [a.b=c ...]; run it in the repository's root.
# See examples/qwen3_30b_a3b/submit.sh, whose environment variables change the sizes.
set -euo pipefail

export SBATCH_JOB_NAME=${SBATCH_JOB_NAME:-rlzero-nemotron-3-nano}
export LEARNER_NODES=${LEARNER_NODES:-4} ROLLOUT_NODES=${ROLLOUT_NODES:-2} GPUS_PER_SERVER=${GPUS_PER_SERVER:-2}
exec bash "$(dirname "$0")/../qwen3_30b_a3b/submit.sh" "$@"
