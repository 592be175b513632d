"""Counter-based uniform numbers, and tokens drawn from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from groupwise.engines.sampling import draw, uniforms
from groupwise.types import Sampling

BELOW_ONE = 1 - 2.0**-24


# -- uniform numbers -------------------------------------------------------------------------------------------------


def splitmix64(x: int) -> int:
    """The finaliser of SplitMix64, in Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "sample"), [(0, 0), (1, 0), (0, 1), (2**63 + 5, 7), (-3, 2)])
def test_numbers_are_the_published_hash(seed: int, sample: int) -> None:
    golden = 0x9E3779B97F4A7C15
    stream = splitmix64((seed + golden * (sample + 1)) % 2**64)
    by_hand = [(splitmix64((stream + golden * (t + 1)) % 2**64) >> 40) / 2**24 for t in range(5)]
    assert uniforms(seed, sample, 5).tolist() == by_hand


def test_any_position_by_itself() -> None:
    whole = uniforms(11, 3, 100)
    assert whole.dtype == np.float32
    for count in (1, 7, 99):
        assert uniforms(11, 3, count).tolist() == whole[:count].tolist()


def test_numbers_are_uniform() -> None:
    x = np.concatenate([uniforms(seed, 0, 1000) for seed in range(100)]).astype(np.float64)
    assert x.min() >= 0
    assert x.max() < 1
    n = len(x)
    assert abs(x.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    assert abs(x.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    counts = np.bincount((x * 64).astype(int), minlength=64)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 103.4  # chi-square, 63 degrees of freedom, p = 0.001


@pytest.mark.parametrize("neighbour", [(8, 0), (7, 1), (8, 1), (7 + 2**32, 0), (-7, 0)])
def test_neighbouring_streams_are_independent(neighbour: tuple[int, int]) -> None:
    a, b = uniforms(7, 0, 10_000).astype(np.float64), uniforms(*neighbour, 10_000).astype(np.float64)
    for lag in (0, 1, 2):
        assert abs(np.corrcoef(a[lag:], b[: len(b) - lag])[0, 1]) < 0.04  # four standard errors
        assert abs(np.corrcoef(b[lag:], a[: len(a) - lag])[0, 1]) < 0.04


def test_no_two_of_many_streams_are_equal() -> None:
    streams = {tuple(uniforms(seed, sample, 4).tolist()) for seed in range(64) for sample in range(64)}
    assert len(streams) == 64 * 64


# -- drawing ---------------------------------------------------------------------------------------------------------

LOGITS = (2.0, 1.0, 0.5, 0.5, -1.0, -3.0)


def filtered_shares(logits: tuple[float, ...], sampling: Sampling) -> list[float]:
    """The distribution that is to be drawn from: top-k, then top-p of what is left, then min-p, in float64."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    shares = {i: w / sum(weights) for i, w in enumerate(weights)}
    ranked = sorted(shares, key=lambda i: -shares[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    kept, mass = [], 0.0
    whole = sum(shares[i] for i in ranked)
    for i in ranked:
        if mass < sampling.top_p * whole:
            kept.append(i)
        mass += shares[i]
    kept = [i for i in kept if shares[i] >= sampling.min_p * shares[ranked[0]]]
    total = sum(shares[i] for i in kept)
    return [shares[i] / total if i in kept else 0.0 for i in range(len(logits))]


FILTERS = {
    "plain": Sampling(),
    "cool": Sampling(temperature=0.5),
    "hot": Sampling(temperature=2.0),
    "top-k 2": Sampling(top_k=2),
    "top-k beyond the vocabulary": Sampling(top_k=100),
    "top-p 0.6": Sampling(top_p=0.6),
    "top-p just below the third": Sampling(top_p=0.73),
    "top-p just into the third": Sampling(top_p=0.735),
    "top-p tiny": Sampling(top_p=1e-6),
    "min-p 0.3": Sampling(min_p=0.3),
    "all": Sampling(temperature=1.5, top_k=5, top_p=0.9, min_p=0.2),
}


def test_the_filters_bite_as_intended() -> None:
    """Shares at temperature 1 are 0.535 0.197 0.119 0.119 0.027 0.004 of the six tokens, worked out by hand."""
    kept = {name: [i for i, s in enumerate(filtered_shares(LOGITS, f)) if s] for name, f in FILTERS.items()}
    assert kept["top-k 2"] == kept["top-p 0.6"] == kept["min-p 0.3"] == [0, 1]
    assert kept["top-p just below the third"] == [0, 1]  # 0.535 + 0.197 = 0.731
    assert len(kept["top-p just into the third"]) == 3
    assert kept["top-p tiny"] == [0]
    assert kept["plain"] == kept["top-k beyond the vocabulary"] == list(range(6))
    assert filtered_shares(LOGITS, FILTERS["plain"]) == pytest.approx(
        [0.535, 0.197, 0.119, 0.119, 0.027, 0.004], abs=5e-4
    )


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_an_even_grid_of_numbers_gives_the_exact_distribution(sampling: Sampling) -> None:
    n = 20_000
    grid = (torch.arange(n) + 0.5) / n
    tokens, _ = draw(torch.tensor(LOGITS).expand(n, -1), grid, sampling, len(LOGITS))
    frequency = (torch.bincount(tokens, minlength=len(LOGITS)) / n).tolist()
    # Inverse CDF: each token's share of an even grid is right to one grid step.
    assert frequency == pytest.approx(filtered_shares(LOGITS, sampling), abs=1.5 / n)


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_hashed_numbers_give_the_distribution(sampling: Sampling) -> None:
    n = 20_000
    numbers = torch.from_numpy(uniforms(5, 0, n))
    tokens, _ = draw(torch.tensor(LOGITS).expand(n, -1), numbers, sampling, len(LOGITS))
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    shares = filtered_shares(LOGITS, sampling)
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0)
    chi_square = sum((c - n * s) ** 2 / (n * s) for c, s in zip(counts, shares, strict=True) if s)
    assert chi_square < 20.5  # 5 degrees of freedom or fewer, p = 0.001


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_log_probs_are_over_the_full_vocabulary_without_filters(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=2, top_p=0.9)
    logits = torch.tensor(LOGITS).expand(4, -1)
    tokens, logps = draw(logits, torch.tensor([0.0, 0.3, 0.6, 0.9]), sampling, len(LOGITS))
    exact = torch.log_softmax(torch.tensor(LOGITS).double() / (temperature or 1.0), 0)
    assert logps.tolist() == pytest.approx(exact[tokens].tolist(), abs=1e-6)


def test_temperature_divides_logits_not_log_probs() -> None:
    tokens, logps = draw(torch.tensor([[2.0, 0.0]]), torch.tensor([0.0]), Sampling(temperature=0.5), 2)
    assert tokens.tolist() == [0]
    assert logps.item() == pytest.approx(-0.01815, abs=1e-5)


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    tokens, _ = draw(logits, torch.tensor([BELOW_ONE, BELOW_ONE]), Sampling(temperature=0.0), 3)
    assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.99), Sampling(min_p=0.001)])
def test_the_ends_of_the_interval_draw_tokens_that_have_a_share(sampling: Sampling) -> None:
    logits = torch.tensor([[-200.0, 1.0, 2.0, 0.5, -200.0]])
    first, _ = draw(logits, torch.tensor([0.0]), sampling, 5)
    last, _ = draw(logits.expand(2, -1), torch.tensor([BELOW_ONE, 1.0]), sampling, 5)  # 1, should rounding reach it
    assert first.tolist() == [1]
    assert last.tolist() == [3, 3]


def test_the_last_number_below_one_on_a_large_vocabulary() -> None:
    """Rounding of a long cumulative sum must not lead out of it, nor to a token without a share."""
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    logits[:, -100:] = -1e4
    tokens, logps = draw(logits, torch.full((64,), BELOW_ONE), Sampling(), 50_000)
    assert tokens.max() < 49_900
    assert torch.isfinite(logps).all()


@pytest.mark.parametrize("beyond", [-5.0, 5.0, 60.0, 500.0])
def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(beyond: float) -> None:
    """A head is often padded beyond the tokenizer; whatever those rows say, the rest keeps its own proportions."""
    n = 2000
    logits = torch.tensor([*LOGITS, beyond, beyond]).expand(n, -1)
    grid = (torch.arange(n) + 0.5) / n
    tokens, logps = draw(logits, grid, Sampling(), len(LOGITS))
    frequency = (torch.bincount(tokens, minlength=len(LOGITS)) / n).tolist()
    assert frequency == pytest.approx(filtered_shares(LOGITS, Sampling()), abs=1.5 / n)
    exact = torch.log_softmax(logits[0].double(), 0)[tokens]
    assert logps.tolist() == pytest.approx(exact.tolist(), abs=1e-4)
    greedy, _ = draw(logits[:1], grid[:1], Sampling(temperature=0.0), len(LOGITS))
    assert greedy.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"min_p": 1.0}, "min_p"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)
