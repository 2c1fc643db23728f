"""What a configuration needs before anything starts: bytes per learner rank, pipeline balance, and the refit's plan.

Everything follows from config.json and the layout; no weights are read and no torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from megatron_rlzero.architectures import architecture
from megatron_rlzero.architectures.layouts import Parallel, engine_layout, expert_number, learner_layout
from megatron_rlzero.config import Config
from megatron_rlzero.resharding.layout import Layout, Piece
from megatron_rlzero.resharding.messages import messages
from megatron_rlzero.resharding.plan import plan

#: bytes of an element on the learner, on the engine and on the wire
ITEMSIZE = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Rank:
    """Bytes of one learner rank. ``activations`` are those that the pipeline schedule keeps for backward passes."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class RefitPlan:
    """One refit of all servers: bytes by rank, and messages in all."""

    sent: dict[int, int]
    received: dict[int, int]
    messages: int

    @property
    def imbalance(self) -> float:
        """The busiest sender's bytes over the mean of all learner ranks."""
        return max(self.sent.values()) * len(self.sent) / sum(self.sent.values())

    def seconds(self, bytes_per_s: float) -> float:
        """Where every rank and worker sends and receives ``bytes_per_s`` and no link is shared."""
        return max(max(self.sent.values()), max(self.received.values())) / bytes_per_s


@dataclass(frozen=True)
class Estimate:
    """Ranks by number; ``flops`` per token and stage, forward; ``worker_bytes``: weights of a server's worker."""

    model_parameters: int
    ranks: list[Rank]
    flops: list[float]
    refit: RefitPlan
    worker_bytes: int


def estimate(config: Config, hf: dict[str, Any]) -> Estimate:
    """The estimate of a valid configuration.

    Args:
        hf: config.json of ``model.path``.
    """
    family = architecture(hf)
    layout = learner_layout(family, hf, parallel_sizes(config), config.reduction_slices)
    engine = engine_layout(family, hf, config.rollout.tensor_model_parallel_size)
    itemsize = ITEMSIZE[config.model.dtype]
    return Estimate(
        sum(prod(shape) for shape in family.tensors(hf).values()),
        learner_ranks(config, hf, layout),
        _flops(config, hf),
        refit_plan(config, layout, engine, itemsize),
        max(sum(p.box.numel for p in pieces) for pieces in engine.values()) * itemsize,
    )


def learner_ranks(config: Config, hf: dict[str, Any], layout: Layout) -> list[Rank]:
    """Every learner rank, in order."""
    learner, parallel = config.learner, parallel_sizes(config)
    itemsize, state = ITEMSIZE[config.model.dtype], _optimizer_bytes(config.model.dtype)
    sharded = learner.optimizer.use_distributed_optimizer
    dense_replicas = parallel.stage_size // learner.tensor_model_parallel_size
    expert_replicas = parallel.stage_size // learner.expert_model_parallel_size
    ranks, counted = [], {}
    for rank in range(parallel.world_size):
        at = parallel.coordinates(rank)
        if at not in counted:
            dense, expert = _elements(layout[rank])
            kept = ceil(dense / dense_replicas) + ceil(expert / expert_replicas) if sharded else dense + expert
            counted[at] = Rank(
                at.pipeline,
                (dense + expert) * itemsize,
                (dense + expert) * 4,  # reduced in fp32
                state * kept,
                _activation_bytes(config, hf, at.pipeline),
            )
        ranks.append(counted[at])
    return ranks


def parallel_sizes(config: Config) -> Parallel:
    """The learner's sizes."""
    learner = config.learner
    return Parallel(
        learner.world_size,
        learner.tensor_model_parallel_size,
        learner.pipeline_model_parallel_size,
        learner.expert_model_parallel_size,
    )


def stage_layers(config: Config, hf: dict[str, Any]) -> list[int]:
    """Layers of the checkpoint on every pipeline stage."""
    pattern = architecture(hf).layer_pattern(hf, config.learner.pipeline_model_parallel_size)
    return [part.count("*") for part in pattern.split("|")]


