"""Group-relative advantages and GAE, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from groupwise.algorithms.advantages import gae, group_advantages, grpo_advantage, ppo_advantage

ROOT3 = math.sqrt(3)
rewards = st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=9)


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(reward: float, scale: str, baseline: str) -> None:
    assert group_advantages([reward] * 4, scale=scale, baseline=baseline, eps=0.0) == [0.0] * 4


@pytest.mark.parametrize("values", [[0.1] * 8, [0.35] * 8, [0.7] * 6])
def test_float32_noise_is_not_scaled_up_to_a_signal(values: list[float]) -> None:
    singles = np.array(values, dtype=np.float32)
    assert group_advantages(singles.tolist()) == [0.0] * len(values)
    noisy = [v + 1e-10 * i for i, v in enumerate(values)]
    assert group_advantages(noisy, eps=0.0) == [0.0] * len(values)


def test_one_failure_among_seven_good_in_float32() -> None:
    values = np.array([0.0] + [0.95] * 7, dtype=np.float32).tolist()
    # mean 0.83125; sample deviation 0.95 / sqrt(8) = 0.33588
    assert group_advantages(values, ddof=1) == pytest.approx([-2.4749] + [0.3536] * 7, abs=1e-4)


def test_population_sample_and_no_deviation() -> None:
    one_right = [1.0, 0.0, 0.0, 0.0]  # mean 1/4; squares sum to 3/4
    assert group_advantages(one_right) == pytest.approx([ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3], abs=1e-6)
    assert group_advantages(one_right, ddof=1) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)
    assert group_advantages(one_right, scale="none") == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_compares_with_the_others() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out", scale="none") == pytest.approx(
        [1.0, -1 / 3, -1 / 3, -1 / 3]
    )
    # Others of 3: (1, 2) -> 1.5; of 1: (3, 2) -> 2.5; of 2: (3, 1) -> 2.
    assert group_advantages([3.0, 1.0, 2.0], baseline="leave_one_out", scale="none") == pytest.approx([1.5, -1.5, 0.0])


def test_eps_is_added_to_the_deviation() -> None:
    # mean 0.5, deviation 0.5: 0.5 / (0.5 + 0.5)
    assert group_advantages([1.0, 0.0], eps=0.5) == [0.5, -0.5]


def test_an_unscored_sample_stays_out_of_mean_and_deviation() -> None:
    # Scored: 1, 1, 0.5; mean 5/6, sample deviation 0.288675.
    found = group_advantages([1.0, None, 1.0, 0.5], ddof=1)
    assert found[1] is None
    assert [found[0], found[2], found[3]] == pytest.approx([0.5774, 0.5774, -1.1547], abs=1e-4)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_lone_survivor_is_worth_zero_on_every_path(ddof: int, scale: str, baseline: str) -> None:
    kept = {"ddof": ddof, "scale": scale, "baseline": baseline}
    assert group_advantages([None, 1.0, None], **kept) == [None, 0.0, None]
    assert group_advantages([1.0], **kept) == [0.0]
    assert group_advantages([None, None], **kept) == [None, None]
    assert group_advantages([], **kept) == []


def test_opposite_parts_cancel_before_the_spread_is_taken() -> None:
    first, second = [2.0, 0.0], [0.0, 2.0]
    totals = [a + b for a, b in zip(first, second, strict=True)]
    assert group_advantages(totals) == [0.0, 0.0]


@pytest.mark.parametrize(
    "values", [[1.0, 0.0, 0.0], [1.0, -1.0, -1.0], [101.0, 100.0, 100.0], [-4.0, -5.0, -5.0]], ids=str
)
def test_shift_and_scale_of_rewards_do_not_matter(values: list[float]) -> None:
    # Two thirds above the mean; the sample deviation of (1, 0, 0) is 1 / sqrt(3).
    assert group_advantages(values, ddof=1) == pytest.approx([2 / ROOT3, -1 / ROOT3, -1 / ROOT3], abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite numbers or None"):
        group_advantages([1.0, bad])


@given(rewards, st.sampled_from([0, 1]))
def test_agrees_with_numpy(values: list[float], ddof: int) -> None:
    assume(max(values) > min(values))
    exact = (np.array(values) - np.mean(values)) / (np.std(values, ddof=ddof) + 1e-8)
    assert group_advantages(values, ddof=ddof) == pytest.approx(exact.tolist(), rel=1e-9, abs=1e-9)


@given(rewards, st.data())
def test_a_sample_that_cannot_be_scored_changes_nothing_for_the_others(
    values: list[float], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(values)))
    found = group_advantages([*values[:place], None, *values[place:]])
    assert found[place] is None
    assert found[:place] + found[place + 1 :] == group_advantages(values)


def test_the_method_s_own_names() -> None:
    assert grpo_advantage is group_advantages
    assert ppo_advantage([0.0, 1.0], [0.5, 0.25, 0.0]) == ([0.5, 0.75], [1.0, 1.0])


# -- generalised advantage estimation --------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    # gamma 0.9, lambda 0.5:
    #   delta_2 = 2 + 0.9*0 - 1     =  1       A_2 = 1
    #   delta_1 = 0 + 0.9*1 - 0.5   =  0.4     A_1 = 0.4 + 0.45*1    = 0.85
    #   delta_0 = 1 + 0.9*0.5 - 2   = -0.55    A_0 = -0.55 + 0.45*0.85 = -0.1675
    advantages, returns = gae([1.0, 0.0, 2.0], [2.0, 0.5, 1.0, 0.0], gamma=0.9, lam=0.5)
    assert advantages == pytest.approx([-0.1675, 0.85, 1.0])
    assert returns == pytest.approx([1.8325, 1.35, 2.0])


def test_gae_takes_the_value_after_a_cut_into_account() -> None:
    at_end, _ = gae([0.0], [0.5, 0.0], gamma=1.0, lam=1.0)
    at_cut, _ = gae([0.0], [0.5, 0.8], gamma=1.0, lam=1.0)
    assert at_end == pytest.approx([-0.5])
    assert at_cut == pytest.approx([0.3])


def test_gae_with_lambda_one_is_reward_to_go_minus_value() -> None:
    advantages, returns = gae([0.0, 0.0, 1.0], [0.2, 0.4, 0.6, 0.0], gamma=1.0, lam=1.0)
    assert advantages == pytest.approx([0.8, 0.6, 0.4])
    assert returns == pytest.approx([1.0, 1.0, 1.0])


def test_gae_with_lambda_zero_looks_one_step_ahead() -> None:
    advantages, _ = gae([0.0, 0.0, 1.0], [0.2, 0.4, 0.6, 0.0], gamma=1.0, lam=0.0)
    assert advantages == pytest.approx([0.2, 0.2, 0.4])


def test_gae_needs_one_value_more_than_rewards() -> None:
    with pytest.raises(ValueError, match="one value more than rewards, got 2 for 2"):
        gae([0.0, 1.0], [0.5, 0.25], gamma=1.0, lam=1.0)
