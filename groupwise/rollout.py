"""Prompts x engine x rewards -> groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.chat import Chat
from groupwise.engines import Engine, Request
from groupwise.rewards import Scorer
from groupwise.types import Group, Prompt, Rollout, Sampling, stable_hash


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored groups (their advantages still to be computed), what was left out, and the time it took."""

    groups: list[Group]
    too_long: list[Prompt]
    generate_seconds: float
    score_seconds: float


def collect(
    prompts: Sequence[Prompt],
    *,
    chat: Chat,
    engine: Engine,
    reward: Scorer,
    sampling: Sampling,
    group_size: int,
    seed: tuple[int, ...],
    max_prompt_tokens: int,
) -> Collected:
    """Draw `group_size` completions per prompt and score them.

    Each prompt's samples are a pure function of (weights, prompt, seed, its place in `prompts`, sample number), so any
    one can be drawn again alone. Prompts of more than `max_prompt_tokens` tokens are left out, and returned.
    """
    requests: list[Request] = []
    kept: list[Prompt] = []
    too_long: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        ids = chat.prompt_ids(prompt.messages)
        if len(ids) > max_prompt_tokens:
            too_long.append(prompt)
            continue
        kept.append(prompt)
        requests.append(Request(ids, stable_hash(*seed, index), range(group_size)))
    start = time.perf_counter()
    completions = engine.generate(requests, sampling)
    generated = time.perf_counter()
    texts = [
        [chat.prefill(prompt.messages) + chat.response_text(c.token_ids) for c in samples]
        for prompt, samples in zip(kept, completions, strict=True)
    ]
    pairs = [(prompt, text) for prompt, row in zip(kept, texts, strict=True) for text in row]
    rewards = iter(reward.score_many(pairs))
    groups = [
        Group(prompt, request.prompt_ids, [Rollout(c, t, next(rewards)) for c, t in zip(samples, row, strict=True)])
        for prompt, request, samples, row in zip(kept, requests, completions, texts, strict=True)
    ]
    return Collected(groups, too_long, generated - start, time.perf_counter() - generated)
