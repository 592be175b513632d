"""GRPOTrainer: its update against an independent float64 computation, and everything a step must and must not do."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groupwise.batch import Segment
from groupwise.config import GRPOConfig, LoRA
from groupwise.engines import Request
from groupwise.engines.local import LocalEngine
from groupwise.engines.scripted import ScriptedEngine
from groupwise.model import Policy
from groupwise.rewards import RewardComposer
from groupwise.trainer import GRPOTrainer, RewardOutageError
from groupwise.types import Group, Prompt, Reward, Sampling

PROMPTS = ["2+2", "13*7", "name a colour"]


def by_letters(prompt: Prompt, response: str) -> float:
    """A reward without meaning that differs between nearly all responses."""
    return sum(map(ord, response)) % 11 / 10


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in trainer.policy.trainable_state().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    assert before.keys() == after.keys()
    return any(not torch.equal(before[name], after[name]) for name in before)


def gradient(trainer: GRPOTrainer) -> list[Tensor]:
    """What the optimiser has seen: ten times its first moment, which after one step is the (clipped) gradient."""
    return [trainer.optimizer.adamw.state[p]["exp_avg"] * 10 for p in trainer.policy.named_parameters.values()]


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "memory/"))}


# -- one step, computed again ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plain_step(naive_logprobs) -> Callable[..., dict[str, float]]:
    """The parts of the GRPO loss of one optimiser step on all samples of `groups`, from float64 models."""

    def compute(
        groups: Sequence[Group], cfg: GRPOConfig, now: PreTrainedModel, old: PreTrainedModel, ref: PreTrainedModel
    ) -> dict[str, float]:
        samples = []
        for group in groups:
            rewards = np.array([r.reward.total for r in group.rollouts], dtype=np.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                samples.append((group.prompt_ids, rollout.completion.token_ids, float(advantage)))
        count, tokens = len(samples), sum(len(ids) for _, ids, _ in samples)
        parts = {"loss/policy": 0.0, "loss/kl": 0.0}
        for prompt_ids, token_ids, advantage in samples:
            segment = [Segment(prompt_ids=prompt_ids, token_ids=token_ids)]
            with torch.no_grad():
                rows = [naive_logprobs(m, segment, cfg.temperature).tolist() for m in (now, old, ref)]
            weight = 1 / tokens if cfg.weighting == "token" else 1 / (count * len(token_ids))
            for logp, old_logp, ref_logp in zip(*rows, strict=True):
                ratio = math.exp(logp - old_logp)
                clipped = min(max(ratio, 1 - cfg.clip_range), 1 + cfg.clip_range)
                parts["loss/policy"] -= weight * min(ratio * advantage, clipped * advantage)
                d = ref_logp - logp
                parts["loss/kl"] += cfg.kl_coef * weight * (math.exp(d) - d - 1)
        return parts

    return compute


@pytest.mark.parametrize("weighting", ["sequence", "token"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_loss_of_the_first_and_second_epoch(
    weighting, temperature, llama, tokenizer, plain_copy, plain_step
) -> None:
    """Two trainers take one and two epochs on the same groups: the first one's weights are where epoch two begins."""
    reference = llama(seed=5, spread=0.1)
    settings = {"weighting": weighting, "temperature": temperature, "kl_coef": 0.1, "lr": 3e-3, "clip_range": 0.02}
    settings |= {"group_size": 4, "max_tokens": 6, "max_batch_tokens": 40}
    one, two = (
        GRPOTrainer(
            llama(spread=0.1),
            ref_model=Policy(llama(seed=5, spread=0.1), tokenizer),
            reward_model=by_letters,
            tokenizer=tokenizer,
            config=GRPOConfig(ppo_epochs=epochs, **settings),
        )
        for epochs in (1, 2)
    )
    start, ref = plain_copy(one.policy.base, double=True), plain_copy(reference, double=True)
    groups, _ = one.collect(PROMPTS)
    first = one.update(groups)
    both = two.update(groups)
    after = plain_copy(one.policy.base, double=True)

    expected = plain_step(groups, one.config, start, start, ref)
    assert first["loss/policy"] == pytest.approx(expected["loss/policy"], abs=1e-5)
    assert first["loss/kl"] == pytest.approx(expected["loss/kl"], rel=1e-4)
    assert expected["loss/kl"] > 0.01
    second = plain_step(groups, one.config, after, start, ref)
    assert both["policy/clip_high"] + both["policy/clip_low"] > 0.05, "the second epoch meets the clip"
    assert abs(second["loss/policy"] - expected["loss/policy"]) > 1e-3
    for name in ("loss/policy", "loss/kl"):  # metrics are means over the optimiser steps
        assert both[name] == pytest.approx((expected[name] + second[name]) / 2, abs=2e-5)


