"""The nouns of Groupwise: plain data, no torch, no I/O.

Data flows one way: a `Prompt` is sampled G times under a `Sampling` into `Completion`s; a completion that has been
scored is a `Rollout` with its `Reward`; the G rollouts of one prompt are a `Group`. An `Example` is a conversation
whose last turn is to be imitated (supervised fine-tuning).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

Message = Mapping[str, str]
"""One chat turn: `{"role": "system" | "user" | "assistant", "content": text}`."""

FinishReason = Literal["stop", "length"]
"""Why sampling ended: at a stop token, or cut off at the token limit."""


def stable_hash(*parts: object) -> int:
    """64-bit hash of the parts' JSON text, the same in every process and on every machine.

    >>> stable_hash(0, "step", 1) == stable_hash(0, "step", 1)
    True
    """
    text = json.dumps(parts, ensure_ascii=False, default=str)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is asked, and what is known about the right answer.

    `data` holds every other column of the row the prompt came from; rewards receive it with the prompt, so a gold
    column can never be separated from its own question. Two rows with the same text keep different `id`s.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last user message: the question itself."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    @classmethod
    def of(cls, value: str | Sequence[Message] | Prompt, *, answer: str | None = None) -> Prompt:
        """Make a prompt of a string, of chat messages, or return a `Prompt` unchanged.

        Raises:
            ValueError: the value is none of these, or a message lacks `role` or `content`.

        >>> Prompt.of("2 + 2 = ?", answer="4").messages
        ({'role': 'user', 'content': '2 + 2 = ?'},)
        """
        if isinstance(value, Prompt):
            return value
        if isinstance(value, str):
            messages: tuple[Message, ...] = ({"role": "user", "content": value},)
        elif isinstance(value, Sequence) and value and all(isinstance(m, Mapping) for m in value):
            messages = tuple(m for m in value if isinstance(m, Mapping))
            for message in messages:
                if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                    raise ValueError(f"a chat message needs 'role' and 'content', got {dict(message)!r}")
        else:
            raise ValueError(f"a prompt is a string, a list of chat messages or a Prompt, got {value!r}")
        return cls(id=f"prompt-{stable_hash(messages, answer):016x}", messages=messages, answer=answer)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy decoding; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    The filters are applied to the distribution at `temperature`, in the order top-k, top-p, min-p; each always keeps
    the likeliest token. Log-probs are reported at `temperature` over the full vocabulary, filters not counted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}; 0 means greedy decoding")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; 0 turns it off")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}; 0 turns it off")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one sample: exactly the ids that were sampled, the stop token included.

    `logps[t]` is the log-prob of `token_ids[t]` at the sampling temperature over the full vocabulary;
    `policy_version` counts the optimiser steps of the weights that sampled it. In a sample of several turns, `sampled`
    is False for the tokens that a tool or the environment wrote: they are attended to and never trained, and their
    entries of `logps` mean nothing.

    >>> Completion((5, 6, 7), (-0.5, 0.0, -0.25), "stop", sampled=(True, False, True)).sampled_length
    2
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    sampled: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.sampled is not None and len(self.sampled) != len(self.token_ids):
            raise ValueError(f"sampled needs {len(self.token_ids)} entries, one per token, got {len(self.sampled)}")

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy itself wrote."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)

    @property
    def sampled_logps(self) -> tuple[float, ...]:
        """The log-probs of the tokens that the policy itself wrote."""
        if self.sampled is None:
            return self.logps
        return tuple(logp for logp, sampled in zip(self.logps, self.sampled, strict=True) if sampled)


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of one response: the weighted total beside its unweighted parts.

    A part is `None` when it abstained (it does not apply here) or failed; failures are explained in `errors`.
    `total` is `None` when a weighted part failed or nothing could be scored: never silently 0.
    """

    total: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Rollout:
    """One completion with its text as the rewards saw it, its reward, its advantage and what models make of its tokens.

    `text` begins with the assistant text that the chat template prefilled (such as `<think>`), if any, and holds no
    end or padding token. `advantage` is `None` until computed, and stays `None` for a sample that could not be scored;
    where tokens are credited one by one it is their mean.

    The rest is there if the algorithm looks at it, one number per token that the policy wrote: log-probs and entropies
    under the policy that the update starts from, log-probs under the reference, and the critic's values, which have one
    number more: what follows the last token, 0 at the end of an answer.
    """

    completion: Completion
    text: str
    reward: Reward
    advantage: float | None = None
    old_logps: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    ref_logps: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None


@dataclass(slots=True)
class Group:
    """A prompt and its G rollouts: the unit that advantages are computed in, and that is never split.

    `greedy_reward` is the reward of the greedy answer to the prompt, where the algorithm compares with it.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    rollouts: list[Rollout]
    greedy_reward: float | None = None

    @property
    def rewards_G(self) -> list[float | None]:
        return [r.reward.total for r in self.rollouts]

    @property
    def has_signal(self) -> bool:
        """Whether any sample has an advantage other than zero."""
        return any(r.advantage for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation to imitate; its last message is the assistant's. `source` says where it came from."""

    messages: tuple[Message, ...]
    source: Mapping[str, Any] = field(default_factory=dict)
