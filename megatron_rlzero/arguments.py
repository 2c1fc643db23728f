"""Arguments of commands: what they may be, and the longer lists of them."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable

#: see align/ledger.py
ALIGN_STEPS = ("all", "proxy", "map", "measure", "check", "gradcheck", "profile", "accept")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def port(text: str) -> int:
    """A port that nobody listens on."""
    number = int(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: give 1 to 65535")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", number)) == 0:
            raise argparse.ArgumentTypeError(f"{text}: another process listens on it; choose another")
    return number


def add_convert(commands: argparse._SubParsersAction, run: Callable) -> None:
    command = commands.add_parser("convert", help="Hugging Face directory to Megatron distributed checkpoint, and back")
    command.add_argument("source", help="Hugging Face directory, or Megatron distributed checkpoint")
    command.add_argument("target", help="directory to make; it must not exist, or be empty")
    command.add_argument("--to", required=True, choices=("megatron", "hf"))
    for name in ("tensor-model", "pipeline-model", "expert-model", "expert-tensor"):
        command.add_argument(f"--{name}-parallel-size", type=int, default=1, metavar="N", help="of --to megatron")
    command.add_argument("--naming", choices=("hybrid", "gpt"), default="hybrid", help="of --to megatron")
    command.add_argument("--config", metavar="DIR", help="of --to hf: directory with config and tokenizer files")
    command.add_argument("--family", metavar="FILE", help="Python file that defines the model's family")
    command.add_argument(
        "--verify", action="store_true", help="compare log-probs with transformers, within 1e-4 in fp32"
    )
    command.set_defaults(run=run)


def add_align(commands: argparse._SubParsersAction, run: Callable) -> None:
    command = commands.add_parser(
        "align", help="check a model's operators on both sides, step by step, each with a gate"
    )
    command.add_argument("step", choices=ALIGN_STEPS, help="all takes those that are not passed")
    command.add_argument("model", help="Hugging Face directory")
    command.add_argument("overrides", nargs="*", metavar="a.b=c", help="values of the configuration")
    command.add_argument("--out", metavar="DIR", help="for alignment.json and its report (default runs/align/NAME)")
    command.add_argument("--family", metavar="FILE", help="Python file that defines the model's family")
    command.set_defaults(run=run)
