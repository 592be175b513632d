"""`reasoning_gym:<name>`: the generators of the reasoning-gym library, scored by the library itself."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import count
from typing import Any, Literal

from groupwise.schema import Strict, nearest
from groupwise.tasks.base import Seed, Split, draw_split, no_traces, user
from groupwise.types import Example, Prompt, stable_hash

_RUNS_ANSWERS = "its scorer runs the answer as Python code, which a policy could learn to use"
REFUSED = dict.fromkeys(
    (
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ),
    _RUNS_ANSWERS,
) | {
    "composite": "it may hold tasks that are refused; name one task",
    "game_of_life_halting": "its scorer takes any text for a yes",
}
"""Tasks of the library whose scorers cannot be trained against, and why."""

BLOCK = 1000
"""Problems per data set of the library: some make them all at once, some refuse to be large."""


class ReasoningGymConfig(Strict):
    """Needs `pip install groupwise[gym]`. `task: {kind: "reasoning_gym:chain_sum"}` is short for kind and name."""

    kind: Literal["reasoning_gym"]
    name: str
    options: dict[str, Any] = {}
    """Passed to the library's generator, such as `{min_terms: 2}`."""


class ReasoningGym:
    """`verify` asks the library's own scorer, and counts full marks only.

    Most of its scorers give part marks to a wrong answer that contains the right one (121 for 12), which a policy would
    learn to collect. A prompt keeps the seed and the place of its problem, from which the problem is made again to be
    scored: as JSON its tuples would become lists, which some scorers take for something else.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config = config
        self._dataset = lru_cache(maxsize=8)(self._make_dataset)
        self._entry = lru_cache(maxsize=4096)(lambda seed, index: self._dataset(seed)[index])
        self._dataset(0)  # unknown names and options are found before a run

    def verify(self, prompt: Prompt, answer: str) -> float:
        """1 for full marks, else 0."""
        seed = prompt.data["seed"]
        entry = self._entry(seed, prompt.data["index"])
        try:
            return float(self._dataset(seed).score_answer(answer=answer, entry=entry) >= 1.0)
        except Exception:  # some scorers stumble over text that is no answer in their form
            return 0.0

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        first = stable_hash(seed, split) % 2**31
        places = (divmod(number, BLOCK) for number in count())

        def draw(_: random.Random) -> Prompt:
            block, index = next(places)
            return self._prompt(first + block * BLOCK, index)

        return draw_split(draw, n, seed, split, key=lambda prompt: prompt.text)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        raise no_traces(f"reasoning_gym:{self.config.name}")

    def _prompt(self, seed: int, index: int) -> Prompt:
        entry = self._entry(seed, index)
        return Prompt(
            id=f"reasoning_gym:{self.config.name}/{seed}/{index}",
            messages=user(entry["question"]),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            data={"seed": seed, "index": index},
        )

    def _make_dataset(self, seed: int) -> Any:
        library, cfg = _library(), self.config
        known = library.factory.DATASETS
        if cfg.name not in known:
            hint = nearest(cfg.name, known) or f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"reasoning_gym has no task {cfg.name!r}{hint}")
        if cfg.name in REFUSED:
            raise ValueError(f"reasoning_gym:{cfg.name} is refused: {REFUSED[cfg.name]}")
        try:
            return library.create_dataset(cfg.name, seed=seed, size=BLOCK, **cfg.options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym:{cfg.name}: options {cfg.options}: {error}") from error


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("this task needs reasoning-gym; install it with: pip install 'groupwise[gym]'") from error
    return reasoning_gym
