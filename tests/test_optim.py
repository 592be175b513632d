"""Learning rates worked out by hand, and what an optimiser step must never do."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.config import OptimConfig
from groupwise.optim import Optimizer, learning_rate


def rates(config: OptimConfig, steps: range, total: int | None = None) -> list[float]:
    return [learning_rate(config, step, total) for step in steps]


def test_the_first_warm_up_step_already_moves() -> None:
    warm = OptimConfig(lr=1.0, warmup_steps=10)
    assert rates(warm, range(12)) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0])
    assert rates(OptimConfig(lr=0.5), range(2)) == [0.5, 0.5]


def test_linear_and_cosine_fall_to_the_floor() -> None:
    linear = OptimConfig(lr=1.0, lr_schedule="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert rates(linear, range(8), total=6) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimConfig(lr=1.0, lr_schedule="cosine", min_lr_ratio=0.0)
    by_hand = [1.0, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 * (1 - math.sqrt(0.5)), 0.0]
    assert rates(cosine, range(5), total=4) == pytest.approx(by_hand)


def test_a_falling_schedule_needs_the_number_of_steps() -> None:
    with pytest.raises(ValueError, match="'linear' needs the total number of steps"):
        learning_rate(OptimConfig(lr_schedule="linear"), 0, None)


def test_first_step_of_adamw_by_hand() -> None:
    """The first AdamW step moves each weight by the learning rate against the sign of its gradient."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Optimizer({"weight": weight}, OptimConfig(lr=0.1, warmup_steps=2, max_grad_norm=0.0))
    weight.grad = torch.tensor([3.0, -4.0])
    assert optimizer.apply() == {"update/grad_norm": 5.0, "update/lr": 0.05, "grad_norm/weight": 5.0}
    assert weight.tolist() == pytest.approx([0.95, -1.95], abs=1e-6)
    assert weight.grad is None
    assert optimizer.steps == 1


def test_weight_decay_is_decoupled() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = Optimizer({"weight": weight}, OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([2.0])
    optimizer.apply()
    assert weight.item() == pytest.approx(1.0 * (1 - 0.1 * 0.5) - 0.1, abs=1e-6)


@pytest.mark.parametrize(("limit", "kept"), [(1.0, [0.6, -0.8]), (0.0, [3.0, -4.0]), (10.0, [3.0, -4.0])])
def test_gradients_are_scaled_down_to_the_limit(limit: float, kept: list[float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"weight": weight}, OptimConfig(lr=0.1, max_grad_norm=limit))
    weight.grad = torch.tensor([3.0, -4.0])
    assert optimizer.apply()["update/grad_norm"] == 5.0
    first_moment = optimizer.adamw.state[weight]["exp_avg"]  # a tenth of the gradient that was used
    assert first_moment.tolist() == pytest.approx([0.1 * g for g in kept], rel=1e-4)


@pytest.mark.parametrize("limit", [1.0, 0.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad: float, limit: float) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Optimizer({"weight": weight}, OptimConfig(lr=0.1, max_grad_norm=limit))
    weight.grad = torch.tensor([1.0, bad])
    with pytest.raises(FloatingPointError, match="optimiser step 0; weights unchanged"):
        optimizer.apply()
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.steps == 0
    assert not optimizer.adamw.state
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.apply()
    assert weight.tolist() == pytest.approx([0.9, 1.9], abs=1e-6)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        Optimizer({}, OptimConfig())
