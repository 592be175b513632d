"""What samples and tokens are credited with, from rewards to whitened advantages, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from groupwise.algorithms.credit import Credit, assign, differs, trained_length
from groupwise.algorithms.presets import PRESETS, Algorithm
from groupwise.config import GRPOConfig
from groupwise.engines.scripted import ScriptedEngine
from groupwise.rewards import RewardComposer
from groupwise.trainer import GRPOTrainer
from groupwise.types import Completion, Group, Prompt, Reward, Rollout

MAX_TOKENS = 100
ROOT3 = math.sqrt(3)
COMPARING = [name for name in PRESETS if Algorithm(algorithm=name).compares_groups]


def sample(
    reward: float | None,
    length: int = 2,
    *,
    cut: bool = False,
    sampled: Sequence[bool] | None = None,
    parts: Mapping[str, float | None] | None = None,
    old: Sequence[float] | None = None,
    ref: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
) -> Rollout:
    """A scored sample of `length` tokens; its log-probs and values are given for the policy's own tokens."""
    completion = Completion(
        tuple(range(5, 5 + length)),
        (-1.0,) * length,
        "length" if cut else "stop",
        sampled=None if sampled is None else tuple(sampled),
    )
    given = [None if x is None else tuple(x) for x in (old, ref, values)]
    return Rollout(
        completion, "text", Reward(reward, parts or {}), old_logps=given[0], ref_logps=given[1], values=given[2]
    )


def group(*rollouts: Rollout, greedy: float | None = None) -> Group:
    return Group(Prompt.of("2+2"), (1, 2), list(rollouts), greedy_reward=greedy)


def of_rewards(*rewards: float | None) -> Group:
    return group(*(sample(r) for r in rewards))


def credits_of(groups: Sequence[Group], cfg: Algorithm, **options: Any) -> list[Credit | None]:
    """The credits of all samples in one row."""
    found = assign(groups, cfg, max_tokens=MAX_TOKENS, **options)
    assert [len(row) for row in found] == [len(g.rollouts) for g in groups]
    return [c for row in found for c in row]


def advantages_of(groups: Sequence[Group], cfg: Algorithm, **options: Any) -> list[float | None]:
    return [None if c is None else c.advantage for c in credits_of(groups, cfg, **options)]


def one(rollout: Rollout, cfg: Algorithm, greedy: float | None = None) -> Credit:
    [found] = credits_of([group(rollout, greedy=greedy)], cfg)
    assert found is not None
    return found


# -- how much of a sample is trained ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "masks", "length"),
    [
        (sample(1.0, 5), True, 5),
        (sample(1.0, 5, cut=True), True, 0),
        (sample(1.0, 5, cut=True), False, 5),
        (sample(1.0, 5, sampled=(True, False, False, True, True)), True, 3),
        (sample(1.0, 5, sampled=(True, False, False, True, True), cut=True), True, 0),
        (sample(1.0, 5, sampled=(True, False, False, True, True), cut=True), False, 3),
    ],
)
def test_what_is_trained_is_what_the_policy_wrote_unless_it_was_cut_off(
    rollout: Rollout, masks: bool, length: int
) -> None:
    cfg = Algorithm(mask_truncated=masks)
    assert trained_length(rollout, cfg) == length
    [credit, _] = credits_of([group(rollout, sample(0.0))], cfg)
    assert credit is not None and len(credit.advantages) == length


# -- one number per sample -------------------------------------------------------------------------------------------