def test_the_gradient_is_that_of_the_plain_policy_gradient(make_trainer, plain_copy, naive_logprobs) -> None:
    """At ratio 1 the gradient of the loss is -sum_i A_i / (N L_i) sum_t grad logp_it."""
    trainer = make_trainer(max_grad_norm=0.0)
    plain = plain_copy(trainer.policy.base)
    groups, _ = trainer.collect(PROMPTS)
    trainer.update(groups)
    rollouts = [(g, r) for g in groups for r in g.rollouts]
    for group, rollout in rollouts:
        ids = rollout.completion.token_ids
        logps = naive_logprobs(plain, [Segment(prompt_ids=group.prompt_ids, token_ids=ids)])
        (-rollout.advantage * logps.mean() / len(rollouts)).backward()
    for found, p in zip(gradient(trainer), plain.parameters(), strict=True):
        assert (found - p.grad).abs().max() < 1e-4 * p.grad.abs().max()


# -- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "gspo"])
@pytest.mark.filterwarnings("ignore:no refill is given")
def test_one_micro_batch_equals_many(algorithm, make_trainer) -> None:
    settings = {"algorithm": algorithm, "kl_coef": 0.04, "max_grad_norm": 0.0, "lr": 1e-4}
    whole, parts = (make_trainer(max_batch_tokens=n, **settings) for n in (100_000, 12))
    groups, _ = whole.collect(PROMPTS)
    one, many = whole.update(groups), parts.update(groups)
    for a, b in zip(gradient(parts), gradient(whole), strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
    for name, value in weights(whole).items():
        torch.testing.assert_close(parts.policy.trainable_state()[name], value, rtol=0, atol=5e-6)
    for name in ("loss/policy", "loss/kl", "update/grad_norm", "policy/entropy", "policy/ratio", "tokens/trained"):
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name


def test_the_order_of_groups_does_not_matter(make_trainer) -> None:
    forward, backward = (make_trainer(max_grad_norm=0.0) for _ in range(2))
    groups, _ = forward.collect(PROMPTS)
    forward.update(groups)
    backward.update(groups[::-1])
    for a, b in zip(gradient(forward), gradient(backward), strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_a_group_without_signal_adds_nothing_but_counts_in_the_mean(make_trainer) -> None:
    """With a second group of equal rewards, the gradient is that of the first group, over twice as many samples."""
    alone, beside, other = (make_trainer(max_grad_norm=0.0) for _ in range(3))
    groups, _ = alone.collect(PROMPTS)
    silent = [
        dataclasses.replace(g, rollouts=[dataclasses.replace(r, reward=Reward(1.0)) for r in g.rollouts])
        for g in groups
    ]
    one = alone.update([groups[0]])
    two = beside.update([groups[0], silent[1]])
    assert two["update/grad_norm"] == pytest.approx(one["update/grad_norm"] / 2, rel=1e-5)
    assert two["tokens/trained"] == one["tokens/trained"]
    other.update([groups[0], silent[2]])
    assert not changed(weights(beside), weights(other))


def test_a_group_without_signal_is_trained_where_the_kl_needs_it(make_trainer) -> None:
    trainer = make_trainer(lambda prompt, response: 1.0, kl_coef=0.1)
    metrics = trainer.train_step(PROMPTS)
    assert metrics["group/no_signal"] == 1.0
    assert metrics["tokens/trained"] == metrics["tokens/sampled"]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_everywhere_leave_the_weights_alone(reward, make_trainer) -> None:
    trainer = make_trainer(lambda prompt, response: reward)
    before = weights(trainer)
    with pytest.warns(UserWarning, match="nothing to train in this step"):
        metrics = trainer.train_step(PROMPTS)
    assert metrics["group/no_signal"] == 1.0
    assert metrics["tokens/trained"] == 0
    assert not changed(before, weights(trainer))
    assert all(math.isfinite(v) for v in metrics.values())
    assert trainer.step == 1


# -- ratio, epochs, minibatches --------------------------------------------------------------------------------------


def test_the_only_update_on_its_rollouts_has_ratio_exactly_one(make_trainer) -> None:
    trainer = make_trainer()
    for _ in range(2):
        metrics = trainer.train_step(PROMPTS)
        assert metrics["policy/ratio"] == metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/clip_high"] == metrics["policy/clip_low"] == 0.0
        assert metrics["engine/logp_gap"] < 1e-5


def test_loss_zero_is_not_gradient_zero(make_trainer, tokenizer) -> None:
    """Equal lengths, advantages 1 and -1, first update: the loss is 0 and the weights move all the same."""
    end = tokenizer.eos_token_id
    engine = ScriptedEngine(lambda request, sample: [65 + sample, 70, end], [end])
    trainer = make_trainer(lambda p, r: float(r[0] == "b"), engine=engine, group_size=2)
    before = weights(trainer)
    metrics = trainer.train_step(["x"])
    assert metrics["loss/policy"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["update/grad_norm"] > 1e-3
    assert changed(before, weights(trainer))


@pytest.mark.parametrize(("epochs", "minibatches", "steps"), [(1, 1, 1), (3, 1, 3), (1, 3, 3), (2, 2, 4), (2, 5, 6)])
def test_epochs_times_minibatches_optimiser_steps(epochs, minibatches, steps, make_trainer) -> None:
    """Three groups: five minibatches are three, because groups are never split."""
    trainer = make_trainer(ppo_epochs=epochs, minibatches=minibatches)
    metrics = trainer.train_step(PROMPTS)
    assert trainer.optimizer.steps == steps
    assert trainer.policy.version == steps
    assert trainer.step == 1
    assert metrics["tokens/trained"] == metrics["tokens/sampled"]
    assert (metrics["policy/ratio_max"] > 1.0) == (steps > 1)
    _, later = trainer.collect(PROMPTS[:1])
    assert later["group/count"] == 1.0


def test_minibatches_are_normalised_each_by_itself(make_trainer) -> None:
    """Two minibatches of one group each have the gradients of two updates of one group, not half of them."""
    together, apart = (make_trainer(minibatches=n, max_grad_norm=0.0, lr=1e-7) for n in (2, 1))
    groups, _ = together.collect(PROMPTS[:2])
    together.update(groups)
    for group in groups:
        apart.update([group])
    for a, b in zip(gradient(together), gradient(apart), strict=True):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


# -- direction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "gspo"])
@pytest.mark.filterwarnings("ignore:no refill is given")
def test_good_samples_become_likelier_and_bad_ones_less(algorithm, make_trainer, plain_copy, naive_logprobs) -> None:
    trainer = make_trainer(algorithm=algorithm, kl_coef=0.0, lr=3e-4)
    before = plain_copy(trainer.policy.base)
    [group], _ = trainer.collect(["2+2"])
    trainer.update([group])
    after = plain_copy(trainer.policy.base)
    best, worst = (pick(group.rollouts, key=lambda r: r.reward.total) for pick in (max, min))
    for rollout, sign in ((best, 1), (worst, -1)):
        segment = [Segment(prompt_ids=group.prompt_ids, token_ids=rollout.completion.token_ids)]
        with torch.no_grad():
            rise = naive_logprobs(after, segment).sum() - naive_logprobs(before, segment).sum()
        assert sign * rise.item() > 1e-3


def test_it_learns_what_is_rewarded(make_trainer) -> None:
    """The reward is the share of digits; a random model writes few."""

    def digits(prompt: Prompt, response: str) -> float:
        return sum(c.isdigit() for c in response) / max(1, len(response))

    trainer = make_trainer(digits, group_size=16, lr=1e-2)
    history = [trainer.train_step(PROMPTS)["reward/total"] for _ in range(15)]
    assert sum(history[:3]) / 3 < 0.1
    assert sum(history[-3:]) / 3 > 0.4


# -- the reference ---------------------------------------------------------------------------------------------------


def k3_mean(
    groups: Sequence[Group], policy: PreTrainedModel, ref: PreTrainedModel, naive: Callable[..., Tensor]
) -> float:
    segments = [Segment(prompt_ids=g.prompt_ids, token_ids=r.completion.token_ids) for g in groups for r in g.rollouts]
    with torch.no_grad():
        d = naive(ref, segments) - naive(policy, segments)
    return float((d.exp() - d - 1).mean())


def test_the_kl_to_the_frozen_start_is_zero_first_and_grows(make_trainer, plain_copy, naive_logprobs) -> None:
    trainer = make_trainer(kl_coef=0.1)
    start = plain_copy(trainer.policy.base, double=True)
    assert trainer.train_step(PROMPTS)["policy/kl_ref"] == 0.0
    moved = plain_copy(trainer.policy.base, double=True)
    groups, _ = trainer.collect(PROMPTS)
    metrics = trainer.update(groups)
    assert metrics["policy/kl_ref"] == pytest.approx(k3_mean(groups, moved, start, naive_logprobs), rel=1e-3)
    assert metrics["policy/kl_ref"] > 1e-4
    assert metrics["loss/kl"] > 0
    assert trainer.reference is not None and trainer.reference.model is not None
    for frozen, p in zip(trainer.reference.model.model.parameters(), start.parameters(), strict=True):
        assert not frozen.requires_grad
        assert torch.equal(frozen.double(), p)


def test_the_reference_of_an_adapter_is_the_model_without_it(
    make_trainer, llama, tokenizer, plain_copy, naive_logprobs
) -> None:
    policy = Policy(llama(spread=0.1), tokenizer, lora=LoRA(rank=4, alpha=8))
    trainer = make_trainer(model=policy, kl_coef=0.1, lr=1e-2)
    assert trainer.reference is not None and trainer.reference.model is None
    start = plain_copy(llama(spread=0.1))
    assert trainer.train_step(PROMPTS)["policy/kl_ref"] == 0.0
    groups, _ = trainer.collect(PROMPTS)
    expected = k3_mean(groups, policy.model, start, naive_logprobs)
    assert expected > 1e-4
    assert trainer.update(groups)["policy/kl_ref"] == pytest.approx(expected, rel=1e-2)


def test_a_reference_of_another_model(make_trainer, llama, tokenizer) -> None:
    config = GRPOConfig(group_size=4, max_tokens=6, kl_coef=0.1)
    trainer = GRPOTrainer(
        llama(spread=0.1),
        ref_model=llama(seed=2, spread=0.1),
        reward_model=by_letters,
        tokenizer=tokenizer,
        config=config,
    )
    assert trainer.train_step(PROMPTS)["policy/kl_ref"] > 0.01


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_model_itself_as_reference_is_its_frozen_copy(wrapped, llama, tokenizer) -> None:
    model = llama(spread=0.1)
    same = Policy(model, tokenizer) if wrapped else model
    config = GRPOConfig(group_size=4, max_tokens=6, kl_coef=0.1, lr=1e-3)
    trainer = GRPOTrainer(same, ref_model=same, reward_model=by_letters, tokenizer=tokenizer, config=config)
    before = weights(trainer)
    assert trainer.train_step(PROMPTS)["policy/kl_ref"] == 0.0
    assert changed(before, weights(trainer))
    assert trainer.train_step(PROMPTS)["policy/kl_ref"] > 1e-4


def test_no_reference_is_kept_where_the_kl_is_off(make_trainer) -> None:
    assert make_trainer(kl_coef=0.0).reference is None


# -- adapters --------------------------------------------------------------------------------------------------------


def test_no_trainable_parameter_is_an_error(make_trainer, llama, tokenizer) -> None:
    policy = Policy(llama(spread=0.1), tokenizer, lora=LoRA(rank=4, alpha=8))
    policy.model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        make_trainer(model=policy)


def test_an_adapter_s_weights_change_and_the_base_s_do_not(make_trainer, llama, tokenizer) -> None:
    policy = Policy(llama(spread=0.1), tokenizer, lora=LoRA(rank=4, alpha=8))
    trainer = make_trainer(model=policy)
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    before = weights(trainer)
    trainer.train_step(PROMPTS)
    assert changed(before, weights(trainer))
    assert not changed(base, {n: p for n, p in policy.model.named_parameters() if not p.requires_grad})


def test_the_engine_samples_with_the_adapter(make_trainer, llama, tokenizer, naive_greedy) -> None:
    policy = Policy(llama(spread=0.1), tokenizer, lora=LoRA(rank=4, alpha=8))
    trainer = make_trainer(model=policy, lr=0.05)
    prompt = policy.chat.prompt_ids([{"role": "user", "content": "2+2"}])

    def greedy() -> list[int]:
        [[c]] = trainer.engine.generate([Request(prompt, 0, [0])], Sampling(temperature=0.0, max_tokens=8))
        return list(c.token_ids)

    before = greedy()
    assert before == naive_greedy(llama(spread=0.1), prompt, 8, policy.chat.stop_ids)
    for _ in range(3):
        trainer.train_step(PROMPTS)
    assert greedy() == naive_greedy(policy.model, prompt, 8, policy.chat.stop_ids)
    assert greedy() != before
    assert trainer.train_step(PROMPTS)["engine/logp_gap"] < 1e-4  # as at the first step


# -- prompts and their answers ---------------------------------------------------------------------------------------


@pytest.fixture
def echo(tokenizer) -> ScriptedEngine:
    """Answers with the question, then a digit: the number of the sample."""
    end = tokenizer.eos_token_id

    def say(request: Request, sample: int) -> list[int]:
        question = request.prompt_ids[1:-1]  # between <|user|> and <|assistant|>
        return [*question, tokenizer.convert_tokens_to_ids(str(sample)), end]

    return ScriptedEngine(say, [end])


def test_each_answer_is_scored_with_its_own_prompt_and_data(make_trainer, echo) -> None:
    prompts = [
        Prompt(f"row-{n}", ({"role": "user", "content": f"{n} x 2 ="},), str(2 * n), {"solution": f"it is {2 * n}"})
        for n in range(32)
    ]

    def check(prompt: Prompt, response: str) -> float:
        n = int(response.split()[0])
        right = prompt.id == f"row-{n}" and prompt.answer == str(2 * n) and prompt.data["solution"] == f"it is {2 * n}"
        return float(right and response[:-1] == prompt.text)

    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    groups, metrics = make_trainer(check, engine=echo, max_tokens=16).collect([prompts[i] for i in order])
    assert metrics["reward/total"] == 1.0
    assert [g.prompt.id for g in groups] == [f"row-{i}" for i in order]
    assert [r.text[-1] for r in groups[5].rollouts] == ["0", "1", "2", "3"]


def test_rewards_are_grouped_by_prompt(make_trainer, echo) -> None:
    """Two prompts, two samples each; only the first sample of A is right: A learns, B has nothing to compare."""
    trainer = make_trainer(lambda p, r: float(r == "A0"), engine=echo, group_size=2, ddof=1)
    groups, metrics = trainer.collect(["A", "B"])
    found = [[r.advantage for r in g.rollouts] for g in groups]
    assert found[0] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)
    assert found[1] == [0.0, 0.0]
    assert metrics["group/no_signal"] == 0.5


def test_advantages_are_normalised_once(make_trainer, echo) -> None:
    """Groups with rewards (1, 0) and (1, 1) reach the loss as they are: the gradient is that of the first alone."""
    reward = {"A0": 1.0, "A1": 0.0, "B0": 1.0, "B1": 1.0}
    trainer = make_trainer(lambda p, r: reward[r], engine=echo, group_size=2, weighting="token", max_grad_norm=0.0)
    groups, _ = trainer.collect(["A", "B"])
    assert [r.advantage for g in groups for r in g.rollouts] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)
    metrics = trainer.update(groups)
    assert metrics["loss/policy"] == pytest.approx(0.0, abs=1e-6)  # 3 tokens of A_i = 1 and 3 of -1, of 12


def test_equal_prompts_stay_two_groups_with_their_own_answers(make_trainer) -> None:
    twins = [Prompt.of("2+2", answer="4"), Prompt.of("2+2", answer="5")]
    seen: list[tuple[str | None, str]] = []

    def note(prompt: Prompt, response: str) -> float:
        seen.append((prompt.answer, response))
        return by_letters(prompt, response)

    trainer = make_trainer(note)
    groups, metrics = trainer.collect(twins)
    assert [len(g.rollouts) for g in groups] == [4, 4]
    assert [answer for answer, _ in seen] == ["4"] * 4 + ["5"] * 4
    ids = [[r.completion.token_ids for r in g.rollouts] for g in groups]
    assert ids[0] != ids[1], "copies of a prompt draw samples of their own"
    assert metrics["tokens/sampled"] == sum(len(c) for row in ids for c in row)
    assert trainer.update(groups)["tokens/trained"] == metrics["tokens/sampled"]


def test_samples_differ_within_a_group_and_between_steps_and_seeds(make_trainer) -> None:
    def drawn(trainer: GRPOTrainer) -> list[tuple[int, ...]]:
        return [r.completion.token_ids for r in trainer.collect(["hello"])[0][0].rollouts]

    first = drawn(make_trainer(group_size=8))
    assert len(set(first)) >= 7
    assert drawn(make_trainer(group_size=8)) == first
    assert drawn(make_trainer(group_size=8, seed=1)) != first
    later = make_trainer(group_size=8)
    later.step = 1
    assert drawn(later) != first


def test_strings_chats_and_prompts_are_the_same_question(make_trainer) -> None:
    forms = ["2+2", [{"role": "user", "content": "2+2"}], Prompt.of("2+2")]
    found = [make_trainer().train_step([form]) for form in forms]
    assert without_times(found[0]) == without_times(found[1]) == without_times(found[2])


def test_long_prompts_are_left_out_whole_and_counted(make_trainer) -> None:
    trainer = make_trainer(max_prompt_tokens=10)
    groups, metrics = trainer.collect(["x" * 8, "x" * 9, "short"])  # two more tokens of the template
    assert [g.prompt.text for g in groups] == ["x" * 8, "short"]
    assert metrics["data/prompts_too_long"] == 1.0
    # Without a setting, the model's 256 positions leave room for 250 tokens.
    groups, metrics = make_trainer().collect(["x" * 248, "x" * 249])
    assert [len(g.prompt_ids) for g in groups] == [250]
    assert metrics["data/prompts_too_long"] == 1.0


def test_a_limit_that_leaves_no_room_for_a_prompt_is_refused(make_trainer) -> None:
    with pytest.raises(ValueError, match="max_tokens 256 leaves no room for a prompt in the 256 positions"):
        make_trainer(max_tokens=256)


@pytest.mark.parametrize("think", ["<think>\n", "<think>"])
def test_the_reward_sees_reasoning_that_the_template_began(think, make_trainer, llama, tokenizer) -> None:
    prefilling = copy.deepcopy(tokenizer)
    prefilling.chat_template = tokenizer.chat_template.replace(
        "<|assistant|>' }}{% endif", f"<|assistant|>{think}' }}}}{{% endif"
    )
    end = tokenizer.eos_token_id
    ids = prefilling("a\n</think>\nThe answer is 4.", add_special_tokens=False)["input_ids"]
    seen = []

    def note(prompt: Prompt, response: str) -> float:
        seen.append(response)
        return 0.0

    policy = Policy(llama(spread=0.1), prefilling)
    trainer = make_trainer(note, model=policy, engine=ScriptedEngine(lambda r, n: [*ids, end], [end]), max_tokens=64)
    [group], _ = trainer.collect(["2+2"])
    assert policy.chat.prompt_text(group.prompt.messages).endswith("<|assistant|>" + think)
    assert set(seen) == {think + "a\n</think>\nThe answer is 4."}
    assert group.rollouts[0].text == seen[0]
    assert group.rollouts[0].completion.token_ids == (*ids, end)  # what is trained is what was sampled


# -- rewards that cannot be had --------------------------------------------------------------------------------------


def test_unscored_samples_are_left_out_of_baseline_and_update(make_trainer, echo) -> None:
    """Of eight samples two cannot be scored: the other six are a group of their own."""
    rewards = dict(enumerate([1.0, None, 0.0, 0.0, 1.0, None, 0.0, 0.0]))
    trainer, six = (make_trainer(lambda p, r: rewards[int(r[-1])], engine=echo, group_size=8) for _ in range(2))
    [group], metrics = trainer.collect(["A"])
    # 1, 0, 0, 1, 0, 0: mean 1/3, population deviation sqrt(2)/3
    good, bad = math.sqrt(2), -math.sqrt(0.5)
    assert [group.rollouts[i].advantage for i in (1, 5)] == [None, None]
    assert [r.advantage for r in group.rollouts if r.advantage is not None] == pytest.approx(
        [good, bad, bad, good, bad, bad], abs=1e-6
    )
    assert metrics["reward/failed"] == 0.25
    assert metrics["reward/total"] == pytest.approx(1 / 3)
    trainer.update([group])
    kept = [r for r in group.rollouts if r.advantage is not None]
    six.update([dataclasses.replace(group, rollouts=kept)])
    assert not changed(weights(trainer), weights(six))


@pytest.mark.parametrize(("failures", "stops"), [(2, False), (3, True), (8, True)])
def test_a_reward_outage_stops_the_run(failures, stops, make_trainer, echo) -> None:
    def flaky(prompt: Prompt, response: str) -> float:
        if int(response[-1]) < failures:
            raise ConnectionError("judge is down")
        return float(response[-1])

    trainer = make_trainer(flaky, engine=echo, group_size=8, max_failed_rewards=0.25)
    before = weights(trainer)
    if not stops:
        assert trainer.train_step(["A"])["reward/failed"] == failures / 8
        assert changed(before, weights(trainer))
        return
    with pytest.raises(RewardOutageError, match=rf"{failures} of 8 rewards failed in step 0.*judge is down"):
        trainer.train_step(["A"])
    assert not changed(before, weights(trainer))
    assert trainer.step == 0


def test_a_part_that_nobody_could_be_given_has_no_point(make_trainer, echo) -> None:
    reward = RewardComposer(
        {"length": 1.0, "abstains": 1.0},
        parts={"length": lambda p, r: float(r[-1]), "abstains": lambda p, r: None},
    )
    _, metrics = make_trainer(reward, engine=echo).collect(["A"])
    assert metrics["reward/length"] == metrics["reward/total"] == 1.5  # 0, 1, 2, 3
    assert "reward/abstains" not in metrics
    assert metrics["reward/failed"] == 0.0


# -- completions that were cut off -----------------------------------------------------------------------------------


def test_nothing_is_trained_when_every_completion_is_cut_off_and_masked(make_trainer) -> None:
    engine = ScriptedEngine(lambda request, sample: [65 + sample] * 6, stop_ids=[0])
    trainer = make_trainer(engine=engine, mask_truncated=True, kl_coef=0.1, entropy_coef=0.1)
    before = weights(trainer)
    with pytest.warns(UserWarning, match="nothing to train in this step"):
        metrics = trainer.train_step(["A"])
    assert metrics["rollout/truncated"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())
    assert not changed(before, weights(trainer))


def test_a_masked_completion_counts_in_the_mean_but_is_not_trained(make_trainer, tokenizer) -> None:
    end = tokenizer.eos_token_id
    engine = ScriptedEngine(lambda request, sample: [65, 66, end] if sample else [65, 66, 67, 68, 69, 70], [end])
    reward = {0: 0.0, 1: 1.0}
    trainer = make_trainer(
        lambda p, r: reward[int(len(r) == 2)], engine=engine, group_size=2, mask_truncated=True, ddof=0
    )
    [group], _ = trainer.collect(["A"])
    assert [r.advantage for r in group.rollouts] == pytest.approx([-1.0, 1.0], abs=1e-6)
    metrics = trainer.update([group])
    assert metrics["tokens/trained"] == 3  # the stop token among them
    assert metrics["loss/policy"] == pytest.approx(-1.0, abs=1e-6)  # the mean is over what is trained


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)])
def test_a_resumed_trainer_continues_bit_for_bit(lora, make_trainer, llama, tokenizer) -> None:
    settings = {"kl_coef": 0.1, "ppo_epochs": 2, "warmup_steps": 5}

    def fresh() -> GRPOTrainer:
        torch.manual_seed(0)  # of the adapter's start
        return make_trainer(model=Policy(llama(spread=0.1), tokenizer, lora=lora), **settings)

    unbroken = fresh()
    for _ in range(2):
        unbroken.train_step(PROMPTS)
    buffer = io.BytesIO()
    torch.save(unbroken.state_dict(), buffer)
    resumed = fresh()
    resumed.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert (resumed.step, resumed.policy.version, resumed.optimizer.steps) == (2, 4, 4)
    for _ in range(2):
        expected, found = unbroken.train_step(PROMPTS), resumed.train_step(PROMPTS)
        assert without_times(found) == without_times(expected)
    assert not changed(weights(unbroken), weights(resumed))


