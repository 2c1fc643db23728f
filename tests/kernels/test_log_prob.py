"""Log-probability and entropy: float64 values and gradients; chunks, padding and batch change no bit."""

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.log_prob import dispatch, log_prob
from tests.kernels.checks import DTYPES, FP32, INTERPRETED, dependent_rows, error, errors, tolerance, with_gradients

#: ids, and with their padding; an interpreter is slow
IDS, PADDED = (300, 384) if INTERPRETED else (1000, 1024)


def make(tokens, hidden, vocabulary, dtype=FP32, padded=None):
    """Logits of a spread of about 2."""
    x = torch.randn(tokens, hidden).to(dtype)
    weight = (torch.randn(padded or vocabulary, hidden) * 2 / hidden**0.5).to(dtype)
    return x, weight, torch.randint(0, vocabulary, (tokens,))


def oracle(targets, vocabulary, temperature=1.0, dtype=FP32):
    """The logits are rounded to the model's dtype, on both sides of the comparison."""

    def f(hidden, weight):
        logits = hidden @ weight[:vocabulary].T
        logits = logits + (logits.to(dtype).double() - logits).detach()
        return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    return f


def entropy_oracle(hidden, weight, vocabulary, temperature=1.0):
    p = torch.distributions.Categorical(logits=hidden.double() @ weight[:vocabulary].double().T / temperature)
    return p.entropy()


CASES = [
    # tokens, hidden, vocabulary, padded vocabulary, temperature
    (1, 16, 7, 7, 1.0),
    (5, 32, 100, 128, 1.0),
    (17, 33, 1000, 1024, 0.7),
    (33, 64, 1025, 1152, 1.0),
    (4, 64, 256, 512, 2.5),
]
if INTERPRETED:
    CASES = [(5, 32, 100, 128, 1.0), (17, 33, 300, 384, 0.7)]


@pytest.mark.parametrize("case", CASES)
def test_value_entropy_and_gradients(case):
    tokens, hidden, vocabulary, padded, temperature = case
    x, weight, targets = make(tokens, hidden, vocabulary, FP32, padded)
    targets[-1] = vocabulary - 1
    f = lambda a, w: log_prob(a, w, targets, vocabulary, temperature)[0]  # noqa: E731
    assert f(x, weight).shape == (tokens,)
    assert max(errors(f, oracle(targets, vocabulary, temperature), (x, weight))) < tolerance(FP32)
    entropies = log_prob(x, weight, targets, vocabulary, temperature)[1]
    assert not entropies.requires_grad
    assert error(entropies, entropy_oracle(x, weight, vocabulary, temperature)) < tolerance(FP32)
    # A temperature that is left out, and padding that is not.
    assert error(f(x, weight), oracle(targets, vocabulary, temperature * 1.01)(x.double(), weight.double())) > 1e-4
    if padded > vocabulary:
        assert error(f(x, weight), oracle(targets, padded, temperature)(x.double(), weight.double())) > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bf16(temperature):
    """Against float64 with logits rounded to bf16, as both engines hold them; d is rounded once and the product once.

    Rounded logits land beside each other where float64 and fp32 accumulation round differently: a few elements differ
    by one unit of bf16, so the value has the same tolerance as a gradient.
    """
    x, weight, targets = make(33, 64, IDS, torch.bfloat16, PADDED)
    f = lambda a, w: log_prob(a, w, targets, IDS, temperature)[0]  # noqa: E731
    assert f(x, weight).dtype == FP32
    wanted = oracle(targets, IDS, temperature, torch.bfloat16)
    assert max(errors(f, wanted, (x, weight))) < tolerance(torch.bfloat16, roundings=2)
    exact = oracle(targets, IDS, temperature)(x.double(), weight.double())
    assert error(f(x, weight), exact) > tolerance(FP32)