LENGTHS = [2, 1, 1, 1, 3, 4]
BASELINES: dict[str, list[float]] = {
    # Rewards (1, 0, 0, 0) of lengths (2, 1, 1, 1), and (1, 1) of lengths (3, 4) beside one that was not scored.
    "mean": [0.75, -0.25, -0.25, -0.25, 0.0, 0.0],
    "leave_one_out": [1.0, -1 / 3, -1 / 3, -1 / 3, 0.0, 0.0],
    "length_weighted": [0.6, -0.4, -0.4, -0.4, 0.0, 0.0],  # 2 right tokens of 5
    "best_of_others": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "greedy": [0.75, -0.25, -0.25, -0.25, 1.0, 1.0],  # greedy answers worth 1/4 and 0
    "none": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
}


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("whiten", ["none", "samples", "tokens"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_baseline_with_every_whitening(baseline: str, whiten: str, ddof: int) -> None:
    groups = [
        group(sample(1.0, 2), sample(0.0, 1), sample(0.0, 1), sample(0.0, 1), greedy=0.25),
        group(sample(1.0, 3), sample(None, 9), sample(1.0, 4), greedy=0.0),
    ]
    cfg = Algorithm(baseline=baseline, scale="none", whiten=whiten, ddof=ddof, eps=0.01, kl_coef=0.0)
    found = credits_of(groups, cfg)
    raw = np.array(BASELINES[baseline])
    counted = np.repeat(raw, LENGTHS) if whiten == "tokens" else raw
    expected = raw if whiten == "none" else (raw - counted.mean()) / (counted.std(ddof=ddof) + 0.01)
    assert found.pop(5) is None
    for credit, advantage, length in zip(found, expected.tolist(), LENGTHS, strict=True):
        assert credit is not None
        assert credit.advantage == pytest.approx(advantage)
        assert credit.advantages == pytest.approx((advantage,) * length)
        assert credit.returns is None


def test_whitening_counts_each_sample_or_each_token_once() -> None:
    groups = [group(sample(1.0, 3), sample(0.0, 1))]
    parts = {"baseline": "none", "scale": "none", "eps": 0.0, "kl_coef": 0.0}
    assert advantages_of(groups, Algorithm(whiten="samples", **parts)) == pytest.approx([1.0, -1.0])
    # Tokens 1, 1, 1, 0: mean 3/4, deviation sqrt(3)/4.
    assert advantages_of(groups, Algorithm(whiten="tokens", **parts)) == pytest.approx([1 / ROOT3, -ROOT3])


def test_a_group_of_grpo_by_hand() -> None:
    # mean 1/4, population deviation sqrt(3)/4
    found = credits_of([group(sample(1.0, 3), sample(0.0), sample(0.0), sample(0.0))], Algorithm())
    assert found[0] is not None
    assert found[0].advantages == pytest.approx((ROOT3,) * 3)
    assert [c.advantage for c in found if c] == pytest.approx([ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3])


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_credit_nothing_in_any_preset(name: str, reward: float) -> None:
    known = {"parts": {"right": reward}, "old": (-1.0, -2.0), "ref": (-1.0, -2.0)}
    groups = [group(*(sample(reward, **known) for _ in range(4)))]
    for credit in credits_of(groups, Algorithm(algorithm=name), part_weights={"right": 1.0}):
        assert credit == Credit(0.0, (0.0, 0.0))


@pytest.mark.parametrize("name", COMPARING)
def test_a_lone_survivor_is_worth_nothing_in_any_preset(name: str) -> None:
    known = {"old": (-1.0, -2.0), "ref": (-1.5, -2.0)}
    groups = [group(sample(None), sample(1.0, parts={"right": 1.0}, **known), sample(None))]
    found = credits_of(groups, Algorithm(algorithm=name), part_weights={"right": 1.0})
    assert found == [None, Credit(0.0, (0.0, 0.0)), None]


def test_groups_normalised_by_themselves_are_not_normalised_again() -> None:
    found = advantages_of([of_rewards(1.0, 0.0), of_rewards(1.0, 1.0)], Algorithm(ddof=1))
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0])


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.0), (1.0, -1.0, -1.0), (101.0, 100.0, 100.0), (-4.0, -5.0, -5.0)])
def test_a_constant_added_to_all_rewards_and_their_unit_do_not_matter(rewards: tuple[float, ...]) -> None:
    found = advantages_of([of_rewards(*rewards)], Algorithm(ddof=1))
    assert found == pytest.approx([2 / ROOT3, -1 / ROOT3, -1 / ROOT3], abs=1e-4)


def by_number(scores: Sequence[float | None]) -> Callable[[Prompt, str], float | None]:
    """A reward part that looks its score up; the response is the number of the sample."""
    return lambda prompt, response: scores[int(response)]


def composed(first: Sequence[float | None], second: Sequence[float | None], weights: Mapping[str, float]) -> Group:
    reward = RewardComposer(weights, parts={"first": by_number(first), "second": by_number(second)})
    scores = [reward.score("2+2", str(i)) for i in range(len(first))]
    return group(*(sample(s.total, parts=s.parts) for s in scores))


