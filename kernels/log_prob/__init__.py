"""Log-probability of given tokens and entropy, without a [tokens, vocabulary] tensor."""

from megatron_rlzero.kernels.log_prob.reference import log_prob, log_softmax

__all__ = ["log_prob", "log_softmax"]
