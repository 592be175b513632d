"""Who generates. An engine is token in, token out: it knows nothing of text, rewards or groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from groupwise.types import Completion, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """Draw the samples numbered `samples` for one prompt.

    A completion is a pure function of (weights, prompt_ids, seed, sample number): requests that are to differ, such as
    two copies of one prompt in a step, carry different seeds.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    samples: Sequence[int]


class Engine(Protocol):
    """Anything that completes prompts."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """One list per request, one completion per sample number, in order."""
        ...