def test_a_sample_on_which_every_part_abstained_is_left_out() -> None:
    scored = composed([1.0, None, 0.0, None], [None, None, 1.0, 0.5], {"first": 1.0, "second": 1.0})
    assert scored.rewards_G == [1.0, None, 1.0, 0.5]
    found = advantages_of([scored], Algorithm(ddof=1))
    assert found[1] is None
    # mean 5/6, deviation of the sample 1/sqrt(12)
    assert [found[i] for i in (0, 2, 3)] == pytest.approx([0.5774, 0.5774, -1.1547], abs=1e-4)


def test_parts_that_cancel_leave_nothing_to_compare_unless_they_are_compared_one_by_one() -> None:
    scored = composed([2.0, 0.0], [0.0, 2.0], {"first": 1.0, "second": 1.0})
    assert scored.rewards_G == [2.0, 2.0]
    assert advantages_of([scored], Algorithm()) == [0.0, 0.0]
    assert not differs(scored, Algorithm(), MAX_TOKENS)
    by_part = Algorithm(per_part=True, eps=0.0)
    assert differs(scored, by_part, MAX_TOKENS)
    assert advantages_of([scored], by_part, part_weights={"first": 3.0, "second": 1.0}) == pytest.approx([2.0, -2.0])


# -- what is true of every preset ------------------------------------------------------------------------------------

numbers = st.integers(0, 8).map(lambda n: n / 4)
log_probs = st.integers(-12, -1).map(lambda n: n / 4)


@st.composite
def known_samples(draw: st.DrawFn) -> Rollout:
    """A scored sample of which everything is known."""
    length, cut = draw(st.integers(1, 4)), draw(st.booleans())
    old, ref, values = (tuple(draw(log_probs) for _ in range(length)) for _ in range(3))
    right, form = draw(numbers), draw(numbers)
    after = -0.25 if cut else 0.0
    return sample(
        right + form,
        length,
        cut=cut,
        parts={"right": right, "form": form},
        old=old,
        ref=ref,
        values=(*values, after),
    )


def groups_of(samples: st.SearchStrategy[Rollout]) -> st.SearchStrategy[list[Group]]:
    some = st.lists(samples, min_size=1, max_size=4)
    return st.lists(st.builds(lambda r, g: group(*r, greedy=g), some, numbers), min_size=1, max_size=4)


settings_of_presets = st.builds(
    lambda name, masks: Algorithm(algorithm=name, mask_truncated=masks), st.sampled_from(list(PRESETS)), st.booleans()
)
WEIGHTS = {"right": 1.0, "form": 0.5}


def assert_same(found: Sequence[Credit | None], expected: Sequence[Credit | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.advantage == pytest.approx(b.advantage, rel=1e-9, abs=1e-9)
            assert a.advantages == pytest.approx(b.advantages, rel=1e-9, abs=1e-9)
            assert (a.returns is None) == (b.returns is None)
            assert a.returns is None or a.returns == pytest.approx(b.returns, rel=1e-9, abs=1e-9)


@given(settings_of_presets, groups_of(known_samples()), st.data())
def test_an_unscored_sample_changes_nothing_for_the_others(
    cfg: Algorithm, groups: list[Group], data: st.DataObject
) -> None:
    p = data.draw(st.integers(0, len(groups) - 1))
    i = data.draw(st.integers(0, len(groups[p].rollouts)))
    rollouts = groups[p].rollouts
    more = [
        *groups[:p],
        group(*rollouts[:i], sample(None, 3), *rollouts[i:], greedy=groups[p].greedy_reward),
        *groups[p + 1 :],
    ]
    found = assign(more, cfg, max_tokens=MAX_TOKENS, part_weights=WEIGHTS)
    assert found[p].pop(i) is None
    expected = assign(groups, cfg, max_tokens=MAX_TOKENS, part_weights=WEIGHTS)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


@given(settings_of_presets, groups_of(known_samples()), st.randoms(use_true_random=False))
def test_groups_keep_their_credits_in_whatever_order_they_stand(cfg: Algorithm, groups: list[Group], rng: Any) -> None:
    order = list(range(len(groups)))
    rng.shuffle(order)
    expected = assign(groups, cfg, max_tokens=MAX_TOKENS, part_weights=WEIGHTS)
    found = assign([groups[i] for i in order], cfg, max_tokens=MAX_TOKENS, part_weights=WEIGHTS)
    for row, i in zip(found, order, strict=True):
        assert_same(row, expected[i])


@given(settings_of_presets, groups_of(known_samples()))
def test_a_sample_has_one_finite_number_per_trained_token_and_their_mean(cfg: Algorithm, groups: list[Group]) -> None:
    rollouts = [r for g in groups for r in g.rollouts]
    for rollout, credit in zip(rollouts, credits_of(groups, cfg, part_weights=WEIGHTS), strict=True):
        assert credit is not None
        assert len(credit.advantages) == trained_length(rollout, cfg)
        assert all(map(math.isfinite, credit.advantages)) and math.isfinite(credit.advantage)
        if credit.advantages:
            assert credit.advantage == pytest.approx(sum(credit.advantages) / len(credit.advantages), abs=1e-9)
        assert (credit.returns is not None) == (cfg.baseline == "critic" and bool(credit.advantages))


# -- whether rewards differ ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((1.0, 1.0 + 1e-12), False),
        ((1.0, None), False),
        ((1.0, None, 0.5), True),
        ((None, None), False),
        ((1.0,), False),
    ],
)
def test_rewards_differ_if_two_scored_samples_do(rewards: tuple[float | None, ...], expected: bool) -> None:
    assert differs(of_rewards(*rewards), Algorithm(), MAX_TOKENS) is expected


