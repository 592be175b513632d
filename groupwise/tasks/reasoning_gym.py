"""`reasoning_gym:<name>`: the generators of the reasoning-gym library, scored by the library itself."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from groupwise.schema import Strict, nearest
from groupwise.tasks.base import Seed, Split, draw_split, most_draws, no_traces, user
from groupwise.types import Example, Prompt, stable_hash


class ReasoningGymConfig(Strict):
    """Needs `pip install groupwise[gym]`. `task: {kind: "reasoning_gym:chain_sum"}` is short for kind and name."""

    kind: Literal["reasoning_gym"]
    name: str
    options: dict[str, Any] = {}
    """Passed to the library's generator, such as `{min_terms: 2}`."""


class ReasoningGym:
    """`verify` asks the library's own scorer, and counts full marks only.

    Most of its scorers give part marks to a wrong answer that contains the right one (121 for 12), which a policy would
    learn to collect.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config
        _ = self._scorer  # unknown names and options are found before a run

    def verify(self, prompt: Prompt, answer: str) -> float:
        """1 for full marks, else 0."""
        return float(self._scorer.score_answer(answer=answer, entry=json.loads(prompt.data["entry"])) >= 1.0)

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        number = stable_hash(seed, split) % 2**31
        entries = _library().create_dataset(self.config.name, seed=number, size=most_draws(n), **self.config.options)
        places = iter(range(most_draws(n)))  # an entry is made when it is asked for

        def draw(_: random.Random) -> Prompt:
            place = next(places)
            return self._prompt(entries[place], f"{number}/{place}")

        return draw_split(draw, n, seed, split, key=lambda prompt: prompt.text)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        raise no_traces(f"reasoning_gym:{self.config.name}")

    def _prompt(self, entry: Mapping[str, Any], place: str) -> Prompt:
        return Prompt(
            id=f"reasoning_gym:{self.config.name}/{place}",
            messages=user(entry["question"]),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            data={"entry": json.dumps(entry, default=str)},
        )

    @cached_property
    def _scorer(self) -> Any:
        library, cfg = _library(), self.config
        known = library.factory.DATASETS
        if cfg.name not in known:
            hint = nearest(cfg.name, known) or f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"reasoning_gym has no task {cfg.name!r}{hint}")
        try:
            return library.create_dataset(cfg.name, seed=0, size=1, **cfg.options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym:{cfg.name}: options {cfg.options}: {error}") from error


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("this task needs reasoning-gym; install it with: pip install 'groupwise[gym]'") from error
    return reasoning_gym
