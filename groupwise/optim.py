"""The optimiser step that every training stage takes: AdamW, a learning-rate schedule, gradient clipping."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from groupwise.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int | None) -> float:
    """The rate of optimiser step `step` (from 0) of `total_steps`.

    Raises:
        ValueError: the schedule needs `total_steps`.

    >>> learning_rate(OptimConfig(lr=1.0, warmup_steps=10), 0, None)
    0.1
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(f"lr_schedule {config.lr_schedule!r} needs the total number of steps")
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    fall = 1 - done if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def block_of(parameter: str) -> str:
    """The block of a model that a parameter belongs to: its layer, or the module that holds it.

    >>> block_of("model.layers.3.mlp.up_proj.weight"), block_of("model.embed_tokens.weight")
    ('layers.3', 'embed_tokens')
    """
    numbered = re.search(r"([^.]+\.\d+)\.", parameter)
    return numbered[1] if numbered else parameter.split(".")[-2] if "." in parameter else parameter


class Optimizer:
    """AdamW over the trainable parameters; `apply` takes one step with the gradients that have been accumulated.

    Raises:
        ValueError: there is nothing to train.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimConfig, total_steps: int | None = None
    ) -> None:
        if not parameters:
            raise ValueError("no parameter of the model requires a gradient; unfreeze it, or the adapter, first")
        self.parameters, self.config, self.total_steps = list(parameters.values()), config, total_steps
        self.blocks: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in parameters.items():
            self.blocks.setdefault(block_of(name), []).append(parameter)
        self.adamw = torch.optim.AdamW(self.parameters, lr=0.0, betas=config.betas, weight_decay=config.weight_decay)
        self.steps = 0

    def apply(self) -> dict[str, float]:
        """Clip, step, clear the gradients; returns `update/lr` and the norms of the gradient before it was clipped.

        `update/grad_norm` is that of the whole gradient, `grad_norm/<block>` of each block of the model.

        Raises:
            FloatingPointError: a gradient is NaN or infinite. The weights and the optimiser are unchanged.
        """
        by_block = [
            torch.nn.utils.get_total_norm([p.grad for p in block if p.grad is not None])
            for block in self.blocks.values()
        ]
        total = torch.linalg.vector_norm(torch.stack(by_block))
        norm, *norms = torch.stack([total, *by_block]).tolist()
        if not math.isfinite(norm):
            self.forget_gradients()
            raise FloatingPointError(f"the gradient norm is {norm} at optimiser step {self.steps}; weights unchanged")
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, total)
        rate = learning_rate(self.config, self.steps, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.forget_gradients()
        self.steps += 1
        blocks = {f"grad_norm/{block}": n for block, n in zip(self.blocks, norms, strict=True)}
        return {"update/grad_norm": norm, "update/lr": rate, **blocks}

    def forget_gradients(self) -> None:
        """Drop what has been accumulated since the last step."""
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]
