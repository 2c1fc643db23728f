"""A task for the whole stack: the digits of the prompt in ascending order; its files and its base model.

Usage, by ``prepare``, to warm up: python -m tools.evidence.digits CONFIG MODEL. A prompt has 1 to ``difficulty`` digits
from 1 to 9, its length evenly distributed. math-verify grades the answer, a number. Training prompts are written again
when the difficulty changes; held-out prompts, of every length, stay.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np

from megatron_rlzero.rollout import Rollout
from tools.evidence.results import ROOT, write_whole

#: longest prompt; training prompts, held-out prompts
LONGEST, TRAINING, HELD_OUT = 24, 16384, 256
DIGITS = "123456789"
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
}
#: of the warm-up by maximum likelihood: steps, responses, learning rate, wrong digits of the teacher
STEPS, BATCH, LEARNING_RATE, NOISE = 1500, 128, 2e-3, 0.3


def write(path: Path, count: int, difficulty: float, seed: str) -> None:
    """``count`` problems as a jsonl environment reads them; replaced as a whole."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        length = 1 + int(draw.random() * difficulty)
        digits = "".join(draw.choice(DIGITS) for _ in range(LONGEST))[:length]  # the same digits at any difficulty
        lines.append(json.dumps({"problem": digits, "answer": "".join(sorted(digits))}))
    write_whole(path, "\n".join(lines) + "\n")


def make_tokenizer(directory: Path) -> tuple[int, int]:
    """A tokenizer of digits and roles; its size and the end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(DIGITS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, END, USER, ASSISTANT)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    return len(wrapped), wrapped.convert_tokens_to_ids(END)


def prepare(config_file: Path, model: Path, random_model: Path) -> None:
    """Makes the base model that ``config_file`` names as model.path, where it is not there yet."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from prepare import make_model

    from megatron_rlzero.launch import launch

    if (model / "model.safetensors").exists():
        return
    random_model.mkdir(parents=True, exist_ok=True)
    size, end = make_tokenizer(random_model)
    make_model(random_model, MODEL, size, end, seed=0)
    if code := launch(["-m", "tools.evidence.digits", str(config_file), str(random_model)], 1):
        raise RuntimeError(f"the warm-up ended with exit code {code}")


def lesson(tokenizer, step: int) -> list[Rollout]:
    """BATCH answers to prompts of any length, of whose digits NOISE are replaced: the policy is left with entropy."""
    draw, rollouts = random.Random(f"lesson {step}"), []
    for item in range(BATCH):
        digits = "".join(draw.choice(DIGITS) for _ in range(1 + int(draw.random() * LONGEST)))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": digits}], add_generation_prompt=True, return_dict=False
        )
        answer = "".join(draw.choice(DIGITS) if draw.random() < NOISE else c for c in sorted(digits))
        answer = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        action = np.arange(len(prompt) + len(answer)) >= len(prompt)
        tokens, zeros = np.array([*prompt, *answer], np.int32), np.zeros(len(action), np.float32)
        versions = np.where(action, 0, -1).astype(np.int32)
        rollouts.append(Rollout(0, item, 0, tokens, action, zeros, versions, 1.0, "stop"))
    return rollouts


def warm_up(config_file: str, random_model: str) -> None:
    """STEPS of maximum likelihood by the learner itself; the one rank of a launch."""
    import torch.distributed as dist

    from megatron_rlzero.config_io import parse
    from megatron_rlzero.environments.prompts import load_tokenizer
    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.learner import Learner

    config = parse(config_file, []).config
    target, config.model.path, config.loop.updates = config.model.path, random_model, STEPS
    optimizer = config.learner.optimizer
    optimizer.lr, optimizer.adam_beta2, optimizer.lr_decay_style = LEARNING_RATE, 0.98, "cosine"
    device, _ = initialise_distributed(config)
    learner, tokenizer = Learner(config, device), load_tokenizer(random_model)
    for step in range(STEPS):
        batch = Batch.of(lesson(tokenizer, step), np.ones(BATCH))
        done = learner.step(batch, likelihood=True).gradients
        if step % 50 == 0 or step == STEPS - 1:
            mean = float(done.log_pi[batch.action_mask].mean())
            print(f"warm-up {step}/{STEPS}  -log p of a token {-mean:.3f}", flush=True)
    learner.weights.export(target, random_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    warm_up(*sys.argv[1:])
