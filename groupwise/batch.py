"""Batches without padding: flat tokens in which every continuation of a prompt shares the prompt's tokens.

F: tokens of the flat sequence; T: trained tokens; S: segments; B: prefixes (prompts).

A prompt stands once, followed by its segments; each segment sees the prompt and itself. A segment's last token predicts
nothing and is not in the flat sequence; its first is predicted by the prompt's last token:

    prompt (1 2), segments (7 8 9) and (7 5):     flat  1 2 7 8 7     position  0 1 2 3 2
    targets 7 8 9 7 5 are predicted by flat indices  1 2 3 1 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Segment:
    """One continuation of a prompt, and what is known of its tokens.

    `trained` marks the tokens that are trained and scored (all by default): tool output inside a continuation is seen
    but never trained. `weight` holds for each trained token; the sequences have one entry per trained token.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...] | None = None
    weight: float = 0.0
    advantages: Sequence[float] | None = None
    sampler_logps: Sequence[float] | None = None
    old_logps: Sequence[float] | None = None
    entropies: Sequence[float] | None = None
    ref_logps: Sequence[float] | None = None
    selected: Sequence[bool] | None = None
    values: Sequence[float] | None = None
    returns: Sequence[float] | None = None

    def __post_init__(self) -> None:
        assert self.prompt_ids and self.token_ids, "a segment continues a prompt of at least one token"
        assert self.trained is None or len(self.trained) == len(self.token_ids)

    @property
    def trained_length(self) -> int:
        return len(self.token_ids) if self.trained is None else sum(self.trained)


@dataclass(frozen=True, slots=True)
class Span:
    """`length` flat tokens from `start`; a segment's span also names the prefix it continues."""

    start: int
    length: int
    prefix: int = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch. The tensors suffixed F describe the flat input, those suffixed T the trained tokens."""

    segments: tuple[Segment, ...]
    prefixes: tuple[Span, ...]
    continuations: tuple[Span, ...]
    token_ids_F: Tensor
    position_F: Tensor
    source_T: Tensor
    """Flat index of the token whose hidden state predicts each trained token."""
    target_T: Tensor
    segment_T: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device | str = "cpu") -> Self:
        """Pack segments; neighbours with the same prompt share it."""
        token_ids: list[int] = []
        positions: list[int] = []
        prefixes: list[Span] = []
        continuations: list[Span] = []
        sources: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        prompt: tuple[int, ...] | None = None
        for index, segment in enumerate(segments):
            if prompt is None or segment.prompt_ids != prompt:
                prompt = segment.prompt_ids
                prefixes.append(Span(len(token_ids), len(prompt)))
                token_ids += prompt
                positions += range(len(prompt))
            start, inputs = len(token_ids), segment.token_ids[:-1]
            continuations.append(Span(start, len(inputs), len(prefixes) - 1))
            token_ids += inputs
            positions += range(len(prompt), len(prompt) + len(inputs))
            last_of_prompt = prefixes[-1].start + prefixes[-1].length - 1
            for t, target in enumerate(segment.token_ids):
                if segment.trained is None or segment.trained[t]:
                    sources.append(start + t - 1 if t else last_of_prompt)
                    targets.append(target)
                    owners.append(index)
        token_ids_F, position_F, source_T, target_T, segment_T = (
            torch.tensor(x, dtype=torch.long, device=device) for x in (token_ids, positions, sources, targets, owners)
        )
        return cls(
            tuple(segments),
            tuple(prefixes),
            tuple(continuations),
            token_ids_F,
            position_F,
            source_T,
            target_T,
            segment_T,
        )

    @property
    def device(self) -> torch.device:
        return self.token_ids_F.device

    def per_token(self, values: Iterable[float]) -> Tensor:
        """One number per segment, spread over its trained tokens; shape [T], float32."""
        return torch.tensor(list(values), dtype=torch.float32, device=self.device)[self.segment_T]

    def flat(self, values: Iterable[Sequence[float] | None]) -> Tensor | None:
        """One sequence of numbers per segment, joined; shape [T], float32. None if any segment has none."""
        rows = list(values)
        if any(row is None for row in rows):
            return None
        joined = [v for row in rows if row is not None for v in row]
        assert len(joined) == len(self.target_T), "each segment needs one number per trained token"
        return torch.tensor(joined, dtype=torch.float32, device=self.device)

    def split(self, values_T: Tensor) -> list[tuple[float, ...]]:
        """The inverse of `flat`: values of the trained tokens, one tuple per segment."""
        lengths = [s.trained_length for s in self.segments]
        return [tuple(part.tolist()) for part in values_T.detach().float().cpu().split(lengths)]


def pack(segments: Sequence[Segment], max_tokens: int, device: torch.device | str = "cpu") -> list[Batch]:
    """Pack segments in order into as few batches as fit `max_tokens` flat tokens each.

    A group that does not fit is cut between its segments, and its prompt repeated. A single segment longer than the
    budget gets a batch of its own.
    """
    batches: list[Batch] = []
    current: list[Segment] = []
    used = 0
    for segment in segments:
        cost = len(segment.token_ids) - 1
        if not current or current[-1].prompt_ids != segment.prompt_ids:
            cost += len(segment.prompt_ids)
        if current and used + cost > max_tokens:
            batches.append(Batch.of(current, device))
            current, used = [], 0
            cost = len(segment.prompt_ids) + len(segment.token_ids) - 1
        current.append(segment)
        used += cost
    if current:
        batches.append(Batch.of(current, device))
    return batches
