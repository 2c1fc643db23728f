"""Linear: float64 values and gradients, and rows whose bits no batch changes."""

import pytest
import torch
from torch.nn import functional as F

from megatron_rlzero.kernels.linear import column_parallel, linear, replicated, row_parallel
from megatron_rlzero.kernels.product.reference import batched, batched_add
from megatron_rlzero.kernels.reduction import row_sum, sliced_product, tree
from tests.kernels.checks import DTYPES, FP32, INTERPRETED, dependent_rows, errors, rounded_once, tolerance


def oracle(x, weight, bias=None):
    y = torch.einsum("...k,nk->...n", x, weight)
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (3, 11), (0, 4), (2, 1, 3)])
def test_value_and_gradients(dtype, shape):
    x, weight = torch.randn(*shape, 96).to(dtype), torch.randn(33, 96).to(dtype)
    for inputs in ((x, weight), (x, weight, torch.randn(33).to(dtype))):
        y = linear(*inputs)
        assert y.shape == (*shape, 33)
        assert y.dtype == dtype
        if x.numel():
            assert rounded_once(y, oracle(*(t.double() for t in inputs)))
            assert max(errors(linear, oracle, inputs)) < tolerance(dtype)


def test_products_rounded_in_between_are_noticed():
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(33, 96).bfloat16()
    halves = F.linear(x[:, :48], weight[:, :48]) + F.linear(x[:, 48:], weight[:, 48:])
    assert not rounded_once(halves, oracle(x.double(), weight.double()))
    assert errors(lambda a, w: linear(a, w) * 1.0001, oracle, (x.float(), weight.float()))[0] > tolerance(FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(32, 1), (32, 7), (64, 129), (100, 33), (127, 129), (256, 1), (256, 512)])
def test_rows_do_not_depend_on_the_batch(dtype, k, n):
    weight = torch.randn(n, k).to(dtype)
    # The bf16 product reads on into the next row, times zero, where K is no multiple of 32: harmless but for NaN.
    nan = dtype == FP32 or k % 32 == 0
    assert dependent_rows(lambda x: linear(x, weight), torch.randn(50, k).to(dtype), nan) == []


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(512, 1024), (1024, 100), (2048, 512)])
def test_rows_of_wide_products_do_not_depend_on_the_batch(dtype, k, n):
    """Where libraries would cut K to fit the number of rows (bf16, AMX) or of threads (fp32)."""
    weight = torch.randn(n, k).to(dtype)
    assert dependent_rows(lambda x: linear(x, weight), torch.randn(50, k).to(dtype)) == []


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 8, 16, 24, 33, 96])
def test_narrow_products_depend_neither_on_threads_nor_on_the_other_columns(dtype, n):
    """Where a library has other code for few columns, or for the few that a thread of many is left with."""
    x, weight = torch.randn(16, 64).to(dtype), torch.randn(96, 64).to(dtype)
    torch.set_num_threads(1)
    wanted = linear(x, weight)[:, :n]
    for threads in (1, 2, 3, 4, 8):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x, weight[:n]), wanted), threads


@pytest.mark.cpu
@pytest.mark.parametrize("n", [8, 16, 24, 40, 64])
@pytest.mark.parametrize("rows", [8, 16])
def test_narrow_batches_do_not_depend_on_threads_strides_and_number(rows, n):
    a, b, total = torch.randn(3, rows, 32), torch.randn(3, 32, n), torch.randn(3, rows, n)
    layouts = [(a, b), tuple(x.movedim(0, 2).contiguous().movedim(2, 0) for x in (a, b))]
    torch.set_num_threads(1)
    wanted, added = batched(a, b), batched_add(total.clone(), a, b)
    for threads in (1, 2, 3, 4, 8):
        torch.set_num_threads(threads)
        for x, y in layouts:
            for some in (slice(0, 3), slice(0, 1), slice(1, 2)):
                assert torch.equal(batched(x[some], y[some]), wanted[some])
                assert torch.equal(batched(x[some], y[some], torch.empty_like(wanted[some])), wanted[some])
                assert torch.equal(batched_add(total[some].clone(), x[some], y[some]), added[some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96] if INTERPRETED else [64, 576, 896])
