"""Stages with everything that has a memory, stopped in the middle and taken up: the run is that of one that was not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise import pipeline
from groupwise.config import Recipe
from groupwise.progress import Progress
from groupwise.recipes import parse_recipe
from groupwise.run import RunDir

RECIPE = """
name: schedules
model: builtin:tiny
threads: 1
task: {kind: arithmetic, digits: 1}
rewards: {correctness: 1.0, format: 0.2}
stages:
  - {name: cold, kind: sft, data: {kind: traces, count: 64}, epochs: 16, batch_size: 8, lr: 2e-3}
  - name: rl
    kind: grpo
    model: cold
    algorithm: dapo
    steps: 5
    prompts_per_step: 4
    group_size: 4
    ppo_epochs: 2
    max_tokens: 24
    lr: 1e-4
    kl_coef: 0.01
    kl_target: 0.001
    entropy_coef: 0.001
    entropy_target: 3.0
    reference_every: 2
    curriculum: {pool: 24, hard_share: 0.25}
    checkpoint_every: 2
  - name: ppo
    kind: ppo
    model: rl
    steps: 4
    prompts_per_step: 4
    group_size: 2
    minibatches: 2
    max_tokens: 24
    lr: 1e-4
    reference_every: 1
    reference_mix: 0.5
    critic: {lr: 1e-3}
    checkpoint_every: 3
"""
STAGES = ["02-rl", "03-ppo"]


class Stopping(Progress):
    """Ctrl-C when a stage has taken a given number of steps."""

    def __init__(self, stage: str, step: int) -> None:
        super().__init__()
        self.stop_at = (stage, step)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        if (self.label.split(" ")[0], done) == self.stop_at:
            raise KeyboardInterrupt
        super().step(done, metrics)


def run(root: Path, progress: Progress | None = None) -> None:
    recipe: Recipe = parse_recipe(RECIPE)
    pipeline.check(recipe)
    with progress or Progress() as shown:
        pipeline.run(recipe, root, shown)


def rows(root: Path, stage: str) -> list[dict[str, Any]]:
    measured = ("time", "memory/", "tokens/per_second")
    lines = RunDir(root).stage(int(stage[:2]) - 1, stage[3:]).metrics()
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unbroken")
    run(root)
    return root


def test_stopped_between_checkpoints_it_ends_the_same(unbroken: Path, tmp_path: Path) -> None:
    for stage, step in (("rl", 1), ("rl", 3), ("rl", 5), ("ppo", 2), ("ppo", 4)):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, Stopping(stage, step))
    run(tmp_path)
    for stage in STAGES:
        assert rows(tmp_path, stage) == rows(unbroken, stage)
        weights = [(root / stage / "model" / "model.safetensors").read_bytes() for root in (tmp_path, unbroken)]
        assert weights[0] == weights[1]


def test_the_schedules_were_at_work(unbroken: Path) -> None:
    rl, ppo = (rows(unbroken, stage) for stage in STAGES)
    assert any(row["group/count"] > 4 for row in rl)
    assert len({row["update/kl_coef"] for row in rl}) == 5
    assert len({row["update/entropy_coef"] for row in rl}) > 1
    assert rl[0]["curriculum/unseen"] > rl[-1]["curriculum/unseen"]
    assert all(abs(row["policy/kl_ref"]) > 1e-6 for row in ppo)  # k1, which may be negative
    assert all(row["value/error"] > 0 for row in ppo)
    folder = RunDir(unbroken).stage(2, "ppo")
    for group in folder.load_rollouts(3) or []:
        for r in group.rollouts:
            n = len(r.completion.token_ids)
            assert [len(x or ()) for x in (r.old_logps, r.ref_logps, r.values)] == [n, n, n + 1]
            assert r.advantage is not None


def test_every_metric_of_a_step_is_in_the_documentation(unbroken: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_<>]+)`", text.split("## Reading the metrics")[1]))
    found = {
        re.sub(r"(grad_norm)/.*", r"\1/<block>", key)
        for stage in STAGES
        for row in rows(unbroken, stage)
        for key in row
    }
    found -= {"step", "reward/correctness", "reward/format"}  # parts
    assert found <= named


LONG = """
name: long
model: builtin:tiny
threads: 1
task: {kind: files, path: PATH}
rewards: {correctness: 1.0}
stages:
  - {name: rl, kind: grpo, algorithm: ALGORITHM, steps: 4, prompts_per_step: 3, group_size: 2, max_tokens: 4,
     max_prompt_tokens: 40, checkpoint_every: 2, KEYS}
"""


def write_rows(folder: Path) -> Path:
    """Ten short questions and two that are too long."""
    questions = [f"{n}+1" for n in range(10)] + [f"{n} " + "very " * 20 for n in range(2)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": q, "answer": "1"}) + "\n" for q in questions))
    return file


def run_long(folder: Path, progress: Progress | None = None, **keys: str) -> list[dict[str, Any]]:
    text = LONG.replace("PATH", str(write_rows(folder.parent)))
    for name, value in keys.items():
        text = text.replace(name, value)
    with progress or Progress() as shown:
        pipeline.run(parse_recipe(text), folder, shown)
    return rows(folder, "01-rl")


def test_a_curriculum_draws_no_prompt_that_is_too_long(tmp_path: Path) -> None:
    steps = run_long(tmp_path / "run", ALGORITHM="grpo", KEYS="curriculum: {pool: 12}")
    assert [row["data/prompts_too_long"] for row in steps] == [0.0] * 4
    assert [row["group/count"] for row in steps] == [3.0] * 4


def test_what_was_left_out_is_counted_the_same_after_a_stop(tmp_path: Path) -> None:
    keys = {"ALGORITHM": "dapo", "KEYS": "resample_rounds: 2"}
    unbroken = run_long(tmp_path / "unbroken", **keys)
    assert any(row["data/prompts_too_long"] for row in unbroken)
    with pytest.raises(KeyboardInterrupt):
        run_long(tmp_path / "run", Stopping("rl", 3), **keys)
    assert run_long(tmp_path / "run", **keys) == unbroken


def test_a_checkpoint_of_another_version_is_named_with_the_remedy(tmp_path: Path) -> None:
    keys = {"ALGORITHM": "grpo", "KEYS": "lr: 0.0"}
    with pytest.raises(KeyboardInterrupt):
        run_long(tmp_path / "run", Stopping("rl", 2), **keys)
    file = tmp_path / "run" / "01-rl" / "checkpoints" / "step-000002" / "state.pt"
    state = torch.load(file)
    del state["coefficients"]
    torch.save(state, file)
    with pytest.raises(pipeline.StageError, match="holds no 'coefficients': another version wrote it; delete it"):
        run_long(tmp_path / "run", **keys)
