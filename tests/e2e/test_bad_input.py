"""What the real command says to bad input: exit code 2 before any heavy import, a clear line, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
name: small
model: builtin:tiny
task: {kind: arithmetic, digits: 1}
stages:
  - {name: cold-start, kind: sft, model: base, data: {kind: traces, count: 8}}
  - {name: rl, kind: grpo, model: cold-start, steps: 1, prompts_per_step: 2, group_size: 2, max_tokens: 8}
"""


def groupwise(*arguments: str, cwd: Path) -> tuple[int, str, set[str]]:
    """(exit code, standard error, modules imported) of the command."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "groupwise", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines = done.stderr.splitlines()
    imports = {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}
    error = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done.returncode, error, imports


BAD_RECIPES = {
    "unknown key": ("digits: 1}", "digitz: 1}", ["digitz", "digits"]),
    "unknown key of a stage": ("steps: 1", "step: 1", ["stages.1.step", "steps"]),
    "unknown task": ("arithmetic", "arithmetik", ["arithmetik", "arithmetic"]),
    "unknown stage kind": ("kind: sft", "kind: sftt", ["sftt", "sft"]),
    "unknown reward": ("stages:", "rewards: {corectness: 1.0}\nstages:", ["corectness", "correctness"]),
    "unknown stage": ("model: cold-start", "model: cold-stat", ["cold-stat", "cold-start"]),
    "unknown algorithm": ("group_size: 2", "group_size: 2, algorithm: grpoo", ["grpoo", "grpo"]),
    "cycle": ("model: base", "model: rl", ["cold-start", "rl", "cycle"]),
    "group of one": ("group_size: 2", "group_size: 1", ["group_size", "2", "1"]),
    "negative weight": ("stages:", "rewards: {correctness: 1.0, format: -1}\nstages:", ["format", ">= 0", "-1"]),
    "wrong type": ("steps: 1", "steps: many", ["stages.1.steps", "many"]),
    "true is no number": ("steps: 1", "steps: true", ["stages.1.steps", "true"]),
    "greedy training": ("max_tokens: 8", "max_tokens: 8, temperature: 0", ["temperature", "> 0", "0"]),
    "missing model folder": ("builtin:tiny", "./nowhere", ["./nowhere", "does not exist"]),
    "folder that is no model": ("builtin:tiny", "./empty", ["./empty", "config.json"]),
    "missing data file": (
        "{kind: arithmetic, digits: 1}",
        "{kind: files, path: gone.jsonl, columns: {prompt: q, answer: a}}",
        ["gone.jsonl"],
    ),
    "malformed line": (
        "{kind: arithmetic, digits: 1}",
        "{kind: files, path: torn.jsonl, columns: {prompt: q, answer: a}}",
        ["torn.jsonl", "2"],
    ),
    "absent column": (
        "{kind: arithmetic, digits: 1}",
        "{kind: files, path: good.jsonl, columns: {prompt: q, answer: gold}}",
        ["gold", "good.jsonl"],
    ),
    "task without traces": (
        "{kind: arithmetic, digits: 1}",
        "{kind: files, path: good.jsonl, columns: {prompt: q, answer: a}}",
        ["stages.cold-start.data", "no worked examples"],
    ),
    "not YAML": ("stages:", "stages: [", ["YAML"]),
    "key given twice": ("model: builtin:tiny", "model: builtin:tiny\nmodel: builtin:tiny", ["model", "twice"]),
    "own reward that does not resolve": (
        "stages:",
        'rewards: {mine: {weight: 1.0, function: "no_such_module:f"}}\nstages:',
        ["no_such_module"],
    ),
}


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "empty").mkdir()
    rows = [json.dumps({"q": f"{i}+1", "a": str(i + 1)}) for i in range(40)]
    (tmp_path / "good.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "torn.jsonl").write_text(rows[0] + "\n" + rows[1][:-3] + "\n")
    return tmp_path


@pytest.mark.parametrize("kind", BAD_RECIPES)
def test_bad_recipe_is_refused_before_any_work(kind, workplace):
    old, new, named = BAD_RECIPES[kind]
    assert old in RECIPE
    (workplace / "recipe.yaml").write_text(RECIPE.replace(old, new, 1))
    before = sorted(workplace.iterdir())
    code, error, imports = groupwise("run", "recipe.yaml", cwd=workplace)
    assert code == 2, error
    assert "torch" not in imports  # which alone takes seconds
    assert "Traceback" not in error
    for word in named:
        assert word.lower() in error.lower(), error
    assert sorted(workplace.iterdir()) == before


def test_the_recipe_itself_is_good(workplace):
    (workplace / "recipe.yaml").write_text(RECIPE)
    assert groupwise("check", "recipe.yaml", cwd=workplace)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "gone.yaml"], "gone.yaml"),
        (["run", "recipe.yaml", "stages.nope.steps=3"], "nope"),
        (["run", "recipe.yaml", "seed"], "key.path=value"),
        (["eval", "./empty", "--recipe", "recipe.yaml"], "config.json"),
        (["chat", "./nowhere", "hello"], "does not exist"),
        (["score", "torn.jsonl"], "line 1"),
        (["score", "gone.jsonl"], "gone.jsonl"),
    ],
)
def test_bad_arguments_are_refused(arguments, named, workplace):
    (workplace / "recipe.yaml").write_text(RECIPE)
    code, error, _ = groupwise(*arguments, cwd=workplace)
    assert code == 2, error
    assert named in error
    assert "Traceback" not in error
