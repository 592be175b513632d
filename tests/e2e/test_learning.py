"""The shipped recipe learns, on three seeds; and the check that says so can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_recipe(folder: Path, *overrides: str) -> dict:
    """Run recipes/r1-tiny.yaml; returns the evaluations by model."""
    run = folder / "run"
    subprocess.run(
        [sys.executable, "-m", "groupwise", "run", str(ROOT / "recipes/r1-tiny.yaml"), *overrides, "--dir", str(run)],
        cwd=folder,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    result = json.loads((run / "06-report" / "eval.json").read_text())
    assert result["prompts"] >= 500
    return result["models"]


def failures_to_learn(models: dict) -> list[str]:
    """What the demo promises and these evaluations do not show; empty if all of it is there."""
    cold, rl, final = (models[name] for name in ("cold-start", "reason-rl", "final-rl"))
    failures = []
    for measure in ("greedy", "sampled"):
        if final[measure]["mean"] < 0.90:
            failures.append(f"final {measure} accuracy {final[measure]['mean']:.3f} is below 0.90")
        if final[measure]["mean"] - cold[measure]["mean"] < 0.25:
            failures.append(f"{measure}: the final model is not 25 points above the cold start")
        if final[measure]["low"] <= cold[measure]["high"]:
            failures.append(f"{measure}: the intervals of final model and cold start overlap")
        if rl[measure]["mean"] - cold[measure]["mean"] < 0.15:
            failures.append(f"{measure}: the first GRPO stage gains less than 15 points")
    if final["format"] < 0.99:
        failures.append(f"format rate {final['format']:.3f} is below 0.99")
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(seed, tmp_path):
    assert failures_to_learn(run_recipe(tmp_path, f"seed={seed}")) == []


def test_frozen_weights_are_found_out(tmp_path):
    """The same recipe with a learning rate of 0, and little of it: nothing is learned, and the check says so."""
    models = run_recipe(
        tmp_path,
        "stages.cold-start.lr=0",
        "stages.cold-start.epochs=1",
        "stages.cold-start.data.count=16",
        "stages.reason-rl.lr=0",
        "stages.reason-rl.steps=1",
        "stages.select.keep=best",
        "stages.select.prompts=8",
        "stages.select-sft.lr=0",
        "stages.select-sft.epochs=1",
        "stages.final-rl.lr=0",
        "stages.final-rl.steps=1",
        "stages.report.samples=1",
        "stages.report.max_tokens=8",
    )
    failures = failures_to_learn(models)
    assert any("below 0.90" in f for f in failures)
    assert any("gains less than 15 points" in f for f in failures)
    assert any("format rate" in f for f in failures)


def test_gains_without_separate_intervals_are_found_out():
    def model(mean, low, high):
        return {m: {"mean": mean, "low": low, "high": high} for m in ("greedy", "sampled")} | {"format": 1.0}

    good = {"cold-start": model(0.5, 0.45, 0.55), "reason-rl": model(0.7, 0.65, 0.75), "final-rl": model(0.95, 0.9, 1)}
    assert failures_to_learn(good) == []
    wide = good | {"cold-start": model(0.5, 0.1, 0.9)}
    assert failures_to_learn(wide) == [
        f"{m}: the intervals of final model and cold start overlap" for m in ("greedy", "sampled")
    ]
    late = good | {"reason-rl": model(0.6, 0.55, 0.65)}
    assert len(failures_to_learn(late)) == 2
