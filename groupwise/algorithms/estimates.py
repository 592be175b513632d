"""What a finite number of samples says about a model: pass@k, majority votes, 95 % intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is right, from n of which `correct` are (arXiv 2107.03374).

    1 - C(n - correct, k) / C(n, k).

    Raises:
        ValueError: k is larger than n: nothing unbiased can be said.

    >>> pass_at_k(4, 1, 4), pass_at_k(4, 1, 1), round(pass_at_k(4, 2, 2), 4)
    (1.0, 0.25, 0.8333)
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, got {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the commonest answer is right (maj@k); a tie counts the share of tied answers that are. None never wins.

    >>> majority_is_correct(["7", "7", "9", None], [True, True, False, False])
    1.0
    >>> majority_is_correct(["7", "9"], [True, False])
    0.5
    """
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {a for a, c in zip(answers, correct, strict=True) if c}
    winners = [a for a, n in votes.items() if n == most]
    return sum(a in right for a in winners) / len(winners)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): a 95 % interval of the mean of values in [0, 1], one per problem.

    Yes-or-no values get the Wilson score interval, which is right near 0 and 1. Shares (several samples per problem)
    get the normal interval of their mean, problems being independent, samples of one problem not; it is never narrower
    than what Wilson gives for as many yes-or-no problems when all shares are equal.

    >>> tuple(round(x, 4) for x in mean_interval([1.0] * 9 + [0.0]))
    (0.9, 0.5958, 0.9821)
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if set(values) <= {0.0, 1.0} or variance == 0:
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        return mean, max(0.0, centre - half), min(1.0, centre + half)
    half = Z95 * math.sqrt(variance / n)
    return mean, max(0.0, mean - half), min(1.0, mean + half)
