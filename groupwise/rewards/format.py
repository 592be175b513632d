"""Whether a response has the form that is trained for: reasoning, then the answer, each in its tags, nothing else."""

from __future__ import annotations

from groupwise.chat import ANSWER, ANSWER_END, THINK, THINK_END
from groupwise.types import Prompt

_TAGS = (THINK, THINK_END, ANSWER, ANSWER_END)


def format_reward(prompt: Prompt, response: str) -> float:
    """1.0 for `<think>...</think><answer>...</answer>`, both with content and nothing but space around them; else 0.0.

    Each tag must stand there exactly once, so nothing can be repeated or nested. The response begins with what the chat
    template wrote of it: a `<think>` that stood in the prompt counts, and one that nobody wrote is missed.

    >>> question = Prompt.of("1 + 1 = ?")
    >>> format_reward(question, "<think>1 + 1 = 2</think> <answer>2</answer>")
    1.0
    >>> format_reward(question, "<think></think><answer>2</answer>")
    0.0
    """
    text = response.strip()
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    before, text = text.split(THINK)
    reasoning, closed, text = text.partition(THINK_END)
    between, opened, text = text.partition(ANSWER)
    answer, ended, after = text.partition(ANSWER_END)
    in_order = bool(closed and opened and ended)
    has_content = bool(reasoning.strip() and answer.strip())
    return float(in_order and has_content and not before and not between.strip() and not after)
