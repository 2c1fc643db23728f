"""Log-probabilities over the vocabulary."""

from megatron_rlzero.kernels.log_prob.dispatch import log_prob, log_softmax

__all__ = ["log_prob", "log_softmax"]
