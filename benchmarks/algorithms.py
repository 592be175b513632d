"""Six algorithms from the same cold start, with the same budget of samples: curves, a table, time and memory.

    make six-algorithms                                    # or, with the extra `bench` installed:
    python benchmarks/algorithms.py [--seeds 0 1 2] [--jobs 2] [--out docs]

Every run is a recipe of its own in a process of its own (so that its peak memory is its own), on the built-in model
and two-digit addition; runs that are done are not run again. Writes six-algorithms.md and its plot into --out, and
prints the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.001},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {"kl_coef": 0.001},
    "ppo": {"kl_coef": 0.001, "critic": {"lr": 1e-3}},
}
"""Options beyond the preset: those that keep a KL keep it small, and a critic that starts from nothing learns fast."""

TASK = {"kind": "arithmetic", "digits": 2, "min_digits": 2}
STEPS, PROMPTS, GROUP = 50, 48, 8
COLD_START = {
    "name": "cold-start",
    "kind": "sft",
    "data": {"kind": "traces", "count": 192},
    "epochs": 18,
    "batch_size": 16,
    "lr": 2e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 20,
}
TRAINING = {
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "group_size": GROUP,
    "minibatches": 2,
    "lr": 1e-4,
    "max_tokens": 64,
    "max_batch_tokens": 2048,
    "eval_every": 5,
    "eval_prompts": 300,
}
REPORT = {
    "name": "report",
    "kind": "evaluate",
    "models": ["base", "rl"],
    "prompts": 500,
    "samples": 4,
    "max_tokens": 64,
}


NOTES = """*Same samples* is the accuracy on 300 held-out problems when as many samples were drawn as the others draw in
all (the dotted line): DAPO's dynamic sampling draws more per step. *End* is after the last step, on 500 problems;
*sampled* is at temperature 1, four answers per problem. *Without signal* is the share of the sampled tokens that lie in
groups without advantage. Seconds and memory are of one process with one thread; *critic* is within the step, and its GB
are its weights, gradients and optimiser state.