def test_equal_rewards_differ_by_the_overlong_penalty() -> None:
    dapo = Algorithm(algorithm="dapo")
    assert differs(group(sample(1.0, 80), sample(1.0, 90)), dapo, MAX_TOKENS)
    assert not differs(group(sample(1.0, 70), sample(1.0, 80)), dapo, MAX_TOKENS)
    assert not differs(group(sample(1.0, 80), sample(1.0, 90)), Algorithm(), MAX_TOKENS)


@given(st.sampled_from(COMPARING), groups_of(known_samples()), st.booleans())
def test_a_group_whose_rewards_do_not_differ_is_credited_with_nothing(
    name: str, groups: list[Group], equal: bool
) -> None:
    cfg = Algorithm(algorithm=name, whiten="none", kl_coef=0.0)
    if equal:
        for g in groups:
            for r in g.rollouts:
                r.reward = g.rollouts[0].reward
    found = assign(groups, cfg, max_tokens=MAX_TOKENS, part_weights=WEIGHTS)
    assert not equal or not any(differs(g, cfg, MAX_TOKENS) for g in groups)
    for g, row in zip(groups, found, strict=True):
        assert differs(g, cfg, MAX_TOKENS) or not any(c.advantage for c in row if c)


def with_a_failure() -> Group:
    """A failed part leaves no total; what the other parts said of that sample is compared with nothing."""
    whole = {"parts": {"right": 1.0, "form": 1.0}}
    return group(sample(2.0, **whole), sample(2.0, **whole), sample(None, parts={"right": 0.0, "form": None}))


def test_the_parts_of_a_sample_without_a_total_are_credited_with_nothing() -> None:
    assert advantages_of([with_a_failure()], Algorithm(algorithm="gdpo"), part_weights=WEIGHTS) == [0.0, 0.0, None]


def test_the_parts_of_a_sample_without_a_total_do_not_differ_from_others() -> None:
    assert not differs(with_a_failure(), Algorithm(algorithm="gdpo"), MAX_TOKENS)


@pytest.fixture
def make_trainer(llama, tokenizer) -> Callable[..., GRPOTrainer]:
    """A trainer whose samples are "0", "1", ... by their number; the sample numbers in `cut` never end."""

    def make(reward: Any, cut: Sequence[int] = (), **config: Any) -> GRPOTrainer:
        end = tokenizer.eos_token_id
        digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
        engine = ScriptedEngine(lambda q, n: [digits[n]] * 4 if n in cut else [digits[n], end], [end])
        cfg = GRPOConfig(**{"group_size": 2, "max_tokens": 4, "lr": 1e-3} | config)
        return GRPOTrainer(llama(spread=0.1), reward_model=reward, tokenizer=tokenizer, config=cfg, engine=engine)

    return make


def test_a_part_without_weight_does_not_keep_a_group_from_being_replaced(make_trainer) -> None:
    reward = RewardComposer(
        {"right": 1.0, "noted": 0.0}, parts={"right": lambda p, r: 1.0, "noted": lambda p, r: float(r)}
    )
    trainer = make_trainer(reward, algorithm="gdpo", kl_coef=0.0, resample_rounds=1)
    missing = []

    def refill(number: int, count: int) -> list[Prompt]:
        missing.append(count)
        return []

    [group], _ = trainer.collect(["2+2"], refill)
    assert [r.advantage for r in group.rollouts] == [0.0, 0.0]
    assert missing == [1]


