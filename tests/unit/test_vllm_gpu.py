"""What vLLM is told where its platform is a GPU, which none of these tests has; and what a captured graph may keep."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_rlzero.invariance.vllm_step import Step

# the registries are a process's own
INSTALL = """
from types import SimpleNamespace
import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from megatron_rlzero.invariance import vllm_attention, vllm_layers

platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: {cuda}, device_name="rocm")
vllm_layers.current_platform = vllm_attention.current_platform = platform
vllm_layers.install(4, 1.0)
backend = AttentionBackendEnum.CUSTOM.get_class()
assert backend is vllm_attention.InvariantAttentionBackend and backend.get_name() == "CUSTOM"
asked = dict(
    head_size=128, kv_cache_dtype="auto", block_size=None, use_mla=False, has_sink=False, use_sparse=False,
    use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0), attn_type="decoder",
)
for dtype in (torch.bfloat16, torch.float32):
    assert backend.validate_configuration(dtype=dtype, **asked) == []
for other in (dict(use_mla=True), dict(has_sink=True), dict(kv_cache_dtype="fp8"), dict(block_size=16)):
    assert backend.validate_configuration(dtype=torch.bfloat16, **asked | other), other
assert backend.validate_configuration(dtype=torch.bfloat16, **asked, has_sliding_window=True)
assert backend.get_preferred_block_size(16) == 128
assert backend.get_builder_cls()._cudagraph_support == AttentionCGSupport.ALWAYS
for name in ("RMSNorm", "SiluAndMul", "Mixer2RMSNormGated", "RotaryEmbedding"):
    operator = op_registry_oot[name]
    chosen = operator.dispatch_forward(SimpleNamespace(forward_native="ours"), compile_native=True)
    assert chosen == "ours"
print("installed")
"""


@pytest.mark.parametrize("cuda", [True, pytest.param(False, marks=pytest.mark.full)])
def test_installed_on_gpus_of_one_kind(cuda):
    command = [sys.executable, "-c", INSTALL.replace("{cuda}", str(cuda))]
    ended = subprocess.run(command, capture_output=True, text=True)
    if cuda:
        assert ended.stdout.endswith("installed\n"), ended.stderr
    else:
        assert "there are operators for CPUs and for NVIDIA's GPUs, and vLLM's platform is rocm" in ended.stderr


def test_a_captured_graph_makes_its_own(monkeypatch):
    """What was made before it would be made no more when it is replayed."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    bounds, other = SimpleNamespace(is_cuda=True), torch.zeros(1)
    step, made = Step(1, bounds, other, other, other), []

    def make(step):
        made.append(capturing)
        return len(made)

    assert [step.shared(make), step.shared(make)] == [1, 1]
    capturing = True
    assert [step.shared(make), step.shared(make)] == [2, 2]
    assert made == [False, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked without a GPU"))
    assert Step(1, other, other, other, other).shared(lambda step: step.tokens) == 1
