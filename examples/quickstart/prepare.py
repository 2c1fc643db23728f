"""Makes the quick start's base model: a tiny Qwen3-MoE, warmed up by maximum likelihood with the learner itself.

Usage: python examples/quickstart/prepare.py CONFIG [a.b=c ...]. Writes the Hugging Face directory that CONFIG names as
model.path. The teacher leaves something to learn by reinforcement: it replaces each letter of an answer by a random one
with probability NOISE, which greedy decoding sees through, and takes b for d and p for q, and the other way round, with
probability CONFUSION, which it does not.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from megatron_rlzero import environments
from megatron_rlzero.config import Config
from megatron_rlzero.config_io import parse
from megatron_rlzero.environments.prompts import encode_prompt, load_tokenizer
from megatron_rlzero.launch import is_rank, launch, launcher
from megatron_rlzero.rollout import Rollout
from megatron_rlzero.watch import killed_with

SENTENCE = "Spell this word backward (example: sun -> nus): "
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS, BATCH, LEARNING_RATE, BETA2 = 300, 128, 2e-3, 0.98
NOISE, CONFUSION, MIRRORED = 0.15, 0.6, str.maketrans("bdpqBDPQ", "dbqpDBQP")


def make_tokenizer(directory: Path) -> int:
    """A tokenizer of single characters whose special tokens are the chat roles and the task's sentence; its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = string.ascii_letters + string.digits + " "
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, END, USER, ASSISTANT)])
    tokenizer.add_tokens([AddedToken(SENTENCE, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    return len(wrapped)


def make_model(directory: Path, vocab_size: int, end: int, seed: int) -> None:
    """A random Qwen3-MoE of half a million parameters as transformers writes it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.06,
        eos_token_id=end,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    # transformers writes num_local_experts, vLLM and published checkpoints have num_experts.
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": config.num_experts}, indent=2) + "\n")


def lesson(config: Config, tokenizer, environment, step: int) -> list[Rollout]:
    """BATCH prompts with the noisy teacher's answers."""
    draw = random.Random(f"{config.seed}/{step}")
    letters, end, rollouts = string.ascii_letters, tokenizer.eos_token_id, []
    for item in draw.sample(range(len(environment)), BATCH):
        problem = environment.problem(item)
        prompt = encode_prompt(tokenizer, problem, config.rollout.max_prompt_tokens)
        answer = problem.removeprefix(SENTENCE)[::-1]
        answer = "".join(c.translate(MIRRORED) if draw.random() < CONFUSION else c for c in answer)
        answer = "".join(draw.choice(letters) if draw.random() < NOISE else c for c in answer)
        tokens = [*prompt, *tokenizer.encode(answer, add_special_tokens=False), end]
        action = np.arange(len(tokens)) >= len(prompt)
        zeros = np.zeros(len(tokens), np.float32)
        rollouts.append(
            Rollout(
                0,
                item,
                0,
                np.array(tokens, np.int32),
                action,
                zeros,
                np.where(action, 0, -1).astype(np.int32),
                1.0,
                "stop",
            )
        )
    return rollouts


def warm_up(config: Config, directory: Path) -> None:
    """STEPS of maximum likelihood; every rank of the learner runs this."""
    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.channel import Channel
    from megatron_rlzero.learner.learner import Learner
    from megatron_rlzero.learner.ranks import Ranks, follow

    config.model.path = f"{directory}.random"
    config.loop.updates = STEPS
    optimizer = config.learner.optimizer
    optimizer.lr, optimizer.adam_beta2, optimizer.lr_decay_style = LEARNING_RATE, BETA2, "cosine"
    device, store = initialise_distributed(config)
    learner, channel = Learner(config, device), Channel(store)
    if dist.get_rank() > 0:
        follow(learner, channel, None)
    else:
        ranks = Ranks(learner, channel, None)
        tokenizer = load_tokenizer(config.model.path)
        environment = environments.build(config.environment, "train")
        for step in range(STEPS):
            rollouts = lesson(config, tokenizer, environment, step)
            done = ranks.step(Batch.of(rollouts, np.ones(BATCH)), likelihood=True).gradients
            action = np.concatenate([r.action_mask for r in rollouts])
            if step % 50 == 0 or step == STEPS - 1:
                print(
                    f"warm-up {step}/{STEPS}  -log p of a token {-done.log_pi.numpy()[action].mean():.3f}", flush=True
                )
        ranks.export(str(directory))
        ranks.stop()
    dist.destroy_process_group()


def main() -> int:
    parsed = parse(sys.argv[1], sys.argv[2:])
    if parsed.violations:
        print("\n".join(parsed.violations), file=sys.stderr)
        return 2
    config = parsed.config
    directory = Path(config.model.path)
    if is_rank():
        killed_with(launcher())
        warm_up(config, directory)
        return 0
    if (directory / "model.safetensors").exists():
        Console().print(f"{directory} is there already")
        return 0
    start = Path(f"{directory}.random")
    start.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(start)
    make_model(start, vocab_size, load_tokenizer(start).eos_token_id, config.seed)
    return launch([__file__, *sys.argv[1:]], config.learner.world_size)


if __name__ == "__main__":
    sys.exit(main())
