"""The command line. Imports what a command needs when it runs, so that --help is quick.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.append(os.getcwd())  # where a recipe's own rewards are looked for
    try:
        options.command(options)
    except KeyboardInterrupt:
        program = sys.argv[0] if Path(sys.argv[0]).name == "groupwise" else "groupwise"
        again = f"; go on with: {shlex.join([program, *given])}" if options.command is _run else ""
        print(f"\ninterrupted{again}", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:  # the user's input
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:  # the outermost frame: everything else is told in one line, the trace on request
        if os.environ.get("GROUPWISE_TRACE"):
            raise
        print(f"failed: {type(error).__name__}: {error}\n(GROUPWISE_TRACE=1 shows where)", file=sys.stderr)
        return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="groupwise", description="Train language models to reason with GRPO.")
    commands = parser.add_subparsers(metavar="command", required=True)

    run = commands.add_parser("run", help="run a recipe, or take up where it stopped")
    _add_recipe(run)
    run.add_argument("--dir", type=Path, help="run directory (default: runs/<name of the recipe>)")
    run.set_defaults(command=_run)

    check = commands.add_parser("check", help="find what is wrong with a recipe without running it")
    _add_recipe(check)
    check.set_defaults(command=_check)

    evaluate = commands.add_parser("eval", help="accuracy of one model on held-out prompts")
    evaluate.add_argument("model", help="folder, .gguf file, hub id or builtin:tiny")
    evaluate.add_argument("--recipe", type=Path, help="take the task from this recipe (default: the model's own run)")
    evaluate.add_argument("--prompts", type=_count, default=500)
    evaluate.add_argument("--samples", type=_count, default=8, help="sampled completions per prompt")
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--max-tokens", type=_count, default=256)
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--json", type=Path, help="also write the result here")
    evaluate.set_defaults(command=_eval)

    chat = commands.add_parser("chat", help="talk to a model")
    chat.add_argument("model", help="folder, .gguf file, hub id or builtin:tiny")
    chat.add_argument("prompt", nargs="?", help="answer this and leave (default: a conversation)")
    chat.add_argument("--system-prompt", default="none", help="none, r1, r1-zh, or your own text")
    chat.add_argument("--temperature", type=float, default=0.0)
    chat.add_argument("--max-tokens", type=_count, default=256)
    chat.set_defaults(command=_chat)

    algorithms = commands.add_parser("algorithms", help="the presets and their parts, or one of them in full")
    algorithms.add_argument("name", nargs="?", help="show every part of this preset")
    algorithms.set_defaults(command=_algorithms)

    score = commands.add_parser("score", help="score JSONL rows {prompt, response, answer} with the rewards")
    score.add_argument("file", type=Path)
    score.add_argument("-o", "--output", type=Path, help="write here (default: standard output)")
    score.add_argument(
        "--rewards",
        default="correctness=1,format=0.2,reasoning=0.2,safety=0.5",
        help="name=weight,... (default: %(default)s)",
    )
    score.add_argument("--answer-style", default="auto")
    score.set_defaults(command=_score)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="such as stages.reason-rl.steps=50")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _run(options: argparse.Namespace) -> None:
    from groupwise import pipeline
    from groupwise.progress import Progress
    from groupwise.recipes import read_recipe

    recipe = read_recipe(options.recipe, options.overrides)
    pipeline.check(recipe)
    root = options.dir or Path("runs") / recipe.name
    _quiet_libraries()
    with Progress() as progress:
        results = pipeline.run(recipe, root, progress)
        progress.table(pipeline.stage_table(recipe, results))
        for stage in recipe.stages:
            if stage.kind == "evaluate":
                result = results[stage.name]["result"]
                title = f"{stage.name}: {result['prompts']} held-out prompts, % right with 95 % intervals"
                progress.table(pipeline.evaluation_table(title, result["models"]))
        progress.note(f"run directory: {root}")


def _check(options: argparse.Namespace) -> None:
    from groupwise import pipeline
    from groupwise.config import parents_of
    from groupwise.recipes import read_recipe

    recipe = read_recipe(options.recipe, options.overrides)
    pipeline.check(recipe)
    for stage in recipe.stages:
        parents = ", ".join(dict.fromkeys(p for _, p, _ in parents_of(stage)))
        print(f"{stage.name:<16} {stage.kind:<9} from {parents}")
    print(f"{options.recipe}: {len(recipe.stages)} stages, nothing wrong found")


def _eval(options: argparse.Namespace) -> None:
    from groupwise import pipeline
    from groupwise.progress import Progress
    from groupwise.recipes import read_recipe
    from groupwise.tasks import make_task
    from groupwise.types import Sampling

    recipe = read_recipe(options.recipe or _recipe_of(options.model))
    _refuse_no_model(options.model)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens)
    task = make_task(recipe.task)
    prompts = task.sample(options.prompts, seed=options.seed, split="test")
    if not prompts:
        raise ValueError("the task has no test prompts: give test_path, or a larger test_fraction")
    _quiet_libraries()
    from groupwise.model import Policy
    from groupwise.stages.evaluate import PROMPTS_AT_ONCE, evaluate

    policy = Policy.load(options.model, system_prompt=recipe.system_prompt, dtype=recipe.dtype)
    with Progress() as progress:
        progress.start("evaluate", -(-len(prompts) // PROMPTS_AT_ONCE))
        result = evaluate(
            policy,
            prompts,
            recipe.composer({"correctness": 1.0, "format": 0.0}, task.verify),
            sampling,
            samples=options.samples,
            seed=options.seed,
            answer_style=recipe.answer_style,
            on_chunk=lambda done: progress.step(done, {}),
        )
        progress.table(pipeline.evaluation_table(f"{result['prompts']} held-out prompts", {options.model: result}))
    if options.json:
        import json

        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _chat(options: argparse.Namespace) -> None:
    from groupwise.types import Sampling

    _refuse_no_model(options.model)
    sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens)
    _quiet_libraries()
    from groupwise.engines import Request
    from groupwise.engines.local import LocalEngine
    from groupwise.model import Policy

    policy = Policy.load(options.model, system_prompt=options.system_prompt)
    engine = LocalEngine(policy)
    messages: list[dict[str, str]] = []

    def answer(text: str) -> str:
        messages.append({"role": "user", "content": text})
        request = Request(policy.chat.prompt_ids(messages), seed=len(messages), samples=[0])
        completion = engine.generate([request], sampling)[0][0]
        reply = policy.chat.prefill(messages) + policy.chat.response_text(completion.token_ids)
        messages.append({"role": "assistant", "content": reply})
        return reply

    if options.prompt is not None:
        print(answer(options.prompt))
        return
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        if text.strip():
            print(answer(text))


def _algorithms(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from groupwise.algorithms.presets import PRESETS, Algorithm
    from groupwise.schema import nearest

    console = Console()
    if not console.is_terminal:
        console.width = 160
    if options.name is not None:
        if options.name not in PRESETS:
            raise ValueError(
                f"no preset is called {options.name!r}{nearest(options.name, PRESETS)}; known: {', '.join(PRESETS)}"
            )
        cfg = Algorithm(algorithm=options.name)
        title = f"{options.name} ({PRESETS[options.name].paper}); * where it differs from grpo"
        table = Table("part", "value", "what it is", title=title)
        for key, field in Algorithm.model_fields.items():
            own = key in PRESETS[options.name].parts
            shown = f"{getattr(cfg, key)}{' *' if own else ''}"
            table.add_row(key, shown, escape(" ".join((field.description or "").split())), style="bold" if own else "")
        console.print(table)
        return
    table = Table("preset", "paper", "parts in which it differs from grpo")
    for name, preset in PRESETS.items():
        parts = ", ".join(f"{key} {value}" for key, value in preset.parts.items())
        table.add_row(
            name, preset.paper, parts or "baseline mean, scale std, ratio token, clip 0.2, k3 0.04 in the loss"
        )
    console.print(table)


def _score(options: argparse.Namespace) -> None:
    import json

    from groupwise.rewards import RewardComposer
    from groupwise.tasks.table import answer_text

    weights: dict[str, float] = {}
    for item in options.rewards.split(","):
        name, equals, weight = item.strip().partition("=")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError as error:
            raise ValueError(f"--rewards: the weight of {name!r} must be a number, got {weight!r}") from error
    reward = RewardComposer(weights, answer_style=options.answer_style)
    rows = list(_score_rows(options.file))
    lines = []
    for row in rows:
        found = reward.score(row["prompt"], row["response"], answer_text(row.get("answer")))
        scored = {"reward": found.total, "parts": dict(found.parts), "errors": dict(found.errors)}
        lines.append(json.dumps({**row, **scored}, ensure_ascii=False))
    text = "".join(line + "\n" for line in lines)
    if options.output is None:
        sys.stdout.write(text)
    else:
        from groupwise.run import write_atomically

        write_atomically(options.output, text)


def _score_rows(file: Path) -> list[dict[str, Any]]:
    import json

    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} line {number}: is not JSON: {error.msg}") from error
        for key in ("prompt", "response"):
            if not isinstance(row, dict) or key not in row:
                raise ValueError(f"{file} line {number}: needs an object with 'prompt', 'response' and 'answer'")
        if not isinstance(row["response"], str) or not isinstance(row["prompt"], str | list):
            raise ValueError(f"{file} line {number}: 'response' must be text, 'prompt' text or a list of messages")
        rows.append(row)
    return rows


def _recipe_of(model: str) -> Path:
    """The recipe of the run that made a model: recipe.yaml in a folder above it."""
    for folder in Path(model).resolve().parents:
        if (folder / "recipe.yaml").is_file():
            return folder / "recipe.yaml"
    raise ValueError(f"--recipe is needed: {model!r} does not lie in a run directory")


def _refuse_no_model(source: str) -> None:
    from groupwise.pipeline import model_problem

    if problem := model_problem(source):
        raise ValueError(f"model: {problem}")


def _quiet_libraries() -> None:
    """Keep what libraries say about themselves off the screen; errors stay."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module="transformers")
    from transformers.utils import logging

    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
