"""Recipes: strict models of all that can be set. Nothing here imports torch, so mistakes are told at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from groupwise.algorithms.presets import GROUP_BASELINES, Algorithm, NonNegative
from groupwise.rewards import BUILTIN_PARTS, RewardComposer, Verifier, load_part
from groupwise.schema import Many, Strict, nearest
from groupwise.tasks import TaskConfig
from groupwise.types import Sampling

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
BASE = "base"
"""The name under which stages refer to the recipe's own model."""


# -- parts ---------------------------------------------------------------------------------------------------------


class OptimConfig(Strict):
    """The optimiser: AdamW, its learning-rate schedule, gradient clipping."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to `min_lr_ratio` of the peak by the last step."""
    min_lr_ratio: Share = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly; the first step already uses lr / warmup_steps."""
    weight_decay: NonNegative = 0.0
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0 turns clipping off."""


class SamplingConfig(Strict):
    """How completions are drawn; see `groupwise.types.Sampling`."""

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Positive = 512
    """Longest completion; a completion cut off here has finish reason "length"."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are left out and counted; by default what the model's positions leave room for."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p, self.max_tokens)


class CriticConfig(Strict):
    """The critic of PPO; used with the baseline `critic` only."""

    model: Literal["separate", "shared"] = "separate"
    """A model of its own, which begins as a copy of the policy; or a value head on the policy itself."""
    lr: NonNegative = 1e-5
    """Learning rate of a separate critic; a shared one has the policy's."""
    coef: NonNegative = 0.1
    """Weight of the value loss in the loss of a policy that shares its model with the critic."""
    clip_range: NonNegative | None = 0.2
    """Values are trained only as far as this from where the update began; null turns it off."""


