"""GRPOTrainer: sample a group of answers per prompt, score them, learn from the differences.

`train_step` is `collect`, then `update`; a pipeline calls the two itself to store the rollouts in between.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.algorithms.advantages import group_advantages
from groupwise.algorithms.losses import policy_loss
from groupwise.algorithms.presets import Algorithm
from groupwise.algorithms.weights import token_weights
from groupwise.batch import Batch, Segment, pack
from groupwise.config import GRPOConfig
from groupwise.engines import Engine
from groupwise.engines.local import LocalEngine
from groupwise.model import Policy
from groupwise.optim import Optimizer
from groupwise.rewards import Scorer, as_reward
from groupwise.rollout import collect
from groupwise.types import Group, Message, Prompt, Rollout

NOT_WIRED = ("per_part", "whiten", "credit", "selection", "kl_in", "kl_target", "entropy_target")
"""Parts of an algorithm that the loss knows and the step does not."""

ModelSource: TypeAlias = str | Path | PreTrainedModel | Policy


class RewardOutageError(RuntimeError):
    """Too many rewards of a step failed: training on what is left would learn from the fault."""


class GRPOTrainer:
    """Group-relative policy optimisation (arXiv 2402.03300) of any causal language model.

    Args:
        model: a path, hub id, GGUF file, `builtin:tiny`, a loaded transformers model or a `Policy`.
        ref_model: the frozen reference of the KL penalty; by default the model as it is now (under LoRA, the model
            without its adapter). Not used while `config.kl_coef` is 0.
        reward_model: a RewardComposer, any callable (prompt, response) -> float, or anything with
            `.score(prompt, response)`.
        tokenizer: where `model` brings none.
        config: see `GRPOConfig`.
        engine: who generates; by default `LocalEngine` on the same weights.
        total_steps: optimiser steps of the whole run, for a falling learning-rate schedule.

    Raises:
        ValueError: the model or the configuration cannot be used.
    """

    def __init__(
        self,
        model: ModelSource,
        ref_model: ModelSource | None = None,
        reward_model: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: GRPOConfig = GRPOConfig(),  # noqa: B008  (frozen)
        *,
        engine: Engine | None = None,
        total_steps: int | None = None,
    ) -> None:
        if reward_model is None:
            raise ValueError("reward_model is needed: a RewardComposer, a callable or an object with .score()")
        if unwired := [key for key in NOT_WIRED if getattr(config, key) != Algorithm.model_fields[key].default]:
            raise ValueError(f"algorithm {config.algorithm!r} needs {', '.join(unwired)}, which no step computes yet")
        self.config = config
        self.policy = model if isinstance(model, Policy) else Policy.load(model, tokenizer=tokenizer)
        if config.max_tokens >= self.policy.max_positions:
            raise ValueError(
                f"max_tokens {config.max_tokens} leaves no room for a prompt in the {self.policy.max_positions} "
                "positions of the model; lower max_tokens"
            )
        self.reward: Scorer = as_reward(reward_model)
        self.engine: Engine = engine or LocalEngine(self.policy)
        self.optimizer = Optimizer(self.policy.parameters, config, total_steps)
        self.reference = self._frozen_reference(ref_model)
        self.step = 0

    # -- the step ------------------------------------------------------------------------------------------------

    def train_step(self, prompts: Iterable[str | Sequence[Message] | Prompt]) -> dict[str, float]:
        """Sample, score, compute advantages, update: one GRPO step. Returns its metrics, named `phase/quantity`."""
        groups, metrics = self.collect(prompts)
        return metrics | self.update(groups)

    def collect(self, prompts: Iterable[str | Sequence[Message] | Prompt]) -> tuple[list[Group], dict[str, float]]:
        """The groups of the current step, advantages included, and the metrics of sampling and scoring.

        Raises:
            ValueError: there is no prompt, or every prompt is too long.
            RewardOutageError: more than `config.max_failed_rewards` of the rewards failed.
        """
        cfg = self.config
        if isinstance(prompts, str):
            raise ValueError(f"prompts is a list, got the text {prompts!r}; wrap it in []")
        asked = [Prompt.of(p) for p in prompts]
        if not asked:
            raise ValueError("a step needs at least one prompt, got none")
        room = self.policy.max_positions - cfg.max_tokens
        longest = room if cfg.max_prompt_tokens is None else min(room, cfg.max_prompt_tokens)
        found = collect(
            asked,
            chat=self.policy.chat,
            engine=self.engine,
            reward=self.reward,
            sampling=cfg.sampling,
            group_size=cfg.group_size,
            seed=(cfg.seed, self.step),
            max_prompt_tokens=longest,
        )
        if not found.groups:
            raise ValueError(
                f"all {len(found.too_long)} prompts of step {self.step} are longer than {longest} tokens; raise "
                "max_prompt_tokens, or lower max_tokens to leave them room"
            )
        self._stop_on_outage(found.groups)
        for group in found.groups:
            advantages_G = group_advantages(
                group.rewards_G, baseline=cfg.baseline, scale=cfg.scale, ddof=cfg.ddof, eps=cfg.eps
            )
            for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
                rollout.advantage = advantage
        metrics = group_metrics(found.groups)
        metrics["data/prompts_too_long"] = float(len(found.too_long))
        metrics |= {"time/generate": found.generate_seconds, "time/score": found.score_seconds}
        return found.groups, metrics

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """`ppo_epochs` x `minibatches` optimiser steps on the groups of one step; returns the metrics of the update."""
        start = time.perf_counter()
        cfg = self.config
        chunks = [[self._segments(g) for g in groups[i :: cfg.minibatches]] for i in range(cfg.minibatches)]
        chunks = [chunk for chunk in chunks if chunk]
        for chunk in chunks:
            self._weigh(chunk)
        if cfg.kl_coef == 0 and cfg.entropy_coef == 0:
            # A group without signal has exactly no gradient. It was counted in the weights: the mean stays the mean.
            chunks = [[group for group in chunk if any(s.advantage for s in group)] for chunk in chunks]
        trained = [[s for group in chunk for s in group if s.weight] for chunk in chunks]
        trained = [chunk for chunk in trained if chunk]
        if not trained:
            warnings.warn("nothing to train in this step: every sample was masked or without signal", stacklevel=2)
        everything = [s for chunk in trained for s in chunk]
        if cfg.kl_coef > 0:
            with self._as_reference() as reference:
                self._score(reference, everything, "ref_logps")
        if cfg.ppo_epochs * len(trained) > 1:
            self._score(self.policy, everything, "old_logps")
        steps = [self._optimizer_step(chunk) for _ in range(cfg.ppo_epochs) for chunk in trained]
        self.step += 1
        metrics = _mean_of(steps) if steps else {}
        metrics["tokens/trained"] = float(sum(s.trained_length for s in everything))
        metrics["time/update"] = time.perf_counter() - start
        return metrics

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.policy.version,
            "weights": self.policy.trainable_state(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_trainable_state(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.policy.version = state["step"], state["version"]

    # -- internals -----------------------------------------------------------------------------------------------

    def _segments(self, group: Group) -> list[Segment]:
        """The group's completions as they are trained; a sample without advantage is left out."""
        return [
            Segment(
                prompt_ids=group.prompt_ids,
                token_ids=r.completion.token_ids,
                advantage=r.advantage,
                trained=(False,) * len(r.completion.token_ids) if self._is_masked(r) else None,
                sampler_logps=r.completion.logps,
            )
            for r in group.rollouts
            if r.advantage is not None
        ]

    def _is_masked(self, rollout: Rollout) -> bool:
        return self.config.mask_truncated and rollout.completion.finish_reason == "length"

    def _weigh(self, chunk: list[list[Segment]]) -> None:
        """Set each segment's weight per token over the whole optimiser step."""
        segments = [s for group in chunk for s in group]
        lengths = [s.trained_length for s in segments]
        weights = token_weights(lengths, self.config.weighting, self.config.max_tokens)
        for segment, weight in zip(segments, weights, strict=True):
            segment.weight = weight

    def _score(self, policy: Policy, segments: list[Segment], name: str) -> None:
        """Fill `ref_logps` or `old_logps` of the segments."""
        with torch.inference_mode():
            for batch in self._pack(segments):
                logp_T, _ = policy.token_logprobs(batch, temperature=self.config.temperature)
                for segment, logps in zip(batch.segments, batch.split(logp_T), strict=True):
                    setattr(segment, name, logps)

    def _optimizer_step(self, segments: list[Segment]) -> dict[str, float]:
        parts: list[tuple[int, dict[str, float]]] = []
        for batch in self._pack(segments):
            logp_T, entropy_T = self.policy.token_logprobs(batch, temperature=self.config.temperature, entropy=True)
            old_logp_T = batch.flat(s.old_logps for s in batch.segments)
            if old_logp_T is None:  # the only optimiser step on these rollouts: the old policy is this one
                old_logp_T = logp_T.detach()
            sampler_logp_T = batch.flat(s.sampler_logps for s in batch.segments)
            loss, metrics = policy_loss(
                logp_T,
                old_logp_T,
                batch.per_token(s.advantage for s in batch.segments),
                batch.per_token(s.weight for s in batch.segments),
                cfg=self.config,
                segment_T=batch.segment_T,
                ref_logp_T=batch.flat(s.ref_logps for s in batch.segments),
                sampler_logp_T=sampler_logp_T,
                entropy_T=entropy_T,
            )
            loss.backward()
            if sampler_logp_T is not None:
                metrics["engine/logp_gap"] = float((old_logp_T - sampler_logp_T).abs().mean())
            parts.append((len(batch.target_T), metrics))
        metrics = _sum_up(parts) | self.optimizer.apply()
        self.policy.version += 1
        return metrics

    def _pack(self, segments: list[Segment]) -> list[Batch]:
        return pack(segments, self.config.max_batch_tokens, self.policy.device)

    def _frozen_reference(self, ref_model: ModelSource | None) -> Policy | None:
        if self.config.kl_coef == 0:
            return None
        if ref_model is None and self.policy.has_adapter:
            return None  # the model with its adapter switched off
        reference = self.policy
        if isinstance(ref_model, Policy):
            reference = ref_model
        elif ref_model is not None:
            reference = Policy.load(ref_model, tokenizer=self.policy.tokenizer)
        if reference.base is self.policy.base:  # a copy, which does not move with the policy
            reference = copy.copy(reference)
            reference.base = reference.model = copy.deepcopy(self.policy.base)
        reference.model.requires_grad_(False)
        return reference

    def _as_reference(self) -> AbstractContextManager[Policy]:
        if self.reference is not None:
            return nullcontext(self.reference)
        return self.policy.adapter_off()

    def _stop_on_outage(self, groups: Sequence[Group]) -> None:
        rewards = [r.reward for g in groups for r in g.rollouts]
        failed = [r for r in rewards if r.total is None and r.errors]
        if len(failed) > self.config.max_failed_rewards * len(rewards):
            reasons = dict.fromkeys(f"{name}: {text}" for r in failed for name, text in r.errors.items())
            raise RewardOutageError(
                f"{len(failed)} of {len(rewards)} rewards failed in step {self.step}, more than max_failed_rewards "
                f"{self.config.max_failed_rewards}: {'; '.join(list(reasons)[:3])}"
            )


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's groups say before any update. A part that nobody could be given has no entry."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {"group/count": 0.0}
    metrics: dict[str, float] = {}
    values: dict[str, list[float | None]] = {"reward/total": [r.reward.total for r in rollouts]}
    for name in dict.fromkeys(n for r in rollouts for n in r.reward.parts):
        values[f"reward/{name}"] = [r.reward.parts.get(name) for r in rollouts]
    for name, column in values.items():
        scored = [v for v in column if v is not None]
        if scored:
            metrics[name] = sum(scored) / len(scored)
    lengths = [len(r.completion.token_ids) for r in rollouts]
    return metrics | {
        "reward/failed": sum(r.reward.total is None for r in rollouts) / len(rollouts),
        "group/count": float(len(groups)),
        "group/no_signal": sum(not g.has_signal for g in groups) / len(groups),
        "rollout/length": sum(lengths) / len(lengths),
        "rollout/truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "tokens/sampled": float(sum(lengths)),
    }


def _sum_up(parts: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Metrics of one optimiser step from (trained tokens, metrics) of its micro-batches.

    Losses add up, maxima are maxima, the rest are means over tokens.
    """
    tokens = sum(n for n, _ in parts)
    total = {}
    for name in parts[0][1]:
        values = [m[name] for _, m in parts]
        if name.startswith("loss/"):
            total[name] = sum(values)
        elif name.endswith("_max"):
            total[name] = max(values)
        else:
            total[name] = sum(n * v for (n, _), v in zip(parts, values, strict=True)) / tokens
    return total


def _mean_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a GRPO step from those of its optimiser steps: maxima are maxima, the rest are means."""
    return {
        name: max(s[name] for s in steps) if name.endswith("_max") else sum(s[name] for s in steps) / len(steps)
        for name in steps[0]
    }
