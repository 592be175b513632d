"""A recipe is an ordered list of stages: skip what is done, take up what is half-done, run the rest."""

from __future__ import annotations

import importlib
import platform
import subprocess
import time
from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from groupwise.config import (
    BASE,
    STAGE_KINDS,
    AnyStage,
    EvaluateStage,
    FileData,
    Recipe,
    SFTStage,
    TraceData,
    parents_of,
)
from groupwise.progress import Progress
from groupwise.recipes import RecipeError, dump_recipe
from groupwise.run import RunDir, StageDir, hash_files, read_jsonl, write_atomically
from groupwise.tasks import TaskConfig, make_task
from groupwise.tasks.gsm8k import GSM8KConfig
from groupwise.tasks.hub import HubConfig

MODULES = {kind: f"groupwise.stages.{kind}" for kind in STAGE_KINDS} | {"ppo": "groupwise.stages.grpo"}
"""Where each kind of stage is implemented; imported when it runs, since it brings torch."""


class StageError(RuntimeError):
    """A stage could not finish; what it has done is kept."""


class RunConflictError(ValueError):
    """The run directory holds something else than what is about to run."""


# -- before the run ------------------------------------------------------------------------------------------------


def check(recipe: Recipe) -> None:
    """Find what would fail later: data that cannot be read, a model that is none. Quick: no model is loaded.

    Raises:
        RecipeError: with every mistake found.
    """
    mistakes: list[str] = []
    if problem := model_problem(recipe.model):
        mistakes.append(f"model: {problem}")
    for stage in recipe.stages:
        path = "task" if getattr(stage, "task", None) is None else f"stages.{stage.name}.task"
        try:
            task = make_task(recipe.task_of(stage))
        except ValueError as error:
            mistakes.append(f"{path}: {error}")
            continue
        if _is_remote(recipe.task_of(stage)):
            continue  # asking for rows would download them
        if isinstance(stage, EvaluateStage) and not task.sample(1, 0, "test"):
            mistakes.append(f"stages.{stage.name}: the task has no test prompts: give test_path or a test_fraction")
        if isinstance(stage, SFTStage) and isinstance(stage.data, TraceData):
            try:
                task.traces(1, 0)
            except ValueError as error:
                mistakes.append(f"stages.{stage.name}.data: {error}")
    for stage in recipe.stages:
        if isinstance(stage, SFTStage) and isinstance(stage.data, FileData):
            mistakes += [f"stages.{stage.name}.data.path: {p}" for p in _conversation_problems(Path(stage.data.path))]
    if mistakes:
        raise RecipeError("recipe", list(dict.fromkeys(mistakes)))


def _is_remote(task: TaskConfig) -> bool:
    return isinstance(task, HubConfig) or (isinstance(task, GSM8KConfig) and task.path is None)


def model_problem(source: str) -> str | None:
    """Why `source` cannot be a model, as far as can be told without loading it."""
    path = Path(source).expanduser()
    if source.startswith("builtin:"):
        return None if source == "builtin:tiny" else f"{source!r} is unknown; the built-in model is builtin:tiny"
    if path.suffix == ".gguf":
        if not path.is_file():
            return f"{source!r} does not exist"
        with path.open("rb") as file:
            return None if file.read(4) == b"GGUF" else f"{source!r} is no GGUF file"
    if path.is_dir():
        return None if (path / "config.json").is_file() else f"{source!r} is no model: it holds no config.json"
    if path.exists():
        return f"{source!r} is a file; a model is a folder with config.json, a .gguf file or a hub id"
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or not source:
        return f"{source!r} does not exist"
    return None  # a hub id


def _conversation_problems(path: Path) -> list[str]:
    if not path.is_file():
        return [f"{str(path)!r} does not exist"]
    try:
        rows = read_jsonl(path)
    except ValueError as error:
        return [str(error)]
    for number, row in enumerate(rows, start=1):
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
            return [f"{path} line {number}: needs 'messages' that end with the assistant's"]
    return [] if rows else [f"{path} holds no row"]


# -- the run -------------------------------------------------------------------------------------------------------


def run(recipe: Recipe, root: Path, progress: Progress) -> dict[str, Any]:
    """Run all stages of a checked recipe in `root`; returns each stage's result by name.

    Raises:
        RunConflictError: `root` holds another recipe's run, or a stage made from something that has changed since.
        StageError: a stage could not finish.
    """
    import torch

    directory = RunDir(root)
    _claim(directory, recipe)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    earlier: dict[str, StageDir] = {}
    results: dict[str, Any] = {}
    for index, stage in enumerate(recipe.stages):
        folder = directory.stage(index, stage.name)
        lineage = _lineage(recipe, stage, earlier)
        _refuse_stale(folder, stage, lineage)
        if folder.is_done:
            progress.note(f"{stage.name} ({stage.kind}): already done")
        else:
            _run_stage(recipe, stage, folder, earlier, lineage, progress)
        earlier[stage.name] = folder
        results[stage.name] = folder.read_json("DONE")
    return results


def _run_stage(
    recipe: Recipe,
    stage: AnyStage,
    folder: StageDir,
    earlier: Mapping[str, StageDir],
    lineage: Mapping[str, Any],
    progress: Progress,
) -> None:
    from groupwise.stages import StageContext

    folder.open(lineage)
    start = time.time()
    module = importlib.import_module(MODULES[stage.kind])
    try:
        result = module.run(StageContext(recipe, stage, folder, dict(earlier), progress))
    except ValueError as error:
        raise StageError(f"stage {stage.name!r}: {error}") from error
    outputs = {name: hash_files(p) for name in ("model", "data.jsonl") if (p := folder.path / name).exists()}
    folder.finish({"seconds": time.time() - start, "outputs": outputs, "result": result})


