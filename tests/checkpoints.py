"""Random Hugging Face directories of every family, written without transformers: small, odd sizes."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rlzero import cli
from megatron_rlzero.architectures import KNOWN, architecture

SIZES = {
    "vocab_size": 101,
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
HYBRID = {
    "hybrid_override_pattern": "M*-EME",
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "n_groups": 4,
    "ssm_state_size": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": 7,
}


def config(family: str, **settings: object) -> dict:
    """config.json of a registered family; ``settings`` replace the sizes above."""
    special = HYBRID if "nemotron" in family.lower() else EXPERTS if "moe" in family else {}
    hf = {"model_type": family, **SIZES, **special, **settings}
    if special is HYBRID:
        del hf["num_hidden_layers"]  # the pattern says
    faults = architecture(hf).unsupported(hf)
    assert not faults, faults
    return hf


FAMILIES = KNOWN
#: family, naming: GPTModel has names for pairs of attention and MLP alone
NAMED = [(f, n) for f in FAMILIES for n in ("hybrid", "gpt") if n == "hybrid" or "nemotron" not in f.lower()]


def write(directory: Path, hf: dict, seed: int = 0, mixed: bool = False) -> Path:
    """Random bits that are finite: fp32, or bf16 where ``mixed`` but for norms, gates and what always stays fp32."""
    generator = torch.Generator().manual_seed(seed)
    family, tensors = architecture(hf), {}
    for name, shape in family.tensors(hf).items():
        wide = not mixed or "norm" in name or name.endswith((".gate.weight", *family.FP32))
        tensors[name] = torch.randn(shape, generator=generator).to(torch.float32 if wide else torch.bfloat16)
    return write_tensors(directory, hf, tensors)


def write_tensors(directory: Path, hf: dict, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by the safetensors library."""
    return {n: t for file in sorted(directory.glob("*.safetensors")) for n, t in load_file(file).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Names, shapes, dtypes and bytes."""
    bits = lambda t: (t.dtype, t.shape, bytes(t.flatten().view(torch.uint8).numpy()))  # noqa: E731
    return one.keys() == other.keys() and all(bits(one[n]) == bits(other[n]) for n in one)


def refused(capsys, arguments: list, message: str) -> str:
    """Exit code 2, the message, no target and nothing beside it."""
    target = Path(arguments[1])
    assert cli.main(["convert", *map(str, arguments)]) == 2
    out = capsys.readouterr().err
    assert re.search(message, out), out
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    return out


def changed(source: Path, change) -> Path:
    tensors = read(source)
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source
