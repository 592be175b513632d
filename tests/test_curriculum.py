"""Curriculum: which prompts are drawn, and what is remembered of them."""

from __future__ import annotations

import io
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config import CurriculumConfig
from groupwise.curriculum import Curriculum
from groupwise.types import Completion, Group, Prompt, Reward, Rollout

COMPLETION = Completion((5,), (-1.0,), "stop")


def prompts(kind: str, count: int) -> list[Prompt]:
    """Prompts whose ids begin with what they are."""
    return [Prompt(f"{kind}-{i}", ({"role": "user", "content": f"{kind} {i}"},)) for i in range(count)]


def curriculum(easy: int = 0, hard: int = 0, between: int = 0, unseen: int = 0, **config: Any) -> Curriculum:
    """A pool with so many prompts of each kind, at the default bounds 1 and 0."""
    rates = {"easy": 1.0, "hard": 0.0, "between": 0.5}
    pool = prompts("easy", easy) + prompts("hard", hard) + prompts("between", between) + prompts("unseen", unseen)
    made = Curriculum(CurriculumConfig(**config), pool)
    made.rates = {p.id: rates[kind_of(p)] for p in pool if kind_of(p) in rates}
    return made


def kind_of(prompt: Prompt) -> str:
    return prompt.id.split("-")[0]


def kinds(drawn: Sequence[Prompt]) -> Counter[str]:
    return Counter(map(kind_of, drawn))


def group(prompt: Prompt, *marks: float | None, name: str = "correctness") -> Group:
    return Group(prompt, (1,), [Rollout(COMPLETION, "", Reward(1.0, {name: mark})) for mark in marks])


# -- what is drawn ---------------------------------------------------------------------------------------------------


def test_the_shares_of_easy_and_hard_prompts() -> None:
    made = curriculum(easy=20, hard=20, between=20, easy_share=0.2, hard_share=0.3)
    assert kinds(made.pick(10, 0)) == {"easy": 2, "hard": 3, "between": 5}


def test_prompts_never_drawn_are_as_good_as_those_between() -> None:
    made = curriculum(easy=5, hard=5, between=30, unseen=30, easy_share=0.0, hard_share=0.0)
    found = Counter[str]()
    for seed in range(50):
        found += kinds(made.pick(10, seed))
    assert found.keys() == {"between", "unseen"}
    assert 200 < found["unseen"] < 300


def test_by_default_one_in_ten_is_hard_and_none_is_easy() -> None:
    made = curriculum(easy=50, hard=50, unseen=50)
    assert kinds(made.pick(20, 0)) == {"hard": 2, "unseen": 18}


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        # Of 10, 2 are to be easy and 3 hard.
        ({"easy": 1, "hard": 20, "between": 20}, {"easy": 1, "hard": 3, "between": 6}),  # first what is between
        ({"easy": 20, "hard": 1, "between": 20}, {"easy": 2, "hard": 1, "between": 7}),
        ({"easy": 20, "hard": 20, "between": 3}, {"easy": 2, "hard": 5, "between": 3}),  # then what is hard
        ({"easy": 20, "hard": 4, "between": 3}, {"easy": 3, "hard": 4, "between": 3}),  # then what is easy
        ({"easy": 20}, {"easy": 10}),
        ({"hard": 20}, {"hard": 10}),
        ({"unseen": 20}, {"unseen": 10}),
    ],
)
def test_what_is_missing_is_filled_up_in_order(pool: dict[str, int], expected: dict[str, int]) -> None:
    made = curriculum(**pool, easy_share=0.2, hard_share=0.3)
    assert kinds(made.pick(10, 0)) == expected


def test_a_smaller_pool_is_returned_whole() -> None:
    made = curriculum(easy=2, hard=3, between=1, unseen=2, easy_share=0.2, hard_share=0.3)
    for count in (8, 9, 100):
        assert sorted(p.id for p in made.pick(count, 0)) == sorted(p.id for p in made.prompts)


@pytest.mark.parametrize(("easy_share", "hard_share", "count"), [(0.5, 0.5, 3), (0.7, 0.3, 5), (0.3, 0.7, 5)])
def test_shares_that_round_up_to_more_than_all_still_draw_as_many_as_asked(
    easy_share: float, hard_share: float, count: int
) -> None:
    made = curriculum(easy=20, hard=20, unseen=20, easy_share=easy_share, hard_share=hard_share)
    assert len(made.pick(count, 0)) == count


@st.composite
def curricula(draw: st.DrawFn) -> Curriculum:
    pool = {kind: draw(st.integers(0, 12)) for kind in ("easy", "hard", "between", "unseen")}
    easy_share = draw(st.integers(0, 10))
    hard_share = draw(st.integers(0, 10 - easy_share))
    return curriculum(**pool, easy_share=easy_share / 10, hard_share=hard_share / 10)


@given(curricula(), st.integers(1, 40), st.integers(0, 5))
def test_as_many_different_prompts_as_asked_or_all(made: Curriculum, count: int, seed: int) -> None:
    drawn = [p.id for p in made.pick(count, seed)]
    assert len(drawn) == min(count, len(made.prompts))
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= {p.id for p in made.prompts}


