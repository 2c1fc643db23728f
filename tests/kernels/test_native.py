"""The compiled attention: torch's form within rounding, one result from two instruction sets; the choice of a form."""

import shutil

import pytest
import torch

from megatron_rlzero.kernels import backend, compiler, tiles
from megatron_rlzero.kernels.attention import attention, native, paged_attention, reference
from tests.kernels.checks import BF16, DTYPES, FP32, error, rounded_once, tolerance
from tests.kernels.test_attention import oracle

needs_native = pytest.mark.skipif(not compiler.usable(), reason="no compiler, or no AVX2")
LENGTHS = [1, 5, 17, 128, 129, 300, 2]


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", "")


def make(lengths, dtype=FP32, heads=4, kv_heads=2, dim=32):
    return tuple((torch.randn(sum(lengths), h, dim) * 2).to(dtype) for h in (heads, kv_heads, kv_heads))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (80, 1, 24), (3, 3, 31), (12, 4, 128)])
def test_native_is_torch_within_rounding(dtype, heads, kv_heads, dim):
    inputs = make(LENGTHS, dtype, heads, kv_heads, dim)
    wanted = reference.attention(*inputs, LENGTHS, dim**-0.5)
    found = native.attention(*inputs, LENGTHS, dim**-0.5)
    assert error(found, wanted) < tolerance(dtype)
    assert not torch.equal(found, wanted)
    assert error(native.attention(*inputs, LENGTHS, dim**-0.4), wanted) > 0.05


@needs_native
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0, 64.0])
def test_flat_and_steep_scores(scale):
    """Scores that are exact in fp32, and weights from nearly equal ones to those that vanish."""
    inputs = [x.round() for x in make([257], dim=8)]
    wanted = oracle([257])(inputs[0].double() * scale * 8**0.5, *(x.double() for x in inputs[1:]))
    assert rounded_once(native.attention(*inputs, [257], scale), wanted)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", [("-march=x86-64-v3",), ("-O1", "-march=x86-64-v3"), ("-march=x86-64-v2",)])
def test_another_instruction_set_gives_the_same_bits(monkeypatch, dtype, flags):
    """The order of every sum is the source's, not the compiler's."""
    inputs = make(LENGTHS, dtype, dim=24)
    wanted = native.attention(*inputs, LENGTHS, 0.2)
    other = compiler.compiled("attention", (*compiler.FLAGS, *flags))
    monkeypatch.setattr(native, "compiled", lambda name: other)
    assert torch.equal(native.attention(*inputs, LENGTHS, 0.2), wanted)
    assert not torch.equal(reference.attention(*inputs, LENGTHS, 0.2), wanted)


@needs_native
def test_views_are_read_in_place():
    """Queries, keys and values as slices of one product, which is how the layers have them."""
    q, k, v = make(LENGTHS)
    both = torch.cat((q, k, v), 1)
    views = both.split([4, 2, 2], 1)
    assert not any(x.is_contiguous() for x in views)
    assert torch.equal(native.attention(*views, LENGTHS, 0.2), native.attention(q, k, v, LENGTHS, 0.2))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_from_its_token_on(dtype, bad):
    for which in (1, 2):
        inputs = make([40], dtype)
        wanted = native.attention(*inputs, [40], 0.2)
        inputs[which][21] = bad
        found = native.attention(*inputs, [40], 0.2)
        assert torch.equal(found[:21], wanted[:21])
        assert not bool(found[21:].isfinite().all(-1).any())


@needs_native
def test_tokens_without_a_slot_are_not_stored():
    q, k, v = make([3])
    cache = torch.zeros(1, 2, 2, tiles.KEYS, 32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    plan = native.plan(table, torch.tensor([0, -1, 2]), [3], [3])
    native.paged_attention(q, k, v, cache, plan, 0.2)
    assert torch.equal(cache[0, :, 0, [0, 2]], k[[0, 2]].transpose(0, 1))
    assert torch.equal(cache[0, :, 1, [0, 2]], v[[0, 2]].transpose(0, 1))
    assert not bool(cache[0, :, :, 1].any())
    with pytest.raises(ValueError, match="for 3 new tokens"):
        native.paged_attention(q, k[:2], v[:2], cache, plan, 0.2)
    with pytest.raises(TypeError, match=r"one dtype on one device: torch\.float32 on cpu, torch\.bfloat16"):
        paged_attention(q, k.to(BF16), v, cache, plan, 0.2)


@needs_native
@pytest.mark.parametrize("shapes", [(3, 2, 8, 8), (4, 2, 8, 9), (4, 0, 8, 8)])
def test_shapes_that_do_not_fit_are_refused(shapes):
    heads, kv_heads, dim, other = shapes
    q, k = torch.randn(5, heads, dim), torch.randn(5, kv_heads or 2, other)
    with pytest.raises(ValueError, match=r"expected are \[tokens, heads or kv_heads, dim\]"):
        attention(q, k, k if kv_heads else k[:4], [5], 0.2)


@needs_native
def test_another_dtype_is_refused():
    with pytest.raises(TypeError, match=r"torch\.float64 on cpu"):
        attention(*(x.double() for x in make([3])), [3], 0.2)


def test_the_choice(monkeypatch):
    with pytest.raises(ValueError, match="operators = other: expected is sm_N, or one of native, torch"):
        backend.choose("other")
    assert backend.backend() == ("native" if compiler.usable() else "torch")
    inputs = make([20])
    backend.choose("torch")
    assert backend.backend() == "torch"
    assert torch.equal(attention(*inputs, [20], 0.2), reference.attention(*inputs, [20], 0.2))
    if compiler.usable():
        backend.choose("native")
        assert torch.equal(attention(*inputs, [20], 0.2), native.attention(*inputs, [20], 0.2))


def test_a_gpu_of_another_architecture_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="operators = sm_90 and no GPU here"):
        backend.choose("sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert backend.backend() == "sm_80"  # its tiles are the nearest below
    with pytest.raises(RuntimeError, match="operators = sm_90 and a GPU of sm_80 here"):
        backend.choose("sm_90")
    backend.choose("sm_80")
    assert not backend.native(torch.zeros(1))
    tiles.gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"capability 7\.5; there are some for 8\.0, 9\.0, 10\.0"):
        backend.choose("sm_75")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiler, "COMPILER", "no-such-compiler")
    assert backend.backend() == "torch"
    with pytest.raises(RuntimeError, match="operators = native needs the compiler no-such-compiler"):
        backend.choose("native")


@pytest.mark.skipif(shutil.which(compiler.COMPILER) is None, reason="no compiler")
def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = (*compiler.FLAGS, "-O0")
    compiler.compiled.__wrapped__("attention", flags)
    (path,) = (tmp_path / "megatron_rlzero").iterdir()
    made = path.stat().st_mtime_ns
    compiler.compiled.__wrapped__("attention", flags)
    assert path.stat().st_mtime_ns == made
    with pytest.raises(RuntimeError, match="no-such-flag"):
        compiler.compiled.__wrapped__("attention", (*compiler.FLAGS, "-fno-such-flag"))
    assert [path] == list((tmp_path / "megatron_rlzero").iterdir())
