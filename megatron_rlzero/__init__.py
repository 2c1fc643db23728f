"""Trainer-inference invariant, asynchronous reinforcement learning on stock Megatron-Core and stock vLLM."""

__version__ = "0.1.0"
