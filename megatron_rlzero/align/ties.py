"""A copy of a model whose routers have ties everywhere: all experts score alike, so that only their ids decide."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from megatron_rlzero.architectures import architecture, routed_experts


def with_ties(model: str | Path, directory: Path, hf: dict[str, Any]) -> Path | None:
    """Writes it; None for a model without a router.

    A router is what the learner calls router.weight, its bias router.expert_bias: all experts get the first one's rows.
    """
    if not routed_experts(hf):
        return None
    gates = {
        piece.tensor
        for name, rule in architecture(hf).parameters(hf, 1).items()
        if name.endswith((".router.weight", ".router.expert_bias"))
        for piece in rule.pieces("", 0, 1)
    }
    directory.mkdir(parents=True, exist_ok=True)
    for path in Path(model).iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            for name in gates & tensors.keys():
                tensors[name][:] = tensors[name][0].clone()
            save_file(tensors, directory / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copyfile(path, directory / path.name)
    return directory
