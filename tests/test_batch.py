"""Packing, against layouts written down by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.batch import Batch, Segment, Span, pack


def test_the_layout_by_hand() -> None:
    batch = Batch.of([Segment(prompt_ids=(1, 2), token_ids=(7, 8, 9)), Segment(prompt_ids=(1, 2), token_ids=(7, 5))])
    assert batch.token_ids_F.tolist() == [1, 2, 7, 8, 7]
    assert batch.position_F.tolist() == [0, 1, 2, 3, 2]
    assert batch.target_T.tolist() == [7, 8, 9, 7, 5]
    assert batch.source_T.tolist() == [1, 2, 3, 1, 4]
    assert batch.segment_T.tolist() == [0, 0, 0, 1, 1]
    assert batch.prefixes == (Span(0, 2),)
    assert batch.continuations == (Span(2, 2, 0), Span(4, 1, 0))


def test_two_prompts_and_a_segment_of_one_token() -> None:
    batch = Batch.of([Segment(prompt_ids=(1,), token_ids=(6,)), Segment(prompt_ids=(3, 4), token_ids=(5, 6, 7))])
    assert batch.token_ids_F.tolist() == [1, 3, 4, 5, 6]
    assert batch.position_F.tolist() == [0, 0, 1, 2, 3]
    assert batch.source_T.tolist() == [0, 2, 3, 4]
    assert batch.target_T.tolist() == [6, 5, 6, 7]  # the first answer token is trained, and nothing of the prompt
    assert batch.continuations == (Span(1, 0, 0), Span(3, 2, 1))


def test_tokens_that_are_not_trained_are_seen_but_not_scored() -> None:
    segment = Segment(prompt_ids=(1,), token_ids=(5, 6, 7, 8), trained=(False, True, False, True))
    batch = Batch.of([segment])
    assert batch.token_ids_F.tolist() == [1, 5, 6, 7]
    assert batch.target_T.tolist() == [6, 8]
    assert batch.source_T.tolist() == [1, 3]
    assert segment.trained_length == 2


def test_the_stop_token_is_trained_where_padding_has_its_id() -> None:
    eos = 2
    batch = Batch.of(
        [Segment(prompt_ids=(7, 8), token_ids=(9, eos)), Segment(prompt_ids=(7,), token_ids=(9, 9, 9, eos))]
    )
    assert batch.target_T.tolist() == [9, eos, 9, 9, 9, eos]
    assert batch.token_ids_F.tolist() == [7, 8, 9, 7, 9, 9, 9]  # no padding to be confused with it


def test_equal_prompts_are_shared_by_neighbours_only() -> None:
    a, b = (1, 2), (3,)
    segments = [Segment(prompt_ids=p, token_ids=(9, 9)) for p in (a, a, b, a)]
    batch = Batch.of(segments)
    assert batch.token_ids_F.tolist() == [1, 2, 9, 9, 3, 9, 1, 2, 9]
    assert [c.prefix for c in batch.continuations] == [0, 0, 1, 2]


def test_numbers_of_segments_and_of_tokens() -> None:
    batch = Batch.of([Segment(prompt_ids=(1,), token_ids=(7, 8)), Segment(prompt_ids=(1,), token_ids=(9,))])
    assert batch.per_token([0.5, -1.0]).tolist() == [0.5, 0.5, -1.0]
    flat = batch.flat([[0.1, 0.2], [0.3]])
    assert flat is not None
    assert flat.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert batch.flat([[0.1, 0.2], None]) is None
    assert batch.split(torch.tensor([1.0, 2.0, 3.0])) == [(1.0, 2.0), (3.0,)]


def test_pack_keeps_to_the_budget_and_repeats_the_prompt_of_a_group_that_is_cut() -> None:
    group = [Segment(prompt_ids=(1, 2, 3), token_ids=(9,) * n) for n in (3, 3, 5)]
    # Flat tokens: 3 + 2 + 2 = 7, and 3 + 4 = 7 for the third with a prompt of its own.
    batches = pack(group, max_tokens=8)
    assert [b.token_ids_F.tolist() for b in batches] == [[1, 2, 3, 9, 9, 9, 9], [1, 2, 3, 9, 9, 9, 9]]
    assert [len(b.segments) for b in batches] == [2, 1]
    assert len(pack(group, max_tokens=11)) == 1
    assert len(pack(group, max_tokens=10)) == 2


def test_a_segment_longer_than_the_budget_stands_alone() -> None:
    segments = [Segment(prompt_ids=(1,), token_ids=(9,) * n) for n in (2, 50, 2)]
    assert [len(b.token_ids_F) for b in pack(segments, max_tokens=8)] == [2, 50, 2]
    assert pack([], max_tokens=8) == []


ids = st.integers(0, 20)
prompts = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=3)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    segments = []
    for prompt in draw(prompts):
        for _ in range(draw(st.integers(1, 3))):
            tokens = tuple(draw(st.lists(ids, min_size=1, max_size=5)))
            mask = draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)).map(tuple))
            segments.append(Segment(prompt_ids=prompt, token_ids=tokens, trained=mask))
    return segments


@given(segment_lists(), st.integers(1, 30))
def test_packing_loses_nothing_and_points_every_target_at_its_past(segments: list[Segment], budget: int) -> None:
    batches = pack(segments, budget)
    assert [s for b in batches for s in b.segments] == segments
    for batch in batches:
        assert len(batch.token_ids_F) <= budget or len(batch.segments) == 1
        expected = []  # (segment, position that predicts, token that stands there, target)
        for n, s in enumerate(batch.segments):
            whole = s.prompt_ids + s.token_ids
            for t, target in enumerate(s.token_ids):
                if s.trained is None or s.trained[t]:
                    at = len(s.prompt_ids) + t - 1
                    expected.append((n, at, whole[at], target))
        source = batch.source_T
        found = zip(
            batch.segment_T.tolist(),
            batch.position_F[source].tolist(),
            batch.token_ids_F[source].tolist(),
            batch.target_T.tolist(),
            strict=True,
        )
        assert list(found) == expected
