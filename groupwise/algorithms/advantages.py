"""How much better than expected: group-relative advantages (GRPO) and generalised advantage estimation (PPO)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from groupwise.algorithms.presets import Baseline, Scale

NO_SPREAD = 1e-9
"""Rewards whose range is no larger than this are equal: float noise must not be scaled up to a signal."""


def group_advantages(
    rewards_G: Sequence[float | None],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    eps: float = 1e-8,
) -> list[float | None]:
    """Advantages of the G samples of one prompt, computed in float64 (arXiv 2402.03300; Dr. GRPO 2503.20783).

    A_i = (R_i - b_i) / (std + eps), where b_i is the mean of the group, or of the others (`leave_one_out`), and
    `scale="none"` leaves the division out. `None` marks a sample that could not be scored: it stays out of the mean and
    the deviation, and its advantage is `None`. A group without spread, or with fewer than two scored samples, carries
    no signal: its advantages are exactly 0.

    Raises:
        ValueError: a reward is NaN or infinite.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], eps=0.0)
    [1.0, -1.0, -1.0, 1.0]
    >>> group_advantages([1.0, None, 0.0, 0.5], scale="none")
    [0.5, None, -0.5, 0.0]
    """
    scored = [float(r) for r in rewards_G if r is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"rewards must be finite numbers or None, got {list(rewards_G)}")
    n = len(scored)
    if n < 2 or max(scored) - min(scored) <= NO_SPREAD:
        return [None if r is None else 0.0 for r in rewards_G]
    mean = math.fsum(scored) / n
    divisor = 1.0
    if scale == "std":
        divisor = math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / (n - ddof)) + eps
    # Leaving oneself out of the mean stretches the difference: R_i - (n*mean - R_i)/(n-1) = (R_i - mean) * n/(n-1).
    stretch = n / (n - 1) if baseline == "leave_one_out" else 1.0
    return [None if r is None else (float(r) - mean) * stretch / divisor for r in rewards_G]


def gae(
    rewards_T: Sequence[float], values_T1: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv 1506.02438) along one sequence; returns (advantages_T, returns_T).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t. `values_T1` has one
    value more than there are rewards: what follows the last token, 0 at a true end, the critic's value at a cut.

    Raises:
        ValueError: the lengths do not fit.

    >>> gae([0.0, 1.0], [0.5, 0.25, 0.0], gamma=1.0, lam=1.0)
    ([0.5, 0.75], [1.0, 1.0])
    """
    if len(values_T1) != len(rewards_T) + 1:
        raise ValueError(
            f"values must hold one entry more than rewards (the value after the last token, 0 at a true end), "
            f"got {len(values_T1)} values for {len(rewards_T)} rewards"
        )
    advantages, following = [0.0] * len(rewards_T), 0.0
    for t in reversed(range(len(rewards_T))):
        delta = rewards_T[t] + gamma * values_T1[t + 1] - values_T1[t]
        advantages[t] = following = delta + gamma * lam * following
    return advantages, [a + v for a, v in zip(advantages, values_T1[:-1], strict=True)]


grpo_advantage = group_advantages
"""GRPO's advantage under the name that the method gives it."""


def ppo_advantage(
    rewards_T: Sequence[float], values_T1: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> tuple[list[float], list[float]]:
    """PPO's advantage: `gae` with the defaults for one reward at the end of an answer (gamma 1, lambda 1)."""
    return gae(rewards_T, values_T1, gamma, lam)