# -- the overlong penalty --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "left"), [(1, 1.0), (80, 1.0), (85, 0.75), (90, 0.5), (100, 0.0), (101, 0.0)])
def test_the_overlong_penalty_is_taken_from_the_reward(length: int, left: float) -> None:
    cfg = Algorithm(baseline="none", scale="none", kl_coef=0.0, overlong_share=0.2)
    assert one(sample(1.0, length), cfg).advantage == pytest.approx(left)


def test_the_overlong_penalty_is_within_what_is_compared() -> None:
    groups = [group(sample(1.0, 80), sample(1.0, 90), sample(None, 100))]  # worth 1 and 1/2
    cfg = Algorithm(algorithm="dapo", scale="none")
    assert advantages_of(groups, cfg) == [pytest.approx(0.25), pytest.approx(-0.25), None]
    along = Algorithm(algorithm="ppo", overlong_share=0.2, whiten="none", kl_coef=0.0)
    assert one(sample(1.0, 90, values=(0.0,) * 91), along).advantages == pytest.approx((0.5,) * 90)


# -- the KL in the reward --------------------------------------------------------------------------------------------


def test_rloo_takes_the_kl_of_the_whole_sample_from_its_reward() -> None:
    # k1 = old - ref:  0.5 - 1 = -0.5;   1;   0.25 + 0.25 = 0.5.   Rewards 1.05, -0.1, 0.45.
    groups = [
        group(
            sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0)),
            sample(0.0, 1, old=(-0.5,), ref=(-1.5,)),
            sample(None, 4),
            sample(0.5, 2, old=(-1.0, -1.0), ref=(-1.25, -1.25)),
        )
    ]
    found = credits_of(groups, Algorithm(algorithm="rloo", kl_coef=0.1))
    assert found[2] is None
    assert found[0] is not None and found[0].advantages == pytest.approx((0.875, 0.875))  # 1.05 - (-0.1 + 0.45) / 2
    assert found[1] is not None and found[1].advantages == pytest.approx((-0.85,))  # -0.1 - (1.05 + 0.45) / 2
    assert found[3] is not None and found[3].advantages == pytest.approx((-0.025, -0.025))  # 0.45 - (1.05 - 0.1) / 2


@pytest.mark.parametrize(
    ("kind", "kl"),
    [("k1", 0.5 - 1.0), ("k2", 0.125 + 0.5), ("k3", (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1))],
)
def test_any_estimator_can_be_taken_from_the_reward(kind: str, kl: float) -> None:
    cfg = Algorithm(baseline="none", scale="none", kl=kind, kl_in="reward", kl_coef=0.2)
    found = one(sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0)), cfg)
    assert found.advantages == pytest.approx((1.0 - 0.2 * kl,) * 2)


def test_a_kl_in_the_loss_leaves_the_reward_alone() -> None:
    cfg = Algorithm(baseline="none", scale="none", kl_coef=0.2)
    assert one(sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0)), cfg) == Credit(1.0, (1.0, 1.0))


def test_reinforce_plus_plus_takes_the_kl_of_each_token_and_whitens_over_tokens() -> None:
    # k1 (0.5, -1) and (1), coefficient 0.1: rewards (-0.05, 1 + 0.1) and (0 - 0.1); to go (1.05, 1.1) and (-0.1).
    groups = [
        group(sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0))),
        group(sample(None, 3), sample(0.0, 1, old=(-0.5,), ref=(-1.5,))),
    ]
    plain = credits_of(groups, Algorithm(algorithm="reinforce++", kl_coef=0.1, whiten="none"))
    assert plain[0] is not None and plain[0].advantages == pytest.approx((1.05, 1.1))
    assert plain[0].advantage == pytest.approx(1.075)
    assert plain[1] is None
    assert plain[2] is not None and plain[2].advantages == pytest.approx((-0.1,))
    # mean 2.05 / 3, squares of the differences 0.921667, deviation sqrt(0.460833) = 0.678847
    white = credits_of(groups, Algorithm(algorithm="reinforce++", kl_coef=0.1))
    assert white[0] is not None and white[0].advantages == pytest.approx((0.540132, 0.613786), abs=1e-6)
    assert white[1] is None
    assert white[2] is not None and white[2].advantages == pytest.approx((-1.153918,), abs=1e-6)


