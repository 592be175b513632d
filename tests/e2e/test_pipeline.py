"""A small recipe of all four stages through the real command: it runs, is killed in every stage, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = """
name: small
model: builtin:tiny
task: {kind: arithmetic, digits: 1}
stages:
  - {name: cold-start, kind: sft, model: base, data: {kind: traces, count: 32}, epochs: 3, batch_size: 4, lr: 2e-3,
     checkpoint_every: 1}
  - {name: rl, kind: grpo, model: cold-start, steps: 6, prompts_per_step: 4, group_size: 4, lr: 1e-4, max_tokens: 40,
     ppo_epochs: 2, minibatches: 2, checkpoint_every: 1}
  - {name: select, kind: reject, model: rl, prompts: 128, samples: 2, keep: best, max_tokens: 40}
  - {name: select-sft, kind: sft, model: base, data: {stage: select}, batch_size: 16, lr: 2e-3, checkpoint_every: 1}
  - {name: final-rl, kind: grpo, model: select-sft, steps: 4, prompts_per_step: 4, group_size: 4, max_tokens: 40,
     rewards: {correctness: 1.0, format: 0.2, reasoning: 0.2, safety: 0.5}, checkpoint_every: 1}
  - {name: report, kind: evaluate, models: [base, rl, final-rl], prompts: 20, samples: 2, max_tokens: 40}
"""


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "groupwise", "run", "recipe.yaml"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        # A shell that runs this in the background has its children ignore Ctrl-C, and theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen) -> str:
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return error


def metrics(run: Path, stage: str) -> list[dict]:
    return [json.loads(line) for line in (run / stage / "metrics.jsonl").read_text().splitlines()]


def selected(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "03-select" / "data.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> dict[str, int]:
    """The steps of each training stage; select-sft takes one per 16 rows that were selected."""
    return {"01-cold-start": 24, "02-rl": 6, "04-select-sft": -(-len(selected(run)) // 16), "05-final-rl": 4}


def without_times(rows: list[dict]) -> list[dict]:
    measured = ("time", "memory/", "tokens/per_second")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "recipe.yaml").write_text(RECIPE)
    output = finish(start(folder))
    return folder / "runs" / "small", output


def test_every_stage_leaves_what_it_promises(finished):
    run, output = finished
    for stage, steps in steps_of(run).items():
        assert [row["step"] for row in metrics(run, stage)] == list(range(steps))
        AutoModelForCausalLM.from_pretrained(run / stage / "model")
        AutoTokenizer.from_pretrained(run / stage / "model")
    for stage in sorted(p for p in run.iterdir() if p.is_dir()):
        assert (stage / "DONE").exists()
        assert json.loads((stage / "lineage.json").read_text())["code"]["source"]
    rollouts = pq.read_table(run / "02-rl" / "rollouts" / "step-000003.parquet").to_pylist()
    assert len(rollouts) == 16
    assert {r["finish_reason"] for r in rollouts} <= {"stop", "length"}
    for r in rollouts:
        parts = dict(r["reward_parts"])
        expected = parts["correctness"] + 0.2 * parts["format"] + 0.2 * parts["reasoning"]
        assert r["reward"] == pytest.approx(expected)
        assert len(r["token_ids"]) == len(r["logps"])
    result = json.loads((run / "06-report" / "eval.json").read_text())
    assert list(result["models"]) == ["base", "rl", "final-rl"]
    assert "final-rl" in output
    assert "greedy" in output


def test_rejected_rows_name_their_origin(finished):
    run, _ = finished
    rows = selected(run)
    assert 100 < len(rows) <= 128  # keep: best keeps one per prompt, unless all its samples were cut off
    for row in rows:
        assert row["messages"][-1]["role"] == "assistant"
        assert {"stage", "model", "prompt", "answer", "chunk", "sample", "seed", "reward", "parts"} <= set(
            row["source"]
        )


def test_running_again_does_nothing(finished):
    run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    output = finish(start(run.parents[1]))
    assert output.count("already done") == 6
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before


def test_another_recipe_in_the_same_folder_is_refused(finished):
    run, _ = finished
    process = subprocess.run(
        [sys.executable, "-m", "groupwise", "run", "recipe.yaml", "seed=1"],
        cwd=run.parents[1],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.returncode == 2
    assert "seed: 0" in process.stderr
    assert "seed: 1" in process.stderr


def test_killed_in_every_stage_it_finishes_with_the_same_weights(finished, tmp_path):
    """kill -9 in the middle of each stage: no finished step is taken again, the end is the same, bit for bit."""
    unbroken, _ = finished
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = tmp_path / "runs" / "small"
    signs = [
        run / "01-cold-start" / "checkpoints" / "step-000003",
        run / "02-rl" / "checkpoints" / "step-000002",
        run / "02-rl" / "rollouts" / "step-000004.parquet",  # between rollout and update
        run / "03-select" / "chunks" / "chunk-00001.jsonl",
        run / "04-select-sft" / "checkpoints" / "step-000002",
        run / "05-final-rl" / "checkpoints" / "step-000002",
        run / "06-report" / "models" / "base.json",
    ]
    for sign in signs:
        process = start(tmp_path)
        deadline = time.monotonic() + 120
        while not sign.exists():
            assert process.poll() is None, f"ended before {sign}: {process.stderr.read()}"
            assert time.monotonic() < deadline, f"{sign} never came"
            time.sleep(0.002)
        seen = {p: p.read_bytes() for p in run.glob("*/rollouts/*.parquet")}
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (sign.parents[1] / "DONE").exists()
    finish(start(tmp_path))
    assert all(p.read_bytes() == content for p, content in seen.items())
    for stage, steps in steps_of(unbroken).items():
        rows = metrics(run, stage)
        assert [row["step"] for row in rows] == list(range(steps))
        assert without_times(rows) == without_times(metrics(unbroken, stage))
        weights = (run / stage / "model" / "model.safetensors").read_bytes()
        assert weights == (unbroken / stage / "model" / "model.safetensors").read_bytes()
    assert (run / "03-select" / "data.jsonl").read_bytes() == (unbroken / "03-select" / "data.jsonl").read_bytes()


def test_data_that_changed_since_is_refused(tmp_path):
    rows = [json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "name: small\nmodel: builtin:tiny\ntask: {kind: files, path: data.jsonl}\n"
        "stages: [{name: rl, kind: grpo, steps: 1, prompts_per_step: 2, group_size: 2, max_tokens: 8}]\n"
    )
    finish(start(tmp_path))
    (tmp_path / "data.jsonl").write_text("\n".join(rows[1:]) + "\n")
    process = start(tmp_path)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "made from another data.jsonl" in error
    assert "01-rl" in error


def test_interrupt_exits_130_and_says_how_to_go_on(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    process = start(tmp_path)
    sign = tmp_path / "runs" / "small" / "02-rl" / "checkpoints" / "step-000002"
    while not sign.exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "groupwise run recipe.yaml" in error
