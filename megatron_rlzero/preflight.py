"""Checks of a configuration against what lies outside it: the model directory, the data, ports, the run directory."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path
from typing import Any

from megatron_rlzero import environments
from megatron_rlzero.architectures import Architecture, architecture, language_prefix, language_settings, wrong_counts
from megatron_rlzero.config_io import Findings, line
from megatron_rlzero.generation.token import read_token
from megatron_rlzero.network import LOOPBACK, address

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model(f: Findings, weights: bool = True) -> None:
    """model.path holds a checkpoint of a known family whose sizes go with the layout and the lengths.

    Args:
        weights: also look for weights and tokenizer.
    """
    if not f.usable("model.path"):
        return
    path = Path(f.config.model.path)
    if not path.is_dir():
        f.reject("model.path", "no such directory", "give a Hugging Face directory")
        return
    if weights and not any(path.glob("*.safetensors")):
        f.add("model.path", "no *.safetensors in it", "save the weights as safetensors")
    if weights and not any((path / name).is_file() for name in TOKENIZER_FILES):
        f.add("model.path", "no tokenizer in it", "save the tokenizer there (tokenizer.json)")
    hf = _read_config(f, path / "config.json")
    if hf is None:
        return
    try:
        family = architecture(hf)
    except ValueError as error:
        f.add("model.path", f"config.json says {error}", "or name a file with its family as model.family")
        return
    if wrong := wrong_counts(hf):
        for fault in wrong:
            f.add("model.path", f"config.json says {fault}", "correct it")
        return
    faults = family.unsupported(hf)
    for fault in faults:
        f.add("model.path", f"config.json says {fault}", "correct it or use a checkpoint without it")
    if weights and language_prefix(hf):
        f.add(
            "model.path",
            f"config.json says model_type = {hf['model_type']}, whose wrapper around the language model is not served",
            "give the language model as a directory of its own",
        )
    if not faults:
        _check_sizes(f, hf, family)


def _read_config(f: Findings, path: Path) -> dict[str, Any] | None:
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        f.add("model.path", "no config.json in it", "give a Hugging Face directory")
    except (OSError, ValueError) as error:  # not readable, not UTF-8, not JSON
        f.add("model.path", f"config.json cannot be read: {error}", "correct it")
    else:
        if isinstance(hf, dict):
            return language_settings(hf)
        f.add("model.path", "config.json is not an object", "correct it")
    return None


def _check_sizes(f: Findings, hf: dict[str, Any], family: Architecture) -> None:
    """Heads, layers, experts and positions of the model against the parallel sizes and the lengths."""
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if heads % kv_heads:
        f.add(
            "model.path",
            f"config.json says num_attention_heads = {heads} and num_key_value_heads = {kv_heads}",
            "use a checkpoint in which the first is a multiple of the second",
        )
        return
    _check_learner_heads(f, heads, kv_heads)
    _check_rollout_heads(f, heads, kv_heads)
    if f.usable("learner.pipeline_model_parallel_size"):
        try:
            family.layer_pattern(hf, f.config.learner.pipeline_model_parallel_size)
        except ValueError as error:
            f.add("learner.pipeline_model_parallel_size", str(error), "lower it")
    try:
        model, layers = family.transformer_config(hf), family.layer_pattern(hf, 1)
    except KeyError as missing:
        f.add("model.path", f"config.json has no {missing.args[0]}", "add it")
        return
    _check_slices(f, model, layers)
    if "mamba_num_heads" in model:
        _check_mamba(f, model)
    elif family.engine_models():
        f.add(
            "model.path", "config.json says that no layer is a Mamba layer", "vLLM serves this family with one or more"
        )
    experts = model.get("num_moe_experts") or 0
    size = f.config.learner.expert_model_parallel_size
    if f.usable("learner.expert_model_parallel_size") and size > 1 and not experts:
        f.add("learner.expert_model_parallel_size", "the model is dense, it has no experts", "set it to 1")
    elif f.usable("learner.expert_model_parallel_size") and experts % size:
        f.add(
            "learner.expert_model_parallel_size",
            f"the model has {experts} experts, not divisible by it",
            f"choose a divisor of {experts}",
        )
    rollout = f.config.rollout
    if f.usable("rollout.max_prompt_tokens", "rollout.max_response_tokens"):
        longest, positions = rollout.max_prompt_tokens + rollout.max_response_tokens, hf["max_position_embeddings"]
        if longest > positions:
            f.add(
                "rollout.max_response_tokens",
                f"with max_prompt_tokens = {longest} tokens, but the model has max_position_embeddings = {positions}",
                f"make their sum at most {positions}",
            )


def _check_slices(f: Findings, model: dict[str, Any], layers: str) -> None:
    """What tensor parallelism contracts over is cut into reduction_slices equal parts.

    Args:
        model: Megatron's configuration of the model.
        layers: Megatron's pattern.
    """
    if not f.usable("reduction_slices", "kernels") or f.config.kernels != "aligned":
        return
    heads, groups, dim = model["num_attention_heads"], model["num_query_groups"], model["kv_channels"]
    sizes = {
        f"{heads} heads of {dim} = {heads * dim} columns of the output projection": heads * dim,
        f"{heads} + 2 x {groups} heads of {dim} = {(heads + 2 * groups) * dim} rows of the query, key and value "
        "projections": (heads + 2 * groups) * dim,
    }
    if not model.get("num_moe_experts") or "-" in layers:
        sizes[f"intermediate_size = {model['ffn_hidden_size']}"] = model["ffn_hidden_size"]
    if width := model.get("moe_shared_expert_intermediate_size"):
        sizes[f"shared experts of width {width}"] = width
    if heads := model.get("mamba_num_heads"):
        states = model["mamba_num_groups"] * model["mamba_state_dim"]
        sizes |= {f"{heads} Mamba heads": heads, f"{states} elements of Mamba's B and of its C": states}
    for what, size in sizes.items():
        if size % f.config.reduction_slices:
            f.add("reduction_slices", f"the model has {what}, not divisible by it", "lower it to a divisor")


def _check_mamba(f: Findings, model: dict[str, Any]) -> None:
    """Tensor parallelism splits heads and groups of heads; the scan's products are of multiples of 8."""
    for size in ("mamba_head_dim", "mamba_state_dim"):
        if f.usable("kernels") and f.config.kernels == "aligned" and model[size] % 8:
            f.add(
                "model.path", f"{size} = {model[size]}, not a multiple of 8", "use another checkpoint or kernels=stock"
            )
    caching = {"enable_prefix_caching", "enable-prefix-caching"} & f.config.rollout.engine_args.keys()
    if f.usable("rollout.engine_args", "kernels") and f.config.kernels == "aligned":
        for name in sorted(caching):
            if f.config.rollout.engine_args[name]:
                key = f"rollout.engine_args.{name}"
                f.lines.append(line(key, True, "states of Mamba layers cannot be cached by prefix", "remove it"))
    for key in ("learner.tensor_model_parallel_size", "rollout.tensor_model_parallel_size"):
        heads, groups = model["mamba_num_heads"], model["mamba_num_groups"]
        if f.usable(key) and (heads % f.value(key) or groups % f.value(key)):
            f.add(
                key,
                f"the model has {heads} Mamba heads in {groups} groups, not divisible by it",
                f"choose a divisor of {groups}",
            )


