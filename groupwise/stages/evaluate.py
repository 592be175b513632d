"""How good a model is on held-out prompts: greedy and sampled accuracy, pass@k, maj@k, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from groupwise.algorithms.estimates import majority_is_correct, mean_interval, pass_at_k
from groupwise.config import EvaluateStage
from groupwise.engines.local import LocalEngine
from groupwise.model import Policy
from groupwise.rewards import RewardComposer, Scorer, answers
from groupwise.rollout import collect
from groupwise.stages import StageContext
from groupwise.types import Group, Prompt, Sampling

PROMPTS_AT_ONCE = 64


def run(ctx: StageContext) -> dict[str, Any]:
    """Evaluate `stage.models` on the task's test prompts; writes `eval.json`. Models already evaluated are skipped."""
    cfg = ctx.stage
    assert isinstance(cfg, EvaluateStage)
    task = ctx.task()
    prompts = task.sample(cfg.prompts, seed=ctx.seed, split="test")
    if not prompts:
        raise ValueError("the task has no test prompts: give test_path, or a larger test_fraction")
    reward = RewardComposer(
        {"correctness": 1.0, "format": 0.0}, verify=task.verify, answer_style=ctx.recipe.answer_style
    )
    chunks = -(-len(prompts) // PROMPTS_AT_ONCE)
    ctx.progress.start(ctx.label, len(cfg.models) * chunks)
    results: dict[str, Any] = {}
    for place, name in enumerate(cfg.models):
        results[name] = ctx.dir.read_json(f"models/{name}.json")
        if results[name] is None:
            results[name] = evaluate(
                ctx.policy(name),
                prompts,
                reward,
                cfg.sampling,
                samples=cfg.samples,
                seed=ctx.seed,
                answer_style=ctx.recipe.answer_style,
                on_chunk=lambda done: ctx.progress.step(place * chunks + done, {}),  # noqa: B023  (called in this pass)
            )
            ctx.dir.write_json(f"models/{name}.json", results[name])
    summary = {"task": ctx.recipe.task_of(cfg).model_dump(mode="json"), "prompts": len(prompts), "models": results}
    ctx.dir.write_json("eval.json", summary)
    return summary


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    reward: Scorer,
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    answer_style: str = "auto",
    on_chunk: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """One greedy completion and `samples` sampled ones per prompt, scored by `reward`'s part `correctness`.

    Accuracies come as {mean, low, high} with 95 % intervals over prompts. Samples that could not be scored are left out
    and counted; prompts too long for the model likewise.
    """
    greedy: list[Group] = []
    sampled: list[Group] = []
    too_long = 0
    for done, start in enumerate(range(0, len(prompts), PROMPTS_AT_ONCE), start=1):
        chunk = prompts[start : start + PROMPTS_AT_ONCE]
        for groups, how, size in ((greedy, replace(sampling, temperature=0.0), 1), (sampled, sampling, samples)):
            found = _draw(policy, chunk, reward, how, size, (seed, start))
            groups += found.groups
        too_long += len(found.too_long)
        on_chunk(done)
    marks = [[_is_correct(r) for r in g.rollouts if r.reward.parts.get("correctness") is not None] for g in sampled]
    scored = [m for m in marks if m]
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= samples]
    votes = [
        majority_is_correct(
            [answers.find(r.text, answer_style) for r in g.rollouts], [_is_correct(r) for r in g.rollouts]
        )
        for g in sampled
    ]
    rollouts = [r for g in sampled for r in g.rollouts]
    return {
        "prompts": len(sampled),
        "samples": samples,
        "prompts_too_long": too_long,
        "unscored": sum(r.reward.parts.get("correctness") is None for g in (*greedy, *sampled) for r in g.rollouts),
        "greedy": _interval([float(_is_correct(g.rollouts[0])) for g in greedy]),
        "sampled": _interval([sum(m) / len(m) for m in scored]),
        "pass_at": {str(k): _mean([pass_at_k(len(m), sum(m), k) for m in scored if len(m) >= k]) for k in ks},
        f"maj_at_{samples}": _mean(votes),
        "format": _mean([float(r.reward.parts.get("format") == 1.0) for r in rollouts]),
        "length": _mean([float(len(r.completion.token_ids)) for r in rollouts]),
        "truncated": _mean([float(r.completion.finish_reason == "length") for r in rollouts]),
    }


def greedy_accuracy(policy: Policy, prompts: Sequence[Prompt], reward: Scorer, sampling: Sampling) -> float:
    """Share of prompts whose greedy completion is right."""
    found = _draw(policy, prompts, reward, replace(sampling, temperature=0.0), 1, (0,))
    return _mean([float(_is_correct(g.rollouts[0])) for g in found.groups])


def _draw(
    policy: Policy, prompts: Sequence[Prompt], reward: Scorer, sampling: Sampling, size: int, seed: tuple[int, ...]
) -> Any:
    return collect(
        prompts,
        chat=policy.chat,
        engine=LocalEngine(policy),
        reward=reward,
        sampling=sampling,
        group_size=size,
        seed=seed,
        max_prompt_tokens=policy.max_positions - sampling.max_tokens,
    )


def _is_correct(rollout: Any) -> bool:
    return rollout.reward.parts.get("correctness") == 1.0


def _interval(values: list[float]) -> dict[str, float]:
    mean, low, high = mean_interval(values)
    return {"mean": mean, "low": low, "high": high}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
