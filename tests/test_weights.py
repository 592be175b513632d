"""Weights per token: three ways to make one number of many, none of which a micro-batch can change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms.weights import token_weights


def total(losses: list[list[float]], weights: list[float]) -> float:
    return sum(w * sum(row) for w, row in zip(weights, losses, strict=True))


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        ("token", 4 / 4),  # mean of 4, 0, 0, 0
        ("sequence", (4 / 1 + 0 / 3) / 2),
        ("constant", 4 / (2 * 4)),  # two sequences of at most 4
    ],
)
def test_the_three_means_of_one_loss(mode: str, by_hand: float) -> None:
    losses = [[4.0], [0.0, 0.0, 0.0]]
    assert total(losses, token_weights([1, 3], mode, max_len=4)) == pytest.approx(by_hand)


def test_token_mean_with_one_sequence_per_micro_batch() -> None:
    """Weights come from the whole step, so that a token mean does not become a mean of sequence means (0.5)."""
    losses = [[1.0], [0.0] * 9]
    weights = token_weights([1, 9], "token")
    parts = [total([row], [weight]) for row, weight in zip(losses, weights, strict=True)]
    assert sum(parts) == pytest.approx(0.1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
def test_means_have_weights_that_sum_to_one(lengths: list[int]) -> None:
    for mode in ("sequence", "token"):
        weights = token_weights(lengths, mode)
        assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [("sequence", [1 / 4, 0.0, 1 / 8]), ("token", [1 / 6, 0.0, 1 / 6]), ("constant", [0.1, 0, 0.1])],
)
def test_a_sequence_with_nothing_to_train_is_not_counted(mode: str, by_hand: list[float]) -> None:
    assert token_weights([2, 0, 4], mode, max_len=5) == pytest.approx(by_hand)


@pytest.mark.parametrize("mode", ["sequence", "token", "constant"])
def test_nothing_to_train_at_all_weighs_nothing(mode: str) -> None:
    assert token_weights([0, 0], mode, max_len=5) == [0.0, 0.0]
    assert token_weights([], mode, max_len=5) == []


@pytest.mark.parametrize("max_len", [None, 0, -1])
def test_constant_needs_a_length(max_len: int | None) -> None:
    with pytest.raises(ValueError, match="max_len, which must be >= 1"):
        token_weights([1], "constant", max_len)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="sequence, token, sum, constant, got 'batch'"):
        token_weights([1], "batch")  # type: ignore[arg-type]
