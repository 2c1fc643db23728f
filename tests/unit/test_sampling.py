"""Sampling noise: SplitMix64's published numbers, independence of batch and order, first-token frequencies."""

from __future__ import annotations

import torch

from megatron_rlzero.generation import sampling
from megatron_rlzero.generation.sampling import gumbel, sample, stream


def streams(*keys: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([stream(key) for key in keys])


def test_bits_are_splitmix64() -> None:
    """First outputs for seed 1234567, as published with the algorithm's C code; mix is also checked in Python."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    state = torch.tensor(1234567)
    counters = torch.arange(1, 5) * sampling._signed(sampling.GAMMA)
    assert [int(bits) % 2**64 for bits in sampling._mix(state + counters)] == expected
    assert [sampling._mix_int(1234567 + n * sampling.GAMMA) for n in range(1, 5)] == expected


def test_every_part_of_the_key_and_its_place_matter() -> None:
    keys = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0), (1, -1, 0, 0), (1, 0, 2, 3)]
    keys.append((1, 0, 3, 2))
    assert len({stream(key) for key in keys}) == len(keys)
    assert stream((1, 0, 2, 3)) == stream([1, 0, 2, 3])


def test_a_row_does_not_depend_on_batch_order_or_vocabulary_blocks(monkeypatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(48, 5000)
    keys = streams(*((1, 0, item, 0) for item in range(48)))
    positions = torch.arange(48) % 7
    tokens = sample(logits, keys, positions)
    order = torch.randperm(48)
    assert torch.equal(sample(logits[order], keys[order], positions[order]), tokens[order])
    alone = [sample(logits[i : i + 1], keys[i : i + 1], positions[i : i + 1]) for i in range(48)]
    assert torch.equal(torch.cat(alone), tokens)
    monkeypatch.setattr(sampling, "BLOCK", 777)
    assert torch.equal(sample(logits, keys, positions), tokens)
    # the same test sees a change of key, and of position
    assert (sample(logits, keys + 1, positions) != tokens).sum() > 40
    assert (sample(logits, keys, positions + 1) != tokens).sum() > 40


def test_first_token_frequencies_are_the_probabilities() -> None:
    draws = 20000
    torch.manual_seed(0)
    logits = torch.randn(8) * 1.5
    keys = streams(*((3, 0, item, item % 5) for item in range(draws)))
    tokens = sample(logits.expand(draws, 8), keys, torch.zeros(draws, dtype=torch.int64))
    frequencies = torch.bincount(tokens, minlength=8) / draws

    def deviation(temperature: float) -> float:
        """Largest difference in standard errors of a frequency."""
        p = torch.softmax(logits / temperature, 0)
        return float(((frequencies - p) / (p * (1 - p) / draws).sqrt()).abs().max())

    assert deviation(1.0) < 4.0  # 8 frequencies: exceeded once in 2,000 seeds
    assert deviation(1.2) > 10.0  # what a wrong temperature would show


def test_temperature_divides_the_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 50)
    keys, positions = streams(*((1, 0, i, 0) for i in range(64))), torch.zeros(64, dtype=torch.int64)
    assert torch.equal(sample(logits, keys, positions, 0.5), sample(logits * 2, keys, positions))
    assert not torch.equal(sample(logits, keys, positions, 0.5), sample(logits, keys, positions))


def test_positions_and_tokens_of_one_key_are_uncorrelated() -> None:
    noise = gumbel(streams((1, 0, 0, 0)).expand(2000), torch.arange(2000), torch.arange(100))
    assert abs(float(noise.mean()) - 0.5772) < 0.02  # Euler's constant; the standard error is 0.003
    assert abs(float(noise.var()) - torch.pi**2 / 6) < 0.05
    centred = noise - noise.mean()
    by_token = (centred[:, 1:] * centred[:, :-1]).mean() / noise.var()
    by_position = (centred[1:] * centred[:-1]).mean() / noise.var()
    assert max(abs(float(by_token)), abs(float(by_position))) < 0.015


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 4)
    logits[:, [0, 2]] = -torch.inf
    tokens = sample(logits, streams(*((1, 0, i, 0) for i in range(500))), torch.zeros(500, dtype=torch.int64))
    assert set(tokens.tolist()) == {1, 3}
