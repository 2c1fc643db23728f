"""A synthetic model with more than a language model: tensors and settings of one, and others of many formats."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rlzero.architectures import architecture
from megatron_rlzero.resharding.safetensors_files import INDEX
from tests.checkpoints import read

OMNI = "NemotronH_Nano_Omni_Reasoning_V3"
#: of no language model, values of all kinds
BESIDE = {
    "vision_model.radio_model.model.blocks.0.attn.qkv.weight": torch.linspace(-3, 3, 45).view(9, 5).bfloat16(),
    "vision_model.radio_model.input_conditioner.norm_mean": torch.linspace(0, 1, 3).view(3, 1, 1),
    "vision_model.radio_model.summary_idxs": torch.tensor([0, 1, 2**40]),
    "mlp1.0.weight": torch.tensor([1.0, -0.0, torch.nan, torch.inf]).bfloat16(),
    "mlp1.3.weight": torch.linspace(-1, 1, 14).view(2, 7).to(torch.float8_e4m3fn),
    "sound_projection.norm.weight": torch.linspace(-1, 1, 33),
    "sound_encoder.encoder.layers.0.conv.norm.num_batches_tracked": torch.tensor(12345678901),
    "sound_encoder.encoder.mask": torch.tensor([True, False, True]),
    "sound_encoder.encoder.empty": torch.empty(0, 4),
}


def make_omni(directory: Path, language: Path, key: str = "llm_config", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Three files with the tensors of ``language`` under their prefix and BESIDE; its settings under ``key``."""
    directory.mkdir()
    fp32 = architecture({"model_type": OMNI}).FP32
    tensors = {f"language_model.{n}": t if n.endswith(fp32) else t.to(dtype) for n, t in read(language).items()}
    names = sorted(tensors | BESIDE, key=lambda n: n[::-1])
    files = {f"model-{i + 1:05d}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, mine in files.items():
        save_file({n: (tensors | BESIDE)[n].contiguous() for n in mine}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, mine in files.items() for n in mine}}
    (directory / INDEX).write_text(json.dumps(index))
    settings = json.loads((language / "config.json").read_text())
    config = {"model_type": OMNI, "vision_config": {"hidden_size": 5}, key: settings}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "modeling.py").write_text("")
    return directory
