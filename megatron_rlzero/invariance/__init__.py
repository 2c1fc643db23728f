"""What makes the learner and the servers compute the same: Megatron's modules, and vLLM's plugin."""
