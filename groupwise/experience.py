"""Experience: the samples of a step as they are trained, dealt out to optimiser steps and weighed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from groupwise.algorithms.credit import Credit
from groupwise.algorithms.selection import select_tokens
from groupwise.algorithms.weights import token_weights
from groupwise.batch import Segment
from groupwise.config import GRPOConfig
from groupwise.types import Group, Rollout


def minibatches(
    groups: Sequence[Group], credits_PG: Sequence[Sequence[Credit | None]], cfg: GRPOConfig, seed: int
) -> list[list[Segment]]:
    """The segments of each optimiser step of an epoch, weighed over that step; without those that have no gradient.

    Groups are dealt out in turn. Samples without credit are left out of the averages; a group without signal counts in
    them. `seed` is that of a random selection.
    """
    pairs = zip(groups, credits_PG, strict=True)
    chosen = [(group, credits_G) for group, credits_G in pairs if any(c is not None for c in credits_G)]
    parts = [
        [
            [_trained(group, r, c) for r, c in zip(group.rollouts, credits_G, strict=True) if c is not None]
            for group, credits_G in chosen[i :: cfg.minibatches]
        ]
        for i in range(cfg.minibatches)
    ]
    for part in parts:
        _weigh(list(chain.from_iterable(part)), cfg)
    if cfg.selection != "all":
        _select([s for part in parts for group in part for s in group if s.weight], cfg, seed)
    if not cfg.needs_every_group:  # a group without signal has exactly no gradient
        parts = [[group for group in part if any(any(s.advantages or ()) for s in group)] for part in parts]
    trained = [[s for group in part for s in group if s.weight] for part in parts]
    return [minibatch for minibatch in trained if minibatch]


def moves(given: Credit | None) -> bool:
    """Whether a sample's credit moves the policy: an advantage other than 0 on a token that is trained."""
    return given is not None and any(given.advantages)


def untrained(group: Group, rollout: Rollout) -> Segment:
    """A sample whose tokens are only to be scored."""
    completion = rollout.completion
    return Segment(prompt_ids=group.prompt_ids, token_ids=completion.token_ids, trained=completion.sampled)


def _trained(group: Group, rollout: Rollout, given: Credit) -> Segment:
    """A sample with its credit and all that is known of its tokens; a masked one has no token to train."""
    completion = rollout.completion
    if not given.advantages:
        nothing = (False,) * len(completion.token_ids)
        return Segment(prompt_ids=group.prompt_ids, token_ids=completion.token_ids, trained=nothing)
    return Segment(
        prompt_ids=group.prompt_ids,
        token_ids=completion.token_ids,
        trained=completion.sampled,
        advantages=given.advantages,
        sampler_logps=completion.sampled_logps,
        old_logps=rollout.old_logps,
        entropies=rollout.entropies,
        ref_logps=rollout.ref_logps,
        values=None if rollout.values is None else rollout.values[:-1],
        returns=given.returns,
    )


def _weigh(segments: Sequence[Segment], cfg: GRPOConfig) -> None:
    """Set each segment's weight per token over the whole optimiser step."""
    weights = token_weights([s.trained_length for s in segments], cfg.weighting, cfg.max_tokens)
    for segment, weight in zip(segments, weights, strict=True):
        segment.weight = weight


def _select(segments: Sequence[Segment], cfg: GRPOConfig, seed: int) -> None:
    """Mark the tokens that the algorithm treats apart, over all of the step's."""
    if not segments:
        return
    logp_T, advantage_T, entropy_T = (
        torch.tensor([v for row in rows for v in row or ()], dtype=torch.float64)
        for rows in zip(*((s.old_logps, s.advantages, s.entropies) for s in segments), strict=True)
    )
    selected_T = select_tokens(cfg, logp_T=logp_T, advantage_T=advantage_T, entropy_T=entropy_T, seed=seed)
    for segment, selected in zip(segments, selected_T.split([s.trained_length for s in segments]), strict=True):
        segment.selected = selected.tolist()