def refit_plan(config: Config, layout: Layout, engine: Layout, itemsize: int) -> RefitPlan:
    """The plan that the first refit of the run will make."""
    servers = len(config.rollout.urls) or config.rollout.servers
    world = len(layout)
    targets = {world + s * len(engine) + w: pieces for s in range(servers) for w, pieces in engine.items()}
    sent, received = dict.fromkeys(layout, 0), dict.fromkeys(targets, 0)
    transfers = plan(layout, targets)
    for t in transfers:
        nbytes = t.box.numel * itemsize
        sent[t.source] += nbytes
        received[t.target] += nbytes
    itemsizes = dict.fromkeys((t.tensor for t in transfers), itemsize)
    return RefitPlan(sent, received, sum(1 for _ in messages(transfers, itemsizes)))


def _elements(pieces: list[Piece]) -> tuple[int, int]:
    """Elements outside the experts, and of experts. Padding of the vocabulary, under 0.1 % of it, is left out."""
    dense = expert = 0
    for piece in pieces:
        if expert_number(piece.local) is None:
            dense += piece.box.numel
        else:
            expert += piece.box.numel
    return dense, expert


def _optimizer_bytes(dtype: str) -> int:
    """Per parameter: two fp32 moments, and with bf16 parameters the fp32 main parameter."""
    return 8 if dtype == "fp32" else 12


def layer_activation_bytes(hf: dict[str, Any], itemsize: int, recompute: str) -> float:
    """What one layer keeps for its backward pass, bytes per token over all tensor-parallel ranks.

    Counted from the tensors that the operators of ``kernels`` save: inputs and normed inputs of attention and MLP, the
    fused projection, queries and keys before and after the rotary embedding, the MLP's two products; with experts, k
    copies of each token. Routing is taken as balanced. tests/distributed/test_estimate.py compares it with what is
    saved.
    """
    family = architecture(hf)
    config = family.transformer_config(hf)
    h = config["hidden_size"]
    q = config["num_attention_heads"] * config["kv_channels"]
    kv = config["num_query_groups"] * config["kv_channels"]
    if recompute == "full":
        return 2 * itemsize * h
    attention = itemsize * (2 * h + 4 * q + 3 * kv)  # its core computes its weights again, recompute or not
    k = config.get("moe_router_topk")
    if k is None:
        return attention + itemsize * (2 * h + 3 * config["ffn_hidden_size"])
    experts = itemsize * k * (h + 3 * config["moe_ffn_hidden_size"]) + 4 * k * h
    return attention + itemsize * 2 * h + (0 if recompute == "selective" else experts)


def _activation_bytes(config: Config, hf: dict[str, Any], stage: int) -> int:
    """1F1B: stage s of n has up to n - s microbatches between their forward and backward passes."""
    learner, layers = config.learner, stage_layers(config, hf)
    tokens = learner.max_tokens_per_microbatch / learner.tensor_model_parallel_size
    itemsize = ITEMSIZE[config.model.dtype]
    kept = layers[stage] * layer_activation_bytes(hf, itemsize, learner.recompute) * (len(layers) - stage)
    # Of the layer that is being recomputed everything is there.
    again = layer_activation_bytes(hf, itemsize, "none") if learner.recompute != "none" else 0
    return int(tokens * (kept + again))


def _flops(config: Config, hf: dict[str, Any]) -> list[float]:
    """Forward floating-point operations per token of every stage: two per weight in use, and the output layer's.

    Attention's own products, which grow with the length, are the same for every layer and left out.
    """
    c = architecture(hf).transformer_config(hf)
    h, d = c["hidden_size"], c["kv_channels"]
    weights = h * d * 2 * (c["num_attention_heads"] + c["num_query_groups"])
    if k := c.get("moe_router_topk"):
        weights += 3 * k * h * c["moe_ffn_hidden_size"] + h * c["num_moe_experts"]
    else:
        weights += 3 * h * c["ffn_hidden_size"]
    flops = [2.0 * weights * n for n in stage_layers(config, hf)]
    flops[-1] += 2.0 * h * hf["vocab_size"]
    return flops