def test_what_is_earned_later_is_discounted() -> None:
    cfg = Algorithm(algorithm="reinforce++", kl_coef=0.1, whiten="none", gamma=0.9)
    found = one(sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0)), cfg)
    assert found.advantages == pytest.approx((-0.05 + 0.9 * 1.1, 1.1))
    bare = Algorithm(algorithm="reinforce++", kl_coef=0.0, whiten="none", gamma=0.5)
    assert one(sample(2.0, 3), bare) == Credit(3.5 / 3, (0.5, 1.0, 2.0))


# -- the greedy answer -----------------------------------------------------------------------------------------------


def test_remax_compares_with_the_greedy_answer_and_takes_the_kl_from_each_token_on() -> None:
    # 1 - 0.25 at the end; k1 (0.5, -1) with coefficient 0.05: rewards (-0.025, 0.75 + 0.05).
    cfg = Algorithm(algorithm="remax")
    found = one(sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0)), cfg, greedy=0.25)
    assert found.advantages == pytest.approx((0.775, 0.8))
    assert found.advantage == pytest.approx(0.7875)


def test_an_unscored_greedy_answer_leaves_its_group_without_credit() -> None:
    known = {"old": (-1.0, -1.0), "ref": (-1.0, -1.0)}
    groups = [group(sample(1.0, **known), sample(0.0, **known)), group(sample(1.0, **known), greedy=0.0)]
    assert credits_of(groups, Algorithm(algorithm="remax")) == [None, None, Credit(1.0, (1.0, 1.0))]


# -- along tokens, with a critic -------------------------------------------------------------------------------------


def ppo(**parts: Any) -> Algorithm:
    return Algorithm(**{"algorithm": "ppo", "kl_coef": 0.0, "whiten": "none"} | parts)


@pytest.mark.parametrize(
    ("follows", "gamma", "lam", "advantages", "returns"),
    [
        # Values 0.5, 0.2, 0.4, and what follows the last token: 0 at an end. The reward of 1 comes with that token.
        (0.0, 1.0, 1.0, (0.5, 0.8, 0.6), (1.0, 1.0, 1.0)),
        (0.8, 1.0, 1.0, (1.3, 1.6, 1.4), (1.8, 1.8, 1.8)),
        # delta_2 = 1 - 0.4 = 0.6;  delta_1 = 0.9 * 0.4 - 0.2 = 0.16;  delta_0 = 0.9 * 0.2 - 0.5 = -0.32
        # A_1 = 0.16 + 0.855 * 0.6 = 0.673;  A_0 = -0.32 + 0.855 * 0.673 = 0.255415
        (0.0, 0.9, 0.95, (0.255415, 0.673, 0.6), (0.755415, 0.873, 1.0)),
        # delta_2 = 1 + 0.9 * 0.8 - 0.4 = 1.32;  A_1 = 0.16 + 0.855 * 1.32;  A_0 = -0.32 + 0.855 * 1.2886
        (0.8, 0.9, 0.95, (0.781753, 1.2886, 1.32), (1.281753, 1.4886, 1.72)),
    ],
)
def test_gae_by_hand(
    follows: float, gamma: float, lam: float, advantages: tuple[float, ...], returns: tuple[float, ...]
) -> None:
    rollout = sample(1.0, 3, values=(0.5, 0.2, 0.4, follows))
    found = one(rollout, ppo(gamma=gamma, lam=lam))
    assert found.advantages == pytest.approx(advantages)
    assert found.returns == pytest.approx(returns)
    assert found.advantage == pytest.approx(sum(advantages) / 3)


def test_the_kl_is_part_of_what_the_critic_foresees() -> None:
    # k1 (0.5, -1), coefficient 0.1: rewards (-0.05, 1.1), returns (1.05, 1.1).
    rollout = sample(1.0, 2, old=(-1.0, -2.0), ref=(-1.5, -1.0), values=(0.5, 0.25, 0.0))
    found = one(rollout, ppo(kl_coef=0.1))
    assert found.returns == pytest.approx((1.05, 1.1))
    assert found.advantages == pytest.approx((0.55, 0.85))


