"""How much better than expected: group-relative advantages (GRPO and its kin), reward-to-go, and GAE (PPO).

Plain numbers in float64, no tensors. P prompts, G samples of one prompt, T trained tokens of one sample. `None` marks a
sample that could not be scored: it stays out of every mean and deviation, and its advantage is `None`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from groupwise.algorithms.presets import GROUP_BASELINES, Algorithm, Baseline, Scale

Column: TypeAlias = Sequence[float | None]
"""One number per sample, `None` where there is none."""

NO_SPREAD = 1e-9
"""Rewards whose range is no larger than this are equal: float noise must not be scaled up to a signal."""


def group_advantages(
    rewards_G: Column,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ddof: int = 0,
    eps: float = 1e-8,
    lengths_G: Sequence[int] | None = None,
    greedy: float | None = None,
) -> list[float | None]:
    """Advantages of the G samples of one prompt (arXiv 2402.03300; Dr. GRPO 2503.20783; RLOO 2402.14740).

    A_i = (R_i - b_i) / (std + eps). The baseline b_i is the mean of the group, or the mean of the others
    (`leave_one_out`); weighted by length, sum(L R) / sum(L) (`length_weighted`, 2505.23585); or `greedy`, the reward of
    the greedy answer (2310.10505). `best_of_others` credits what the best of the group owes to the sample, max(R) -
    max_{j != i} R_j (2503.19595); `none` and `critic` leave the reward as it is. `scale="mean"` divides by the mean of
    the group (2602.02710), `none` by nothing. A group without spread, or with fewer than two scored samples, carries no
    signal for the baselines that compare its samples: its advantages are exactly 0.

    Args:
        lengths_G: tokens of each sample, for `length_weighted`.
        greedy: for the baseline of that name; `None`, unscored, leaves nothing to compare with.

    Raises:
        ValueError: a reward is NaN or infinite, or negative under `scale="mean"`; or the scale is one of a batch.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], eps=0.0)
    [1.0, -1.0, -1.0, 1.0]
    >>> group_advantages([1.0, None, 0.0, 0.5], scale="none")
    [0.5, None, -0.5, 0.0]
    >>> group_advantages([1.0, 0.0, 0.25], baseline="best_of_others", scale="none")
    [0.75, 0.0, 0.0]
    """
    if scale in ("batch_std", "signal_share"):
        raise ValueError(f"scale {scale!r} is a number of the whole batch; call batch_advantages")
    scored = _scored(rewards_G)
    if baseline in GROUP_BASELINES and not has_spread(rewards_G):
        return [None if r is None else 0.0 for r in rewards_G]
    mean = math.fsum(scored) / len(scored) if scored else 0.0
    divisor = 1.0
    if scale == "std":
        divisor = _deviation(scored, ddof) + eps
    elif scale == "mean":
        if min(scored) < 0:
            raise ValueError(
                f"scale 'mean' needs rewards >= 0, got {list(rewards_G)}; add a constant, or set scale: std"
            )
        divisor = mean + eps
    expected = _expectation(rewards_G, scored, mean, baseline, lengths_G, greedy)
    if expected is None:
        return [None] * len(rewards_G)
    return [None if r is None else (float(r) - expected(float(r))) / divisor for r in rewards_G]


def batch_advantages(
    rewards_PG: Sequence[Column],
    *,
    cfg: Algorithm,
    lengths_PG: Sequence[Sequence[int]] | None = None,
    greedy_P: Column | None = None,
) -> list[list[float | None]]:
    """Advantages of all groups of one step: `group_advantages` of each, with `cfg`'s scale where it is a batch's.

    `batch_std` divides by the deviation of all rewards of the batch (2508.08221); `signal_share` by the share of
    samples in groups that carry a signal (GPG's 1/alpha, 2504.02546).

    >>> lite = Algorithm(algorithm="lite_ppo", eps=0.0)
    >>> batch_advantages([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], cfg=lite)
    [[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    """
    by_batch = cfg.scale in ("batch_std", "signal_share")
    groups = [
        group_advantages(
            rewards_G,
            baseline=cfg.baseline,
            scale="none" if by_batch else cfg.scale,
            ddof=cfg.ddof,
            eps=cfg.eps,
            lengths_G=None if lengths_PG is None else lengths_PG[p],
            greedy=None if greedy_P is None else greedy_P[p],
        )
        for p, rewards_G in enumerate(rewards_PG)
    ]
    if not by_batch:
        return groups
    scored = [r for rewards_G in rewards_PG for r in _scored(rewards_G)]
    if cfg.scale == "batch_std":
        divisor = _deviation(scored, cfg.ddof) + cfg.eps
    else:
        divisor = sum(len(_scored(r)) for r in rewards_PG if has_spread(r)) / max(1, len(scored))
    if divisor == 0:  # no group carries a signal: all are 0 already
        return groups
    return [[None if a is None else a / divisor for a in group] for group in groups]


def part_advantages(
    parts_PG: Sequence[Sequence[Mapping[str, float | None] | None]],
    weights: Mapping[str, float],
    *,
    cfg: Algorithm,
    lengths_PG: Sequence[Sequence[int]] | None = None,
) -> list[list[float | None]]:
    """GDPO (arXiv 2601.05242): advantages of every reward part by itself, added up by weight.

    So two samples of equal total but different parts still differ. A part that abstained is left out of its own
    statistics; a sample without any part (`None`) has no advantage.

    >>> cfg = Algorithm(per_part=True, eps=0.0)
    >>> part_advantages([[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]], {"a": 2.0, "b": 1.0}, cfg=cfg)
    [[2.0, -2.0]]
    """
    total: list[list[float | None]] = [[None] * len(group) for group in parts_PG]
    for name, weight in weights.items():
        column = [[None if parts is None else parts.get(name) for parts in group] for group in parts_PG]
        for sums, advantages in zip(total, batch_advantages(column, cfg=cfg, lengths_PG=lengths_PG), strict=True):
            for i, advantage in enumerate(advantages):
                if advantage is not None:
                    sums[i] = (sums[i] or 0.0) + weight * advantage
    return total


def whiten(values: Column, *, ddof: int = 1, eps: float = 1e-8) -> list[float | None]:
    """Values brought to mean 0 and deviation 1; `None` stays. Values without spread become 0.

    >>> whiten([3.0, None, 1.0], ddof=0, eps=0.0)
    [1.0, None, -1.0]
    """
    if not has_spread(values):
        return [None if v is None else 0.0 for v in values]
    scored = _scored(values)
    mean, divisor = math.fsum(scored) / len(scored), _deviation(scored, ddof) + eps
    return [None if v is None else (v - mean) / divisor for v in values]


def reward_to_go(rewards_T: Sequence[float], gamma: float = 1.0) -> list[float]:
    """G_t = r_t + gamma G_{t+1}: what is earned from each token on.

    >>> reward_to_go([0.0, 1.0, 2.0], gamma=0.5)
    [1.0, 2.0, 2.0]
    """
    total, returns = 0.0, []
    for reward in reversed(rewards_T):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def gae(
    rewards_T: Sequence[float], values_T1: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv 1506.02438) along one sequence; returns (advantages_T, returns_T).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t. `values_T1` has one
    value more than there are rewards: what follows the last token, 0 where nothing does.

    Raises:
        ValueError: the lengths do not fit.

    >>> gae([0.0, 1.0], [0.5, 0.5, 0.0], gamma=1.0, lam=1.0)
    ([0.5, 0.5], [1.0, 1.0])
    """
    if len(values_T1) != len(rewards_T) + 1:
        raise ValueError(f"gae needs one value more than rewards, got {len(values_T1)} for {len(rewards_T)}")
    deltas = [r + gamma * v1 - v for r, v, v1 in zip(rewards_T, values_T1[:-1], values_T1[1:], strict=True)]
    advantages = reward_to_go(deltas, gamma * lam)
    return advantages, [a + v for a, v in zip(advantages, values_T1[:-1], strict=True)]


grpo_advantage = group_advantages
"""GRPO's advantage under the name that the method gives it."""


def ppo_advantage(
    rewards_T: Sequence[float], values_T1: Sequence[float], gamma: float = 1.0, lam: float = 1.0
) -> tuple[list[float], list[float]]:
    """PPO's advantage: `gae` with the defaults for one reward at the end of an answer (gamma 1, lambda 1)."""
    return gae(rewards_T, values_T1, gamma, lam)


def overlong_penalty(length: int, max_tokens: int, share: float) -> float:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): from 0 to 1 over the last `share` of `max_tokens`.

    >>> [overlong_penalty(n, 100, 0.2) for n in (80, 90, 100)]
    [0.0, 0.5, 1.0]
    """
    buffer = share * max_tokens
    if buffer <= 0:
        return 0.0
    return min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))


def has_spread(values: Column) -> bool:
    """Whether the numbers differ by more than rounding: at least two, with a range above `NO_SPREAD`.

    Of large numbers the range must also exceed a few units in their last place.
    """
    scored = _scored(values)
    if len(scored) < 2:
        return False
    rounding = 8 * math.ulp(max(map(abs, scored)))
    return max(scored) - min(scored) > max(NO_SPREAD, rounding)


def _scored(values: Iterable[float | None]) -> list[float]:
    scored = [float(v) for v in values if v is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"rewards must be finite numbers or None, got {scored}")
    return scored


def _deviation(values: Sequence[float], ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def _expectation(
    rewards_G: Column,
    scored: Sequence[float],
    mean: float,
    baseline: Baseline,
    lengths_G: Sequence[int] | None,
    greedy: float | None,
) -> Callable[[float], float] | None:
    """What a sample of a given reward is compared with, or `None` if there is nothing to compare it with."""
    n = len(scored)
    match baseline:
        case "mean":
            return lambda r: mean
        case "leave_one_out":
            return lambda r: (n * mean - r) / (n - 1)
        case "length_weighted":
            if lengths_G is None:
                raise ValueError("baseline 'length_weighted' needs lengths_G, the tokens of each sample")
            pairs = [(r, n) for r, n in zip(rewards_G, lengths_G, strict=True) if r is not None]
            total = sum(n for _, n in pairs)
            weighted = math.fsum(r * n for r, n in pairs) / total if total else mean
            return lambda r: weighted
        case "best_of_others":
            best, second = sorted(scored, reverse=True)[:2]
            return lambda r: second if r == best else r  # only the best is owed something; of two equals, neither
        case "greedy":
            return None if greedy is None else lambda r: greedy
        case "critic" | "none":
            return lambda r: 0.0
