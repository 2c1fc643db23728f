"""Reading and checking a configuration: every violation at once, each with its key, value and fix.

``load`` is what commands call. Nothing here imports torch, Megatron or vLLM.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rlzero import preflight
from megatron_rlzero.advantage import GROUPED
from megatron_rlzero.config import REFUSED_ENGINE_ARGS, RESERVED_ENGINE_ARGS, Config
from megatron_rlzero.config_io import Findings, Parsed, line, parse
from megatron_rlzero.limits import ABOVE_0, AT_LEAST_0, AT_LEAST_1, CHOICES, FRACTIONS
from megatron_rlzero.run_directory import check_run_dir


class ConfigError(ValueError):
    """A configuration that cannot run; ``violations`` has a line ``key = value: what is wrong; fix`` each."""

    def __init__(self, violations: Sequence[str]) -> None:
        super().__init__("\n".join(violations))
        self.violations = list(violations)


def load(path: str | Path, overrides: Sequence[str] = (), *, starting: bool = True, weights: bool = True) -> Config:
    """The configuration of a YAML file with ``section.key=value`` overrides, checked.

    Args:
        path: YAML file; ``${section.key}`` refers to another key.
        overrides: applied in their order.
        starting, weights: see ``validate``.

    Raises:
        ConfigError: with every violation, those of reading the file included.
    """
    parsed = parse(path, overrides)
    violations = _violations(parsed, starting, os.environ, weights)
    if violations:
        raise ConfigError(violations)
    return parsed.config


def validate(
    config: Config, *, starting: bool = True, environ: Mapping[str, str] = os.environ, weights: bool = True
) -> list[str]:
    """Every violation, one line each; empty if the configuration can run.

    Args:
        config: typed values.
        starting: also check what has to hold before the first process starts and not after: readable data sets (this
            imports reasoning-gym, seconds), free ports, a run directory without a run. The launcher does; a process
            of a running run, or a command that only reads, does not.
        environ: where torch's elastic launcher leaves WORLD_SIZE.
        weights: whether model.path needs more than its config.json.
    """
    return _violations(Parsed(config), starting, environ, weights)


def _violations(parsed: Parsed, starting: bool, environ: Mapping[str, str], weights: bool) -> list[str]:
    findings = Findings(parsed)
    _ranges(findings)
    _layout(findings, environ)
    _slices(findings)
    _batch(findings)
    _rollout(findings)
    preflight.check_model(findings, weights)
    if starting:
        preflight.check_environment(findings)
        preflight.check_ports(findings)
        check_run_dir(findings)
    return findings.lines


def _ranges(f: Findings) -> None:
    for keys, holds, fix in (
        (AT_LEAST_1, lambda value: value >= 1, "give at least 1"),
        (AT_LEAST_0, lambda value: value >= 0, "give 0 or more"),
        (ABOVE_0, lambda value: value > 0, "give more than 0"),
    ):
        for key in keys:
            if not f.usable(key):
                continue
            if not math.isfinite(f.value(key)):
                f.reject(key, "not finite", fix)
            elif not holds(f.value(key)):
                f.reject(key, "too small", fix)
    for key, closed in FRACTIONS.items():
        if f.usable(key) and not (0 <= f.value(key) < 1 or (closed and f.value(key) == 1)):
            f.reject(key, "out of range", f"give 0 or more and {'at most' if closed else 'less than'} 1")
    for key, choices in CHOICES.items():
        if f.usable(key) and f.value(key) not in choices:
            f.reject(key, "unknown", f"one of {', '.join(choices)}")
    if f.config.learner.virtual_pipeline_model_parallel_size is not None:
        f.reject(
            "learner.virtual_pipeline_model_parallel_size",
            "virtual (interleaved) pipeline stages are not supported",
            "remove it",
        )
    if f.usable("learner.context_parallel_size") and f.config.learner.context_parallel_size > 1:
        f.reject("learner.context_parallel_size", "context parallelism is not exact yet", "set it to 1")
    if f.usable("environment.prompt_template") and "{problem}" not in f.config.environment.prompt_template:
        f.reject("environment.prompt_template", "the problem has no place in it", "put {problem} where it goes")


def _layout(f: Findings, environ: Mapping[str, str]) -> None:
    """How the learner's ranks are divided, without regard to the model."""
    c = f.config.learner
    stated = environ.get("WORLD_SIZE")
    if stated is not None and f.usable("learner.world_size") and stated != str(c.world_size):
        f.add(
            "learner.world_size",
            f"the launcher started WORLD_SIZE = {stated} ranks",
            "start as many ranks as it says, or change it",
        )
    sizes = [f"learner.{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")]
    if not f.usable("learner.world_size", *sizes):
        return
    tp, pp, ep = c.tensor_model_parallel_size, c.pipeline_model_parallel_size, c.expert_model_parallel_size
    if c.world_size % (tp * pp):
        f.add(
            "learner.world_size",
            f"not divisible by tensor x pipeline parallel size = {tp} x {pp}",
            f"make it a multiple of {tp * pp}",
        )
        return
    dp = c.world_size // (tp * pp)
    if (tp * dp) % ep:
        f.add(
            "learner.expert_model_parallel_size",
            f"does not divide tensor x data parallel size = {tp} x {dp}",
            f"choose a divisor of {tp * dp}",
        )
    if f.usable("loop.prompts_per_update", "loop.samples_per_prompt"):
        responses = f.config.loop.prompts_per_update * f.config.loop.samples_per_prompt
        if responses % dp:
            f.add(
                "loop.prompts_per_update",
                f"times samples_per_prompt = {responses} responses, not divisible over {dp} data-parallel ranks",
                f"make their product a multiple of {dp}",
            )


