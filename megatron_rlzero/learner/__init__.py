"""The Megatron side: build the model, pack a batch, take a step, read the weights."""
