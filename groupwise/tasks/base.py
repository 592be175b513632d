"""What a task is: where prompts come from, and what is known about their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, Protocol

from groupwise.types import Example, Prompt, stable_hash

Split = Literal["train", "test"]
Seed = int | tuple[int, ...]
Verifier = Callable[[Prompt, str], float]


class Task(Protocol):
    """A source of prompts.

    `verify(prompt, answer)` is the task's own ground truth, from 0 to 1; None where answers are compared with
    `prompt.answer`. Everything a task draws is a pure function of its arguments.
    """

    @property
    def verify(self) -> Verifier | None: ...

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        """Draw prompts. No test prompt is ever a training prompt, whatever the seeds.

        Generated tasks draw anew for each seed. Finite data is walked without replacement: seed (run seed, k) gives
        rows k*n to (k+1)*n of an endless sequence of shuffles; test rows come in their own order, at most all of them.
        """
        ...

    def traces(self, n: int, seed: Seed) -> list[Example]:
        """Worked examples for a cold start, from the training split.

        Raises:
            ValueError: the task has none.
        """
        ...


def draw_split(
    draw: Callable[[random.Random], Prompt | None],
    n: int,
    seed: Seed,
    split: Split,
    key: Callable[[Prompt], str] = lambda prompt: prompt.id,
) -> list[Prompt]:
    """`n` prompts from a generator, of one split: a tenth of all problems are for testing, by the hash of their `key`.

    Raises:
        ValueError: the generator has (almost) nothing for this split.
    """
    rng = random.Random(stable_hash(seed, split))
    prompts: list[Prompt] = []
    for _ in range(1000 * n + 10_000):
        if len(prompts) == n:
            break
        prompt = draw(rng)
        if prompt is not None and (stable_hash("split", key(prompt)) % 10 == 0) == (split == "test"):
            prompts.append(prompt)
    if len(prompts) < n:
        raise ValueError(f"the task is too small: {len(prompts)} of {n} {split} prompts were found; make it larger")
    return prompts


def rows_without_replacement(rows: int, n: int, seed: Seed) -> list[int]:
    """Row numbers for step k of a run, seed = (run seed, k): a walk through one shuffle of all rows after another.

    >>> sorted(rows_without_replacement(4, 2, (7, 0)) + rows_without_replacement(4, 2, (7, 1)))
    [0, 1, 2, 3]
    """
    *run, step = seed if isinstance(seed, tuple) else (seed, 0)
    picked: list[int] = []
    position = step * n
    while len(picked) < n:
        shuffle, place = divmod(position, rows)
        taken = _shuffled(rows, tuple(run), shuffle)[place : place + n - len(picked)]
        picked += taken
        position += len(taken)
    return picked


@lru_cache(maxsize=4)  # the steps of an epoch share one shuffle, which of a million rows takes most of a second
def _shuffled(rows: int, run: tuple[int, ...], shuffle: int) -> Sequence[int]:
    order = list(range(rows))
    random.Random(stable_hash(*run, "shuffle", shuffle)).shuffle(order)
    return order


def no_traces(kind: str) -> ValueError:
    """The error of a task without worked examples."""
    return ValueError(
        f"task {kind!r} has no worked examples for a cold start; give the stage data of your own: "
        "data: {kind: file, path: traces.jsonl}"
    )


def user(text: str) -> tuple[dict[str, str], ...]:
    """A conversation of one question."""
    return ({"role": "user", "content": text},)


def assistant(prompt: Prompt, response: str) -> tuple[dict[str, str], ...]:
    """The prompt's conversation with an answer."""
    return (*(dict(m) for m in prompt.messages), {"role": "assistant", "content": response})
