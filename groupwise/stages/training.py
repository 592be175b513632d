"""The loop that training stages share: take steps, log them, checkpoint, take up where a killed run stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from groupwise.config import TrainingStage
from groupwise.stages import StageContext

CHECKPOINT_SHARE = 0.03
"""`checkpoint_every: auto` saves as often as keeps saving below this share of the time."""


class Resumable(Protocol):
    """What a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train(
    ctx: StageContext, state: Resumable, total: int, take_step: Callable[[int], dict[str, float]]
) -> dict[str, float]:
    """Take the steps that are not taken yet; returns the metrics of the last. `take_step(step)` counts from 0.

    A checkpoint holds the metrics of its step, so that a kill between checkpoint and log loses neither.
    """
    assert isinstance(ctx.stage, TrainingStage)
    done, last = _take_up(ctx, state)
    ctx.progress.start(ctx.label, total, done)
    saved_at, save_seconds = time.monotonic(), 0.0
    for step in range(done, total):
        last = take_step(step)
        now = time.monotonic()
        every = ctx.stage.checkpoint_every
        due = now - saved_at >= save_seconds / CHECKPOINT_SHARE if every == "auto" else (step + 1) % every == 0
        if due or step + 1 == total:
            with ctx.dir.new_checkpoint(step + 1) as folder:
                torch.save(state.state_dict(), folder / "state.pt")
                (folder / "metrics.json").write_text(json.dumps(last))
            saved_at = time.monotonic()
            save_seconds = saved_at - now
        ctx.dir.log(step, last)
        ctx.progress.step(step + 1, last)
    return last


def _take_up(ctx: StageContext, state: Resumable) -> tuple[int, dict[str, float]]:
    """(steps taken, metrics of the last one) of the newest checkpoint, loaded into `state`."""
    found = ctx.dir.latest_checkpoint()
    if found is None:
        ctx.dir.forget_metrics_from(0)
        return 0, {}
    step, folder = found
    try:
        state.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        metrics: dict[str, float] = json.loads((folder / "metrics.json").read_text())
    except (OSError, EOFError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ValueError(f"checkpoint {folder} cannot be read ({error}); delete it to go on without it") from error
    except KeyError as error:
        raise ValueError(f"checkpoint {folder} holds no {error}: another version wrote it; delete it") from error
    ctx.dir.forget_metrics_from(step)
    if not any(m["step"] == step - 1 for m in ctx.dir.metrics()):
        ctx.dir.log(step - 1, metrics)
    return step, metrics