def test_the_version_on_every_sample_counts_optimiser_steps(make_trainer) -> None:
    trainer = make_trainer(ppo_epochs=2)
    for version in (0, 2, 4):
        groups, _ = trainer.collect(PROMPTS)
        assert {r.completion.policy_version for g in groups for r in g.rollouts} == {version}
        trainer.update(groups)


def test_the_first_update_of_a_warm_up_moves_the_weights(make_trainer) -> None:
    trainer = make_trainer(lr=1.0, warmup_steps=10)
    before = weights(trainer)
    assert trainer.train_step(PROMPTS)["update/lr"] == pytest.approx(0.1)
    assert changed(before, weights(trainer))


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 0, -4])
def test_a_group_of_one_has_nothing_to_compare(size: int) -> None:
    with pytest.raises(ValueError, match=f"must be >= 2, got {size}: an advantage compares the samples of one prompt"):
        GRPOConfig(group_size=size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "greedy samples of one prompt are all equal"),
        ({"ppo_epochs": 0}, "greater than or equal to 1"),
        ({"learning_rate": 1e-5}, "Extra inputs"),
        ({"max_failed_rewards": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_train_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**changes)


def test_a_reward_is_needed(llama, tokenizer) -> None:
    with pytest.raises(ValueError, match="reward_model is needed"):
        GRPOTrainer(llama(), tokenizer=tokenizer)


def test_the_engine_by_default_shares_the_weights(make_trainer) -> None:
    trainer = make_trainer()
    assert isinstance(trainer.engine, LocalEngine)
    assert trainer.engine.policy is trainer.policy