def _claim(directory: RunDir, recipe: Recipe) -> None:
    """Save the resolved recipe, or make sure that it is the one that the directory was made with."""
    resolved = dump_recipe(recipe)
    if directory.recipe_file.exists():
        saved = directory.recipe_file.read_text(encoding="utf-8")
        if saved != resolved:
            differences = [f"  {a}  ->  {b}" for a, b in _differing_lines(saved, resolved)]
            raise RunConflictError(
                f"{directory.root} was made with another recipe; use --dir for a new folder, or delete it:\n"
                + "\n".join(differences[:12])
            )
        return
    directory.root.mkdir(parents=True, exist_ok=True)
    write_atomically(directory.recipe_file, resolved)


def _differing_lines(saved: str, resolved: str) -> list[tuple[str, str]]:
    import difflib

    old, new = saved.splitlines(), resolved.splitlines()
    return [
        (" ".join(x.strip() for x in old[i:j]) or "(nothing)", " ".join(x.strip() for x in new[k:m]) or "(nothing)")
        for tag, i, j, k, m in difflib.SequenceMatcher(a=old, b=new).get_opcodes()
        if tag != "equal"
    ]


def _lineage(recipe: Recipe, stage: AnyStage, earlier: Mapping[str, StageDir]) -> dict[str, Any]:
    """What decides the stage's output: its parents' hashes, its configuration, the code and its libraries, the seed."""
    parents: dict[str, Any] = {}
    for _, parent, kind in parents_of(stage):
        if parent == BASE:
            local = Path(recipe.model).expanduser()
            parents[BASE] = {"source": recipe.model, "hash": hash_files(local) if local.exists() else None}
        else:
            name = "model" if kind == "model" else "data.jsonl"
            parents[parent] = earlier[parent].read_json("DONE")["outputs"][name]
    config = stage.model_dump_json()
    return {
        "stage": stage.name,
        "parents": parents,
        "data": {str(path): hash_files(path) for path in _data_files(recipe, stage)},
        "config": blake2b(config.encode(), digest_size=16).hexdigest(),
        "recipe": blake2b(dump_recipe(recipe).encode(), digest_size=16).hexdigest(),
        "seed": recipe.seed,
        "code": code_version(),
        "libraries": {name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
    }


def _data_files(recipe: Recipe, stage: AnyStage) -> list[Path]:
    """The local files and folders that a stage reads its prompts or conversations from."""
    sources = [recipe.task_of(stage), getattr(stage, "data", None)]
    named = [getattr(source, key, None) for source in sources for key in ("path", "test_path")]
    return [Path(name) for name in named if name is not None]


def code_version() -> dict[str, str | None]:
    """The package's version, a hash of its source, and the commit if it runs from a checkout."""
    package = Path(__file__).parent
    digest = blake2b(digest_size=16)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    try:
        commit = subprocess.run(
            ["git", "-C", str(package), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    try:
        released: str | None = version("groupwise")
    except PackageNotFoundError:
        released = None
    return {"version": released, "source": digest.hexdigest(), "commit": commit}


def _refuse_stale(folder: StageDir, stage: AnyStage, lineage: Mapping[str, Any]) -> None:
    saved = folder.read_json("lineage.json")
    if saved is None:
        return
    changed = [k for part in ("parents", "data") for k in lineage[part] if saved[part].get(k) != lineage[part][k]]
    if changed:
        raise RunConflictError(
            f"what stage {stage.name!r} has done was made from another {', '.join(changed)} than is there now; "
            f"delete {folder.path} to make it again"
        )


# -- after the run -------------------------------------------------------------------------------------------------


def stage_table(recipe: Recipe, results: Mapping[str, Any]) -> Table:
    """One row per stage: what it did and how long it took."""
    table = Table(title=f"{recipe.name}: stages", title_justify="left")
    for column in ("stage", "kind", "from", "steps", "time"):
        table.add_column(column, justify="right" if column in ("steps", "time") else "left")
    table.add_column("result")
    for stage in recipe.stages:
        done = results[stage.name]
        result = done["result"]
        parents = ", ".join(dict.fromkeys(p for _, p, _ in parents_of(stage)))
        shown = [f"{k.split('/')[-1]} {v:.3g}" for k, v in result.items() if isinstance(v, float)]
        shown += [f"{k} {v:,}" for k, v in result.items() if k in ("examples", "sampled", "kept", "prompts")]
        steps = str(result.get("steps", ""))
        table.add_row(stage.name, stage.kind, parents, steps, f"{done['seconds']:.0f} s", "  ".join(shown))
    return table


def evaluation_table(title: str, models: Mapping[str, Any]) -> Table:
    """One row per model: accuracies in percent with their 95 % intervals."""
    table = Table(title=title, title_justify="left")
    samples = next(iter(models.values()))["samples"]
    columns = ("model", "greedy", "sampled", f"pass@{samples}", f"maj@{samples}", "format", "length", "cut off")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, result in models.items():
        best = result["pass_at"][max(result["pass_at"], key=int)]
        table.add_row(
            name,
            _percent_interval(result["greedy"]),
            _percent_interval(result["sampled"]),
            f"{best:.1%}",
            f"{result[f'maj_at_{samples}']:.1%}",
            f"{result['format']:.1%}",
            f"{result['length']:.0f}",
            f"{result['truncated']:.1%}",
        )
    return table


def _percent_interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.1%} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
