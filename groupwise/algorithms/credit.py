"""From the rewards of a step's groups to the advantage of every trained token: the parts of an `Algorithm` in order.

rewards, less the penalties  ->  advantages, per sample or along its tokens  ->  whitened over the step

Pure: the same groups give the same credits. P groups, G samples, T trained tokens of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch

from groupwise.algorithms import kl
from groupwise.algorithms.advantages import (
    Column,
    batch_advantages,
    gae,
    has_spread,
    overlong_penalty,
    part_advantages,
    reward_to_go,
    whiten,
)
from groupwise.algorithms.presets import Algorithm
from groupwise.types import Group, Rollout


@dataclass(frozen=True, slots=True)
class Credit:
    """What one sample is credited with.

    `advantage` is that of the whole sample (the mean of its tokens' where they differ), `advantages` has one number per
    trained token, and `returns`, with a critic, what its values are to become.
    """

    advantage: float
    advantages: tuple[float, ...]
    returns: tuple[float, ...] | None = None


def trained_length(rollout: Rollout, cfg: Algorithm) -> int:
    """Tokens of a sample that are trained: those that the policy wrote, none if it was cut off and these are masked."""
    masked = cfg.mask_truncated and rollout.completion.finish_reason == "length"
    return 0 if masked else rollout.completion.sampled_length


def differs(group: Group, cfg: Algorithm, max_tokens: int, part_weights: Mapping[str, float] | None = None) -> bool:
    """Whether the rewards of a group's samples differ, so that comparing them says something."""
    if not cfg.per_part:
        return has_spread([_penalised(r, cfg, max_tokens) for r in group.rollouts])
    scored = [r.reward.parts for r in group.rollouts if r.reward.total is not None]
    names = dict.fromkeys(name for parts in scored for name in parts)
    counted = [name for name in names if part_weights is None or part_weights.get(name)]
    return any(has_spread([parts.get(name) for parts in scored]) for name in counted)


def assign(
    groups: Sequence[Group], cfg: Algorithm, *, max_tokens: int, part_weights: Mapping[str, float] | None = None
) -> list[list[Credit | None]]:
    """The credit of each sample of each group; None for one that could not be scored.

    Samples need `old_logps` and `ref_logps` where the KL is taken from the reward, `values` where there is a critic.

    Args:
        max_tokens: the longest completion, for the overlong penalty.
        part_weights: weight of each reward part, for `cfg.per_part`.

    Raises:
        ValueError: `cfg.per_part` without the weights of the parts.
    """
    rewards_PG = [[_penalised(r, cfg, max_tokens) for r in g.rollouts] for g in groups]
    if cfg.credit == "token":
        credits_PG = _along_tokens(groups, rewards_PG, cfg)
    else:
        advantages_PG = _per_sample(groups, rewards_PG, cfg, part_weights)
        credits_PG = [
            [
                None if a is None else Credit(a, (a,) * trained_length(r, cfg))
                for a, r in zip(row, g.rollouts, strict=True)
            ]
            for row, g in zip(advantages_PG, groups, strict=True)
        ]
    return _whitened(credits_PG, cfg)


def _penalised(rollout: Rollout, cfg: Algorithm, max_tokens: int) -> float | None:
    total = rollout.reward.total
    if total is None or cfg.overlong_share == 0:
        return total
    return total - overlong_penalty(rollout.completion.sampled_length, max_tokens, cfg.overlong_share)


def _per_sample(
    groups: Sequence[Group],
    rewards_PG: Sequence[Column],
    cfg: Algorithm,
    part_weights: Mapping[str, float] | None,
) -> list[list[float | None]]:
    lengths_PG = [[r.completion.sampled_length for r in g.rollouts] for g in groups]
    if cfg.per_part:
        if part_weights is None:
            raise ValueError("per_part compares the parts of a RewardComposer one by one; this reward has no parts")
        parts_PG = [[None if r.reward.total is None else r.reward.parts for r in g.rollouts] for g in groups]
        return part_advantages(parts_PG, part_weights, cfg=cfg, lengths_PG=lengths_PG)
    if cfg.kl_coef > 0 and cfg.kl_in == "reward":
        rewards_PG = [
            [
                None if reward is None else reward - math.fsum(_kl_penalty(r, cfg))
                for reward, r in zip(row, g.rollouts, strict=True)
            ]
            for row, g in zip(rewards_PG, groups, strict=True)
        ]
    return batch_advantages(rewards_PG, cfg=cfg, lengths_PG=lengths_PG, greedy_P=[g.greedy_reward for g in groups])


def _along_tokens(groups: Sequence[Group], rewards_PG: Sequence[Column], cfg: Algorithm) -> list[list[Credit | None]]:
    """The reward less the baseline comes with the last token, the KL with each; a token's credit is what follows."""
    lengths_PG = [[r.completion.sampled_length for r in g.rollouts] for g in groups]
    gains_PG = batch_advantages(rewards_PG, cfg=cfg, lengths_PG=lengths_PG, greedy_P=[g.greedy_reward for g in groups])
    return [
        [None if gain is None else _along_one(r, gain, cfg) for r, gain in zip(g.rollouts, row, strict=True)]
        for g, row in zip(groups, gains_PG, strict=True)
    ]


def _along_one(rollout: Rollout, gain: float, cfg: Algorithm) -> Credit:
    length = trained_length(rollout, cfg)
    if length == 0:
        return Credit(gain, ())
    in_reward = cfg.kl_coef > 0 and cfg.kl_in == "reward"
    rewards_T = [-penalty for penalty in _kl_penalty(rollout, cfg)] if in_reward else [0.0] * length
    rewards_T[-1] += gain
    returns_T: list[float] | None = None
    if cfg.baseline == "critic":
        assert rollout.values is not None, "a critic's values are filled in before credit is assigned"
        advantages_T, returns_T = gae(rewards_T, rollout.values, cfg.gamma, cfg.lam)
    else:
        advantages_T = reward_to_go(rewards_T, cfg.gamma)
    mean = math.fsum(advantages_T) / length
    return Credit(mean, tuple(advantages_T), None if returns_T is None else tuple(returns_T))


def _kl_penalty(rollout: Rollout, cfg: Algorithm) -> list[float]:
    """kl_coef times the KL estimate of each token, in float64."""
    if rollout.completion.sampled_length == 0:
        return []
    assert rollout.old_logps is not None and rollout.ref_logps is not None, "log-probs are filled in before"
    old_logp_T, ref_logp_T = (torch.tensor(x, dtype=torch.float64) for x in (rollout.old_logps, rollout.ref_logps))
    return [cfg.kl_coef * x for x in kl.estimate(old_logp_T, ref_logp_T, cfg.kl).tolist()]


def _whitened(credits_PG: list[list[Credit | None]], cfg: Algorithm) -> list[list[Credit | None]]:
    """Advantages of the whole step brought to mean 0 and deviation 1, each sample or each token counting once."""
    if cfg.whiten == "none":
        return credits_PG
    flat = list(chain.from_iterable(credits_PG))
    if cfg.whiten == "samples":
        numbers = [None if c is None else c.advantage for c in flat]
        counts = [1 if c is not None else 0 for c in flat]
    else:
        numbers = [a for c in flat if c is not None for a in c.advantages]
        counts = [len(c.advantages) if c is not None else 0 for c in flat]
    white = iter([a for a in whiten(numbers, ddof=cfg.ddof, eps=cfg.eps) if a is not None])
    new = iter([None if c is None else _replaced(c, list(islice(white, n))) for c, n in zip(flat, counts, strict=True)])
    return [[next(new) for _ in row] for row in credits_PG]


def _replaced(credit: Credit, advantages: list[float]) -> Credit:
    """The credit with other advantages: one per trained token, or one for all of them."""
    if len(advantages) == 1:
        return Credit(advantages[0], (advantages[0],) * len(credit.advantages), credit.returns)
    mean = math.fsum(advantages) / len(advantages) if advantages else credit.advantage
    return Credit(mean, tuple(advantages), credit.returns)
