"""The critic: its values against plain forward passes, its gradient by hand, and what it must leave alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.batch import Batch, Segment
from groupwise.config import CriticConfig, GRPOConfig, LoRA, OptimConfig
from groupwise.critic import Critic
from groupwise.engines.scripted import ScriptedEngine
from groupwise.model import Policy
from groupwise.trainer import GRPOTrainer

SEGMENTS = [
    Segment(prompt_ids=(7, 11, 5), token_ids=(3, 13, 2, 17)),
    Segment(prompt_ids=(7, 11, 5), token_ids=(19, 23, 6), trained=(True, False, True)),
    Segment(prompt_ids=(29, 31), token_ids=(37,)),
]
TRAINED = 7
ADAPTER = LoRA(rank=4, alpha=8)
EVERY_KIND = ["separate", "separate, padded", "separate, adapter", "shared", "shared, adapter"]


@pytest.fixture
def make_critic(llama, tokenizer, padded_policy) -> Callable[..., tuple[Policy, Critic]]:
    """A policy and its critic, of one of `EVERY_KIND`; equal arguments give equal ones."""

    def make(kind: str = "separate", model: dict[str, Any] | None = None, **config: Any) -> tuple[Policy, Critic]:
        torch.manual_seed(0)  # of the adapter's start
        base = llama(spread=0.1, **model or {})
        if "padded" in kind:
            policy = padded_policy(base, tokenizer)
        else:
            policy = Policy(base, tokenizer, lora=ADAPTER if "adapter" in kind else None)
        settings = CriticConfig(**{"model": kind.split(",")[0]} | config)
        return policy, Critic(policy, settings, OptimConfig(lr=1e-3, max_grad_norm=0.0))

    return make


def set_head(critic: Critic) -> None:
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(1)))
        critic.head.bias.fill_(0.5)


def nudge(model: PreTrainedModel) -> None:
    """Move every weight that is trained a little."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def plain_hidden(model: PreTrainedModel, segments: Sequence[Segment]) -> Tensor:
    """Last hidden states before the trained tokens, by one plain unpadded forward per segment; differentiable."""
    parts = []
    for s in segments:
        ids = torch.tensor([s.prompt_ids + s.token_ids])
        hidden = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        before = hidden[len(s.prompt_ids) - 1 : -1]
        parts.append(before if s.trained is None else before[torch.tensor(s.trained)])
    return torch.cat(parts)


def known(old: Sequence[float], returns: Sequence[float], weight: float = 0.25) -> Batch:
    """The segments with the values and returns of their trained tokens."""
    bounds = [0, 4, 6, 7]
    return Batch.of(
        [
            replace(s, weight=weight, values=tuple(old[a:b]), returns=tuple(returns[a:b]))
            for s, a, b in zip(SEGMENTS, bounds[:-1], bounds[1:], strict=True)
        ]
    )


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def train(critic: Critic, steps: int = 1) -> list[float]:
    """Optimiser steps of a separate critic towards returns of 1; the loss of each."""
    assert critic.optimizer is not None
    batch, losses = known([0.0] * TRAINED, [1.0] * TRAINED), []
    for _ in range(steps):
        loss, metrics = critic.loss(critic.values(batch), batch, batch.per_token(s.weight for s in batch.segments))
        loss.backward()
        critic.optimizer.apply()
        losses.append(metrics["loss/value"])
    return losses


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_values_begin_at_zero(kind: str, make_critic) -> None:
    _, critic = make_critic(kind)
    assert critic.values(Batch.of(SEGMENTS)).tolist() == [0.0] * TRAINED


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_values_are_the_head_on_the_last_hidden_states(kind: str, make_critic, plain_copy) -> None:
    policy, critic = make_critic(kind)
    set_head(critic)
    nudge(critic.body.model)
    with torch.no_grad():
        hidden_TD = plain_hidden(plain_copy(critic.body.model, double=True), SEGMENTS)
        expected = hidden_TD @ critic.head.weight[0].double() + 0.5
        found = critic.values(Batch.of(SEGMENTS))
        of_policy = plain_hidden(plain_copy(policy.model, double=True), SEGMENTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5
    shared = kind.startswith("shared")
    assert torch.equal(hidden_TD, of_policy) == shared, "a separate critic has moved away from the policy"


def test_the_last_hidden_states_are_those_that_the_model_s_head_reads(make_critic, plain_copy) -> None:
    """After the final norm: the language model's own head on them gives its logits."""
    policy, _ = make_critic()
    plain = plain_copy(policy.base)
    ids = torch.tensor([SEGMENTS[0].prompt_ids + SEGMENTS[0].token_ids])
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, 2:-1]
        found = policy.trained_hidden(Batch.of(SEGMENTS[:1]))
        torch.testing.assert_close(plain.lm_head(found), logits, rtol=1e-4, atol=1e-4)


