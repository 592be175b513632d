"""What a training step says about itself, as numbers named `phase/quantity`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import torch

from groupwise.types import Group

Metrics = dict[str, float]


def group_metrics(groups: Sequence[Group], has_signal: Sequence[bool]) -> Metrics:
    """What a step's groups say before any update. A part that nobody could be given has no entry.

    Args:
        has_signal: for each group, whether its samples say something about each other.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {"group/count": 0.0}
    metrics: Metrics = {}
    values: dict[str, list[float | None]] = {"reward/total": [r.reward.total for r in rollouts]}
    for name in dict.fromkeys(n for r in rollouts for n in r.reward.parts):
        values[f"reward/{name}"] = [r.reward.parts.get(name) for r in rollouts]
    for name, column in values.items():
        if scored := [v for v in column if v is not None]:
            metrics[name] = sum(scored) / len(scored)
    if advantages := [r.advantage for r in rollouts if r.advantage is not None]:
        mean = math.fsum(advantages) / len(advantages)
        metrics["advantage/std"] = math.sqrt(math.fsum((a - mean) ** 2 for a in advantages) / len(advantages))
        metrics |= {"advantage/max": max(advantages), "advantage/min": min(advantages)}
    lengths = [r.completion.sampled_length for r in rollouts]
    return metrics | {
        "reward/failed": sum(r.reward.total is None for r in rollouts) / len(rollouts),
        "group/count": float(len(groups)),
        "group/no_signal": has_signal.count(False) / len(groups),
        "rollout/length": sum(lengths) / len(lengths),
        "rollout/truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "tokens/sampled": float(sum(lengths)),
        "tokens/wasted": float(sum(n for g, n in zip(has_signal, _tokens(groups), strict=True) if not g)),
    }


def _tokens(groups: Sequence[Group]) -> list[int]:
    return [sum(r.completion.sampled_length for r in g.rollouts) for g in groups]


def over_batches(parts: Sequence[tuple[int, Mapping[str, float]]]) -> Metrics:
    """Metrics of one optimiser step from (trained tokens, metrics) of its micro-batches.

    Losses add up, extremes are extremes, the rest are means over tokens.
    """
    tokens = sum(n for n, _ in parts)
    return {
        name: sum(m[name] for _, m in parts)
        if name.startswith("loss/")
        else _extreme(name, [m[name] for _, m in parts])
        if name.endswith(("_max", "_min"))
        else sum(n * m[name] for n, m in parts) / tokens
        for name in parts[0][1]
    }


def over_steps(steps: Sequence[Mapping[str, float]]) -> Metrics:
    """Metrics of a whole step from those of its optimiser steps: extremes are extremes, the rest are means.

    Adds what is a ratio of means: `policy/ess`, the share of tokens that an unweighted sample as informative as the
    weighted one would have, (mean ratio)^2 / mean ratio^2; and `value/explained`, 1 - error / variance of the returns.
    """
    if not steps:
        return {}
    metrics = {
        name: _extreme(name, values) if name.endswith(("_max", "_min")) else sum(values) / len(values)
        for name in dict.fromkeys(n for s in steps for n in s)
        for values in [[s[name] for s in steps if name in s]]
    }
    if square := metrics.pop("policy/ratio_square", None):
        metrics["policy/ess"] = metrics["policy/ratio"] ** 2 / square
    if (square := metrics.pop("value/return_square", None)) is not None:
        variance = square - metrics["value/return"] ** 2
        metrics["value/explained"] = 1 - metrics["value/error"] / variance if variance > 1e-12 else 0.0
    return metrics


def peak_memory(device: torch.device) -> Metrics:
    """`memory/peak_gb`: the most memory that this process has held so far; on the GPU if the model is there."""
    if device.type == "cuda":
        return {"memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    if sys.platform == "win32":  # which does not tell
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def _extreme(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else min(values)
