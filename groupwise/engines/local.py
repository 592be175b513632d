"""The local engine: samples from the very weights that are being trained, in this process.

R rows (samples being drawn), B prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from groupwise.attention import DecodeLayout, PackedLayout
from groupwise.batch import Batch, Segment
from groupwise.engines import Request
from groupwise.engines.sampling import draw, uniforms
from groupwise.model import Policy
from groupwise.types import Completion, FinishReason, Sampling

COMPACT_BELOW = 0.75
"""Finished rows are dropped once fewer than this share is still alive: dropping copies the caches of the rest."""


@dataclass(slots=True)
class LocalEngine:
    """Batched sampling with a key/value cache; each prompt is prefilled and cached once, whatever its group size.

    Args:
        policy: shared with the trainer, so there is nothing to synchronise.
        max_rows: most samples that are drawn at a time.
        max_cached_tokens: most tokens (prompts plus room for completions) that are cached at a time; it bounds memory.
    """

    policy: Policy
    max_rows: int = 256
    max_cached_tokens: int = 1 << 16

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """See `Engine.generate`.

        Raises:
            ValueError: a prompt and `max_tokens` exceed the positions that the model has.
        """
        limit = self.policy.max_positions
        for request in requests:
            if len(request.prompt_ids) + sampling.max_tokens > limit:
                raise ValueError(
                    f"a prompt of {len(request.prompt_ids)} tokens and max_tokens {sampling.max_tokens} exceed the "
                    f"{limit} positions of the model; lower max_tokens or drop the prompt"
                )
        done: list[list[Completion]] = [[] for _ in requests]
        for wave in self._waves(requests, sampling):
            rows = _Rows.of([requests[i] for i, _ in wave], [samples for _, samples in wave], sampling, self.policy)
            with torch.inference_mode():
                self._decode(rows, sampling)
            completions = iter(rows.completions(self.policy.version))
            for index, samples in wave:
                done[index] += [next(completions) for _ in samples]
        return done

    def _waves(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[tuple[int, list[int]]]]:
        """(request index, sample numbers) that are decoded together; large groups may span waves."""
        wave: list[tuple[int, list[int]]] = []
        rows = tokens = 0
        for index, request in enumerate(requests):
            for sample in request.samples:
                first = not wave or wave[-1][0] != index
                cost = sampling.max_tokens + first * len(request.prompt_ids)
                if wave and (rows + 1 > self.max_rows or tokens + cost > self.max_cached_tokens):
                    yield wave
                    wave, rows, tokens, first = [], 0, 0, True
                    cost = sampling.max_tokens + len(request.prompt_ids)
                if first:
                    wave.append((index, []))
                wave[-1][1].append(sample)
                rows, tokens = rows + 1, tokens + cost
        if wave:
            yield wave

    def _decode(self, rows: _Rows, sampling: Sampling) -> None:
        decoder_type = _SharedPrefixDecoder if self.policy.attention == "packed" else _PlainDecoder
        decoder = decoder_type(self.policy, rows.prompts, rows.prompt_R, sampling.max_tokens)
        vocabulary = len(self.policy.tokenizer)
        stop = torch.tensor(self.policy.chat.stop_ids, device=self.policy.device)
        current = torch.arange(len(rows.prompt_R), device=self.policy.device)  # rows that the decoder still holds
        alive = torch.ones_like(current, dtype=torch.bool)
        logits = decoder.first_logits()
        for t in range(sampling.max_tokens):
            token_R, logp_R = draw(logits, rows.uniform_RT[current, t], sampling, vocabulary)
            live = current[alive]
            rows.token_RT[live, t], rows.logp_RT[live, t] = token_R[alive], logp_R[alive]
            rows.length_R[live] = t + 1
            stopped = torch.isin(token_R, stop) & alive
            rows.stopped_R[current[stopped]] = True
            alive &= ~stopped
            remaining = int(alive.sum())
            if not remaining or t + 1 == sampling.max_tokens:
                return
            if remaining < COMPACT_BELOW * len(current):
                kept = alive.nonzero().squeeze(1)
                decoder.keep(kept)
                token_R, current, alive = token_R[kept], current[kept], alive[kept]
            logits = decoder.next_logits(token_R)


@dataclass(slots=True)
class _Rows:
    """Samples being drawn together, and what has been drawn of them."""

    prompts: list[tuple[int, ...]]
    prompt_R: Tensor
    uniform_RT: Tensor
    token_RT: Tensor
    logp_RT: Tensor
    length_R: Tensor = field(init=False)
    stopped_R: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.length_R = torch.zeros_like(self.prompt_R)
        self.stopped_R = torch.zeros_like(self.prompt_R, dtype=torch.bool)

    @classmethod
    def of(cls, requests: list[Request], samples: list[list[int]], sampling: Sampling, policy: Policy) -> _Rows:
        table = [
            torch.from_numpy(uniforms(request.seed, sample, sampling.max_tokens))
            for request, numbers in zip(requests, samples, strict=True)
            for sample in numbers
        ]
        owner = [i for i, numbers in enumerate(samples) for _ in numbers]
        shape = (len(owner), sampling.max_tokens)
        device = policy.device
        return cls(
            prompts=[r.prompt_ids for r in requests],
            prompt_R=torch.tensor(owner, device=device),
            uniform_RT=torch.stack(table).to(device),
            token_RT=torch.zeros(shape, dtype=torch.long, device=device),
            logp_RT=torch.zeros(shape, device=device),
        )

    def completions(self, version: int) -> Iterator[Completion]:
        tokens, logps = self.token_RT.tolist(), self.logp_RT.tolist()
        lengths, stopped = self.length_R.tolist(), self.stopped_R.tolist()
        for ids, lps, n, stop in zip(tokens, logps, lengths, stopped, strict=True):
            reason: FinishReason = "stop" if stop else "length"
            yield Completion(tuple(ids[:n]), tuple(lps[:n]), reason, version)


class _Decoder(Protocol):
    """The model's side of decoding: logits of the next token of each row, [R, V] in float32."""

    def first_logits(self) -> Tensor: ...
    def next_logits(self, token_R: Tensor) -> Tensor: ...
    def keep(self, rows: Tensor) -> None: ...


