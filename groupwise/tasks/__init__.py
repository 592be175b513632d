"""Where prompts come from. A new task is one file with a config and a maker, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from groupwise.schema import nearest
from groupwise.tasks.arithmetic import Arithmetic, ArithmeticConfig
from groupwise.tasks.base import Task, Verifier
from groupwise.tasks.countdown import Countdown, CountdownConfig
from groupwise.tasks.files import FilesConfig, files_task
from groupwise.tasks.gsm8k import GSM8K, GSM8KConfig
from groupwise.tasks.hub import Hub, HubConfig
from groupwise.tasks.reasoning_gym import ReasoningGym, ReasoningGymConfig

__all__ = ["TASKS", "Task", "TaskConfig", "Verifier", "make_task", "normalise"]

TASKS: dict[str, Callable[[Any], Task]] = {
    "arithmetic": Arithmetic,
    "countdown": Countdown,
    "files": files_task,
    "gsm8k": GSM8K,
    "hub": Hub,
    "reasoning_gym": ReasoningGym,
}


def make_task(config: TaskConfig) -> Task:
    """The task that a config describes.

    Raises:
        ValueError: its data cannot be read, or its library is not installed.
    """
    return TASKS[config.kind](config)


def normalise(spec: Any) -> Any:
    """Write `kind: "reasoning_gym:<name>"` out as kind and name; anything else is returned as it is.

    Raises:
        ValueError: the kind is unknown; names the nearest.

    >>> normalise({"kind": "reasoning_gym:chain_sum"})
    {'kind': 'reasoning_gym', 'name': 'chain_sum'}
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        return spec
    kind, colon, name = spec["kind"].partition(":")
    if kind not in TASKS:
        raise ValueError(f"unknown kind {kind!r}{nearest(kind, TASKS)}; known kinds: {', '.join(TASKS)}")
    return {**spec, "kind": kind, "name": name} if colon and kind == "reasoning_gym" else spec


TaskConfig = Annotated[
    Annotated[
        ArithmeticConfig | CountdownConfig | FilesConfig | GSM8KConfig | HubConfig | ReasoningGymConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(normalise),
]
"""What a recipe's `task` may be."""
