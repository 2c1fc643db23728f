"""What torch's matrix libraries must be told so that a product's order does not depend on rows or threads.

Both read their settings at the first product of a process. oneDNN's kernels for AMX sum bf16 products in an order that
depends on the number of rows, from 512 columns on; MKL cuts a contraction by the number of threads.
"""

import torch


def settings() -> dict[str, str]:
    """Environment variables for a process that computes with these operators on a CPU."""
    vectors = torch.backends.cpu.get_cpu_capability()
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    if vectors in ("AVX2", "AVX512"):
        variables["MKL_CBWR"] = f"{vectors},STRICT"
    return variables
