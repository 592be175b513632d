"""Golden runs: 20 steps of the tiny model for six algorithms, the same on every run and, to rounding, everywhere.

A change that is meant to change them is recorded anew with `python tests/golden/test_golden.py`, and says why.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config import CriticConfig, GRPOConfig
from groupwise.trainer import GRPOTrainer
from groupwise.types import Prompt

ALGORITHMS = ("grpo", "dapo", "gspo", "cispo", "rloo", "ppo")
STEPS = 20
QUANTITIES = ("reward/total", "loss/policy", "loss/kl", "loss/value", "policy/entropy", "update/grad_norm")
PROMPTS = ("2+2", "13*7", "name a colour", "八加九")


def by_letters(prompt: Prompt, response: str) -> float:
    """A reward without meaning that differs between nearly all responses."""
    return sum(map(ord, response)) % 11 / 10


def golden_run(algorithm: str) -> tuple[list[dict[str, float]], torch.Tensor]:
    """(metrics of each step, all weights in one tensor) of a short run with several optimiser steps per rollout."""
    config = GRPOConfig(
        algorithm=algorithm,
        group_size=4,
        minibatches=2,
        ppo_epochs=2,
        lr=1e-4,
        max_tokens=12,
        max_batch_tokens=96,
        critic=CriticConfig(lr=1e-4) if algorithm == "ppo" else CriticConfig(),
    )
    trainer = GRPOTrainer("builtin:tiny", reward_model=by_letters, config=config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no refill is given")
        steps = [trainer.train_step(PROMPTS) for _ in range(STEPS)]
    return steps, torch.cat([w.flatten() for w in trainer.policy.trainable_state().values()])


def kept(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [s[name] for s in steps] for name in QUANTITIES if name in steps[0]}


def recorded() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "losses.json").read_text())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_losses_are_those_that_were_recorded(algorithm: str) -> None:
    """To 1e-5, the rounding of another processor included."""
    steps, weights = golden_run(algorithm)
    golden = recorded()[algorithm]
    assert kept(steps).keys() == golden.keys()
    for name, values in kept(steps).items():
        assert values == pytest.approx(golden[name], rel=1e-5, abs=1e-5), name
    again, same = golden_run(algorithm)
    assert kept(again) == kept(steps)
    assert torch.equal(weights, same)


def test_the_six_are_six_different_runs() -> None:
    runs = recorded()
    assert runs.keys() == set(ALGORITHMS)
    assert len({tuple(run["loss/policy"]) for run in runs.values()}) == len(ALGORITHMS)
    assert all(len(run["loss/policy"]) == STEPS for run in runs.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    losses = {algorithm: kept(golden_run(algorithm)[0]) for algorithm in ALGORITHMS}
    (Path(__file__).parent / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
