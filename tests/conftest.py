"""Every test process computes with the libraries' settings that the learner and the servers use."""

import os

from megatron_rlzero.kernels import libraries

os.environ.update(libraries.settings())
