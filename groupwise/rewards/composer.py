"""The reward of a response: named parts, weighted and summed, with failures kept apart from scores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol

from groupwise.rewards.correctness import CorrectnessReward, Judge, Verifier
from groupwise.rewards.format import format_reward
from groupwise.rewards.reasoning import reasoning_reward
from groupwise.rewards.safety import SafetyReward
from groupwise.schema import nearest
from groupwise.types import Message, Prompt, Reward

RewardPart = Callable[[Prompt, str], float | None]
"""Scores a response to a prompt; `None` abstains: the part does not apply here."""

BUILTIN_PARTS = ("correctness", "format", "reasoning", "safety")
JUDGE_THREADS = 8
"""Judges mostly wait for a server, so that many are asked at a time."""


class RewardError(ValueError):
    """A response could not be scored; the message holds the errors of all its parts."""


class Scorer(Protocol):
    """What trainers and stages ask of a reward: `RewardComposer`, or anything behind `as_reward`."""

    def score(self, prompt: Prompt, response: str) -> Reward:
        """The reward of one response."""
        ...

    def score_many(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """The rewards of many (prompt, response) pairs, in their order."""
        ...


class RewardComposer:
    """A weighted sum of reward parts.

    A part that abstains (`None`) is left out of the sum. A part that raises or returns anything but a finite number has
    failed: it is `None` with an entry in `errors`, and if its weight is above 0 there is no total, because an outage
    must never look like a wrong answer. A part of weight 0 is computed and logged only.

    Args:
        weights: by part name; these parts are computed, in this order.
        parts: functions `(prompt, response) -> float | None` that add to the built-in parts, or replace them, by name.
        judge: scores the `correctness` of prompts without a gold answer; see `correctness.Judge`.
        verify: the task's own scorer of found answers; see `correctness.Verifier`.
        answer_style: how the final answer is marked; see `answers.find`.
        blocklist: words that `safety` refuses.

    Raises:
        ValueError: a weight is negative, not finite or of an unknown part, or none is above 0.

    >>> reward = RewardComposer({"correctness": 1.0, "format": 0.5})
    >>> reward.compute_reward("1 + 1 = ?", "<think>1 + 1 = 2</think><answer>2</answer>", answer="2")
    1.5
    >>> reward.score("1 + 1 = ?", "<answer>2</answer>", answer="2").parts
    {'correctness': 1.0, 'format': 0.0}
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        parts: Mapping[str, RewardPart] | None = None,
        judge: Judge | None = None,
        verify: Verifier | None = None,
        answer_style: str = "auto",
        blocklist: Sequence[str] = (),
    ) -> None:
        known: dict[str, RewardPart] = {
            "correctness": CorrectnessReward(verify=verify, judge=judge, answer_style=answer_style),
            "format": format_reward,
            "reasoning": reasoning_reward,
            "safety": SafetyReward(blocklist),
            **(parts or {}),
        }
        for name, weight in weights.items():
            _check_weight(name, weight, known)
        if not any(weight > 0 for weight in weights.values()):
            raise ValueError(f"rewards needs at least one weight above 0, got {dict(weights)}")
        self.weights = {name: float(weight) for name, weight in weights.items()}
        self._parts = {name: known[name] for name in self.weights}
        self._threads = JUDGE_THREADS if judge is not None else 1

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that are computed."""
        return tuple(self.weights)

    def score(self, prompt: str | Sequence[Message] | Prompt, response: str, answer: str | None = None) -> Reward:
        """The weighted total of one response beside its unweighted parts; `answer` is the gold answer of the prompt."""
        asked = Prompt.of(prompt, answer=answer)
        if answer is not None and asked.answer != answer:
            asked = replace(asked, answer=answer)
        scores: dict[str, float | None] = {}
        errors: dict[str, str] = {}
        for name, part in self._parts.items():
            scores[name], error = _call(name, part, asked, response)
            if error is not None:
                errors[name] = error
        weighted = {name: weight for name, weight in self.weights.items() if weight > 0}
        terms = [weight * score for name, weight in weighted.items() if (score := scores[name]) is not None]
        has_total = bool(terms) and not any(name in errors for name in weighted)
        return Reward(math.fsum(terms) if has_total else None, scores, errors)

    def score_many(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        """The rewards of many (prompt, response) pairs, in their order; a judge is asked about several at a time."""
        if self._threads == 1:
            return [self.score(prompt, response) for prompt, response in pairs]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda pair: self.score(*pair), pairs))

    def compute_reward(
        self, prompt: str | Sequence[Message] | Prompt, response: str, answer: str | None = None
    ) -> float:
        """The total of `score`.

        Raises:
            RewardError: a weighted part failed, or all of them abstained.
        """
        reward = self.score(prompt, response, answer)
        if reward.total is None:
            raise RewardError("; ".join(reward.errors.values()) or "every weighted reward part abstained")
        return reward.total


class _CustomReward:
    """A reward of the user's own behind the same boundary as a part."""

    def __init__(self, name: str, function: Callable[[Prompt, str], Any]) -> None:
        self.name, self.function = name, function

    def score(self, prompt: Prompt, response: str) -> Reward:
        try:
            value = self.function(prompt, response)
        except Exception as error:
            return Reward(None, {self.name: None}, {self.name: _describe(self.name, error)})
        return self.reward_of(value)

    def score_many(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        return [self.score(prompt, response) for prompt, response in pairs]

    def reward_of(self, value: Any) -> Reward:
        """A `Reward` as it is; a number as its total; `None` abstains; anything else is a failure."""
        if isinstance(value, Reward):
            return value
        score, error = _read_score(self.name, value)
        return Reward(score, {self.name: score}, {} if error is None else {self.name: error})


class _CustomBatchReward(_CustomReward):
    """A custom reward that scores all pairs in one call."""

    def __init__(self, name: str, function: Callable[[Prompt, str], Any], many: Callable[[Any], Any]) -> None:
        super().__init__(name, function)
        self.many = many

    def score_many(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward]:
        try:
            values = self.many(pairs)
            values = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(pairs):
                raise ValueError(f"it must return {len(pairs)} scores for {len(pairs)} responses, got {_kind(values)}")
        except Exception as error:
            return [Reward(None, {self.name: None}, {self.name: _describe(self.name, error)}) for _ in pairs]
        return [self.reward_of(value) for value in values]


def as_reward(reward: Any) -> Scorer:
    """What a user may pass as a reward, as a `Scorer`.

    Accepted are a `RewardComposer`, an object with `score(prompt, response)`, and any callable `(prompt, response)`.
    The prompt is handed over as a `Prompt`, and the result is a number, `None` or a `Reward`. An object's own
    `score_many(pairs)` is used if it has one, and must return as many scores. Failures become errors, as in
    `RewardComposer`.

    Raises:
        ValueError: the object is none of these.

    >>> brevity = as_reward(lambda prompt, response: 1.0 / len(response))
    >>> brevity.score(Prompt.of("hi"), "four").total
    0.25
    """
    if isinstance(reward, RewardComposer | _CustomReward):
        return reward
    score, many = getattr(reward, "score", None), getattr(reward, "score_many", None)
    if callable(score) and callable(many):
        return _CustomBatchReward(type(reward).__name__, score, many)
    if callable(score):
        return _CustomReward(type(reward).__name__, score)
    if callable(reward):
        return _CustomReward(getattr(reward, "__name__", type(reward).__name__), reward)
    raise ValueError(
        "a reward is a RewardComposer, a function (prompt, response) -> float, or an object with .score(prompt, "
        f"response), got {reward!r}"
    )


def load_part(path: str) -> Any:
    """The function or object that a recipe names as `module:name`, such as `my_rewards:brevity`.

    Raises:
        ValueError: the path has another form, or the module or the name in it cannot be found.

    >>> load_part("math:sqrt")(9.0)
    3.0
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"a reward function is given as 'module:function', got {path!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward function {path!r}: cannot import {module_name!r}: {error}") from error
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            hint = nearest(attribute, [n for n in dir(found) if not n.startswith("_")])
            raise ValueError(f"reward function {path!r}: {module_name!r} has no {name!r}{hint}")
        found = getattr(found, attribute)
    return found


# -- the boundary ----------------------------------------------------------------------------------------------------


def _call(name: str, part: RewardPart, prompt: Prompt, response: str) -> tuple[float | None, str | None]:
    """(score, error) of a part; both are `None` when it abstains."""
    try:
        value = part(prompt, response)
    except Exception as error:
        return None, _describe(name, error)
    return _read_score(name, value)


def _read_score(name: str, value: Any) -> tuple[float | None, str | None]:
    """(score, error) of what a reward function returned: NumPy and torch scalars are numbers, strings are not."""
    if value is None:
        return None, None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None, f"{name}: a reward is one number per response, got {_kind(value)}"
    score = float(value)
    return (score, None) if math.isfinite(score) else (None, f"{name}: a reward must be finite, got {score}")


def _describe(name: str, error: Exception) -> str:
    return f"{name}: {type(error).__name__}: {error}"


def _kind(value: Any) -> str:
    """What a value is, in words, for error messages.

    >>> _kind([1.0]), _kind("0.5"), _kind(None)
    ('1 value (list)', "'0.5'", 'None')
    """
    if hasattr(value, "__len__") and not isinstance(value, str):
        return f"{len(value)} value{'s' * (len(value) != 1)} ({type(value).__name__})"
    return repr(value)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _check_weight(name: str, weight: float, known: Mapping[str, RewardPart]) -> None:
    if name not in known:
        raise ValueError(f"rewards.{name} is not a known part{nearest(name, known)}; known are {', '.join(known)}")
    if not isinstance(weight, Real) or isinstance(weight, bool) or not 0 <= weight < math.inf:
        condition = "a finite number >= 0" if weight != weight or weight == math.inf else ">= 0"
        raise ValueError(
            f"rewards.{name}.weight must be {condition}, got {weight}; "
            "set it to 0 to log the part without training on it"
        )