Every algorithm runs with its preset and the same learning rate; none is tuned. So this says that each learns, and what
it costs, and not which is best.
"""


def recipe(name: str, seed: int, model: str, stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "seed": seed, "model": model, "threads": 1, "task": TASK, "stages": stages}


def run(description: dict[str, Any], folder: Path) -> Path:
    """Run a recipe in a process of its own; returns its run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    directory, file = folder / description["name"], folder / f"{description['name']}.yaml"
    file.write_text(json.dumps(description, indent=2))  # JSON is YAML
    command = [sys.executable, "-m", "groupwise", "run", str(file), "--dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return directory


def learn(algorithm: str, seed: int, cold_start: Path, folder: Path) -> dict[str, Any]:
    """One run of one algorithm: its held-out curve over samples drawn, its final accuracy, time and memory."""
    kind = "ppo" if algorithm == "ppo" else "grpo"
    stage = {"name": "rl", "kind": kind, "algorithm": algorithm, "model": "base", **TRAINING, **ALGORITHMS[algorithm]}
    model = str(cold_start / "01-cold-start" / "model")
    directory = run(recipe(f"{algorithm}-{seed}", seed, model, [stage, REPORT]), folder)
    lines = [json.loads(line) for line in (directory / "01-rl" / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((directory / "02-report" / "eval.json").read_text())["models"]
    drawn, curve = 0.0, [(0.0, final["base"]["greedy"]["mean"])]
    for line in lines:
        drawn += line["group/count"] * GROUP
        if "eval/accuracy" in line:
            curve.append((drawn, line["eval/accuracy"]))
    return {
        "curve": curve,
        "cold": final["base"],
        "final": final["rl"],
        "step_seconds": statistics.median(line["time/step"] for line in lines),
        "critic_seconds": statistics.median(line.get("time/critic", 0.0) for line in lines),
        "sampled": sum(line["tokens/sampled"] for line in lines),
        "wasted": sum(line["tokens/wasted"] for line in lines),
        "peak_gb": max(line["memory/peak_gb"] for line in lines),
        "critic_gb": max(line.get("memory/critic_gb", 0.0) for line in lines),
    }


def at_budget(curve: list[tuple[float, float]]) -> float:
    """Held-out accuracy when the budget of samples was spent."""
    return [accuracy for drawn, accuracy in curve if drawn <= STEPS * PROMPTS * GROUP][-1]


def table(results: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Means over seeds with the lowest and the highest."""

    def spread(values: list[float], scale: float = 100, digits: int = 1) -> str:
        low, mean, high = (x * scale for x in (min(values), statistics.mean(values), max(values)))
        return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    rows = [
        "| algorithm | greedy, same samples | greedy, end | sampled, end | tokens sampled | without signal "
        "| s per step | critic, s | peak GB | critic GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for algorithm, by_seed in results.items():
        runs = list(by_seed.values())
        wasted = sum(r["wasted"] for r in runs) / sum(r["sampled"] for r in runs)
        rows.append(
            f"| {algorithm} | {spread([at_budget(r['curve']) for r in runs])} "
            f"| {spread([r['final']['greedy']['mean'] for r in runs])} "
            f"| {spread([r['final']['sampled']['mean'] for r in runs])} "
            f"| {statistics.mean(r['sampled'] for r in runs) / 1e6:.2f} M | {wasted:.0%} "
            f"| {statistics.mean(r['step_seconds'] for r in runs):.2f} "
            f"| {statistics.mean(r['critic_seconds'] for r in runs):.2f} "
            f"| {max(r['peak_gb'] for r in runs):.2f} | {max(r['critic_gb'] for r in runs):.3f} |"
        )
    return "\n".join(rows)


def plot(results: dict[str, dict[int, dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "groupwise"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for colour, (algorithm, by_seed) in enumerate(results.items()):
        for place, one in enumerate(by_seed.values()):
            drawn, accuracy = zip(*one["curve"], strict=True)
            label = algorithm if place == 0 else None
            axes.plot(drawn, [100 * a for a in accuracy], color=f"C{colour}", label=label, alpha=0.8, linewidth=1.2)
    axes.set(xlabel="samples drawn", ylabel="held-out greedy accuracy, %", ylim=(0, 100))
    axes.axvline(STEPS * PROMPTS * GROUP, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(loc="lower right", ncols=2)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def processor() -> str:
    """The name of the machine's processor, as far as it can be had."""
    found = re.search(r"model name\s*: (.+)", info.read_text()) if (info := Path("/proc/cpuinfo")).exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        cold = [recipe(f"cold-start-{seed}", seed, "builtin:tiny", [COLD_START]) for seed in options.seeds]
        starts = dict(zip(options.seeds, pool.map(lambda r: run(r, options.runs), cold), strict=True))
        jobs = [(algorithm, seed) for seed in options.seeds for algorithm in options.algorithms]
        done = pool.map(lambda job: learn(*job, starts[job[1]], options.runs), jobs)
        results: dict[str, dict[int, dict[str, Any]]] = {algorithm: {} for algorithm in options.algorithms}
        for (algorithm, seed), result in zip(jobs, done, strict=True):
            results[algorithm][seed] = result
            print(f"{algorithm} seed {seed}: {at_budget(result['curve']):.1%}", file=sys.stderr)
    started = [results[options.algorithms[0]][seed]["cold"]["greedy"]["mean"] for seed in options.seeds]
    machine = f"{processor()}, {os.cpu_count()} cores, {options.jobs} runs at a time"
    text = (
        "# Six algorithms\n\nMade by `make six-algorithms`.\n\n"
        f"{STEPS} steps of {PROMPTS} prompts × {GROUP} samples in {TRAINING['minibatches']} optimiser steps each, "
        f"two-digit sums, `builtin:tiny`. Seeds {', '.join(map(str, options.seeds))}, from cold starts at "
        f"{', '.join(f'{c:.1%}' for c in started)} greedy. Percent of held-out problems, mean [lowest, highest] over "
        f"seeds. {machine}, {datetime.date.today()}.\n\n{table(results)}\n\n"
        "![held-out accuracy over samples drawn](six-algorithms.svg)\n\n" + NOTES
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "six-algorithms.md").write_text(text)
    plot(results, options.out / "six-algorithms.svg")
    print(text)


if __name__ == "__main__":
    main()
