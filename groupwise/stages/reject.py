"""Rejection sampling: draw many samples, keep the good ones as a data set for supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from groupwise.config import RejectStage
from groupwise.engines.local import LocalEngine
from groupwise.rollout import collect
from groupwise.run import read_jsonl, write_atomically
from groupwise.stages import StageContext
from groupwise.types import Group, Rollout

PROMPTS_AT_ONCE = 32


def run(ctx: StageContext) -> dict[str, Any]:
    """Sample `stage.prompts` training prompts with `stage.model`, keep by rule; writes `data.jsonl`.

    Each row is `{"messages": [...], "source": {...}}`: the conversation, and where it came from down to the sample.
    Prompts are worked off in chunks, each written as it is done; a run that was killed skips the chunks it has.

    Raises:
        ValueError: not a single sample was kept.
    """
    cfg = ctx.stage
    assert isinstance(cfg, RejectStage)
    task = ctx.task()
    reward = ctx.reward(task)
    policy = ctx.policy(cfg.model)
    engine = LocalEngine(policy)
    chunks = -(-cfg.prompts // PROMPTS_AT_ONCE)
    files = [ctx.dir.path / "chunks" / f"chunk-{i:05d}.jsonl" for i in range(chunks)]
    (ctx.dir.path / "chunks").mkdir(exist_ok=True)
    done = next((i for i, f in enumerate(files) if not f.exists()), chunks)
    kept = sum(len(read_jsonl(f)) for f in files[:done])
    ctx.progress.start(ctx.label, chunks, done)
    for index in range(done, chunks):
        count = min(PROMPTS_AT_ONCE, cfg.prompts - index * PROMPTS_AT_ONCE)
        found = collect(
            task.sample(count, seed=(ctx.seed, index)),
            chat=policy.chat,
            engine=engine,
            reward=reward,
            sampling=cfg.sampling,
            group_size=cfg.samples,
            seed=(ctx.seed, index),
            max_prompt_tokens=policy.max_positions - cfg.max_tokens,
        )
        rows = [
            _row(ctx, cfg, group, sample, index)
            for group in found.groups
            for sample in keep(group, cfg.keep, cfg.per_prompt, cfg.deduplicate)
        ]
        write_atomically(files[index], "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
        kept += len(rows)
        ctx.progress.step(index + 1, {"data/kept": float(kept)})
    if not kept:
        raise ValueError(
            f"stages.{cfg.name}: none of {cfg.prompts} x {cfg.samples} samples was kept; train {cfg.model!r} longer, "
            "sample more, or choose keep: best"
        )
    write_atomically(ctx.dir.path / "data.jsonl", "".join(f.read_text(encoding="utf-8") for f in files))
    return {"steps": chunks, "sampled": cfg.prompts * cfg.samples, "kept": kept}


def keep(group: Group, rule: str, per_prompt: int | None, deduplicate: bool) -> list[int]:
    """The sample numbers of a group that are kept, in order.

    `correct` keeps samples whose correctness is 1 and whose format, where it is scored, is 1; `best` keeps those with
    the highest total (at most `per_prompt`, by default 1). With `per_prompt`, higher totals go first, then earlier
    samples. What could not be scored is never kept, nor what was cut off: that would teach to stop in the middle.
    """
    whole = [r.reward.total is not None and r.completion.finish_reason == "stop" for r in group.rollouts]
    numbers = [i for i, kept in enumerate(whole) if kept]
    if rule == "correct":
        numbers = [i for i in numbers if _is_right(group.rollouts[i])]
    if deduplicate:
        first = {group.rollouts[i].text: i for i in reversed(numbers)}
        numbers = [i for i in numbers if first[group.rollouts[i].text] == i]
    limit = 1 if rule == "best" and per_prompt is None else per_prompt
    if limit is not None:
        numbers = sorted(sorted(numbers, key=lambda i: -(group.rollouts[i].reward.total or 0.0))[:limit])
    return numbers


def _is_right(rollout: Rollout) -> bool:
    parts = rollout.reward.parts
    return parts.get("correctness") == 1.0 and parts.get("format", 1.0) == 1.0


def _row(ctx: StageContext, cfg: RejectStage, group: Group, sample: int, chunk: int) -> dict[str, Any]:
    rollout = group.rollouts[sample]
    messages: Sequence[Any] = [*group.prompt.messages, {"role": "assistant", "content": rollout.text}]
    source = {
        "stage": cfg.name,
        "model": cfg.model,
        "prompt": group.prompt.id,
        "answer": group.prompt.answer,
        "chunk": chunk,
        "sample": sample,
        "seed": ctx.seed,
        "reward": rollout.reward.total,
        "parts": dict(rollout.reward.parts),
    }
    return {"messages": [dict(m) for m in messages], "source": source}