class _SharedPrefixDecoder:
    """Prompts are prefilled packed and cached once; rows decode against them (`attention.DecodeLayout`)."""

    def __init__(self, policy: Policy, prompts: list[tuple[int, ...]], prompt_R: Tensor, max_tokens: int) -> None:
        # A segment of one token adds nothing to the flat sequence: this packs the prompts alone.
        batch = Batch.of([Segment(prompt_ids=p, token_ids=(0,)) for p in prompts], policy.device)
        layout = PackedLayout(batch, keep_prefix=True)
        hidden = policy.hidden_states(batch.token_ids_F, batch.position_F, layout)
        prefix_of = torch.tensor([c.prefix for c in batch.continuations], device=policy.device)
        assert layout.prefix_kv is not None
        self.policy = policy
        self.first = policy.logits(hidden[batch.source_T])[prompt_R]
        self.layout = DecodeLayout(layout.prefix_kv, layout.prompt_length_B, prefix_of[prompt_R], max_tokens)

    def first_logits(self) -> Tensor:
        return self.first

    def next_logits(self, token_R: Tensor) -> Tensor:
        hidden = self.policy.hidden_states(token_R, self.layout.position_R, self.layout)
        self.layout.advance()
        return self.policy.logits(hidden)

    def keep(self, rows: Tensor) -> None:
        self.layout.keep(rows)


class _PlainDecoder:
    """For models whose attention cannot be routed: the model's own forward, without a cache, unpadded.

    Rows of equal length go through the model together; every step reads the whole sequence again. Slow, and right for
    any causal model.
    """

    def __init__(self, policy: Policy, prompts: list[tuple[int, ...]], prompt_R: Tensor, max_tokens: int) -> None:
        self.policy = policy
        self.rows = [list(prompts[p]) for p in prompt_R.tolist()]

    def first_logits(self) -> Tensor:
        by_length: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            by_length.setdefault(len(row), []).append(index)
        logits: list[Tensor] = [torch.empty(0)] * len(self.rows)
        for indices in by_length.values():
            ids = torch.tensor([self.rows[i] for i in indices], device=self.policy.device)
            for i, last in zip(indices, self.policy.next_token_logits(ids), strict=True):
                logits[i] = last
        return torch.stack(logits)

    def next_logits(self, token_R: Tensor) -> Tensor:
        for row, token in zip(self.rows, token_R.tolist(), strict=True):
            row.append(token)
        return self.first_logits()

    def keep(self, rows: Tensor) -> None:
        self.rows = [self.rows[i] for i in rows.tolist()]
