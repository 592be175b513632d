"""Groupwise trains language models to reason with GRPO.

The names below are the public API. They are imported on first use, so that `import groupwise` alone is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.algorithms.advantages import grpo_advantage, ppo_advantage
    from groupwise.config import GRPOConfig
    from groupwise.model import Policy
    from groupwise.rewards import RewardComposer
    from groupwise.trainer import GRPOTrainer
    from groupwise.types import Prompt

_HOMES = {
    "GRPOConfig": "groupwise.config",
    "GRPOTrainer": "groupwise.trainer",
    "Policy": "groupwise.model",
    "Prompt": "groupwise.types",
    "RewardComposer": "groupwise.rewards",
    "grpo_advantage": "groupwise.algorithms.advantages",
    "ppo_advantage": "groupwise.algorithms.advantages",
}

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "Policy",
    "Prompt",
    "RewardComposer",
    "grpo_advantage",
    "ppo_advantage",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
