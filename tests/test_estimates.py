"""pass@k, majority votes and intervals, against numbers worked out by hand or from tables."""

import itertools

import pytest

from groupwise.algorithms.estimates import majority_is_correct, mean_interval, pass_at_k


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(4, 1, 4, 1.0), (4, 1, 1, 0.25), (4, 2, 2, 1 - 1 / 6), (10, 0, 5, 0.0), (5, 5, 1, 1.0), (6, 2, 3, 1 - 4 / 20)],
)
def test_pass_at_k(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_subsets():
    right = [True, False, False, True, False, False, False]
    subsets = list(itertools.combinations(right, 3))
    assert pass_at_k(7, 2, 3) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match=r"pass@10.*got 1"):
        pass_at_k(1, 1, 10)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "9"], [True, True, False], 1.0),
        (["9", "9", "7"], [False, False, True], 0.0),
        (["7", "9"], [True, False], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority(answers, correct, expected):
    assert majority_is_correct(answers, correct) == expected


def test_wilson_interval_for_yes_or_no():
    # Wilson 1927 for 8 of 10, as in statistical tables.
    mean, low, high = mean_interval([1.0] * 8 + [0.0] * 2)
    assert (mean, low, high) == (pytest.approx(0.8), pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_no_success_does_not_mean_certainty():
    mean, low, high = mean_interval([0.0] * 500)
    assert (mean, low) == (0.0, 0.0)
    assert high == pytest.approx(1.959964**2 / (500 + 1.959964**2))


def test_shares_get_the_interval_of_their_mean():
    # mean 0.5, sample deviation sqrt(1/12), standard error sqrt(1/12/4)
    mean, low, high = mean_interval([0.25, 0.25, 0.75, 0.75])
    half = 1.959964 * (1 / 12 / 4) ** 0.5
    assert (mean, low, high) == (0.5, pytest.approx(0.5 - half), pytest.approx(0.5 + half))
