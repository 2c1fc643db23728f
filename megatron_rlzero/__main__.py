"""``python -m megatron_rlzero`` is the console script megatron-rlzero."""

import sys

from megatron_rlzero.cli import main

sys.exit(main())
