"""Values, bits and times of every operator on one GPU, from a checkout with torch, triton and numpy alone.

``python -m tools.gpu_check --help``. The operators are those of this checkout, installed or not.
"""

from pathlib import Path

import megatron_rlzero

ROOT = str(Path(__file__).parents[2])
if ROOT not in megatron_rlzero.__path__:
    megatron_rlzero.__path__.append(ROOT)  # where the folder is that is megatron_rlzero.kernels, see setup.py
