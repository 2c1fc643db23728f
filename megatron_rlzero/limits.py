"""What a value of the configuration may be by itself: smallest values, fractions and choices, key by key."""

from __future__ import annotations

from megatron_rlzero.advantage import ADVANTAGES
from megatron_rlzero.environments import KINDS

AT_LEAST_1 = (
    "reduction_slices",
    "learner.world_size",
    "learner.tensor_model_parallel_size",
    "learner.pipeline_model_parallel_size",
    "learner.expert_model_parallel_size",
    "learner.context_parallel_size",
    "learner.max_tokens_per_microbatch",
    "learner.threads_per_rank",
    "rollout.servers",
    "rollout.tensor_model_parallel_size",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.max_num_seqs",
    "rollout.threads_per_server",
    "rollout.cpu_kv_cache_gib",
    "refit.every",
    "checkpoint.keep",
    "loop.updates",
    "loop.prompts_per_update",
    "loop.samples_per_prompt",
    "eval.prompts",
    "environment.size",
    "probe.tokens",
)
AT_LEAST_0 = (
    "seed",
    "learner.moe_aux_loss_coeff",
    "learner.moe_z_loss_coeff",
    "learner.moe_router_bias_update_rate",
    "learner.optimizer.lr",
    "learner.optimizer.lr_warmup_updates",
    "learner.optimizer.min_lr",
    "learner.optimizer.weight_decay",
    "learner.optimizer.clip_grad",
    "rollout.max_retries",
    "rollout.max_restarts",
    "loop.max_lag",
    "loop.record_every",
    "checkpoint.every",
    "eval.every",
    "probe.every",
)
ABOVE_0 = (
    "learner.timeout_s",
    "learner.optimizer.adam_eps",
    "rollout.temperature",
    "rollout.deadline_s",
    "rollout.startup_timeout_s",
    "refit.deadline_s",
)
FRACTIONS = {  # key -> whether 1 itself is allowed
    "learner.optimizer.adam_beta1": False,
    "learner.optimizer.adam_beta2": False,
    "rollout.max_failed_fraction": True,
}
CHOICES = {
    "kernels": ("aligned", "stock"),
    "model.dtype": ("fp32", "bf16"),
    "learner.recompute": ("none", "selective", "full"),
    "learner.optimizer.lr_decay_style": ("constant", "cosine"),
    "loop.advantage": tuple(ADVANTAGES),
    "loop.objective": ("reinforce_zero", "flash_reinforce", "grpo", "no_correction"),
    "environment.kind": KINDS,
    "probe.on_mismatch": ("stop", "log"),
    "refit.backend": ("gloo", "nccl"),
}
