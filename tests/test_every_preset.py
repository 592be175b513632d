"""The trainer feeds every preset what it needs: a step's losses, computed again from plain float64 forwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms import credit
from groupwise.algorithms.losses import policy_loss, value_loss
from groupwise.algorithms.presets import PRESETS
from groupwise.algorithms.selection import select_tokens
from groupwise.algorithms.weights import token_weights
from groupwise.config import CriticConfig, GRPOConfig
from groupwise.model import Policy
from groupwise.rewards import RewardComposer
from groupwise.trainer import GRPOTrainer
from groupwise.types import Group, Rollout, stable_hash

PROMPTS = ["2+2", "13*7", "name a colour"]
REWARD = RewardComposer(
    {"letters": 1.0, "length": 0.5},
    parts={
        "letters": lambda prompt, response: sum(map(ord, response)) % 11 / 10,
        "length": lambda prompt, response: len(response) % 3,
    },
)

CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in PRESETS},
    "top entropy": {"selection": "top_entropy", "kl_coef": 0.0},
    "grpo with KL in the reward": {"kl_in": "reward", "kl": "k3", "kl_coef": 0.3},
    "entropy bonus and masks": {"entropy_coef": 0.01, "mask_truncated": True, "off_policy_limit": 0.001},
    "truncated sampler mismatch": {"sampler_correction": "sequence_truncate", "sampler_cap": 1.0},
    "ppo as in 1506.02438": {"algorithm": "ppo", "gamma": 0.9, "lam": 0.8, "kl_coef": 0.2},
}


@pytest.fixture
def make_trainer(llama, tokenizer) -> Callable[..., GRPOTrainer]:
    def make(**config: Any) -> GRPOTrainer:
        settings = {"group_size": 4, "max_tokens": 6, "lr": 3e-3, "max_batch_tokens": 60, "temperature": 0.8}
        made = GRPOTrainer(
            llama(spread=0.1),
            ref_model=Policy(llama(seed=5, spread=0.1), tokenizer),
            reward_model=REWARD,
            tokenizer=tokenizer,
            config=GRPOConfig(**{**settings, **config}),
        )
        if made.critic is not None:  # whose head begins at 0
            with torch.no_grad():
                made.critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
        return made

    return make


class Plain:
    """Log-probs, entropies and hidden states of samples by one unpadded float64 forward each."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self.model.double()
        self.temperature = temperature

    def __call__(self, group: Group, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs, entropies, hidden states from the one that predicts the first token to the last token's)."""
        ids = torch.tensor([group.prompt_ids + rollout.completion.token_ids])
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        first = len(group.prompt_ids) - 1
        logps = torch.log_softmax(out.logits[0, first:-1] / self.temperature, dim=1)
        chosen = logps.gather(1, torch.tensor(rollout.completion.token_ids)[:, None]).squeeze(1)
        return chosen, -(logps.exp() * logps).sum(1), out.hidden_states[-1][0, first:]


def plain_losses(
    groups: Sequence[Group], cfg: GRPOConfig, now: Plain, old: Plain, ref: Plain, values: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """The terms of the loss of one optimiser step on all samples."""
    for group in groups:
        for r in group.rollouts:
            logps, entropies, hidden = old(group, r)
            r.old_logps, r.entropies = tuple(logps.tolist()), tuple(entropies.tolist())
            r.ref_logps = tuple(ref(group, r)[0].tolist())
            r.values = (*values(hidden).tolist()[:-1], 0.0)
    given = credit.assign(groups, cfg, max_tokens=cfg.max_tokens, part_weights={"letters": 1.0, "length": 0.5})
    rows = [
        (g, r, c)
        for g, credits_G in zip(groups, given, strict=True)
        for r, c in zip(g.rollouts, credits_G, strict=True)
    ]
    rows = [(g, r, c) for g, r, c in rows if c is not None and c.advantages]
    lengths = [len(c.advantages) for _, _, c in rows]

    def flat(of: Callable[[Group, Rollout, Any], Any]) -> Tensor:
        return torch.cat([torch.as_tensor(of(*row), dtype=torch.float64) for row in rows])

    weight_N = torch.tensor(token_weights(lengths, cfg.weighting, cfg.max_tokens), dtype=torch.float64)
    segment_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    old_logp_T, entropy_T = flat(lambda g, r, c: r.old_logps), flat(lambda g, r, c: r.entropies)
    advantage_T = flat(lambda g, r, c: c.advantages)
    seed = stable_hash(cfg.seed, 0, "selection")
    selected_T = select_tokens(cfg, logp_T=old_logp_T, advantage_T=advantage_T, entropy_T=entropy_T, seed=seed)
    _, metrics = policy_loss(
        flat(lambda g, r, c: now(g, r)[0]),
        old_logp_T,
        advantage_T,
        weight_N[segment_T],
        cfg=cfg,
        segment_T=segment_T,
        ref_logp_T=flat(lambda g, r, c: r.ref_logps) if cfg.kl_coef else None,
        sampler_logp_T=flat(lambda g, r, c: r.completion.logps),
        entropy_T=flat(lambda g, r, c: now(g, r)[1]),
        selected_T=selected_T,
    )
    found = {name: value for name, value in metrics.items() if name.startswith("loss/")}
    if cfg.baseline == "critic":
        loss, _ = value_loss(
            flat(lambda g, r, c: values(old(g, r)[2])[:-1]),
            flat(lambda g, r, c: r.values[:-1]),
            flat(lambda g, r, c: c.returns),
            weight_N[segment_T],
        )
        found["loss/value"] = loss.item()
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_are_those_of_a_plain_computation(case: str, make_trainer) -> None:
    """One trainer takes one epoch, another two, on the same groups: the first ends where the second epoch begins."""
    critic = {"critic": CriticConfig(lr=0.0)} if CASES[case].get("algorithm") == "ppo" else {}
    parts = {**CASES[case], **critic}
    once, twice = make_trainer(**parts), make_trainer(ppo_epochs=2, **parts)
    old, ref = Plain(once.policy.base, 0.8), Plain(make_trainer(algorithm="grpo").reference.model.base, 0.8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no refill is given")
        groups, _ = once.collect(PROMPTS)
    assert all(g.has_signal for g in groups)
    again = copy.deepcopy(groups)
    one, two = once.update(groups), twice.update(again)
    now = Plain(once.policy.base, 0.8)
    head = torch.linspace(-0.3, 0.3, 32).double()
    values = lambda hidden: hidden @ head  # noqa: E731
    first = plain_losses(groups, once.config, old, old, ref, values)
    second = plain_losses(groups, once.config, now, old, ref, values)
    assert first.keys() == {name for name in one if name.startswith("loss/")}
    for name, value in first.items():
        assert one[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name
        assert two[name] == pytest.approx((value + second[name]) / 2, rel=2e-4, abs=2e-6), name
    assert any(abs(second[name] - first[name]) > 1e-5 for name in first)
    assert one["update/steps"] == 1
    assert two["update/steps"] == 2
