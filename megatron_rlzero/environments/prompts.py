"""Text to tokens and back: the tokenizer's chat template around a problem, a response's tokens as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory; nothing is fetched. OSError where there is none."""
    if (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast  # without torch, which AutoTokenizer imports

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def render_prompt(tokenizer: PreTrainedTokenizerBase, problem: str) -> str:
    """One user turn and the opening of the answer, by the chat template; the plain problem where there is none."""
    if not tokenizer.chat_template:
        return problem
    turns = [{"role": "user", "content": problem}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: str, max_prompt_tokens: int) -> list[int]:
    """Token ids of the prompt. Special tokens come from the chat template alone.

    Raises:
        ValueError: longer than ``max_prompt_tokens``, or no token at all.
    """
    tokens = tokenizer.encode(render_prompt(tokenizer, problem), add_special_tokens=False)
    if not tokens:
        raise ValueError(f"prompt {problem!r} has no tokens; a prompt needs at least one")
    if len(tokens) > max_prompt_tokens:
        raise ValueError(
            f"rollout.max_prompt_tokens = {max_prompt_tokens}: the prompt {problem[:60]!r} has {len(tokens)} tokens; "
            "raise it or shorten the prompt"
        )
    return tokens


def decode_response(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], end_tokens: Collection[int]
) -> tuple[str, bool]:
    """(text without the end token, whether the response ended by it).

    Special tokens elsewhere stay visible in the text, so that an answer scattered with them is not graded as right.
    """
    finished = len(tokens) > 0 and tokens[-1] in end_tokens
    body = list(tokens[:-1]) if finished else list(tokens)
    return tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False), finished