def test_whitening_changes_advantages_and_not_returns() -> None:
    # Advantages before: 1 - 0.5 and 0 - 0.25, 0 - 0.75.
    groups = [group(sample(1.0, 1, values=(0.5, 0.0))), group(sample(0.0, 2, values=(0.25, 0.75, 0.0)))]
    first, second = credits_of(groups, ppo(whiten="tokens"))
    assert first is not None and second is not None
    raw = np.array([0.5, -0.25, -0.75])
    white = (raw - raw.mean()) / raw.std(ddof=1)
    assert [*first.advantages, *second.advantages] == pytest.approx(white.tolist(), abs=1e-6)
    assert first.returns == pytest.approx((1.0,)) and second.returns == pytest.approx((0.0, 0.0), abs=1e-12)


# -- samples that were cut off and are masked ------------------------------------------------------------------------


def test_a_masked_sample_counts_in_its_group_and_has_no_trained_token() -> None:
    groups = [group(sample(1.0, 2), sample(0.0, 5, cut=True))]
    found = credits_of(groups, Algorithm(mask_truncated=True, eps=0.0))
    assert found == [Credit(1.0, (1.0, 1.0)), Credit(-1.0, ())]


@pytest.mark.parametrize("parts", [{"baseline": "none"}, {"algorithm": "reinforce++", "ddof": 0}, {"algorithm": "ppo"}])
def test_a_masked_sample_does_not_count_in_the_whitening_of_tokens(parts: dict[str, Any]) -> None:
    settings = {"scale": "none", "whiten": "tokens", "eps": 0.0, "ddof": 0, "kl_coef": 0.0} | parts
    groups = [group(sample(1.0, 3, values=(0,) * 4), sample(9.0, 7, cut=True), sample(0.0, 1, values=(0, 0)))]
    first, masked, last = credits_of(groups, Algorithm(mask_truncated=True, **settings))
    assert first is not None and masked is not None and last is not None
    assert first.advantages == pytest.approx((1 / ROOT3,) * 3)  # 1, 1, 1, 0: mean 3/4, deviation sqrt(3)/4
    assert masked.advantages == ()
    assert last.advantages == pytest.approx((-ROOT3,))


@pytest.mark.parametrize("name", ["rloo", "reinforce++", "remax", "ppo"])
def test_masked_samples_may_stand_beside_others_where_the_kl_is_in_the_reward(make_trainer, name: str) -> None:
    settings = {"algorithm": name, "group_size": 3, "mask_truncated": True, "kl_coef": 0.05}
    trainer = make_trainer(lambda p, r: float(r[0]), cut=[1], **settings)
    [group], _ = trainer.collect(["2+2"])
    assert [r.completion.finish_reason for r in group.rollouts] == ["stop", "length", "stop"]
    assert [r.reward.total for r in group.rollouts] == [0.0, 1.0, 2.0]
    assert all(r.advantage is not None and math.isfinite(r.advantage) for r in group.rollouts)
    assert trainer.update([group])["tokens/trained"] == 4


# -- several turns ---------------------------------------------------------------------------------------------------

OWN = (True, False, False, False, True)
"""The policy wrote the first and the last of five tokens."""


def test_only_the_policy_s_own_tokens_count_in_a_length_weighted_baseline() -> None:
    # Lengths 2 and 1, rewards 1 and 0: baseline 2/3.
    groups = [group(sample(1.0, 5, sampled=OWN), sample(0.0, 1))]
    found = credits_of(groups, Algorithm(algorithm="opo"))
    assert found[0] is not None and found[0].advantages == pytest.approx((1 / 3, 1 / 3))
    assert found[1] is not None and found[1].advantages == pytest.approx((-2 / 3,))


def test_only_the_policy_s_own_tokens_count_in_the_whitening_of_tokens() -> None:
    groups = [group(sample(1.0, 6, sampled=(*OWN, True)), sample(0.0, 3, sampled=(False, True, False)))]
    cfg = Algorithm(baseline="none", scale="none", whiten="tokens", eps=0.0, kl_coef=0.0)
    first, second = credits_of(groups, cfg)
    assert first is not None and first.advantages == pytest.approx((1 / ROOT3,) * 3)
    assert second is not None and second.advantages == pytest.approx((-ROOT3,))