def test_a_separate_critic_begins_as_the_policy(make_critic) -> None:
    policy, critic = make_critic("separate")
    assert equal(weights(critic.body.model), weights(policy.model))
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in critic.body.model.parameters())


# -- the loss --------------------------------------------------------------------------------------------------------

OLD = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
RETURNS = [1.0, 0.0, -1.0, 2.0, 0.5, 0.25, -0.5]


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_the_loss_is_the_larger_squared_error(clip_range: float | None, make_critic) -> None:
    _, critic = make_critic(clip_range=clip_range)
    value_T = torch.tensor([0.1, 0.5, -1.0, 0.9, 0.4, 0.6, 0.5], dtype=torch.float64)
    batch = known(OLD, RETURNS)
    loss, metrics = critic.loss(value_T, batch, batch.per_token(s.weight for s in batch.segments))
    # Within 0.2 of the old values: 0.1, 0.3, 0, 0.5, 0.4, 0.6, 0.5.
    plain = [0.81, 0.25, 0.0, 1.21, 0.01, 0.1225, 1.0]
    held = [0.81, 0.09, 1.0, 2.25, 0.01, 0.1225, 1.0]
    errors = plain if clip_range is None else [max(a, b) for a, b in zip(plain, held, strict=True)]
    assert loss.item() == pytest.approx(0.5 * 0.25 * sum(errors), rel=1e-6)
    assert metrics["loss/value"] == pytest.approx(loss.item())
    assert metrics["value/clip"] == (0.0 if clip_range is None else pytest.approx(2 / 7))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_gradient_of_the_loss_is_that_of_the_plain_squared_error(kind: str, make_critic, plain_copy) -> None:
    _, critic = make_critic(kind, clip_range=None)
    set_head(critic)
    batch = known(OLD, RETURNS)
    plain = plain_copy(critic.body.model, double=True)
    head = critic.head.weight[0].detach().double().requires_grad_()
    error_T = plain_hidden(plain, SEGMENTS) @ head + 0.5 - torch.tensor(RETURNS, dtype=torch.float64)
    (0.5 * 0.25 * error_T.square()).sum().backward()

    loss, _ = critic.loss(critic.values(batch), batch, batch.per_token(s.weight for s in batch.segments))
    loss.backward()
    assert head.grad is not None and critic.head.bias.grad is not None
    torch.testing.assert_close(critic.head.weight.grad.double()[0], head.grad, rtol=1e-3, atol=1e-4)
    assert critic.head.bias.grad.item() == pytest.approx(0.25 * error_T.sum().item(), rel=1e-4)
    compared = 0
    for (name, p), q in zip(critic.body.model.named_parameters(), plain.parameters(), strict=True):
        if p.grad is None:
            assert not p.requires_grad or "lm_head" in name
            continue
        assert (p.grad.double() - q.grad).abs().max() <= 1e-3 * q.grad.abs().max() + 1e-9, name
        compared += bool(q.grad.abs().max() > 1e-3)
    assert compared >= 10


