"""Whether the answer is right, by the best judge there is: the task's verifier, the gold answer, or a judge model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from groupwise.rewards import answers
from groupwise.types import Prompt

Verifier = Callable[[Prompt, str], float]
"""A task's own scorer: `verify(prompt, answer)` in [0, 1] for an answer that was found in a response."""


class Judge(Protocol):
    """A model or program that reads whole responses where nothing exact can be compared."""

    def score(self, prompt: Prompt, response: str) -> float:
        """How good the response is, in [0, 1]."""
        ...


class CorrectnessReward:
    """Compares the final answer with the truth; `answer_style` is one of `answers.STYLES`.

    Args:
        verify: scores the found answer; where given, nothing else does. No answer is 0.0 without a call.
        judge: scores the whole response of prompts without a gold answer.

    >>> reward = CorrectnessReward()
    >>> reward(Prompt.of("6 * 7 = ?", answer="42"), r"<think>...</think>It is \\boxed{42}.")
    1.0
    """

    def __init__(
        self, *, verify: Verifier | None = None, judge: Judge | None = None, answer_style: str = "auto"
    ) -> None:
        if answer_style not in answers.STYLES:
            raise ValueError(f"answer_style must be one of {', '.join(answers.STYLES)}, got {answer_style!r}")
        self.verify, self.judge, self.answer_style = verify, judge, answer_style

    def __call__(self, prompt: Prompt, response: str) -> float:
        """The score of one response.

        Raises:
            ValueError: there is nothing to compare with, or the gold answer cannot be read.
        """
        if self.verify is None and prompt.answer is None:
            if self.judge is None:
                raise ValueError(
                    f"nothing to compare with for prompt {prompt.id!r}: give the prompt an answer, a task with a "
                    "verifier, or a judge; or take `correctness` out of the rewards"
                )
            return self.judge.score(prompt, response)
        answer = answers.find(response, self.answer_style)
        if answer is None:
            return 0.0
        if self.verify is not None:
            return self.verify(prompt, answer)
        assert prompt.answer is not None
        verdict = answers.equal(prompt.answer, answer)
        if verdict is None:
            raise ValueError(f"the gold answer {prompt.answer!r} of prompt {prompt.id!r} cannot be read or compared")
        return float(verdict)
