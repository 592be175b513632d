"""Supervised fine-tuning: imitate the assistant's turn, its stop token included, of worked examples."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.algorithms.weights import token_weights
from groupwise.batch import Segment, pack
from groupwise.config import SFTStage, StageData, TraceData
from groupwise.model import Policy
from groupwise.optim import Optimizer
from groupwise.run import read_jsonl
from groupwise.stages import StageContext
from groupwise.stages.training import train
from groupwise.types import Example, stable_hash


def run(ctx: StageContext) -> dict[str, Any]:
    """Train `stage.model` on `stage.data`; writes `model/`.

    Raises:
        ValueError: the data holds no example that fits the model.
    """
    cfg = ctx.stage
    assert isinstance(cfg, SFTStage)
    policy = ctx.policy(cfg.model, cfg.lora)
    examples = _examples(ctx, cfg)
    segments = [s for e in examples if _fits(s := _segment(policy, e), policy)]
    if not segments:
        raise ValueError(f"stages.{cfg.name}.data: none of its {len(examples)} examples fits the model's positions")
    if dropped := len(examples) - len(segments):
        ctx.progress.note(f"{cfg.name}: {dropped} of {len(examples)} examples are longer than the model and left out")
    per_epoch = -(-len(segments) // cfg.batch_size)
    total = per_epoch * cfg.epochs
    state = _State(policy, Optimizer(policy.named_parameters, cfg, total))

    def take_step(step: int) -> dict[str, float]:
        epoch, place = divmod(step, per_epoch)
        order = list(range(len(segments)))
        random.Random(stable_hash(ctx.seed, "epoch", epoch)).shuffle(order)
        rows = order[place * cfg.batch_size : (place + 1) * cfg.batch_size]
        return sft_step(policy, state.optimizer, [segments[i] for i in rows], cfg.max_batch_tokens)

    last = train(ctx, state, total, take_step)
    with ctx.dir.new_folder("model") as folder:
        policy.save(folder)
    return {"steps": total, "examples": len(segments), "loss/sft": last["loss/sft"]}


def sft_step(policy: Policy, optimizer: Optimizer, segments: list[Segment], max_batch_tokens: int) -> dict[str, float]:
    """One optimiser step on the mean negative log-likelihood per token of the segments, packed."""
    start = time.perf_counter()
    weights = token_weights([s.trained_length for s in segments], "token")
    for segment, weight in zip(segments, weights, strict=True):
        segment.weight = weight
    total_loss = 0.0
    for batch in pack(segments, max_batch_tokens, policy.device):
        logp_T, _ = policy.token_logprobs(batch)
        loss = -(batch.per_token(s.weight for s in batch.segments) * logp_T).sum()
        loss.backward()
        total_loss += loss.item()
    metrics = {"loss/sft": total_loss, **optimizer.apply()}
    policy.version += 1
    trained = sum(s.trained_length for s in segments)
    seconds = time.perf_counter() - start
    return {**metrics, "tokens/trained": float(trained), "tokens/per_second": trained / seconds, "time/step": seconds}


@dataclass(slots=True)
class _State:
    policy: Policy
    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.policy.trainable_state(),
            "version": self.policy.version,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_trainable_state(state["weights"])
        self.policy.version = state["version"]
        self.optimizer.load_state_dict(state["optimizer"])


def _examples(ctx: StageContext, cfg: SFTStage) -> list[Example]:
    match cfg.data:
        case TraceData(count=count):
            return ctx.task().traces(count, ctx.seed)
        case StageData(stage=stage):
            return load_examples(ctx.earlier[stage].path / "data.jsonl")
        case _:
            return load_examples(Path(cfg.data.path))


def load_examples(path: Path) -> list[Example]:
    """Conversations from a JSONL file; rows are `{"messages": [...], "source": {...}}`, `source` may be missing."""
    return [Example(tuple(row["messages"]), row.get("source", {})) for row in read_jsonl(path)]


def _segment(policy: Policy, example: Example) -> Segment:
    prompt_ids, token_ids = policy.chat.example_ids(example.messages)
    return Segment(prompt_ids=prompt_ids, token_ids=token_ids)


def _fits(segment: Segment, policy: Policy) -> bool:
    return len(segment.prompt_ids) + len(segment.token_ids) <= policy.max_positions