def test_only_the_policy_s_own_tokens_are_steps_of_a_sample() -> None:
    known = {"old": (-1.0, -2.0), "ref": (-1.5, -1.0), "values": (0.5, 0.25, 0.0)}
    rollout = sample(1.0, 5, sampled=OWN, **known)
    assert one(rollout, ppo(kl_coef=0.1)) == one(sample(1.0, 2, **known), ppo(kl_coef=0.1))
    discounted = Algorithm(algorithm="reinforce++", kl_coef=0.1, whiten="none", gamma=0.9)
    assert one(rollout, discounted).advantages == pytest.approx((-0.05 + 0.9 * 1.1, 1.1))


# -- part by part ----------------------------------------------------------------------------------------------------


def normalise_then_sum(scores_PGK: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """TRL's advantages with `multi_objective_aggregation="normalize_then_sum"`; NaN marks what was not scored.

    Every reward is normalised within its group by the sample deviation, the weighted sums over the whole batch.
    """

    def spread(x: list[float]) -> float:
        return float(np.std(x, ddof=1)) if len(x) > 1 else math.nan

    groups, size, kinds = scores_PGK.shape
    normal = np.full_like(scores_PGK, np.nan)
    for p in range(groups):
        for k in range(kinds):
            column = scores_PGK[p, :, k]
            seen = [x for x in column if not math.isnan(x)]
            for i in range(size):
                if seen:
                    normal[p, i, k] = (column[i] - np.mean(seen)) / (spread(seen) + 1e-4)
    sums = np.nansum(normal * weights_K, axis=2).reshape(-1)
    sums[np.isnan(scores_PGK).all(axis=2).reshape(-1)] = np.nan
    there = [x for x in sums if not math.isnan(x)]
    return (sums - np.mean(there)) / (spread(there) + 1e-4)


eighths = st.integers(-8, 8).map(lambda n: n / 8)
scores = st.tuples(*[st.one_of(st.none(), eighths)] * 3)
square = st.integers(2, 4).flatmap(
    lambda size: st.lists(st.lists(scores, min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(square, st.tuples(*[st.integers(1, 8).map(lambda n: n / 4)] * 3))
@example([[(1.0, 0.0, None), (0.0, 1.0, None)], [(1.0, None, 0.5), (None, None, None)]], (1.0, 0.5, 2.0))
def test_gdpo_is_that_of_trl(table: list[list[tuple[float | None, ...]]], shares: tuple[float, ...]) -> None:
    names = ("right", "form", "safe")
    weights = dict(zip(names, shares, strict=True))

    def scored(values: tuple[float | None, ...]) -> Rollout:
        terms = [w * v for w, v in zip(shares, values, strict=True) if v is not None]
        return sample(sum(terms) if terms else None, parts=dict(zip(names, values, strict=True)))

    found = credits_of([group(*map(scored, row)) for row in table], Algorithm(algorithm="gdpo"), part_weights=weights)
    filled = np.array([[[math.nan if v is None else v for v in values] for values in row] for row in table])
    if np.isnan(filled).all():
        assert found == [None] * len(found)
        return
    for credit, expected in zip(found, normalise_then_sum(filled, np.array(shares)).tolist(), strict=True):
        if credit is None or math.isnan(expected):
            # Of a single scored sample TRL's deviation is no number, and it sets the advantage to 0.
            assert credit is None or credit.advantage == 0.0
        else:
            assert credit.advantages == pytest.approx((expected, expected), rel=1e-6, abs=1e-6)


def test_gdpo_by_hand() -> None:
    # Both parts differ by one deviation of 1/sqrt(2): +-s, s = 0.5 / (0.7071 + 0.0001); weights 2 and 1.
    # Sums (2s - s, s - 2s) and (3s, -3s); the deviation of (1, -1, 3, -3) s is s sqrt(20 / 3).
    groups = [
        group(sample(2.0, parts={"right": 1.0, "form": 0.0}), sample(1.0, parts={"right": 0.0, "form": 1.0})),
        group(sample(3.0, parts={"right": 1.0, "form": 1.0}), sample(0.0, parts={"right": 0.0, "form": 0.0})),
    ]
    found = advantages_of(groups, Algorithm(algorithm="gdpo"), part_weights={"right": 2.0, "form": 1.0})
    unit = 1 / math.sqrt(20 / 3)
    assert found == pytest.approx([unit, -unit, 3 * unit, -3 * unit], rel=1e-3)


def test_parts_need_their_weights() -> None:
    with pytest.raises(ValueError, match="this reward has no parts"):
        credits_of([of_rewards(1.0, 0.0)], Algorithm(algorithm="gdpo"))