@given(curricula(), st.sampled_from([10, 20]), st.integers(0, 5))
def test_no_kind_gives_way_but_to_what_is_missing(made: Curriculum, count: int, seed: int) -> None:
    """By counting: shares first, then what is between or unseen, then the hard, then the easy."""
    pool = kinds(made.prompts)
    room, expected = count, Counter[str]()
    for kind, most in (
        ("easy", round(made.config.easy_share * count)),
        ("hard", round(made.config.hard_share * count)),
        ("open", count),
        ("hard", count),
        ("easy", count),
    ):
        there = pool["between"] + pool["unseen"] if kind == "open" else pool[kind]
        taken = min(room, most, there - expected[kind])
        expected[kind] += taken
        room -= taken
    found = kinds(made.pick(count, seed))
    assert (found["easy"], found["hard"]) == (expected["easy"], expected["hard"])
    assert found["between"] + found["unseen"] == expected["open"]


@given(curricula(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_draw_is_a_function_of_rates_count_and_seed(made: Curriculum, count: int, rng: random.Random) -> None:
    first = made.pick(count, (7, 3))
    assert made.pick(count, (7, 3)) == first
    shuffled = rng.sample(made.prompts, len(made.prompts))
    other = Curriculum(made.config, shuffled)
    other.rates = dict(rng.sample(sorted(made.rates.items()), len(made.rates)))
    assert other.pick(count, (7, 3)) == first


def test_other_seeds_draw_other_prompts_and_in_time_all() -> None:
    made = curriculum(unseen=20)
    draws = [made.pick(4, (0, step)) for step in range(100)]
    assert len({tuple(p.id for p in d) for d in draws}) == 100
    found = Counter(p.id for p in itertools.chain(*draws))
    assert len(found) == 20
    assert min(found.values()) >= 8 and max(found.values()) <= 35  # 20 each on average


def test_a_draw_changes_with_what_is_learned_of_a_prompt() -> None:
    made = curriculum(unseen=20, hard_share=0.0)
    first = made.pick(5, 0)
    made.record([group(first[0], 1.0, 1.0)])
    assert first[0] not in made.pick(5, 0)
    assert first[1:] == made.pick(5, 0)[:4]


def test_bounds_of_what_is_easy_and_hard() -> None:
    made = Curriculum(CurriculumConfig(easy_from=0.75, hard_to=0.25), prompts("row", 5))
    made.rates = {"row-0": 0.25, "row-1": 0.3, "row-2": 0.7, "row-3": 0.75, "row-4": 1.0}
    assert made.metrics() == {"curriculum/easy": 0.4, "curriculum/hard": 0.2, "curriculum/unseen": 0.0}


def test_prompts_with_the_same_id_are_one() -> None:
    twice = Curriculum(CurriculumConfig(), prompts("row", 3) * 2)
    assert sorted(p.id for p in twice.pick(10, 0)) == ["row-0", "row-1", "row-2"]


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_the_share_of_right_samples_is_recorded() -> None:
    a, b, c = prompts("row", 3)
    made = Curriculum(CurriculumConfig(), [a, b, c])
    made.record([group(a, 1.0, 0.0, 0.0, 1.0), group(b, 0.0, 0.5)])  # half right is not right
    assert made.rates == {"row-0": 0.5, "row-1": 0.0}
    made.record([group(a, 1.0, 1.0), group(c, None, 1.0, None, 0.0, 0.0)])
    assert made.rates == {"row-0": 1.0, "row-1": 0.0, "row-2": pytest.approx(1 / 3)}


def test_a_group_whose_correctness_is_not_known_changes_nothing() -> None:
    a, b = prompts("row", 2)
    made = Curriculum(CurriculumConfig(), [a, b])
    made.record([group(a, 0.0, 1.0)])
    made.record([group(a, None, None), group(b, None), group(a, 1.0, 1.0, name="format"), group(b)])
    assert made.rates == {"row-0": 0.5}


def test_metrics_are_shares_of_the_pool() -> None:
    made = curriculum(easy=3, hard=2, between=1, unseen=4)
    assert made.metrics() == {
        "curriculum/easy": pytest.approx(0.3),
        "curriculum/hard": pytest.approx(0.2),
        "curriculum/unseen": pytest.approx(0.4),
    }


def test_the_state_survives_a_checkpoint() -> None:
    made = curriculum(easy=10, hard=10, between=10, unseen=10, easy_share=0.2)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    fresh = Curriculum(made.config, made.prompts)
    assert fresh.pick(10, 0) != made.pick(10, 0)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert fresh.rates == made.rates
    assert fresh.pick(10, 0) == made.pick(10, 0)


def test_a_state_is_a_copy() -> None:
    made = curriculum(easy=2)
    state = made.state_dict()
    fresh = Curriculum(made.config, made.prompts)
    fresh.load_state_dict(state)
    for one in (made, fresh):
        one.record([group(made.prompts[0], 0.0)])
    assert state == {"rates": {"easy-0": 1.0, "easy-1": 1.0}}
