"""Log-probability of given tokens and entropy, without a [tokens, vocabulary] tensor."""

from megatron_rlzero.kernels.log_prob.reference import log_prob

__all__ = ["log_prob"]