def _check_learner_heads(f: Findings, heads: int, kv_heads: int) -> None:
    key = "learner.tensor_model_parallel_size"
    if not f.usable(key):
        return
    size = f.value(key)
    if heads % size:
        f.add(key, f"the model has {heads} attention heads, not divisible by it", f"choose a divisor of {heads}")
    elif kv_heads < size:
        f.add(
            key,
            f"the model has {kv_heads} key-value heads, and sharing one between ranks is not supported",
            f"set it to at most {kv_heads}",
        )
    elif kv_heads % size:
        f.add(key, f"the model has {kv_heads} key-value heads, not divisible by it", f"choose a divisor of {kv_heads}")


def _check_rollout_heads(f: Findings, heads: int, kv_heads: int) -> None:
    """vLLM repeats key-value heads where there are fewer than ranks; the ranks have to be a multiple of them then."""
    key = "rollout.tensor_model_parallel_size"
    if not f.usable(key):
        return
    size = f.value(key)
    if heads % size:
        f.add(key, f"the model has {heads} attention heads, not divisible by it", f"choose a divisor of {heads}")
    elif kv_heads % size and size % kv_heads:
        f.add(key, f"the model has {kv_heads} key-value heads", f"choose a divisor or a multiple of {kv_heads}")


def check_environment(f: Findings) -> None:
    """The task or the files exist and are well formed, and there are as many held-out prompts as eval.prompts."""
    c = f.config.environment
    needed = {
        "reasoning_gym": ("environment.task", "environment.parameters", "environment.size"),
        "jsonl": ("environment.path", "environment.eval_path"),
    }
    if not f.usable("environment.kind"):
        return
    given = [key for key in needed[c.kind] if f.usable(key)]
    if len(given) < len(needed[c.kind]) and c.kind == "reasoning_gym":
        return
    for split, key in (("train", "environment.path"), ("eval", "environment.eval_path")):
        if c.kind == "jsonl" and key not in given:
            continue
        if c.kind == "jsonl" and not f.value(key):
            f.reject(key, "missing", "give a file of problem and answer lines")
            continue
        try:
            environment = environments.build(c, split)
        except environments.DataError as error:
            f.lines += error.violations
            if c.kind == "reasoning_gym":
                return  # the held-out split would say the same
            continue
        if split == "eval" and f.usable("eval.prompts"):
            _check_held_out(f, environment)


def _check_held_out(f: Findings, environment: environments.Environment) -> None:
    wanted = f.config.eval.prompts
    try:
        environment.problem(wanted - 1)
    except IndexError:
        f.add(
            "eval.prompts",
            f"there are {len(environment)} held-out prompts that training does not use",
            f"set it to at most {len(environment)}",
        )


def check_network(f: Findings) -> None:
    """What refits go over exists here, and the secret of the servers can be read."""
    if f.usable("refit.backend") and f.config.refit.backend == "nccl" and not any(Path("/dev").glob("nvidia[0-9]*")):
        f.reject("refit.backend", "this machine has no NVIDIA GPU", "set gloo")
    if f.usable("refit.interface"):
        try:
            address(f.config.refit.interface)
        except ValueError as error:
            f.reject("refit.interface", str(error), "name one of them")
    if f.usable("rollout.token_file") and f.config.rollout.token_file:
        try:
            read_token(f.config.rollout.token_file)
        except ValueError as error:
            problem, _, fix = str(error).partition("; ")
            f.reject("rollout.token_file", problem, fix)


def check_ports(f: Findings) -> None:
    """The ports of servers to be started on this machine are free."""
    c = f.config.rollout
    if c.urls or not f.usable("rollout.urls", "rollout.port", "rollout.servers") or c.port == 0:
        return
    last = c.port + c.servers - 1
    if c.port < 0 or last > 65535:
        f.reject("rollout.port", f"ports {c.port} to {last} do not all exist", "use 1 to 65535, or 0 for free ones")
        return
    for port in range(c.port, last + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server: only a listener is in the way
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                f.add("rollout.port", f"port {port} is taken or not allowed", "choose another, or 0 for free ones")
