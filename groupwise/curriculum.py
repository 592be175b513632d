"""Curriculum: prompts drawn by how often the policy gets them right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.config import CurriculumConfig
from groupwise.types import Group, Prompt, stable_hash


class Curriculum:
    """A fixed pool of prompts, each easy, hard, or worth drawing: by the share of its samples that was right last.

    A group in which all samples are right, or all wrong, teaches nothing; the prompts in between, and those never
    drawn, do. What is hard is tried again now and then, since the policy changes. `pick` is a pure function of the
    rates, the count and the seed.
    """

    def __init__(self, config: CurriculumConfig, prompts: Sequence[Prompt]) -> None:
        self.config = config
        self.prompts = list({p.id: p for p in prompts}.values())
        self.rates: dict[str, float] = {}
        """Share of right samples, by prompt id, of the prompts that were drawn."""

    def pick(self, count: int, seed: object) -> list[Prompt]:
        """Draw `count` different prompts: the shares of easy and hard ones that are set, the rest from what is left.

        Where a pool has too few, the others fill up: first what is worth drawing, then what is hard. A pool smaller
        than `count` is returned whole.
        """
        order = sorted(self.prompts, key=lambda p: stable_hash(seed, p.id))
        pools: dict[str, list[Prompt]] = {"open": [], "hard": [], "easy": []}
        for prompt in order:
            pools[self._pool(prompt)].append(prompt)
        easy = pools["easy"][: round(self.config.easy_share * count)]
        hard = pools["hard"][: min(round(self.config.hard_share * count), count - len(easy))]
        chosen = [*easy, *hard, *pools["open"][: count - len(easy) - len(hard)]]
        others = [*pools["hard"][len(hard) :], *pools["easy"][len(easy) :]]
        return [*chosen, *others[: count - len(chosen)]]

    def record(self, groups: Sequence[Group]) -> None:
        """Note how the policy did; a group in which no sample's correctness is known changes nothing."""
        for group in groups:
            marks = [m for r in group.rollouts if (m := r.reward.parts.get("correctness")) is not None]
            if marks:
                self.rates[group.prompt.id] = sum(m == 1.0 for m in marks) / len(marks)

    def metrics(self) -> dict[str, float]:
        """Share of the pool that is easy, hard, and not drawn yet."""
        pools = [self._pool(p) for p in self.prompts]
        return {
            "curriculum/easy": pools.count("easy") / len(pools),
            "curriculum/hard": pools.count("hard") / len(pools),
            "curriculum/unseen": sum(p.id not in self.rates for p in self.prompts) / len(pools),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = dict(state["rates"])

    def _pool(self, prompt: Prompt) -> str:
        rate = self.rates.get(prompt.id)
        if rate is None:
            return "open"
        return "easy" if rate >= self.config.easy_from else "hard" if rate <= self.config.hard_to else "open"