class GRPOConfig(Algorithm, OptimConfig, SamplingConfig):
    """Everything that `GRPOTrainer` needs to know; `algorithm` names the method to start from."""

    group_size: int = 8
    """Samples per prompt; 1 is enough where the baseline does not compare them."""
    critic: CriticConfig = CriticConfig()
    reference_every: Annotated[int, Field(ge=0)] = 0
    """Steps between refreshes of the KL's reference; 0 keeps the model that training starts from. R1 refreshed it after
    400 optimiser steps, of which a step here may hold several."""
    reference_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a refresh makes of the reference: mix * policy + (1 - mix) * reference. 1 replaces it; 0.01 with
    `reference_every: 1` is a moving average."""
    ppo_epochs: Positive = 1
    """Passes over the rollouts of a step."""
    minibatches: Positive = 1
    """Optimiser steps per pass; whole groups are dealt out to them in turn."""
    max_batch_tokens: Positive = 4096
    """Tokens per forward and backward pass: bounds memory, changes nothing else."""
    max_failed_rewards: Share = 0.25
    """Stop when more than this share of a step's rewards failed."""
    seed: int = 0

    @field_validator("group_size")
    @classmethod
    def _has_something_to_compare(cls, value: int, info: ValidationInfo) -> int:
        if value < 2 and info.data.get("baseline") in GROUP_BASELINES:
            raise ValueError(f"must be >= 2, got {value}: an advantage compares the samples of one prompt")
        if value < 1:
            raise ValueError(f"must be >= 1, got {value}")
        return value

    @field_validator("reference_every")
    @classmethod
    def _has_a_reference(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("kl_coef") == 0:
            raise ValueError(f"must be 0 while kl_coef is 0, got {value}: there is no reference to refresh")
        return value

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> Self:
        if self.critic != CriticConfig() and self.baseline != "critic":
            raise ValueError(
                f"critic has no effect with baseline {self.baseline!r}; set algorithm: ppo, or leave it out"
            )
        if self.reference_mix != 1 and not self.reference_every:
            raise ValueError(
                f"reference_mix {self.reference_mix:g} has no effect without reference_every; leave it out"
            )
        return self

    @field_validator("temperature")
    @classmethod
    def _draws_different_samples(cls, value: float) -> float:
        if value == 0:
            raise ValueError("must be > 0 to train, got 0: greedy samples of one prompt are all equal")
        return value


class LoRA(Strict):
    """Low-rank adapters (arXiv 2106.09685) instead of full fine-tuning; needs `pip install groupwise[lora]`."""

    rank: Positive = 16
    alpha: Positive = 32
    target_modules: Many[str] | Literal["all-linear"] = "all-linear"


class PartConfig(Strict):
    """A reward part with more than a weight."""

    weight: float = 1.0
    function: str | None = None
    """`module:function` of your own; it is called with (prompt, response) and returns a number, or None to abstain."""

    @field_validator("function")
    @classmethod
    def _resolves(cls, value: str | None) -> str | None:
        if value is not None:
            load_part(value)
        return value


Rewards = dict[str, float | PartConfig]


# -- stages --------------------------------------------------------------------------------------------------------


class Stage(Strict):
    """What all stages have."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Names the stage's folder in the run directory; other stages refer to its model or data by it."""


class TrainingStage(Stage):
    """What the stages that train a model have."""

    model: str = BASE
    """Where training starts: `base`, or an earlier stage that made a model."""
    checkpoint_every: Positive | Literal["auto"] = "auto"
    """Steps between checkpoints; `auto` saves as often as costs less than 3 % of the time. Rollouts are kept at every
    step, so after a kill none is drawn again."""
    lora: LoRA | None = None


class TraceData(Strict):
    """Worked examples that the task makes itself."""

    kind: Literal["traces"] = "traces"
    count: Positive = 512


class StageData(Strict):
    """What an earlier `reject` stage kept."""

    kind: Literal["stage"] = "stage"
    stage: str


class FileData(Strict):
    """Conversations in a JSONL file: rows `{"messages": [...]}` that end with the assistant's message."""

    kind: Literal["file"] = "file"
    path: str


class SFTStage(TrainingStage, OptimConfig):
    """Supervised fine-tuning on assistant tokens."""

    kind: Literal["sft"]
    data: Annotated[TraceData | StageData | FileData, Field(discriminator="kind")] = TraceData()
    epochs: Positive = 1
    batch_size: Positive = 32
    """Examples per optimiser step."""
    lr: NonNegative = 1e-5
    max_batch_tokens: Positive = 4096
    """Tokens per forward and backward pass: bounds memory, changes nothing else."""

    @field_validator("data", mode="before")
    @classmethod
    def _kind_of_data(cls, value: Any) -> Any:
        """`{stage: select}` and `{path: rows.jsonl}` say what they are without a `kind`."""
        if isinstance(value, Mapping) and "kind" not in value:
            kind = "stage" if "stage" in value else "file" if "path" in value else "traces"
            return {"kind": kind, **value}
        return value


class CurriculumConfig(Strict):
    """Prompts drawn by how often the policy gets them right, from a fixed pool of the task's."""

    pool: Positive = 1024
    """Training prompts in the pool; fewer where the task draws some of them twice."""
    easy_from: Share = 1.0
    """A prompt of which at least this share of samples was right (`correctness` 1), when last drawn, is easy."""
    hard_to: Share = 0.0
    """A prompt of which at most this share was right is hard."""
    easy_share: Share = 0.0
    """Share of a step's prompts that are drawn from the easy ones."""
    hard_share: Share = 0.1
    """Share of a step's prompts that are drawn from the hard ones. The rest is neither, or was never drawn."""

    @model_validator(mode="after")
    def _leaves_something_between(self) -> Self:
        if self.hard_to >= self.easy_from:
            raise ValueError(f"hard_to {self.hard_to:g} must be below easy_from {self.easy_from:g}")
        if self.easy_share + self.hard_share > 1:
            raise ValueError(
                f"easy_share {self.easy_share:g} and hard_share {self.hard_share:g} are more than 1 together"
            )
        return self


class GRPOStage(TrainingStage, GRPOConfig):
    """Reinforcement learning with group-relative advantages, or any other of `algorithm`'s."""

    kind: Literal["grpo"]
    steps: Positive
    prompts_per_step: Positive = 32
    seed: int | None = None  # type: ignore[assignment]
    """By default drawn from the recipe's seed and the stage's name."""
    task: TaskConfig | None = None
    """Another task than the recipe's."""
    rewards: Rewards | None = None
    """Other rewards than the recipe's."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between greedy evaluations on held-out prompts; 0 turns them off."""
    eval_prompts: Positive = 128
    curriculum: CurriculumConfig | None = None
    """Draw prompts by difficulty; by default as the task gives them."""

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.lora is not None and self.reference_every and self.reference_mix != 1:
            raise ValueError(
                f"reference_mix must be 1 with lora, got {self.reference_mix:g}: adapters cannot be averaged"
            )
        if self.minibatches > self.prompts_per_step:
            counts = f"minibatches {self.minibatches} are more than prompts_per_step {self.prompts_per_step}"
            raise ValueError(f"{counts}, and the samples of a prompt stay together; lower one or raise the other")
        if self.curriculum is not None and self.curriculum.pool < self.prompts_per_step:
            raise ValueError(
                f"curriculum.pool {self.curriculum.pool} is smaller than prompts_per_step {self.prompts_per_step}"
            )
        return self


class PPOStage(GRPOStage):
    """Proximal policy optimisation with a critic (arXiv 1707.06347): a `grpo` stage that starts from that preset."""

    kind: Literal["ppo"]  # type: ignore[assignment]
    algorithm: str = "ppo"

    @model_validator(mode="after")
    def _has_a_critic(self) -> Self:
        if self.baseline != "critic":
            raise ValueError(f"a ppo stage needs a critic, which algorithm {self.algorithm!r} has not; set kind: grpo")
        return self


class RejectStage(Stage, SamplingConfig):
    """Rejection sampling: draw samples, keep the good ones as a data set for `sft`."""

    kind: Literal["reject"]
    model: str
    prompts: Positive = 512
    samples: Positive = 8
    keep: Literal["correct", "best"] = "correct"
    """correct: every sample that is right (and, if `format` is among the rewards, well formed); best: those with the
    highest total reward, right or not."""
    per_prompt: Positive | None = None
    """Keep at most this many per prompt, the highest rewards first; by default 1 for `best` and all for `correct`."""
    deduplicate: bool = True
    """Drop samples whose text equals an earlier one of the same prompt."""
    task: TaskConfig | None = None
    rewards: Rewards | None = None


class EvaluateStage(Stage, SamplingConfig):
    """Greedy and sampled accuracy on held-out prompts."""

    kind: Literal["evaluate"]
    models: Annotated[Many[str], Field(min_length=1)]
    prompts: Positive = 500
    samples: Positive = 8
    """Samples per prompt beside the greedy one."""
    task: TaskConfig | None = None


AnyStage = Annotated[SFTStage | GRPOStage | PPOStage | RejectStage | EvaluateStage, Field(discriminator="kind")]
STAGE_KINDS = ("sft", "grpo", "ppo", "reject", "evaluate")


# -- the recipe ----------------------------------------------------------------------------------------------------


class Recipe(Strict):
    """A whole run: the model, the task, the rewards, and the stages in order."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Names the run directory, `runs/<name>`."""
    seed: int = 0
    model: str
    """A folder, a `.gguf` file, a hub id or `builtin:tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights. On a GPU float32 weights compute in bfloat16."""
    threads: Positive | None = None
    """CPU threads of torch; by default one per core. With a model of a few million parameters, several threads lose
    more than they gain as soon as other work takes a core."""
    system_prompt: str = "none"
    """`none`, `r1` or `r1-zh` (ask for `<think>` and `<answer>`), or your own text."""
    task: TaskConfig
    rewards: Rewards = {"correctness": 1.0, "format": 0.2, "reasoning": 0.2}
    """Weight of each part by name; a part of your own is `{weight: 0.1, function: "module:function"}`."""
    judge: str | None = None
    """`module:object` with `.score(prompt, response)` from 0 to 1, for answers without ground truth."""
    answer_style: Literal["auto", "boxed", "answer-tag", "hash", "answer-line", "choice", "last-line", "code"] = "auto"
    """Where the final answer stands in a response."""
    blocklist: Many[str] = ()
    """Words that the safety reward refuses, beside its own rules."""
    stages: Annotated[Many[AnyStage], Field(min_length=1)]

    @field_validator("judge")
    @classmethod
    def _resolves(cls, value: str | None) -> str | None:
        if value is not None:
            load_part(value)
        return value

    @model_validator(mode="after")
    def _check_references(self) -> Recipe:
        mistakes = [*_reward_mistakes(self), *_reference_mistakes(self.stages)]
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def task_of(self, stage: AnyStage) -> TaskConfig:
        return getattr(stage, "task", None) or self.task

    def rewards_of(self, stage: AnyStage) -> Rewards:
        return getattr(stage, "rewards", None) or self.rewards

    def composer(self, rewards: Rewards, verify: Verifier | None) -> RewardComposer:
        """The reward that these parts describe; `verify` is the task's own scorer, if it has one."""
        settings = {name: p if isinstance(p, PartConfig) else PartConfig(weight=p) for name, p in rewards.items()}
        return RewardComposer(
            {name: part.weight for name, part in settings.items()},
            parts={name: load_part(part.function) for name, part in settings.items() if part.function},
            judge=load_part(self.judge) if self.judge else None,
            verify=verify,
            answer_style=self.answer_style,
            blocklist=self.blocklist,
        )


def _reward_mistakes(recipe: Recipe) -> Iterator[str]:
    sets = [("rewards", recipe.rewards)]
    sets += [(f"stages.{s.name}.rewards", r) for s in recipe.stages if (r := getattr(s, "rewards", None)) is not None]
    for path, rewards in sets:
        for name, part in rewards.items():
            weight = part.weight if isinstance(part, PartConfig) else part
            if not 0 <= weight < float("inf"):
                yield (
                    f"{path}.{name}: weight must be >= 0 and finite, got {weight}; "
                    "set it to 0 to log the part without training on it"
                )
            if name not in BUILTIN_PARTS and not (isinstance(part, PartConfig) and part.function):
                hint = nearest(name, BUILTIN_PARTS)
                yield f"{path}.{name}: unknown reward{hint}; one of your own needs {{weight, function}}"
        has_truth = getattr(getattr(recipe.task, "columns", None), "answer", "") is not None
        if "correctness" in rewards and not has_truth and recipe.judge is None:
            yield f"{path}.correctness: the task maps no answer column; set task.columns.answer, or a judge"
        if not any((p.weight if isinstance(p, PartConfig) else p) > 0 for p in rewards.values()):
            yield f"{path}: at least one reward needs a weight above 0"
    for stage in recipe.stages:
        if isinstance(stage, GRPOStage) and stage.curriculum and "correctness" not in recipe.rewards_of(stage):
            yield f"stages.{stage.name}.curriculum: goes by correctness; add it to the rewards, a weight of 0 will do"


def parents_of(stage: AnyStage) -> list[tuple[str, str, str]]:
    """(key, name of the parent, "model" or "data") for every stage or model that `stage` builds on."""
    parents = [(f"models.{i}", m, "model") for i, m in enumerate(getattr(stage, "models", ()))]
    if isinstance(stage, SFTStage | GRPOStage | RejectStage):
        parents.append(("model", stage.model, "model"))
    if isinstance(stage, SFTStage) and isinstance(stage.data, StageData):
        parents.append(("data.stage", stage.data.stage, "data"))
    return parents


def _reference_mistakes(stages: Sequence[AnyStage]) -> Iterator[str]:
    names = [s.name for s in stages]
    for name in {n for n in names if names.count(n) > 1}:
        yield f"stages: two stages are called {name!r}; give each a name of its own"
    if BASE in names:
        yield f"stages: {BASE!r} is the name of the recipe's own model; call the stage something else"
    makes = {s.name: {"sft": "model", "grpo": "model", "ppo": "model", "reject": "data"}.get(s.kind) for s in stages}
    graph = {s.name: [p for _, p, _ in parents_of(s)] for s in stages}
    cycle = _find_cycle(graph)
    if cycle:
        yield f"stages: {' -> '.join(cycle)} is a cycle: none of them can run first"
    for place, stage in enumerate(stages):
        for key, parent, wanted in parents_of(stage):
            path = f"stages.{stage.name}.{key}"
            if parent == BASE and wanted == "model":
                continue
            if parent not in makes:
                known = [n for n in names if makes[n] == wanted] + [BASE] * (wanted == "model")
                hint = nearest(parent, known) or f"; known: {', '.join(known)}"
                yield f"{path}: no stage is called {parent!r}{hint}"
            elif makes[parent] != wanted:
                yield f"{path}: stage {parent!r} makes no {wanted}"
            elif not cycle and names.index(parent) >= place:
                yield f"{path}: stage {parent!r} comes later; move it before {stage.name!r}"


def _find_cycle(graph: Mapping[str, Sequence[str]]) -> list[str]:
    """The names along one cycle, the first repeated at the end; empty if there is none."""

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        return next((c for parent in graph.get(name, ()) if (c := search(parent, [*path, name]))), [])

    return next((c for name in graph if (c := search(name, []))), [])