def _slices(f: Findings) -> None:
    """Sums that tensor parallelism splits have the same slices whatever the tensor-parallel sizes."""
    slices = f.config.reduction_slices
    if not f.usable("reduction_slices"):
        return
    if slices & (slices - 1):
        f.reject("reduction_slices", "not a power of two", "give a power of two")
        return
    for key in ("learner.tensor_model_parallel_size", "rollout.tensor_model_parallel_size"):
        if f.usable(key) and slices % f.value(key):
            f.add("reduction_slices", f"not a multiple of {key} = {f.value(key)}", "raise it or lower that size")


def _batch(f: Findings) -> None:
    """Updates, lag and learning-rate schedule."""
    loop, optimizer = f.config.loop, f.config.learner.optimizer
    if f.usable("refit.every", "loop.max_lag") and f.config.refit.every > loop.max_lag + 1:
        f.add(
            "refit.every",
            f"above loop.max_lag + 1 = {loop.max_lag + 1}: prompts would wait for weights that never come",
            f"set it to at most {loop.max_lag + 1} or raise loop.max_lag",
        )
    grouped = f.usable("loop.advantage") and loop.advantage in GROUPED
    if grouped and f.usable("loop.samples_per_prompt") and loop.samples_per_prompt < 2:
        f.add(
            "loop.samples_per_prompt",
            f"loop.advantage = {loop.advantage} compares the responses to one prompt",
            "set it to 2 or more, or loop.advantage to batch_mean",
        )
    if f.usable("loop.objective", "loop.advantage") and loop.objective == "grpo" != loop.advantage:
        f.add(
            "loop.objective", f"its advantages are normalised by group, not {loop.advantage}", "set loop.advantage=grpo"
        )
    keys = [f"learner.optimizer.{name}" for name in ("lr", "min_lr", "lr_decay_style")]
    if f.usable(*keys) and optimizer.lr_decay_style == "cosine" and optimizer.min_lr > optimizer.lr:
        f.add("learner.optimizer.min_lr", f"above lr = {optimizer.lr}", "set it to at most lr")


def _rollout(f: Findings) -> None:
    """Lengths and addresses of the servers."""
    c = f.config.rollout
    lengths = ("rollout.max_prompt_tokens", "rollout.max_response_tokens", "learner.max_tokens_per_microbatch")
    if f.usable(*lengths):
        longest = c.max_prompt_tokens + c.max_response_tokens
        if longest > f.config.learner.max_tokens_per_microbatch:
            f.add(
                "learner.max_tokens_per_microbatch",
                f"a response is never split and can have max_prompt_tokens + max_response_tokens = {longest} tokens",
                f"set it to {longest} or more",
            )
    if f.usable("rollout.engine_args"):
        for name, value in c.engine_args.items():
            flag, key = name.replace("_", "-"), f"rollout.engine_args.{name}"
            if flag in RESERVED_ENGINE_ARGS:
                f.lines.append(line(key, value, "this flag is set by the project", "remove it"))
            elif flag in REFUSED_ENGINE_ARGS:
                f.lines.append(line(key, value, "not supported", f"remove it and {REFUSED_ENGINE_ARGS[flag]}"))
    preflight.check_network(f)
    if not f.usable("rollout.urls"):
        return
    beyond: list[str] = []
    for index, url in enumerate(c.urls):
        if not is_server_url(url):
            f.lines.append(line(f"rollout.urls[{index}]", url, "not the address of a server", "write http://host:port"))
        elif url.rstrip("/") in [other.rstrip("/") for other in c.urls[:index]]:
            f.lines.append(line(f"rollout.urls[{index}]", url, "listed twice", "remove one"))
        elif not is_loopback(urlsplit(url).hostname):
            beyond.append(url)
    if beyond and f.usable("rollout.token_file") and not c.token_file:
        f.add("rollout.token_file", f"{beyond[0]} is not on this machine's loopback", "name the file with its secret")
    if beyond and f.usable("refit.interface") and f.config.refit.interface == "lo":
        f.add("refit.interface", f"{beyond[0]} cannot be reached over it", "name the network interface to it")


def is_loopback(host: str) -> bool:
    """Whether the name of a host is this machine's loopback."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Whether it means every address of a machine, so that nobody else can call it by that."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_server_url(url: str) -> bool:
    """Whether it is http://host:port, without a path, of one host."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname and parts.port) and not is_unspecified(parts.hostname)
        return parts.scheme in ("http", "https") and named and parts.path in ("", "/")
    except ValueError:  # a port that is no number, brackets that do not match
        return False