def test_a_bias_depends_on_neither_rows_nor_columns(dtype, k):
    """Ranks hold some of the columns; the learner's are in another order than the engine's."""
    n = 96 if INTERPRETED else 960
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(50, k).to(dtype)
    y = linear(x, weight, bias)
    assert dependent_rows(lambda x: linear(x, weight, bias), x) == []
    for ranks in (2, 4):
        parts = [linear(x, w, b) for w, b in zip(weight.chunk(ranks), bias.chunk(ranks), strict=True)]
        assert torch.equal(torch.cat(parts, 1), y)
    order = torch.randperm(n)
    assert torch.equal(linear(x, weight[order], bias[order]), y[:, order])
    # a sum rounded before the bias is another one; in fp32 the library adds it to one panel of K, Triton to them all
    assert torch.equal(linear(x, weight) + bias, y) == (dtype == FP32 and (INTERPRETED or k == 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_cut_by_the_number_of_rows_is_noticed(dtype):
    """What libraries do with few rows, and what padding them is for."""
    weight = torch.randn(129, 256).to(dtype)

    def cut(x):
        at = 4 * len(x)
        return linear(x[:, :at], weight[:, :at]) + linear(x[:, at:], weight[:, at:])

    assert dependent_rows(cut, torch.randn(50, 256).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layout_does_not_count(dtype):
    x, weight = torch.randn(21, 96).to(dtype), torch.randn(33, 96).to(dtype)
    strided = torch.empty(21, 192, dtype=dtype)[:, ::2].copy_(x)
    assert torch.equal(linear(strided, weight), linear(x, weight))
    assert torch.equal(linear(x.expand(3, 21, 96), weight)[2], linear(x, weight))
    bias = torch.randn(33).to(dtype)
    assert torch.equal(linear(x, weight, bias.repeat_interleave(2)[::2]), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [(), (16, 16), (8, 20, 4)])
def test_parallel_forms_on_one_rank(dtype, blocks):
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(32, 64).to(dtype)
    column = lambda a, w: column_parallel(a, w, 4, blocks=blocks)  # noqa: E731
    row = lambda a, w: row_parallel(a, w, 4)  # noqa: E731
    for f in (column, row):
        assert rounded_once(f(x, weight), oracle(x.double(), weight.double()))
        assert max(errors(f, oracle, (x, weight))) < tolerance(dtype)
    assert torch.equal(column(x, weight), linear(x, weight))
    bias = torch.randn(32).to(dtype)
    biased = lambda a, w, b: column_parallel(a, w, 4, blocks=blocks, bias=b)  # noqa: E731
    assert max(errors(biased, oracle, (x, weight, bias))) < tolerance(dtype)
    assert torch.equal(biased(x, weight, bias), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replicated_form_on_one_rank(dtype):
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(32, 64).to(dtype)
    assert torch.equal(replicated(x, weight), linear(x, weight))
    assert max(errors(replicated, oracle, (x, weight))) < tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 100, 1000])
def test_a_sum_over_rows_does_not_depend_on_the_columns(dtype, rows):
    x = torch.randn(rows, 33).to(dtype)
    total = row_sum(x)
    assert total.dtype == FP32
    assert torch.equal(total, tree(x.float()))
    for strided in (x.T.contiguous().T, x.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(row_sum(strided), total)
        assert torch.equal(tree(strided.float()), total)
    assert torch.equal(total, torch.cat([row_sum(part) for part in x.split(7, 1)]))
    torch.testing.assert_close(total.double(), x.double().sum(0), atol=1e-4, rtol=0)
    # another order is noticed, but where fp32 holds the sums of bf16 numbers without rounding
    if rows == 1000 and dtype == FP32:
        assert not torch.equal(total, row_sum(x.flip(0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sliced_product_is_the_tree_of_its_parts(dtype):
    """What two ranks hold, added, is what one rank has."""
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64, 33).to(dtype)
    whole = sliced_product(x, weight, 4)
    halves = [sliced_product(a, w, 2) for a, w in zip(x.chunk(2, 1), weight.chunk(2), strict=True)]
    assert torch.equal(tree(torch.stack(halves)), whole)
    for blocks in ((32, 32), (24, 36, 4)):
        stacked, halves = sliced_product(x, weight, 4, blocks), []
        for rank in range(2):
            columns = torch.cat([part.chunk(2)[rank] for part in torch.arange(64).split(blocks)])
            mine = [size // 2 for size in blocks]
            halves.append(sliced_product(x[:, columns], weight[columns], 2, mine))
        assert torch.equal(tree(torch.stack(halves)), stacked)
        assert not torch.equal(whole, stacked)
    assert not torch.equal(whole, sliced_product(x, weight, 2))
    with pytest.raises(ValueError, match="over 64 does not divide into 3 slices: it has a block of 64"):
        sliced_product(x, weight, 3)


def test_a_tree_adds_neighbours():
    x = torch.randn(5, 100)
    a, b, c, d, e = x
    assert torch.equal(tree(x), ((a + b) + (c + d)) + e)
    assert not torch.equal(tree(x), (((a + b) + c) + d) + e)
    assert torch.equal(tree(x.T, dim=1), tree(x))
    assert torch.equal(tree(x[:1]), a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [512] if INTERPRETED else [64, 512, 576, 2048])
def test_rows_of_a_row_parallel_layer_do_not_depend_on_the_batch(dtype, k):
    weight = torch.randn(129, k).to(dtype)
    assert dependent_rows(lambda x: row_parallel(x, weight, 4), torch.randn(50, k).to(dtype)) == []
