"""GRPOTrainer: sample a group of answers per prompt, score them, learn from the differences.

`train_step` is `collect`, then `update`; a pipeline calls the two itself to store the rollouts in between.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.algorithms import credit
from groupwise.algorithms.adaptive import Coefficients
from groupwise.algorithms.credit import Credit
from groupwise.algorithms.losses import policy_loss
from groupwise.batch import Batch, Segment, pack
from groupwise.config import GRPOConfig
from groupwise.critic import Critic
from groupwise.engines import Engine
from groupwise.engines.local import LocalEngine
from groupwise.experience import minibatches, moves, untrained
from groupwise.metrics import Metrics, group_metrics, over_batches, over_steps, peak_memory
from groupwise.model import Policy
from groupwise.optim import Optimizer
from groupwise.reference import Reference
from groupwise.rewards import Scorer, as_reward
from groupwise.rollout import Collected, collect
from groupwise.types import Group, Message, Prompt, Rollout, stable_hash

ModelSource: TypeAlias = str | Path | PreTrainedModel | Policy
PromptSource: TypeAlias = str | Sequence[Message] | Prompt
Refill: TypeAlias = Callable[[int, int], Iterable[PromptSource] | None]
"""(round, count) -> fresh prompts, for dynamic sampling; rounds count from 1."""


class RewardOutageError(RuntimeError):
    """Too many rewards of a step failed: training on what is left would learn from the fault."""


class GRPOTrainer:
    """Group-relative policy optimisation (arXiv 2402.03300), and every other preset, of any causal language model.

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
        self.config = config
        self.policy = model if isinstance(model, Policy) else Policy.load(model, tokenizer=tokenizer)
        if config.max_tokens >= self.policy.max_positions:
            raise ValueError(
                f"max_tokens {config.max_tokens} leaves no room for a prompt in the {self.policy.max_positions} "
                "positions of the model; lower max_tokens"
            )
        self.reward: Scorer = as_reward(reward_model)
        self.part_weights: dict[str, float] | None = getattr(self.reward, "weights", None)
        if config.per_part and self.part_weights is None:
            raise ValueError("per_part compares reward parts one by one; reward_model must be a RewardComposer")
        self.engine: Engine = engine or LocalEngine(self.policy)
        self.critic: Critic | None = None
        parameters = self.policy.named_parameters
        if config.baseline == "critic":
            self.critic = Critic(self.policy, config.critic, config, total_steps)
            parameters |= self.critic.named_parameters if self.critic.shares_policy else {}
        self.optimizer = Optimizer(parameters, config, total_steps)
        self.reference: Reference | None = None
        if config.kl_coef > 0:
            source = ref_model if ref_model is None or isinstance(ref_model, Policy) else self._load(ref_model)
            self.reference = Reference(self.policy, source)
            if config.reference_every:
                self.reference.require_same_model()
        self.coefficients = Coefficients.of(config)
        self.step = 0

    @property
    def current(self) -> GRPOConfig:
        """The configuration with its adaptive coefficients as they are now."""
        return self.coefficients.applied_to(self.config)

    # -- the step ------------------------------------------------------------------------------------------------

    def train_step(self, prompts: Iterable[PromptSource], refill: Refill | None = None) -> Metrics:
        """Sample, score, compute advantages, update: one step. Returns its metrics, named `phase/quantity`.

        `refill(round, count)` gives fresh prompts where the algorithm replaces groups without signal (DAPO).
        """
        groups, metrics = self.collect(prompts, refill)
        return metrics | self.update(groups)

    def collect(self, prompts: Iterable[PromptSource], refill: Refill | None = None) -> tuple[list[Group], Metrics]:
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
        rounds = [self._sample(asked, 0)]
        if not rounds[0].groups:
            raise ValueError(
                f"all {len(asked)} prompts of step {self.step} are longer than {self._longest_prompt} tokens; raise "
                "max_prompt_tokens, or lower max_tokens to leave them room"
            )
        if cfg.resample_rounds and refill is None:
            warnings.warn("no refill is given: groups without signal are left out, not replaced", stacklevel=2)
        for number in range(1, cfg.resample_rounds + 1):
            missing = len(asked) - sum(self._differs(g) for r in rounds for g in r.groups)
            fresh = [] if refill is None or missing <= 0 else [Prompt.of(p) for p in refill(number, missing) or ()]
            if not fresh:
                break
            rounds.append(self._sample(fresh[:missing], number))
        groups = [group for r in rounds for group in r.groups]
        start = time.perf_counter()
        self._prepare(groups)
        metrics = self.describe(groups)
        metrics["data/prompts_too_long"] = float(sum(len(r.too_long) for r in rounds))
        metrics |= {
            "time/generate": sum(r.generate_seconds for r in rounds),
            "time/score": sum(r.score_seconds for r in rounds),
            "time/logprobs": time.perf_counter() - start,
        }
        return groups, metrics

    def describe(self, groups: Sequence[Group]) -> Metrics:
        """The metrics of a step's groups before any update."""
        if self.config.compares_groups:
            return group_metrics(groups, [self._differs(g) for g in groups])
        return group_metrics(groups, [g.has_signal for g in groups])

    def update(self, groups: Sequence[Group]) -> Metrics:
        """`ppo_epochs` x `minibatches` optimiser steps on the groups of one step; returns the metrics of the update.

        What `collect` has found out about the groups is used, not found out again; groups of other origin are scored
        first. Groups are the caller's: only their rollouts' scores and advantages are filled in.
        """
        start = time.perf_counter()
        credits_PG = self._prepare(groups)
        steps_of_epoch = minibatches(
            groups, credits_PG, self.current, stable_hash(self.config.seed, self.step, "selection")
        )
        trained = [s for minibatch in steps_of_epoch for s in minibatch]
        if not trained:
            warnings.warn("nothing to train in this step: every sample was masked or without signal", stacklevel=2)
        steps = self._train_policy(steps_of_epoch)
        metrics = over_steps(steps)
        metrics |= {"update/steps": float(len(steps)), "tokens/trained": float(sum(s.trained_length for s in trained))}
        if self.critic is not None and not self.critic.shares_policy:
            metrics |= self._train_critic(self.critic, steps_of_epoch)
        if self.critic is not None:
            metrics["memory/critic_gb"] = self.critic.gigabytes
        self.step += 1
        metrics |= self._adapt(metrics, samples=sum(len(g.rollouts) for g in groups))
        metrics["time/update"] = time.perf_counter() - start
        return metrics | peak_memory(self.policy.device)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.policy.version,
            "weights": self.policy.trainable_state(),
            "optimizer": self.optimizer.state_dict(),
            "coefficients": self.coefficients.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["critic"] is None) != (self.critic is None):
            raise ValueError("the checkpoint and the trainer do not both have a critic; was `algorithm` changed?")
        self.policy.load_trainable_state(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.coefficients.load_state_dict(state["coefficients"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self.step, self.policy.version = state["step"], state["version"]

    # -- sampling ------------------------------------------------------------------------------------------------

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt is short enough to be drawn from; longer ones are left out of a step, and counted."""
        return len(self.policy.chat.prompt_ids(prompt.messages)) <= self._longest_prompt

    @property
    def _longest_prompt(self) -> int:
        room = self.policy.max_positions - self.config.max_tokens
        return room if self.config.max_prompt_tokens is None else min(room, self.config.max_prompt_tokens)

    def _sample(self, prompts: Sequence[Prompt], number: int) -> Collected:
        """One round of sampling: scored groups, with the reward of the greedy answer where that is the baseline."""
        cfg = self.config
        found = self._draw(prompts, number, greedy=False)
        self._stop_on_outage(found.groups)
        if cfg.baseline != "greedy" or not found.groups:
            return found
        greedy = self._draw([g.prompt for g in found.groups], number, greedy=True)
        for group, answer in zip(found.groups, greedy.groups, strict=True):
            group.greedy_reward = answer.rollouts[0].reward.total
        return replace(
            found,
            generate_seconds=found.generate_seconds + greedy.generate_seconds,
            score_seconds=found.score_seconds + greedy.score_seconds,
        )

    def _differs(self, group: Group) -> bool:
        return credit.differs(group, self.config, self.config.max_tokens, self.part_weights)

    def _draw(self, prompts: Sequence[Prompt], number: int, greedy: bool) -> Collected:
        cfg = self.config
        return collect(
            prompts,
            chat=self.policy.chat,
            engine=self.engine,
            reward=self.reward,
            sampling=replace(cfg.sampling, temperature=0.0) if greedy else cfg.sampling,
            group_size=1 if greedy else cfg.group_size,
            seed=(cfg.seed, self.step, number) if number else (cfg.seed, self.step),
            max_prompt_tokens=self._longest_prompt,
        )

    def _stop_on_outage(self, groups: Sequence[Group]) -> None:
        rewards = [r.reward for g in groups for r in g.rollouts]
        failed = [r for r in rewards if r.total is None and r.errors]
        if len(failed) > self.config.max_failed_rewards * len(rewards):
            reasons = dict.fromkeys(f"{name}: {text}" for r in failed for name, text in r.errors.items())
            raise RewardOutageError(
                f"{len(failed)} of {len(rewards)} rewards failed in step {self.step}, more than max_failed_rewards "
                f"{self.config.max_failed_rewards}: {'; '.join(list(reasons)[:3])}"
            )

    # -- credit --------------------------------------------------------------------------------------------------

    def _prepare(self, groups: Sequence[Group]) -> list[list[Credit | None]]:
        """Find out what the algorithm needs to know of the samples' tokens, and give the samples their advantages.

        Groups that dynamic sampling has replaced have no credit. Those that will not be trained are not scored, unless
        their scores decide that.
        """
        cfg = self.current
        kept = [not cfg.resample_rounds or self._differs(group) for group in groups]
        chosen = [group for group, keep in zip(groups, kept, strict=True) if keep]
        if cfg.credits_by_model:
            self._score(chosen)
        found = credit.assign(chosen, cfg, max_tokens=cfg.max_tokens, part_weights=self.part_weights)
        for group, credits_G in zip(chosen, found, strict=True):
            for rollout, given in zip(group.rollouts, credits_G, strict=True):
                rollout.advantage = None if given is None else given.advantage
        if not cfg.scores_every_group:
            chosen = [g for g, credits_G in zip(chosen, found, strict=True) if any(map(moves, credits_G))]
        self._score(chosen)
        credits_PG = iter(found)
        return [next(credits_PG) if keep else _replaced(g) for g, keep in zip(groups, kept, strict=True)]

    def _score(self, groups: Sequence[Group]) -> None:
        """Fill in what is not known yet of the tokens: under the old policy, under the reference, by the critic."""
        cfg = self.config
        samples = [(g, r) for g in groups for r in g.rollouts if r.reward.total is not None and self._is_looked_at(r)]
        penalised = cfg.kl_coef > 0 and cfg.kl_in == "reward"
        if cfg.ppo_epochs * cfg.minibatches > 1 or penalised or cfg.selection != "all":
            for (_, r), logps, entropies in self._scores(self.policy, [s for s in samples if s[1].old_logps is None]):
                r.old_logps, r.entropies = logps, entropies
        if self.reference is not None:
            with self.reference.scoring() as reference:
                for (_, r), logps, _ in self._scores(reference, [s for s in samples if s[1].ref_logps is None]):
                    r.ref_logps = logps
        if self.critic is not None:
            self._fill_values(self.critic, [s for s in samples if s[1].values is None])

    def _is_looked_at(self, rollout: Rollout) -> bool:
        """Whether a sample's tokens count: they are trained, or what models make of them decides its group's credit."""
        if self.config.credits_by_model:
            return rollout.completion.sampled_length > 0
        return credit.trained_length(rollout, self.config) > 0

    def _scores(
        self, policy: Policy, samples: Sequence[tuple[Group, Rollout]]
    ) -> list[tuple[tuple[Group, Rollout], tuple[float, ...], tuple[float, ...] | None]]:
        """Each sample with the log-probs of its tokens, and their entropies where the algorithm selects by them."""
        entropy = self.config.selection == "top_entropy"
        found: list[tuple[tuple[float, ...], tuple[float, ...] | None]] = []
        with torch.inference_mode():
            for batch in self._pack([untrained(g, r) for g, r in samples]):
                logp_T, entropy_T = policy.token_logprobs(batch, temperature=self.config.temperature, entropy=entropy)
                entropies = batch.split(entropy_T) if entropy_T is not None else [None] * len(batch.segments)
                found += zip(batch.split(logp_T), entropies, strict=True)
        return [(sample, *scores) for sample, scores in zip(samples, found, strict=True)]

    def _fill_values(self, critic: Critic, samples: Sequence[tuple[Group, Rollout]]) -> None:
        """The critic's value before each token, and 0 after the last: a reward judges a cut answer as it stands."""
        with torch.inference_mode():
            batches = self._pack([untrained(g, r) for g, r in samples])
            values = [v for batch in batches for v in batch.split(critic.values(batch))]
        for (_, rollout), found in zip(samples, values, strict=True):
            rollout.values = (*found, 0.0)

    # -- update --------------------------------------------------------------------------------------------------

    def _train_policy(self, steps_of_epoch: Sequence[list[Segment]]) -> list[Metrics]:
        """The metrics of each optimiser step; fewer than planned where the KL from the old policy ends the epochs."""
        steps: list[Metrics] = []
        for _ in range(self.config.ppo_epochs):
            for minibatch in steps_of_epoch:
                metrics = self._accumulate(minibatch)
                if self.config.kl_stop is not None and metrics["policy/kl_old"] > self.config.kl_stop:
                    self.optimizer.forget_gradients()
                    return steps
                steps.append(metrics | self.optimizer.apply())
                self.policy.version += 1
                self.coefficients.follow_entropy(self.config, metrics["policy/entropy"])
        return steps

    def _accumulate(self, segments: list[Segment]) -> Metrics:
        """The gradient of one optimiser step, and its metrics."""
        cfg = self.current
        self.optimizer.forget_gradients()  # of an update that was interrupted
        parts: list[tuple[int, Metrics]] = []
        for batch in self._pack(segments):
            logp_T, entropy_T, value_T = self._forward(batch, detach_entropy=cfg.entropy_coef == 0)
            old_logp_T = batch.flat(s.old_logps for s in batch.segments)
            weight_T = batch.per_token(s.weight for s in batch.segments)
            advantage_T = batch.flat(s.advantages for s in batch.segments)
            selected_T = batch.flat(s.selected for s in batch.segments)
            assert advantage_T is not None
            loss, metrics = policy_loss(
                logp_T,
                logp_T.detach() if old_logp_T is None else old_logp_T,  # the only step: the old policy is this one
                advantage_T,
                weight_T,
                cfg=cfg,
                segment_T=batch.segment_T,
                ref_logp_T=batch.flat(s.ref_logps for s in batch.segments),
                sampler_logp_T=batch.flat(s.sampler_logps for s in batch.segments),
                entropy_T=entropy_T,
                selected_T=None if selected_T is None else selected_T.bool(),
            )
            if self.critic is not None and value_T is not None:
                critic_loss, critic_metrics = self.critic.loss(value_T, batch, weight_T)
                loss = loss + self.config.critic.coef * critic_loss
                metrics |= critic_metrics
            loss.backward()
            parts.append((len(batch.target_T), metrics))
        return over_batches(parts)

    def _forward(self, batch: Batch, detach_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropies and, where the critic is the policy's own head, values of the trained tokens."""
        temperature = self.config.temperature
        if self.critic is None or not self.critic.shares_policy:
            logp_T, entropy_T = self.policy.token_logprobs(
                batch, temperature=temperature, entropy=True, detach_entropy=detach_entropy
            )
            return logp_T, entropy_T, None
        hidden_TD = self.policy.trained_hidden(batch)
        logp_T, entropy_T = self.policy.head_logprobs(
            hidden_TD, batch.target_T, temperature=temperature, entropy=True, detach_entropy=detach_entropy
        )
        return logp_T, entropy_T, self.critic.values_of(hidden_TD)

    def _train_critic(self, critic: Critic, steps_of_epoch: Sequence[list[Segment]]) -> Metrics:
        """As many optimiser steps of a separate critic as the policy was given."""
        assert critic.optimizer is not None
        start = time.perf_counter()
        steps = []
        for _ in range(self.config.ppo_epochs):
            for minibatch in steps_of_epoch:
                critic.optimizer.forget_gradients()
                parts = []
                for batch in self._pack(minibatch):
                    loss, metrics = critic.loss(
                        critic.values(batch), batch, batch.per_token(s.weight for s in batch.segments)
                    )
                    loss.backward()
                    parts.append((len(batch.target_T), metrics))
                norm = critic.optimizer.apply()["update/grad_norm"]
                steps.append(over_batches(parts) | {"value/grad_norm": norm})
        return over_steps(steps) | {"time/critic": time.perf_counter() - start}

    def _adapt(self, metrics: Metrics, samples: int) -> Metrics:
        """After a step: let the coefficients and the reference follow the policy."""
        cfg = self.config
        if "policy/kl_ref" in metrics:
            self.coefficients.follow_kl(cfg, metrics["policy/kl_ref"], samples)
        if self.reference is not None and cfg.reference_every and self.step % cfg.reference_every == 0:
            self.reference.refresh(cfg.reference_mix)
        adapted = {"update/kl_coef": self.coefficients.kl} if cfg.kl_target is not None else {}
        return adapted | ({"update/entropy_coef": self.coefficients.entropy} if cfg.entropy_target is not None else {})

    # -- helpers -------------------------------------------------------------------------------------------------

    def _load(self, source: str | Path | PreTrainedModel) -> Policy:
        return Policy.load(source, tokenizer=self.policy.tokenizer)

    def _pack(self, segments: list[Segment]) -> list[Batch]:
        return pack(segments, self.config.max_batch_tokens, self.policy.device)


def _replaced(group: Group) -> list[Credit | None]:
    """A group without signal that others stand in for: advantages of 0, and no credit, so that it is not averaged."""
    for rollout in group.rollouts:
        rollout.advantage = None if rollout.reward.total is None else 0.0
    return [None] * len(group.rollouts)
