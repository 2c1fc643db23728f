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


def stages(config: Config, hf: dict[str, Any]) -> list[str]:
    """Megatron's layers on every pipeline stage, a symbol each."""
    return architecture(hf).layer_pattern(hf, config.learner.pipeline_model_parallel_size).split("|")


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


def activation_bytes(hf: dict[str, Any], symbol: str, itemsize: int, recompute: str) -> float:
    """What one of Megatron's layers keeps for its backward pass, bytes per token over all tensor-parallel ranks.

    Counted from the tensors that the operators of ``kernels`` save: a layer's input and the normed input; of attention
    the fused projection, queries and keys before and after the rotary embedding; of an MLP its products; with experts,
    k copies of each token; of Mamba the fused projection, what the convolution and the scan give, and the gated norm.
    Routing is taken as balanced. tests/distributed/test_estimate.py compares it with what is saved.
    """
    c = architecture(hf).transformer_config(hf)
    h, products = c["hidden_size"], 3 if c["gated_linear_unit"] else 2
    if recompute == "full":
        return itemsize * h
    if symbol == "M":
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        channels = inner + 2 * c["mamba_num_groups"] * c["mamba_state_dim"]
        projected = inner + channels + c["mamba_num_heads"]
        return itemsize * (2 * h + projected + channels + 2 * inner)
    if symbol == "*":  # its core computes its weights again, recompute or not
        q, kv = c["num_attention_heads"] * c["kv_channels"], c["num_query_groups"] * c["kv_channels"]
        rotated = q + kv if architecture(hf).rotary(hf) else 0
        return itemsize * (2 * h + 3 * q + 2 * kv + rotated)
    if symbol == "-":
        return itemsize * (2 * h + products * c["ffn_hidden_size"])
    if recompute == "selective":
        return itemsize * 2 * h
    k, latent = c["moe_router_topk"], c.get("moe_latent_size") or 0
    width = latent or h
    experts = itemsize * (k * (width + products * c["moe_ffn_hidden_size"]) + 2 * latent) + 4 * k * width
    shared = itemsize * products * (c.get("moe_shared_expert_intermediate_size") or 0)
    return itemsize * 2 * h + experts + shared


def _activation_bytes(config: Config, hf: dict[str, Any], stage: int) -> int:
    """1F1B: stage s of n has up to n - s microbatches between their forward and backward passes."""
    learner, layers = config.learner, stages(config, hf)
    tokens = learner.max_tokens_per_microbatch / learner.tensor_model_parallel_size
    itemsize = ITEMSIZE[config.model.dtype]
    kept = sum(activation_bytes(hf, symbol, itemsize, learner.recompute) for symbol in layers[stage])
    # Of the layer that is being recomputed everything is there.
    again = max(activation_bytes(hf, symbol, itemsize, "none") for symbol in layers[stage])
    return int(tokens * (kept * (len(layers) - stage) + (again if learner.recompute != "none" else 0)))


def _flops(config: Config, hf: dict[str, Any]) -> list[float]:
    """Forward floating-point operations per token of every stage: two per weight in use, and the output layer's.

    What grows with the length, attention's own products, and the scan's are left out.
    """
    flops = [sum(2.0 * _weights(hf, symbol) for symbol in layers) for layers in stages(config, hf)]
    flops[-1] += 2.0 * hf["hidden_size"] * hf["vocab_size"]
    return flops


def _weights(hf: dict[str, Any], symbol: str) -> int:
    """Elements of the matrices that one token meets in a layer."""
    c = architecture(hf).transformer_config(hf)
    h, matrices = c["hidden_size"], 3 if c["gated_linear_unit"] else 2
    if symbol == "M":
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        return h * (3 * inner + 2 * c["mamba_num_groups"] * c["mamba_state_dim"] + c["mamba_num_heads"])
    if symbol == "*":
        return h * c["kv_channels"] * 2 * (c["num_attention_heads"] + c["num_query_groups"])
    if symbol == "-":
        return matrices * h * c["ffn_hidden_size"]
    latent = c.get("moe_latent_size") or 0
    routed = matrices * c["moe_router_topk"] * (latent or h) * c["moe_ffn_hidden_size"] + 2 * h * latent
    return routed + matrices * h * (c.get("moe_shared_expert_intermediate_size") or 0) + h * c["num_moe_experts"]
