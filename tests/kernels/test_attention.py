"""Attention: float64 values and gradients, and a document whose bits neither the pack nor its own future changes."""

import pytest
import torch

from megatron_rlzero.kernels.attention import attention
from tests.kernels.checks import (
    BF16,
    BF16_ROUNDING,
    DTYPES,
    FP32,
    INTERPRETED,
    THREADS,
    error,
    errors,
    rounded_once,
    tolerance,
)

pytestmark = pytest.mark.usefixtures("form")

HEADS, KV_HEADS, DIM = 4, 2, 32
SCALE = DIM**-0.5
#: Each side of the row tile, the key block and the query chunk; several documents of one padded length.
LENGTHS = [1, 2, 15, 16, 17, 37, 127, 128, 129, 256, 257, 300, 513, 700, 31, 1, 290]
if INTERPRETED:  # each side of its range of keys; see SMALL in kernels/tiles.py
    LENGTHS = [1, 17, 129, 1, 260]
#: A document of several chunks of queries, or of several ranges of keys, and prefixes of it.
LONG, PREFIXES = 700, [1, 2, 16, 17, 37, 128, 129, 255, 257, 384, 500, 699]
if INTERPRETED:
    LONG, PREFIXES = 260, [1, 129]


def make(lengths, dtype=FP32, heads=HEADS, kv_heads=KV_HEADS, dim=DIM):
    n = sum(lengths)
    return tuple((torch.randn(n, h, dim) * 2).to(dtype) for h in (heads, kv_heads, kv_heads))


def oracle(lengths):
    """Softmax over the lower triangle, one document at a time, in the dtype of its arguments."""

    def f(q, k, v):
        out = []
        for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            b, c = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (b, c))
            scores = torch.einsum("qhd,khd->hqk", a, b) * q.shape[2] ** -0.5
            future = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, c))
        return torch.cat(out)

    return f


def right(y, inputs, lengths):
    """Whether every element is within one rounding; Triton's product in bf16 rounds each weight too."""
    q, k, v = (x.double() for x in inputs)
    wanted = oracle(lengths)(q, k, v)
    if not INTERPRETED or y.dtype == FP32:
        return rounded_once(y, wanted)
    weights_rounded = BF16_ROUNDING / 2 * oracle(lengths)(q, k, v.abs())
    return bool(((y - wanted).abs() <= BF16_ROUNDING * wanted.abs() + weights_rounded).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [
        ([1], 1, 1, 8),
        ([5, 1, 20], 4, 2, 32),
        ([140, 17] if INTERPRETED else [300, 17, 290], 4, 1, 24),
        ([3, 130], 3, 3, 31),
    ],
)
def test_value_and_gradients(dtype, lengths, heads, kv_heads, dim):
    inputs = make(lengths, dtype, heads, kv_heads, dim)
    f = lambda q, k, v: attention(q, k, v, lengths, dim**-0.5)  # noqa: E731
    y = f(*inputs)
    assert y.shape == inputs[0].shape
    assert y.dtype == dtype
    assert right(y, inputs, lengths)
    # Triton rounds weights and scores' gradients for its products, and takes the sum of both from the rounded result
    assert max(errors(f, oracle(lengths), inputs)) < tolerance(dtype, 3 if INTERPRETED else 1)


def test_a_second_rounding_is_noticed():
    inputs = make([5, 20], BF16)
    y = oracle([5, 20])(*(x.double() for x in inputs))
    assert right(y.bfloat16(), inputs, [5, 20])
    assert not right((y * (1 + 2 * BF16_ROUNDING)).bfloat16(), inputs, [5, 20])


@pytest.mark.parametrize("wrong", [[25, 1], [26], [1, 5, 20]])
def test_other_document_bounds_are_noticed(wrong):
    inputs = make([5, 1, 20])
    assert error(attention(*inputs, wrong, SCALE), oracle([5, 1, 20])(*(x.double() for x in inputs))) > 0.01


def test_a_document_without_tokens_changes_nothing():
    inputs = make([5, 20])
    assert torch.equal(attention(*inputs, [0, 5, 0, 20], SCALE), attention(*inputs, [5, 20], SCALE))


@pytest.mark.parametrize("lengths", [[5, 19], [5, 21], []])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match=f"documents of {sum(lengths)} tokens in all for 25 query rows"):
        attention(*make([25]), lengths, SCALE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_is_alone(dtype):
    inputs = make(LENGTHS, dtype)
    torch.set_num_threads(1)
    packed = attention(*inputs, LENGTHS, SCALE)
    for threads in THREADS:
        torch.set_num_threads(threads)
        documents = zip(packed.split(LENGTHS), *(x.split(LENGTHS) for x in inputs), strict=True)
        for wanted, *document in documents:
            assert torch.equal(attention(*document, [len(wanted)], SCALE), wanted)
    order = torch.randperm(len(LENGTHS)).tolist()
    parts = [[x.split(LENGTHS)[i] for i in order] for x in inputs]
    shuffled = attention(*(torch.cat(p) for p in parts), [LENGTHS[i] for i in order], SCALE)
    assert torch.equal(shuffled, torch.cat([packed.split(LENGTHS)[i] for i in order]))


@pytest.mark.cpu
def test_one_product_over_the_pack_is_not_alone():
    """The same mathematics with a block-diagonal mask: the sum over the values runs over another number of keys."""
    lengths = [37, 300, 129]
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in make(lengths))

    def naive(q, k, v, lengths):
        mask = torch.block_diag(*(torch.ones(n, n) for n in lengths)).tril().bool()
        return (q @ k.transpose(1, 2) * SCALE).masked_fill(~mask, -torch.inf).softmax(-1) @ v

    packed = naive(q, k, v, lengths)
    assert error(packed.transpose(0, 1), attention(*(x.transpose(0, 1) for x in (q, k, v)), lengths, SCALE)) < 1e-5
    alone = [naive(*d, [d[0].shape[1]]) for d in zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)]
    assert not torch.equal(torch.cat(alone, 1), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, 1e4])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of Triton's interpreter
def test_other_documents_do_not_leak(dtype, bad):
    lengths = [20, 130, 7] if INTERPRETED else [20, 37, 257, 20]
    inputs = make(lengths, dtype)
    wanted = attention(*inputs, lengths, SCALE)
    for changed in range(len(lengths)):
        other = [x.clone() for x in inputs]
        for x in other:
            x.split(lengths)[changed].fill_(bad)
        for i, (a, b) in enumerate(
            zip(attention(*other, lengths, SCALE).split(lengths), wanted.split(lengths), strict=True)
        ):
            assert torch.equal(a, b) == (i != changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", PREFIXES)
def test_a_row_does_not_depend_on_its_future(dtype, n):
    """The first n tokens alone are the first n of the whole document."""
    inputs = make([LONG], dtype)
    whole = attention(*inputs, [LONG], SCALE)
    assert torch.equal(attention(*(x[:n] for x in inputs), [n], SCALE), whole[:n])
    changed = [torch.cat((x[:n], -x[n:])) for x in inputs]
    assert torch.equal(attention(*changed, [LONG], SCALE)[:n], whole[:n])


def test_gradients_change_no_bit_of_the_value():
    inputs = make([LONG])
    with torch.no_grad():
        wanted = attention(*inputs, [LONG], SCALE)
    with torch.enable_grad():
        assert torch.equal(attention(*(x.clone().requires_grad_() for x in inputs), [LONG], SCALE), wanted)
