"""Makes a quick start's base model: a tiny one, warmed up by maximum likelihood with the learner itself.

Usage: python examples/quickstart/prepare.py CONFIG [MODEL.json] [a.b=c ...]. Writes the Hugging Face directory that
CONFIG names as model.path. The model has random weights and is as MODEL.json says, by default CONFIG with the suffix
.json. The teacher leaves something to learn by reinforcement: it replaces each letter of an answer by a random one with
probability NOISE, which greedy decoding sees through, and takes b for d and p for q, and the other way round, with
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


def make_model(directory: Path, hf: dict, vocab_size: int, end: int, seed: int) -> None:
    """A random model as transformers writes it.

    Args:
        hf: settings of config.json, model_type among them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = hf | {"vocab_size": vocab_size, "eos_token_id": end, "dtype": "float32"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(directory)
    path = directory / "config.json"
    saved = json.loads(path.read_text())
    if "num_experts" in hf:  # transformers writes num_local_experts, vLLM and published checkpoints have num_experts
        saved["num_experts"] = hf["num_experts"]
    path.write_text(json.dumps(saved, indent=2) + "\n")


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
    source, arguments = Path(sys.argv[1]).with_suffix(".json"), sys.argv[2:]
    if arguments and arguments[0].endswith(".json"):
        source = Path(arguments.pop(0))
    parsed = parse(sys.argv[1], arguments)
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
    make_model(start, json.loads(source.read_text()), vocab_size, load_tokenizer(start).eos_token_id, config.seed)
    return launch([__file__, *sys.argv[1:]], config.learner.world_size)


if __name__ == "__main__":
    sys.exit(main())
