"""Small real checkpoints and batches for the tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_rlzero.config import Config
from megatron_rlzero.rollout import Rollout

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "dtype": "float32",
}
ODD = {
    "vocab_size": 101,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HYBRID = {name: SIZES[name] for name in SIZES.keys() - {"num_hidden_layers", "dtype", "initializer_range"}} | {
    "num_attention_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "moe_latent_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "initializer_range": 0.1,
    "rescale_prenorm_residual": False,
    "time_step_min": 0.01,
}
#: positions that the tests reach are in all three ranges of frequencies: kept, scaled, between
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def make_qwen3_moe(directory: Path, seed: int = 0, **settings: object) -> Path:
    """A random Qwen3-MoE as transformers writes it: 2 layers, hidden 64, 4 experts top-2, vocabulary 100."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return _save(directory, seed, lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | experts | settings))))


def make_qwen3(directory: Path, seed: int = 0, **settings: object) -> Path:
    """A random dense Qwen3 of the same sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(directory, seed, lambda: Qwen3ForCausalLM(Qwen3Config(**(SIZES | settings))))


def make_qwen2(directory: Path, seed: int = 0, **settings: object) -> Path:
    """A random Qwen2 of odd sizes: 3 layers, 4 query heads of 32, 2 KV heads, vocabulary 101."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _save(directory, seed, lambda: Qwen2ForCausalLM(Qwen2Config(**(SIZES | ODD | settings))))


def make_llama(directory: Path, seed: int = 0, **settings: object) -> Path:
    """A random Llama of the same odd sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(directory, seed, lambda: LlamaForCausalLM(LlamaConfig(**(SIZES | ODD | settings))))


def make_nemotron_h(directory: Path, seed: int = 0, **settings: object) -> Path:
    """A random Nemotron-H with every kind of layer: hidden 64, 8 Mamba heads of 16, 4 groups, state 16.

    The router chooses 2 of 4 experts in 1 of 2 groups; they work in a latent space of 32.
    """
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    layers = [kinds[symbol] for symbol in settings.pop("pattern", "ME*M-E")]
    config = NemotronHConfig(**(HYBRID | {"layers_block_type": layers} | settings))
    return _save(directory, seed, lambda: NemotronHForCausalLM(config))


def _save(directory: Path, seed: int, build: Callable[[], torch.nn.Module]) -> Path:
    torch.manual_seed(seed)
    model = build()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of 1 would hide a norm that is swapped or left out
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith(".bias"):  # transformers starts with zeros
            parameter.data.uniform_(-0.5, 0.5)
        elif name.endswith((".A_log", ".D")):  # and with these alike in every layer
            parameter.data.uniform_(0.0, 2.0)
        elif name.endswith(".dt_bias"):  # about half of the time steps below time_step_min
            parameter.data.uniform_(-6.0, 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(directory)
    return directory


def rollouts(count: int, vocab_size: int = 100, longest: int = 48, seed: int = 0) -> list[Rollout]:
    """Random responses of uneven lengths; one has no action token, one has nothing but its last."""
    random = np.random.default_rng(seed)
    result = []
    for i in range(count):
        n = int(random.integers(4, longest))
        first = {1: n, 2: n - 1}.get(i, int(random.integers(1, n)))
        action = np.arange(n) >= first
        result.append(
            Rollout(
                update=0,
                item=i,
                sample=0,
                tokens=random.integers(0, vocab_size, n).astype(np.int32),
                action_mask=action,
                logprobs=np.where(action, random.uniform(-5, -3.5, n), 0).astype(np.float32),
                versions=np.where(action, 0, -1).astype(np.int32),
                reward=float(random.integers(0, 2)),
                finish_reason="stop",
            )
        )
    return result


def learner_config(model: Path, run_dir: Path, **learner: object) -> Config:
    """A configuration for the learner alone; optimizer settings as ``optimizer_NAME``."""
    config = Config(run_dir=str(run_dir))
    config.model.path = str(model)
    config.model.dtype = str(learner.pop("dtype", "fp32"))
    config.kernels = str(learner.pop("kernels", "aligned"))
    config.rollout.temperature = float(learner.pop("temperature", 1.0))
    config.learner.expert_model_parallel_size = 1
    config.learner.optimizer.lr = 1e-3
    config.learner.optimizer.lr_warmup_updates = 0
    config.learner.optimizer.clip_grad = 0.5
    # Adam's first steps are the sign of the gradient where it is far above eps: rounding noise in an element that is
    # zero but for it would count as a whole step.
    config.learner.optimizer.adam_eps = 1e-5
    for name, value in learner.items():
        target = config.learner.optimizer if name.startswith("optimizer_") else config.learner
        setattr(target, name.removeprefix("optimizer_"), value)
    return config