def test_the_gradient_at_the_head_by_hand(make_critic) -> None:
    """With values of 0 it is minus the weighted sum of the returns, times the hidden states."""
    _, critic = make_critic(clip_range=None)
    batch = known([0.0] * TRAINED, RETURNS)
    hidden_TD = critic.body.trained_hidden(batch).detach()
    loss, _ = critic.loss(critic.values(batch), batch, batch.per_token(s.weight for s in batch.segments))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.25 * sum(r * r for r in RETURNS))
    expected = sum(-0.25 * r * h for r, h in zip(RETURNS, hidden_TD, strict=True))
    torch.testing.assert_close(critic.head.weight.grad[0], expected, rtol=1e-4, atol=1e-5)
    assert critic.head.bias.grad.item() == pytest.approx(-0.25 * sum(RETURNS))


def test_tokens_without_weight_are_not_trained(make_critic) -> None:
    _, critic = make_critic()
    batch = known(OLD, RETURNS)
    value_T = torch.tensor(OLD, requires_grad=True)
    weight_T = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0])
    loss, metrics = critic.loss(value_T, batch, weight_T)
    loss.backward()
    assert value_T.grad is not None
    assert value_T.grad.tolist() == pytest.approx([-0.5, 0.0, 0.0, 0.0, -0.05, 0.0, 0.0])
    assert metrics["value/return"] == pytest.approx(0.75)


# -- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["separate", "separate, padded", "separate, adapter"])
def test_training_a_separate_critic_leaves_the_policy_alone(kind: str, make_critic) -> None:
    policy, critic = make_critic(kind, lr=1e-2, clip_range=None)
    before, started = weights(policy.model), weights(critic.body.model)
    losses = train(critic, steps=5)
    assert losses[-1] < 0.5 * losses[0]
    assert equal(weights(policy.model), before)
    assert all(p.grad is None for p in policy.model.parameters())
    after = weights(critic.body.model)
    for name in critic.body.named_parameters:
        assert not torch.equal(after[name], started[name]), name
    assert torch.equal(after[(head := next(n for n in after if "lm_head" in n))], started[head])


def test_the_language_model_s_head_is_not_part_of_a_separate_critic(make_critic) -> None:
    policy, critic = make_critic("separate")
    expected = {n for n, _ in policy.model.named_parameters() if n != "lm_head.weight"}
    assert critic.named_parameters.keys() == expected | {"value_head.weight", "value_head.bias"}
    assert not critic.body.base.lm_head.weight.requires_grad
    assert policy.base.lm_head.weight.requires_grad


def test_a_head_that_is_tied_to_the_embeddings_stays_trained_with_them(make_critic) -> None:
    policy, critic = make_critic("separate", model={"tie_word_embeddings": True}, lr=1e-2, clip_range=None)
    assert "model.embed_tokens.weight" in critic.named_parameters
    before = weights(policy.model)
    train(critic, steps=2)
    assert equal(weights(policy.model), before)
    assert not torch.equal(critic.body.base.model.embed_tokens.weight, policy.base.model.embed_tokens.weight)


def test_of_a_separate_critic_with_an_adapter_only_that_is_trained(make_critic) -> None:
    policy, critic = make_critic("separate, adapter")
    assert all(".lora_" in name or name.startswith("value_head.") for name in critic.named_parameters)
    assert len(critic.named_parameters) == len(policy.named_parameters) + 2


@pytest.mark.parametrize("kind", ["shared", "shared, adapter"])
def test_a_shared_critic_is_the_policy_with_a_head(kind: str, make_critic) -> None:
    policy, critic = make_critic(kind)
    assert critic.body is policy
    assert critic.named_parameters.keys() == {"value_head.weight", "value_head.bias"}
    assert critic.optimizer is None


def test_a_shared_head_needs_packed_attention(llama, tokenizer, padded_policy) -> None:
    policy = padded_policy(llama(), tokenizer)
    with pytest.raises(ValueError, match=r"critic\.model 'shared' needs packed attention.*set separate"):
        Critic(policy, CriticConfig(model="shared"), OptimConfig())


