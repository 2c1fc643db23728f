"""What the numbers were measured on: GPU, driver, libraries, tiles."""

import platform
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

import torch
import triton

from megatron_rlzero.kernels import tiles
from tools.gpu_check.sizes import DEVICE


def environment() -> dict[str, Any]:
    """Names and numbers as strings where they are not numbers of this machine's devices."""
    found = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "tiles": asdict(tiles.gpu(DEVICE)),
    }
    if DEVICE.type != "cuda":
        return {"device": "Triton's interpreter on a CPU", **found}
    gpu = torch.cuda.get_device_properties(DEVICE)
    return {
        "device": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "cuda": torch.version.cuda,
        **asked("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "compute_mode"),
        **found,
    }


def asked(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the GPU that torch uses; nothing where there is no such program, or where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = [program, "-i", uuid, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True)
    lines = said.stdout.splitlines()
    return dict(zip(fields, lines[0].split(", "), strict=False)) if said.returncode == 0 and lines else {}
