"""The stages of a recipe: each reads what earlier stages left in the run directory, and leaves its own there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from groupwise.config import BASE, AnyStage, LoRA, Recipe
from groupwise.model import Policy
from groupwise.progress import Progress
from groupwise.rewards import RewardComposer
from groupwise.run import StageDir
from groupwise.tasks import Task, make_task
from groupwise.types import stable_hash


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage is given: the recipe, its own folder, the folders of the stages before it, the progress line."""

    recipe: Recipe
    stage: AnyStage
    dir: StageDir
    earlier: Mapping[str, StageDir]
    progress: Progress

    @property
    def label(self) -> str:
        return f"{self.stage.name} ({self.stage.kind})"

    @property
    def seed(self) -> int:
        """The stage's own seed: two stages of a recipe never draw the same numbers."""
        return stable_hash(self.recipe.seed, self.stage.name) % 2**31

    def task(self) -> Task:
        return make_task(self.recipe.task_of(self.stage))

    def reward(self, task: Task) -> RewardComposer:
        return self.recipe.composer(self.recipe.rewards_of(self.stage), task.verify)

    def policy(self, name: str, lora: LoRA | None = None) -> Policy:
        """The model of an earlier stage, or the recipe's own (`base`)."""
        source = self.recipe.model if name == BASE else self.earlier[name].model
        return Policy.load(
            source,
            lora=lora,
            system_prompt=self.recipe.system_prompt,
            dtype=self.recipe.dtype,
            seed=self.recipe.seed,
        )
