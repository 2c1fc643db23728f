"""Builds the learner from a configuration: parallel groups, model, optimizer, learning-rate schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rlzero.architectures import Architecture, add
from megatron_rlzero.architectures.rules import padded_vocab_size
from megatron_rlzero.config import Config
from megatron_rlzero.config import Learner as LearnerConfig
from megatron_rlzero.config import Optimizer as OptimizerSettings
from megatron_rlzero.invariance.megatron import PolicyModel, hybrid_stack_spec
from megatron_rlzero.invariance.operators import OPERATORS
from megatron_rlzero.kernels import backend, libraries
from megatron_rlzero.launch import ranks_store
from megatron_rlzero.learner import cpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Parts:
    """What ``build`` makes on one rank.

    Attributes:
        policy: the bare model, for its parameters and their names.
        model: the same inside Megatron's mixed-precision and data-parallel wrappers.
    """

    policy: PolicyModel
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    config: TransformerConfig
    device: torch.device


def initialise_distributed(config: Config) -> tuple[torch.device, dist.Store]:
    """Joins the process group that the launcher's environment names, and makes Megatron's groups.

    gloo on CPUs; with GPUs NCCL for them and gloo for host tensors. Returns the rank's device and the rendezvous store.
    """
    if config.model.family:
        add(config.model.family)
    gpu = torch.cuda.is_available()
    if gpu:
        local, count = dist.get_node_local_rank(0), torch.cuda.device_count()
        if local >= count:
            raise RuntimeError(
                f"rank {local} of this machine has no GPU, of which torch finds {count}: lower learner.world_size, or "
                "start fewer ranks here"
            )
        torch.cuda.set_device(local)
    else:
        if config.kernels == "aligned":
            os.environ.update(libraries.settings())
        torch.set_num_threads(config.learner.threads_per_rank)
        cpu.activate()
    timeout = timedelta(seconds=config.learner.timeout_s)
    store, rank, size = ranks_store(timeout)
    transport = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(transport, store=store, rank=rank, world_size=size, timeout=timeout)
    make_parallel_groups(config.learner)
    if config.kernels == "aligned":
        _agree_on_operators(store, rank, size)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"), store


def _agree_on_operators(store: dist.Store, rank: int, size: int) -> None:
    """All ranks compute with one form of the operators; their libraries are compiled before the first step.

    Raises:
        RuntimeError: the machines would choose differently; names two ranks.
    """
    mine = backend.backend()
    store.set(f"operators/{rank}", mine)
    theirs = [store.get(f"operators/{other}").decode() for other in range(size)]
    if other := [n for n, name in enumerate(theirs) if name != mine]:
        raise RuntimeError(
            f"operators are {mine} on rank {rank} and {theirs[other[0]]} on rank {other[0]}: the ranks need machines "
            "of one kind: one architecture of GPUs, or g++ and AVX2 on all of them or on none"
        )
    backend.choose(mine)


def make_parallel_groups(config: LearnerConfig) -> None:
    """Megatron's tensor, pipeline, expert and data-parallel groups over the ranks of the process group."""
    with cpu.device_mode():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(ceil(config.timeout_s / 60), 1),
        )
        model_parallel_cuda_manual_seed(1)


def build(config: Config, family: Architecture, hf: dict[str, Any], device: torch.device) -> Parts:
    """Model with uninitialised weights, which the caller loads, and its optimizer.

    Args:
        family, hf: architecture module and config.json of the checkpoint.
    """
    with cpu.device_mode():
        transformer = transformer_config(config, family.transformer_config(hf))
        transformer.reduction_slices = config.reduction_slices
        transformer.operators = OPERATORS[config.kernels]
        groups = ProcessGroupCollection.use_mpu_process_groups()
        policy = PolicyModel(
            config=transformer,
            hybrid_stack_spec=hybrid_stack_spec(family.rotary(hf), transformer.qk_layernorm, family.mixer(hf)),
            hybrid_layer_pattern=family.layer_pattern(hf, config.learner.pipeline_model_parallel_size),
            vocab_size=hf["vocab_size"],
            padded_vocab_size=padded_vocab_size(hf["vocab_size"], config.reduction_slices),
            temperature=config.rollout.temperature,
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
            pg_collection=groups,
        ).to(device)
        for parameter in policy.parameters():
            parameter.data.zero_()  # rows of the padded vocabulary come from no checkpoint
        inner = _half(transformer, policy) if transformer.bf16 else policy
        model = DistributedDataParallel(
            transformer,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.learner.optimizer.use_distributed_optimizer,
            ),
            inner,
        )
        transformer.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(optimizer_config(config), [model])
        scheduler = schedule(config.learner.optimizer, optimizer, config.loop.updates)
        transformer.grad_scale_func = optimizer.scale_loss
    return Parts(policy, model, optimizer, scheduler, transformer, device)


def _half(transformer: TransformerConfig, policy: PolicyModel) -> Float16Module:
    """Megatron's bf16 wrapper, but what is to stay fp32 stays so; before weights are loaded, so that no bit is lost."""
    inner = Float16Module(transformer, policy)
    for parameter in policy.parameters():
        if getattr(parameter, "keep_fp32", False):
            parameter.data = parameter.data.float()
    for buffer in policy.buffers():
        buffer.data = buffer.data.float()
    return inner


def transformer_config(config: Config, architecture: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration: the architecture, the layout, and every fusion off that is not ours."""
    learner = config.learner
    recompute: dict[str, Any] = {}
    if learner.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif learner.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    bf16 = config.model.dtype == "bf16"
    return TransformerConfig(
        **architecture,
        **recompute,
        tensor_model_parallel_size=learner.tensor_model_parallel_size,
        pipeline_model_parallel_size=learner.pipeline_model_parallel_size,
        expert_model_parallel_size=learner.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        sequence_parallel=learner.tensor_model_parallel_size > 1,
        params_dtype=DTYPES[config.model.dtype],
        pipeline_dtype=DTYPES[config.model.dtype],
        bf16=bf16,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss" if learner.moe_aux_loss_coeff else "none",
        moe_aux_loss_coeff=learner.moe_aux_loss_coeff,
        moe_z_loss_coeff=learner.moe_z_loss_coeff or None,
        moe_router_bias_update_rate=learner.moe_router_bias_update_rate,
        moe_grouped_gemm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=torch.cuda.is_available(),
        deterministic_mode=config.kernels == "aligned",  # the embedding's gradient, which else has no order on a GPU
    )


def optimizer_config(config: Config) -> OptimizerConfig:
    """Adam over fp32 main parameters."""
    settings = config.learner.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=0.0,  # learner/clip.py clips
        bf16=config.model.dtype == "bf16",
        params_dtype=DTYPES[config.model.dtype],
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )


def schedule(settings: OptimizerSettings, optimizer: MegatronOptimizer, updates: int) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then constant or cosine to min_lr at the last update. One step an update."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_updates,
        lr_decay_steps=max(updates, settings.lr_warmup_updates + 1),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