def test_a_separate_critic_has_a_learning_rate_of_its_own(make_critic) -> None:
    _, critic = make_critic("separate", lr=0.02)
    assert critic.optimizer is not None
    batch = known([0.0] * TRAINED, [1.0] * TRAINED)
    loss, _ = critic.loss(critic.values(batch), batch, batch.per_token(s.weight for s in batch.segments))
    loss.backward()
    assert critic.optimizer.apply()["update/lr"] == 0.02
    assert critic.head.bias.item() == pytest.approx(0.02, rel=1e-3)  # the first step of Adam is the rate itself


# -- memory and state ------------------------------------------------------------------------------------------------

# 265 tokens of width 32: embeddings 265 * 32 = 8480, and as much for the language model's own head.
# A layer: queries and output 32 * 32 each, keys and values 32 * 16 each, three of 32 * 64 in the MLP, two norms of 32.
LAYER = 2 * 1024 + 2 * 512 + 3 * 2048 + 2 * 32
BODY = 8480 + 2 * LAYER + 32
# Rank 4: 4 (in + out) for each of these seven.
ADAPTERS = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))


@pytest.mark.parametrize(
    ("kind", "model", "frozen", "trained"),
    [
        ("separate", {}, 8480, BODY + 33),
        ("separate", {"tie_word_embeddings": True}, 0, BODY + 33),
        ("separate, adapter", {}, BODY + 8480, ADAPTERS + 33),
        ("shared", {}, 0, 33),
        ("shared, adapter", {}, 0, 33),
    ],
)
def test_memory_by_hand(kind: str, model: dict[str, Any], frozen: int, trained: int, make_critic) -> None:
    """Four bytes for each frozen weight; for each trained one four more for the gradient and for both moments."""
    _, critic = make_critic(kind, model=model)
    assert critic.gigabytes == pytest.approx((4 * frozen + 16 * trained) / 1e9, rel=1e-12)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_state_survives_a_checkpoint(kind: str, make_critic) -> None:
    _, critic = make_critic(kind)
    set_head(critic)
    if critic.optimizer is not None:
        train(critic, steps=2)
    buffer = io.BytesIO()
    torch.save(critic.state_dict(), buffer)
    _, resumed = make_critic(kind)
    batch = Batch.of(SEGMENTS)
    assert not torch.equal(resumed.values(batch), critic.values(batch))
    resumed.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert torch.equal(resumed.values(batch), critic.values(batch))
    if critic.optimizer is not None:
        assert train(resumed, steps=2) == train(critic, steps=2)
        assert torch.equal(resumed.values(batch), critic.values(batch))
        assert resumed.optimizer is not None and resumed.optimizer.steps == 4


# -- in a step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["separate", "shared"])
def test_a_step_values_every_token_and_nothing_follows_the_last(model: str, llama, tokenizer, plain_copy) -> None:
    """Whether a completion ended or was cut off: its reward judges it as it stands."""
    end = tokenizer.eos_token_id
    engine = ScriptedEngine(lambda request, n: [65, 66, end] if n else [65, 66, 67, 68], [end])
    config = GRPOConfig(
        algorithm="ppo", group_size=2, max_tokens=4, kl_coef=0.0, whiten="none", critic=CriticConfig(model=model)
    )
    trainer = GRPOTrainer(
        llama(spread=0.1), reward_model=lambda p, r: 1.0, tokenizer=tokenizer, config=config, engine=engine
    )
    assert trainer.critic is not None
    set_head(trainer.critic)
    [group], _ = trainer.collect(["2+2"])
    plain = plain_copy(trainer.critic.body.base, double=True)
    assert [r.completion.finish_reason for r in group.rollouts] == ["length", "stop"]
    for rollout in group.rollouts:
        segment = Segment(prompt_ids=group.prompt_ids, token_ids=rollout.completion.token_ids)
        with torch.no_grad():
            states = plain_hidden(plain, [segment]) @ trainer.critic.head.weight[0].double() + 0.5
        assert rollout.values == pytest.approx([*states.tolist(), 0.0], abs=1e-4)
        # gamma and lambda 1: the reward less the value of each token; their mean is the sample's.
        assert rollout.advantage == pytest.approx(1.0 - states.mean().item(), abs=1e-4)
