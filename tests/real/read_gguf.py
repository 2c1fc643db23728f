"""Saves a GGUF file as a Hugging Face directory: fp32 weights, configuration, tokenizer.

Usage: python -m tests.real.read_gguf FILE DIRECTORY, with gguf and accelerate on the path.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    file, directory = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    main()
