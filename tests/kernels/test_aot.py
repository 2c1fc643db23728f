"""Every Triton kernel compiles for every architecture: no spills, shared memory that fits, tensor cores."""

import pytest
import torch

from megatron_rlzero.kernels import backend, tiles
from megatron_rlzero.kernels.log_prob import log_softmax
from tools import aot_calls
from tools.aot import SHARED, compiled, compiling, grids
from tools.aot_calls import calls

pytestmark = pytest.mark.skipif(backend.INTERPRETED, reason="the interpreter compiles nothing")

#: kernels whose bf16 products are for tensor cores
PRODUCTS = (
    "product.product", "experts.rows_times_weights", "experts.weight_gradients", "attention.triton_forward.attend",
    "attention.triton_backward.to_keys", "attention.triton_backward.to_queries", "mamba.scan",
    "mamba.triton_backward.tokens",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", tiles.GPUS)
def test_every_kernel_fits(capability, dtype):
    seen = set()
    for name, call in calls(dtype):
        found = compiled(call, capability)
        assert found, f"{name} launches no kernel"
        for kernel in found:
            assert kernel.spills == 0, kernel
            assert kernel.shared <= SHARED[capability], kernel
            assert kernel.registers <= 255, kernel
            if dtype == torch.bfloat16 and kernel.kernel in PRODUCTS and name != "router's gate":
                assert kernel.matrix, f"{name}: {kernel}"
            if kernel.matrix:
                seen.add(kernel.kernel)
    assert seen == (set(PRODUCTS) if dtype == torch.bfloat16 else set())  # fp32 is never rounded to TF32


def test_grids_of_many_tokens_are_ones_that_a_gpu_takes(monkeypatch):
    monkeypatch.setattr(aot_calls, "TOKENS", 2**17)
    for name, call in calls(torch.bfloat16):
        for kernel, (x, *others) in grids(call, 90).items():
            assert x < 2**31, (name, kernel)
            assert all(count < 2**16 for count in others), (name, kernel, others)


@pytest.mark.parametrize("capability", tiles.GPUS)
def test_a_block_of_the_vocabulary_is_added_by_one_binary(capability):
    """Its order must not follow from padding, from a rank's part, or from the number of rows."""

    def logits(rows, ids, pitch):
        return torch.empty(rows, pitch, dtype=torch.bfloat16, device="meta")[:, :ids]

    with compiling(capability) as found:
        for rows, ids, pitch in ((16, 32_001, 32_001), (17, 32_001, 32_128), (16, 151_936, 151_936), (1, 128, 128)):
            log_softmax(logits(rows, ids, pitch))
    kinds = [(module, name) for module, name, _ in found if "log_prob" in module]
    assert len(kinds) == 1, kinds


def test_spills_and_shared_memory_are_noticed(monkeypatch):
    """A tile that is too large for its warps."""
    large = tiles.Tile(m=128, n=128, k=32, warps=2, stages=2)
    monkeypatch.setitem(tiles.GPUS, 80, tiles.replace(tiles.GPUS[80], product=large))
    name, call = next(calls(torch.bfloat16))
    assert name == "linear"
    found = [kernel for kernel in compiled(call, 80) if kernel.kernel == "product.product"]
    assert found
    assert all(kernel.spills > 0 or kernel.shared > SHARED[80] for kernel in found)


def test_the_compilers_own_choice_is_put_back():
    before = backend.triton, tiles.gpu
    compiled(next(calls(torch.bfloat16))[1], 80)
    assert (backend.triton, tiles.gpu) == before
