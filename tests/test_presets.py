"""Presets are records over parts: any part can be overridden, and what has no meaning is refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from groupwise.algorithms.presets import PRESETS, Algorithm
from groupwise.cli import main
from groupwise.recipes import RecipeError, parse_recipe

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown preset": ({"algorithm": "dapoo"}, "did you mean 'dapo'"),
    "a deviation of nothing": ({"baseline": "none"}, "set scale: none"),
    "a deviation beside the critic": ({"algorithm": "ppo", "scale": "std"}, "set scale: none"),
    "the mean of others": ({"scale": "mean", "baseline": "leave_one_out"}, "derived for baseline 'mean'"),
    "the mean less a penalty": ({"algorithm": "maxrl", "overlong_share": 0.1}, "set overlong_share: 0"),
    "the mean less a KL": ({"algorithm": "maxrl", "kl_coef": 0.1, "kl_in": "reward", "kl": "k1"}, "set kl_in: loss"),
    "signal without groups": ({"scale": "signal_share", "baseline": "none"}, "does not need"),
    "signal counted twice": ({"algorithm": "gpg", "resample_rounds": 1}, "set resample_rounds: 0"),
    "a critic of whole samples": ({"baseline": "critic", "scale": "none"}, "needs credit: token"),
    "tokens scaled": ({"credit": "token"}, "set scale: none, got 'std'"),
    "tokens whitened as samples": ({"algorithm": "ppo", "whiten": "samples"}, "set whiten: tokens"),
    "parts along tokens": ({"per_part": True, "credit": "token", "scale": "none"}, "set credit: sequence"),
    "parts without groups": ({"per_part": True, "baseline": "none", "scale": "none"}, "within a group"),
    "parts less a KL": ({"per_part": True, "kl_in": "reward", "kl": "k1"}, "set kl_in: loss"),
    "parts less a penalty": ({"per_part": True, "overlong_share": 0.1}, "set overlong_share: 0"),
    "gmpo of sequences": ({"algorithm": "gmpo", "ratio": "sequence"}, "set ratio: token"),
    "gmpo of some tokens": ({"algorithm": "gmpo", "selection": "top_entropy"}, "set selection: all"),
    "reinforce of sequences": ({"surrogate": "reinforce", "ratio": "sequence"}, "set ratio: token"),
    "vespo of tokens": ({"surrogate": "vespo"}, "set ratio: sequence_product"),
    "a dual clip of no clip": ({"surrogate": "cispo", "dual_clip": 3.0}, "set dual_clip: null"),
    "a dual clip inside the clip": ({"dual_clip": 1.1}, "above the clip at 1.2, got 1.1"),
    "a gradient in the reward": ({"kl_in": "reward", "kl": "k1", "kl_gradient": "weighted"}, "has no effect"),
    "a KL that holds nothing back": ({"kl": "k1"}, "gradient of mean 0"),
    "a target without a coefficient": ({"kl_coef": 0.0, "kl_target": 0.1}, "must start above 0"),
    "bounds that fall": ({"cov_bounds": (5.0, 1.0)}, "must rise, got 5 and 1"),
    "a floor above the cap": ({"sampler_floor": 3.0}, "sampler_floor 3 is above sampler_cap 2"),
    "greedy and overlong": ({"algorithm": "remax", "overlong_share": 0.1}, "set overlong_share: 0"),
    "a critic's lambda without a critic": ({"lam": 0.9}, "lam 0.9 has no effect without baseline: critic"),
    "a discount of whole samples": ({"gamma": 0.9}, "no effect without credit: token"),
    "a gate without sapo": ({"sapo_temperatures": (1.0, 2.0)}, "no effect without surrogate: sapo"),
    "a clip without a clip": ({"algorithm": "opo", "clip_range": 0.1}, "no effect without a surrogate that clips"),
    "a share of nothing": ({"selection_share": 0.1}, "no effect without a selection"),
    "an estimator of no KL": ({"algorithm": "dapo", "kl": "k2"}, "kl k2 has no effect without a kl_coef above 0"),
    "a KL of 0 in the reward": ({"kl_coef": 0.0, "kl_in": "reward"}, "kl_in reward has no effect"),
    "a horizon without a target": ({"kl_horizon": 10.0}, "no effect without kl_target"),
    "a cap without a correction": ({"sampler_cap": 3.0}, "no effect without sampler_correction"),
    "replacing without groups": ({"algorithm": "ppo", "resample_rounds": 1}, "does not need"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_with_the_reason(case: str) -> None:
    parts, reason = REFUSED[case]
    with pytest.raises(ValueError) as error:
        Algorithm(**parts)
    assert reason in str(error.value)


def test_presets_are_what_the_papers_say() -> None:
    grpo, dr_grpo, dapo, gspo = (Algorithm(algorithm=name) for name in ("grpo", "dr_grpo", "dapo", "gspo"))
    assert (grpo.scale, grpo.weighting, grpo.kl_coef, grpo.kl) == ("std", "sequence", 0.04, "k3")
    assert grpo.clip_bounds == pytest.approx((0.8, 1.2))
    assert (dr_grpo.scale, dr_grpo.weighting, dr_grpo.kl_coef) == ("none", "constant", 0.0)
    assert (dapo.weighting, dapo.kl_coef) == ("token", 0.0)
    assert dapo.clip_bounds == pytest.approx((0.8, 1.28))
    assert (gspo.ratio, gspo.kl_coef) == ("sequence", 0.0)
    assert gspo.clip_bounds == pytest.approx((1 - 3e-4, 1 + 4e-4))


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_a_preset_can_be_overridden(name: str) -> None:
    whole = Algorithm(algorithm=name)
    for key, value in PRESETS[name].parts.items():
        assert getattr(whole, key) == value
    for key, value in {
        "eps": 0.5,
        "kl_target": 7.0,
        "entropy_coef": 0.25,
        "mask_truncated": True,
        "kl_coef": 0.3,
    }.items():
        assert getattr(Algorithm(algorithm=name, **{"kl_coef": 0.1, key: value}), key) == value


def test_grpo_is_the_default_and_differs_in_nothing() -> None:
    assert Algorithm() == Algorithm(algorithm="grpo")
    assert PRESETS["grpo"].parts == {}


def test_no_two_presets_are_the_same() -> None:
    parts = [Algorithm(algorithm=name).model_dump(exclude={"algorithm"}) for name in PRESETS]
    assert all(a != b for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl_coef": math.nan}, "finite"),
        ({"kl_in_reward": True}, "Extra inputs"),
        ({"kl": "k4"}, "'k1', 'k2' or 'k3'"),
    ],
)
def test_a_value_that_cannot_be_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Algorithm(**parts)


RECIPE = """
name: x
model: builtin:tiny
task: {kind: arithmetic}
stages:
  - {name: rl, steps: 1, KEYS}