def test_large_logits_neither_overflow_nor_vanish():
    x, weight, targets = make(9, 32, 300, FP32, 384)
    x = x * 300
    found, entropies = log_prob(x, weight, targets, 300)
    assert error(found, oracle(targets, 300)(x.double(), weight.double())) < tolerance(FP32)
    assert (entropies >= 0).all()
    assert error(entropies + 1, entropy_oracle(x, weight, 300) + 1) < 1e-4
    assert not (x @ weight.T).exp().isfinite().all()


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_vocabulary(dtype):
    """The targets lie in the first, in the last and in the first block that has padded ids."""
    vocabulary = 151_936
    x, weight, _ = make(5, 16, vocabulary, dtype, 152_064)
    targets = torch.tensor([0, 127, vocabulary - 1, vocabulary - 128, 70_000])
    found, entropies = log_prob(x, weight, targets, vocabulary)
    if dtype == FP32:
        assert error(found, oracle(targets, vocabulary)(x.double(), weight.double())) < tolerance(FP32)
        assert error(entropies, entropy_oracle(x, weight, vocabulary)) < tolerance(FP32)
    # Padded ids are outside: fewer of them, none, or the loudest weights there change no bit.
    loud = weight.clone()
    loud[vocabulary:] = 100.0
    for other in (weight[:vocabulary], loud):
        assert torch.equal(log_prob(x, other, targets, vocabulary)[0], found)
        assert torch.equal(log_prob(x, other, targets, vocabulary)[1], entropies)
    assert not torch.equal(log_prob(x, loud, targets, 152_064)[0], found)
    for i in range(5):
        alone = log_prob(x[i : i + 1], weight, targets[i : i + 1], vocabulary)
        assert torch.equal(alone[0], found[i : i + 1])
        assert torch.equal(alone[1], entropies[i : i + 1])


def test_padded_ids_get_a_zero_gradient():
    x, weight, targets = make(9, 32, 300, FP32, 384)
    _, _, gradient = with_gradients(lambda a, w: log_prob(a, w, targets, 300)[0], (x, weight))
    assert gradient[300:].eq(0).all()
    assert gradient[:300].ne(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [17] if INTERPRETED else [1, 16, 17, 50])
def test_chunks_change_no_bit_of_the_value(monkeypatch, dtype, tokens):
    x, weight, targets = make(tokens, 64, IDS, dtype, PADDED)
    f = lambda a, w: log_prob(a, w, targets, IDS, 0.7)[0]  # noqa: E731
    wanted, entropies = log_prob(x, weight, targets, IDS, 0.7)
    value, *gradients = with_gradients(f, (x, weight))
    assert torch.equal(value, wanted)
    calls = []
    linear = dispatch.linear
    monkeypatch.setattr(dispatch, "linear", lambda h, *a: calls.append(len(h)) or linear(h, *a))
    for elements in (1,) if INTERPRETED else (1, 20 * PADDED, 32 * PADDED):
        monkeypatch.setattr(tiles, "LOGITS", elements)
        calls.clear()
        found = log_prob(x, weight, targets, IDS, 0.7)
        step = max(elements // PADDED // 16, 1) * 16
        assert calls == [min(step, tokens - i) for i in range(0, tokens, step)]
        assert torch.equal(found[0], wanted)
        assert torch.equal(found[1], entropies)
        # The gradient of the weight adds what the chunks round, so it is compared within tolerance.
        _, *chunked = with_gradients(f, (x, weight))
        for a, b in zip(chunked, gradients, strict=True):
            assert error(a, b) < tolerance(dtype, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "vocabulary"), [(32, 100)] if INTERPRETED else [(32, 100), (64, 1000), (96, 1153)])
def test_rows_do_not_depend_on_the_batch(dtype, hidden, vocabulary):
    x, weight, targets = make(50, hidden, vocabulary, dtype)

    def f(rows):
        """The target travels in the last column."""
        chosen = rows[:, -1].float().nan_to_num().abs().long().clamp_max(vocabulary - 1)
        return torch.stack(log_prob(rows[:, :-1], weight, chosen, vocabulary), 1)

    assert dependent_rows(f, torch.cat((x, targets[:, None].to(dtype)), 1)) == []


def test_another_order_of_the_sum_is_noticed():
    """The same log-probability from the vocabulary turned round."""
    x, weight, targets = make(50, 64, IDS)
    found = log_prob(x, weight, targets, IDS)[0]
    turned = log_prob(x, weight.flip(0), IDS - 1 - targets, IDS)[0]
    assert not torch.equal(turned, found)
    assert error(turned, found) < tolerance(FP32)


def test_a_shard_that_cuts_a_block_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dispatch.dist, "get_rank", lambda group: 0)
    x, weight, targets = make(3, 16, 100)
    with pytest.raises(ValueError, match=r"shard of 100 rows is no multiple of 128: pad the vocabulary"):
        log_prob(x, weight, targets, 200, group=object())
