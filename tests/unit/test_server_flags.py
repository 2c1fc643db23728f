"""A server's command line and environment, and what the kernels of a configuration change in them; its port."""

import json
import socket

import pytest
from vllm.config import AttentionConfig, CompilationMode, CUDAGraphMode
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from megatron_rlzero.config import Config
from megatron_rlzero.generation import server
from megatron_rlzero.invariance.vllm import VARIABLE, Settings
from megatron_rlzero.kernels.backend import backend


def configuration(directory, kernels: str, tp: int, hf: dict) -> Config:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"} | hf))
    config = Config(kernels=kernels, reduction_slices=8)
    config.model.path = str(directory)
    config.rollout.tensor_model_parallel_size = tp
    config.rollout.temperature = 0.5
    return config


@pytest.mark.parametrize(
    ("kernels", "tp", "hf", "expert_parallel"),
    [
        ("aligned", 1, {"num_experts": 8}, False),
        ("aligned", 2, {"num_experts": 8}, True),
        ("aligned", 2, {"num_local_experts": 8}, True),
        ("aligned", 2, {}, False),
        ("stock", 2, {"num_experts": 8}, False),
    ],
)
def test_flags(tmp_path, kernels, tp, hf, expert_parallel):
    flags = server.flags(configuration(tmp_path, kernels, tp, hf), 1)
    assert ("--enable-expert-parallel" in flags) == expert_parallel
    assert ("--enable-prefix-caching" in flags) == (kernels == "aligned") == ("--no-enable-prefix-caching" not in flags)


def test_prefixes_of_hybrids_are_not_cached(tmp_path):
    for layers, cached in (("M*", False), ("*-", True)):
        hf = {"model_type": "nemotron_h", "hybrid_override_pattern": layers}
        flags = server.flags(configuration(tmp_path, "aligned", 1, hf), 1)
        assert ("--enable-prefix-caching" in flags) == cached


@pytest.mark.parametrize("kernels", ["aligned", "stock"])
def test_flags_on_gpus_are_ones_that_vllm_has(tmp_path, monkeypatch, kernels):
    monkeypatch.setattr(server, "cpu_build", lambda: False)
    flags = server.flags(configuration(tmp_path, kernels, 2, {"num_experts": 8}), 1)
    chosen = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    compilation = chosen.compilation_config
    attention = AttentionConfig(backend=chosen.attention_backend)
    assert (attention.backend == AttentionBackendEnum.CUSTOM) == (kernels == "aligned")
    assert (compilation.mode == CompilationMode.NONE) == (kernels == "aligned")
    assert (compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY) == (kernels == "aligned")
    assert chosen.disable_custom_all_reduce == (kernels == "aligned")
    assert chosen.async_scheduling == (False if kernels == "aligned" else None)
    assert not chosen.enforce_eager


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "inherited")
    monkeypatch.setattr(server, "cpu_build", lambda: True)
    aligned, stock = (server.environment(configuration(tmp_path, k, 1, {})) for k in ("aligned", "stock"))
    assert Settings(**json.loads(aligned[VARIABLE])) == Settings(0.5, "aligned", 8, backend())
    assert aligned["ONEDNN_MAX_CPU_ISA"] not in ("inherited", None)
    assert "ONEDNN_MAX_CPU_ISA" not in stock


def test_free_ports_are_not_those_of_outgoing_connections(tmp_path, monkeypatch):
    first = int(server.OUTGOING.read_text().split()[0])
    assert all(server.FIRST_PORT <= server.free_port() < first for _ in range(20))
    (tmp_path / "range").write_text("10001 60000")
    monkeypatch.setattr(server, "OUTGOING", tmp_path / "range")
    assert server.free_port() == server.FIRST_PORT
    with socket.socket() as taken:
        taken.bind((server.LOOPBACK, server.FIRST_PORT))
        assert server.free_port() >= first  # then one of theirs is better than none
