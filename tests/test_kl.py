"""Estimators of the KL divergence, against values worked out by hand and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithms.kl import EXPONENT_CAP, estimate


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        ("k1", [1.0, -1.0, 0.0]),
        ("k2", [0.5, 0.5, 0.0]),
        ("k3", [math.exp(-1) + 1 - 1, math.e - 1 - 1, 0.0]),
    ],
)
def test_values(kind: str, by_hand: list[float]) -> None:
    policy, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -1.0, -3.0])
    assert estimate(policy, reference, kind).tolist() == pytest.approx(by_hand, abs=1e-6)


def test_k3_is_never_negative_where_k1_is() -> None:
    policy = torch.linspace(-6, -0.01, 101)
    reference = policy.flip(0)
    assert estimate(policy, reference, "k1").min() < -5
    assert estimate(policy, reference, "k3").min() >= 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_under_the_policy_is_the_divergence(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(12, generator=generator).double().log_softmax(0) for _ in range(2))
    exact = float((p.exp() * (p - q)).sum())
    assert exact > 0.1
    assert float((p.exp() * estimate(p, q, kind)).sum()) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [("k1", 1.0), ("k2", 1.0), ("k3", 1 - math.exp(-1))],  # d/dlogp at logp -1, reference -2
)
def test_gradient_lowers_a_log_prob_above_the_reference(kind: str, by_hand: float) -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    estimate(policy, torch.tensor([-2.0]), kind).sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(by_hand, abs=1e-6)


def test_a_reference_far_above_stays_finite() -> None:
    policy = torch.tensor([-500.0], requires_grad=True)
    value = estimate(policy, torch.tensor([-1.0]), "k3")
    assert value.item() == pytest.approx(math.exp(EXPONENT_CAP) - 499 - 1, rel=1e-6)
    value.sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3, got 'k4'"):
        estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
