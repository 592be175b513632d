"""Coefficients that follow the KL and the entropy, step by step by hand."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms.adaptive import Coefficients
from groupwise.algorithms.presets import Algorithm

ADAPTIVE_KL = Algorithm(kl_coef=0.1, kl_target=0.02, kl_horizon=100.0)
ADAPTIVE_ENTROPY = Algorithm(kl_coef=0.0, entropy_target=0.5, entropy_step=0.01)


def test_the_kl_coefficient_over_several_steps() -> None:
    found = Coefficients.of(ADAPTIVE_KL)
    assert found.kl == 0.1
    # 32 samples of a horizon of 100; the relative error is held within +-0.2.
    for measured, factor in [
        (0.2, 1 + 0.2 * 0.32),  # ten times the target
        (0.022, 1 + 0.1 * 0.32),
        (0.02, 1.0),
        (0.019, 1 - 0.05 * 0.32),
        (0.0, 1 - 0.2 * 0.32),
        (-0.5, 1 - 0.2 * 0.32),  # an estimate may be negative
    ]:
        before = found.kl
        found.follow_kl(ADAPTIVE_KL, measured, samples=32)
        assert found.kl == pytest.approx(before * factor)
    assert found.kl == pytest.approx(0.1 * 1.064 * 1.032 * 0.984 * 0.936 * 0.936)
    assert found.entropy == 0.0


def test_the_entropy_coefficient_over_several_steps() -> None:
    found = Coefficients.of(ADAPTIVE_ENTROPY)
    history = []
    for measured in (0.3, 0.4, 0.49, 0.51, 0.9, 0.7, 0.6, 0.2):
        found.follow_entropy(ADAPTIVE_ENTROPY, measured)
        history.append((round(found.entropy, 9), found.entropy_is_low))
    assert history == [
        (0.01, True),
        (0.02, True),
        (0.03, True),
        (0.02, False),
        (0.01, False),
        (0.0, False),
        (0.0, False),  # never below
        (0.01, True),
    ]


def test_the_bonus_is_given_only_while_the_entropy_is_at_or_below_its_target() -> None:
    cfg = Algorithm(kl_coef=0.0, entropy_coef=0.1, entropy_target=0.5, entropy_step=0.01)
    found = Coefficients.of(cfg)
    assert found.applied_to(cfg).entropy_coef == 0.0  # nothing was measured yet
    found.follow_entropy(cfg, 0.4)
    assert found.applied_to(cfg).entropy_coef == pytest.approx(0.11)
    found.follow_entropy(cfg, 0.6)
    assert found.entropy == pytest.approx(0.1)
    assert found.applied_to(cfg).entropy_coef == 0.0
    found.follow_entropy(cfg, 0.5)
    assert found.applied_to(cfg).entropy_coef == found.entropy > 0


def test_without_targets_nothing_moves() -> None:
    cfg = Algorithm(kl_coef=0.1, entropy_coef=0.2)
    found = Coefficients.of(cfg)
    found.follow_kl(cfg, 5.0, samples=1000)
    found.follow_entropy(cfg, 0.0)
    assert found == Coefficients(kl=0.1, entropy=0.2)
    assert found.applied_to(cfg) is cfg


def test_one_target_leaves_the_other_coefficient_alone() -> None:
    cfg = Algorithm(kl_coef=0.1, kl_target=0.02, kl_horizon=100.0, entropy_coef=0.2)
    found = Coefficients.of(cfg)
    found.follow_kl(cfg, 0.2, samples=100)
    found.follow_entropy(cfg, 0.0)
    applied = found.applied_to(cfg)
    assert (applied.kl_coef, applied.entropy_coef) == (pytest.approx(0.12), 0.2)
    other = Algorithm(kl_coef=0.1, entropy_target=0.5, entropy_step=0.01)
    found = Coefficients.of(other)
    found.follow_kl(other, 0.2, samples=100)
    found.follow_entropy(other, 0.0)
    applied = found.applied_to(other)
    assert (applied.kl_coef, applied.entropy_coef) == (0.1, 0.01)


def test_what_is_applied_changes_the_coefficients_alone() -> None:
    found = Coefficients(kl=0.3, entropy=0.07, entropy_is_low=True)
    cfg = Algorithm(algorithm="dapo", kl_coef=0.1, kl_target=0.02, entropy_target=0.5)
    applied = found.applied_to(cfg)
    assert applied.model_dump() == cfg.model_dump() | {"kl_coef": 0.3, "entropy_coef": 0.07}
    assert (cfg.kl_coef, cfg.entropy_coef) == (0.1, 0.0)


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(0, 10), st.integers(1, 4096)), max_size=20),
    st.floats(1.0, 1e5),
    st.floats(0.0, 1.0),
)
def test_coefficients_are_never_negative(
    steps: list[tuple[float, float, int]], horizon: float, entropy_step: float
) -> None:
    """However many samples a step has beside the horizon: a negative weight would push away from the reference."""
    cfg = Algorithm(kl_coef=0.1, kl_target=0.02, kl_horizon=horizon, entropy_target=0.5, entropy_step=entropy_step)
    found = Coefficients.of(cfg)
    for kl, entropy, samples in steps:
        found.follow_kl(cfg, kl, samples)
        found.follow_entropy(cfg, entropy)
        assert found.kl >= 0 and found.entropy >= 0


def test_the_state_survives_a_checkpoint() -> None:
    found = Coefficients(kl=0.3, entropy=0.07, entropy_is_low=True)
    buffer = io.BytesIO()
    torch.save(found.state_dict(), buffer)
    fresh = Coefficients.of(ADAPTIVE_KL)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert fresh == found