"""


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("kind: ppo, algorithm: grpo", "a ppo stage needs a critic, which algorithm 'grpo' has not; set kind: grpo"),
        ("kind: grpo, critic: {model: shared}", "critic has no effect with baseline 'mean'; set algorithm: ppo"),
        ("kind: grpo, reference_mix: 0.5", "reference_mix 0.5 has no effect without reference_every"),
        ("kind: grpo, minibatches: 40", "minibatches 40 are more than prompts_per_step 32"),
        ("kind: grpo, num_generations: 8", "stages.0.num_generations: unknown key; did you mean 'group_size'?"),
        ("kind: grpo, algorithm: reinforce_plus_plus", "did you mean 'reinforce++'?"),
        ("kind: grpo, kl_coef: 0, reference_every: 3", "stages.0.reference_every: must be 0 while kl_coef is 0, got 3"),
        ("kind: grpo, curriculum: {pool: 3}", "stages.0: curriculum.pool 3 is smaller than prompts_per_step 32"),
        ("kind: grpo, curriculum: {}, rewards: {format: 1}", "stages.rl.curriculum: goes by correctness; add it"),
        ("kind: grpo, curriculum: {easy_from: 0.2, hard_to: 0.5}", "hard_to 0.5 must be below easy_from 0.2"),
        ("kind: grpo, curriculum: {easy_share: 0.7, hard_share: 0.7}", "more than 1 together"),
        ("kind: grpo, lora: {}, reference_every: 1, reference_mix: 0.5", "reference_mix must be 1 with lora, got 0.5"),
        ("kind: ppo, critic: {model: sharde}", "stages.0.critic.model: input should be 'separate' or 'shared'"),
        ("kind: grpo, group_size: 1", "stages.0.group_size: must be >= 2, got 1"),
        ("kind: ppo, group_size: 0", "stages.0.group_size: must be >= 1, got 0"),
    ],
)
def test_a_stage_that_cannot_run_is_told_before_it_does(keys: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(RECIPE.replace("KEYS", keys))
    assert len(error.value.mistakes) == 1
    assert told in error.value.mistakes[0]


def test_every_impossible_combination_of_a_stage_has_a_line_with_its_path() -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(RECIPE.replace("KEYS", "kind: grpo, baseline: critic, dual_clip: 1.1"))
    assert len(error.value.mistakes) == 3
    assert all(m.startswith("stages.0: ") for m in error.value.mistakes)


def test_the_command_lists_every_preset_with_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert any(name in line and preset.paper in line for line in out.splitlines())


def test_the_command_shows_every_part_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "gspo"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in Algorithm.model_fields)
    assert "0.0003" in out
    assert "[sampler_floor, sampler_cap]" in out
    assert main(["algorithms", "gspoo"]) == 2
    assert "did you mean 'gspo'" in capsys.readouterr().err
