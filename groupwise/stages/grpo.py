"""Reinforcement learning: the stages `grpo` and `ppo`, which differ in the preset that they start from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.config import GRPOStage
from groupwise.curriculum import Curriculum
from groupwise.stages import StageContext
from groupwise.stages.evaluate import greedy_accuracy
from groupwise.stages.training import train
from groupwise.tasks import Task
from groupwise.trainer import GRPOTrainer
from groupwise.types import Prompt, stable_hash

TOLD = ("reward/total", "reward/correctness", "memory/peak_gb", "memory/critic_gb")
"""What of the last step stands in the table of stages."""


def run(ctx: StageContext) -> dict[str, Any]:
    """Train `stage.model` on the task's prompts; writes every rollout, and `model/`.

    The rollouts of a step are on disk before its update begins: a run that was killed in between trains on them and
    does not draw them again.
    """
    cfg = ctx.stage
    assert isinstance(cfg, GRPOStage)
    task = ctx.task()
    policy = ctx.policy(cfg.model, cfg.lora)
    seed = ctx.seed if cfg.seed is None else cfg.seed
    config = cfg.model_copy(update={"seed": seed})
    trainer = GRPOTrainer(
        policy,
        reward_model=ctx.reward(task),
        config=config,
        total_steps=cfg.steps * cfg.ppo_epochs * cfg.minibatches,
    )
    source = PromptSource(task, seed, _curriculum(ctx, cfg, trainer, task))
    held_out = task.sample(cfg.eval_prompts, seed=ctx.seed, split="test") if cfg.eval_every else []
    advised: set[str] = set()

    def take_step(step: int) -> dict[str, float]:
        start = time.perf_counter()
        groups = ctx.dir.load_rollouts(step)
        if groups and groups[0].rollouts[0].completion.policy_version == policy.version:
            metrics = trainer.describe(groups) | {"data/prompts_too_long": float(ctx.dir.prompts_left_out(step))}
        else:
            groups, metrics = trainer.collect(
                source.draw(step, 0, cfg.prompts_per_step),
                refill=lambda number, count: source.draw(step, number, count),
            )
            ctx.dir.save_rollouts(step, groups, int(metrics["data/prompts_too_long"]))
        if source.curriculum is not None:
            source.curriculum.record(groups)
            metrics |= source.curriculum.metrics()
        metrics |= trainer.update(groups)
        seconds = time.perf_counter() - start
        metrics |= {"time/step": seconds, "tokens/per_second": metrics.get("tokens/sampled", 0.0) / seconds}
        if cfg.eval_every and ((step + 1) % cfg.eval_every == 0 or step + 1 == cfg.steps):
            metrics["eval/accuracy"] = greedy_accuracy(policy, held_out, trainer.reward, config.sampling)
        for advice in _advice(cfg, step, metrics):
            if advice not in advised:
                advised.add(advice)
                ctx.progress.note(f"{cfg.name}: {advice}")
        return metrics

    last = train(ctx, _State(trainer, source.curriculum), cfg.steps, take_step)
    with ctx.dir.new_folder("model") as folder:
        policy.save(folder)
    return {"steps": cfg.steps, **{k: last[k] for k in TOLD if k in last}}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of a stage, as a function of the step and the round of sampling within it."""

    task: Task
    seed: int
    curriculum: Curriculum | None

    def draw(self, step: int, number: int, count: int) -> Sequence[Prompt]:
        """`count` prompts of one round: round 0 is the step's own, later ones replace groups without signal."""
        if self.curriculum is not None:
            return self.curriculum.pick(count, (self.seed, step, number))
        seed = self.seed if number == 0 else stable_hash(self.seed, "refill", number) % 2**31
        return self.task.sample(count, seed=(seed, step))


def _curriculum(ctx: StageContext, cfg: GRPOStage, trainer: GRPOTrainer, task: Task) -> Curriculum | None:
    if cfg.curriculum is None:
        return None
    drawn = task.sample(cfg.curriculum.pool, seed=(trainer.config.seed, 0))
    curriculum = Curriculum(cfg.curriculum, [p for p in drawn if trainer.fits(p)])
    if not curriculum.prompts:
        raise ValueError(
            "curriculum: every prompt of the pool is too long; raise max_prompt_tokens or lower max_tokens"
        )
    if len(curriculum.prompts) < cfg.curriculum.pool:
        ctx.progress.note(
            f"{cfg.name}: the curriculum's pool holds {len(curriculum.prompts)} prompts, not {cfg.curriculum.pool}: "
            "the rest are repeated or too long"
        )
    return curriculum


@dataclass(frozen=True, slots=True)
class _State:
    """What a checkpoint of the stage holds."""

    trainer: GRPOTrainer
    curriculum: Curriculum | None

    def state_dict(self) -> dict[str, Any]:
        pools = None if self.curriculum is None else self.curriculum.state_dict()
        return {**self.trainer.state_dict(), "curriculum": pools}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state)
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])


def _advice(cfg: GRPOStage, step: int, metrics: dict[str, float]) -> list[str]:
    """What a person would want to be told while the run can still be stopped."""
    advice = []
    if step >= 2 and metrics.get("group/no_signal", 0.0) >= 0.9:
        if metrics.get("reward/correctness", 0.0) > 0.9:
            advice.append("nearly every sample is right: there is little left to learn from these prompts")
        elif metrics["rollout/truncated"] > 0.5:
            advice.append(
                f"most completions are cut off at max_tokens {cfg.max_tokens} and almost no group carries a signal; "
                "raise max_tokens"
            )
        else:
            advice.append(
                "almost no group carries a signal: all samples of a prompt get the same reward; choose easier or "
                "harder prompts, a larger group_size, or a longer cold start"
            )
    if metrics.get("data/prompts_too_long", 0.0):
        advice.append("some prompts are longer than max_prompt_tokens and are left out; see data/prompts_too_long")
    return advice
