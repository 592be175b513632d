"""What changes over the steps of a run: the groups that are replaced, the epochs that end early, what adapts."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms.presets import PRESETS
from groupwise.config import CriticConfig, CurriculumConfig, LoRA
from groupwise.curriculum import Curriculum
from groupwise.engines import Request
from groupwise.engines.scripted import ScriptedEngine
from groupwise.experience import minibatches
from groupwise.model import Policy
from groupwise.rewards import RewardComposer
from groupwise.trainer import GRPOTrainer
from groupwise.types import Completion, Prompt

PROMPTS = ["2+2", "13*7", "name a colour"]


def by_letters(prompt: Prompt, response: str) -> float:
    return sum(map(ord, response)) % 11 / 10


def weights(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in trainer.policy.trainable_state().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steady(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/"))}


# -- dynamic sampling ------------------------------------------------------------------------------------------------


def only_odd(prompt: Prompt, response: str) -> float:
    """All samples of an even prompt get the same reward."""
    return by_letters(prompt, response) if int(prompt.text) % 2 else 1.0


def refill_from(texts: Sequence[str], log: list[tuple[int, int]]) -> Callable[[int, int], list[Prompt]]:
    left = list(texts)

    def refill(number: int, count: int) -> list[Prompt]:
        log.append((number, count))
        taken, left[:] = left[:count], left[count:]
        return [Prompt.of(t) for t in taken]

    return refill


def test_groups_without_signal_are_replaced_until_there_are_enough(make_trainer) -> None:
    trainer = make_trainer(only_odd, resample_rounds=3)
    asked: list[tuple[int, int]] = []
    groups, metrics = trainer.collect(["1", "2", "4"], refill_from(["6", "3", "5"], asked))
    # Round 0 gives one group with signal of three; round 1 asks for two (6 and 3) and gets one; round 2 asks for one.
    assert asked == [(1, 2), (2, 1)]
    assert [g.prompt.text for g in groups] == ["1", "2", "4", "6", "3", "5"]
    assert [g.has_signal for g in groups] == [True, False, False, False, True, True]
    assert metrics["group/count"] == 6
    assert metrics["group/no_signal"] == 0.5
    wasted = sum(len(r.completion.token_ids) for g in groups if not g.has_signal for r in g.rollouts)
    assert metrics["tokens/wasted"] == wasted
    assert metrics["tokens/sampled"] == sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)


def test_the_budget_of_rounds_is_kept(make_trainer) -> None:
    asked: list[tuple[int, int]] = []
    groups, _ = make_trainer(only_odd, resample_rounds=2).collect(["2", "4"], refill_from(list("6824"), asked))
    assert asked == [(1, 2), (2, 2)]
    assert len(groups) == 6
    assert not any(g.has_signal for g in groups)


def test_prompts_that_run_out_end_the_rounds(make_trainer) -> None:
    asked: list[tuple[int, int]] = []
    groups, _ = make_trainer(only_odd, resample_rounds=5).collect(["1", "2"], refill_from(["4"], asked))
    assert asked == [(1, 1), (2, 1)]
    assert len(groups) == 3


def test_prompts_to_refill_from_may_be_texts_and_no_more_are_taken_than_asked_for(make_trainer) -> None:
    trainer = make_trainer(only_odd, resample_rounds=1)
    groups, _ = trainer.collect(["2", "1"], lambda number, count: ["3", "5", "7"])
    assert [g.prompt.text for g in groups] == ["2", "1", "3"]


def test_rewards_that_do_not_differ_are_no_signal_whatever_the_advantages(make_trainer) -> None:
    """Whitening moves all samples of the step; what was sampled in vain was so all the same."""
    groups, metrics = make_trainer(only_odd, algorithm="reinforce++_baseline").collect(["1", "2"])
    assert metrics["group/no_signal"] == 0.5
    assert metrics["tokens/wasted"] == sum(len(r.completion.token_ids) for r in groups[1].rollouts)


def test_what_has_no_signal_is_left_out_of_the_average(make_trainer) -> None:
    """Without replacement it would stay in the mean and shrink the step; with it, it is as if it had not been drawn."""
    dynamic, plain = make_trainer(only_odd, resample_rounds=1), make_trainer(only_odd)
    groups, _ = dynamic.collect(["1", "2"], lambda number, count: [])
    alone = dynamic.update(groups)
    one = plain.update([groups[0]])
    assert alone["update/grad_norm"] == one["update/grad_norm"]
    assert alone["loss/policy"] == one["loss/policy"]
    assert same(weights(dynamic), weights(plain))


@pytest.mark.parametrize("parts", [{"kl_coef": 0.1, "kl_in": "reward", "kl": "k1"}, {"whiten": "tokens"}])
def test_what_was_replaced_is_left_out_whatever_else_would_move_it(parts: dict[str, Any], make_trainer) -> None:
    """A KL in the reward, or whitening, moves the samples of a group although their rewards are equal."""
    dynamic, plain = make_trainer(only_odd, resample_rounds=1, **parts), make_trainer(only_odd, **parts)
    groups, metrics = dynamic.collect(["1", "2"], lambda number, count: [])
    assert metrics["group/no_signal"] == 0.5
    assert [r.advantage for r in groups[1].rollouts] == [0.0] * 4
    dynamic.update(groups)
    plain.update([copy.deepcopy(groups[0])])
    assert same(weights(dynamic), weights(plain))


def test_replaced_prompts_are_drawn_with_seeds_of_their_own(make_trainer) -> None:
    trainer = make_trainer(only_odd, resample_rounds=1)
    groups, _ = trainer.collect(["2"], lambda number, count: [Prompt.of("2")])
    first, second = ([r.completion.token_ids for r in g.rollouts] for g in groups)
    assert first != second


def test_dynamic_sampling_without_prompts_to_refill_from_says_so(make_trainer) -> None:
    with pytest.warns(UserWarning, match="no refill is given"):
        make_trainer(resample_rounds=1).collect(PROMPTS)


# -- epochs ----------------------------------------------------------------------------------------------------------


def test_epochs_end_once_the_policy_has_moved_too_far(make_trainer) -> None:
    free, held = (make_trainer(ppo_epochs=6, lr=1e-2, kl_stop=stop) for stop in (None, 0.01))
    assert free.train_step(PROMPTS)["update/steps"] == 6
    metrics = held.train_step(PROMPTS)
    assert 1 <= metrics["update/steps"] < 6
    assert held.policy.version == metrics["update/steps"]
    assert metrics["policy/kl_old"] <= 0.01
    # The steps that were taken are those that a shorter plan would have taken.
    shorter = make_trainer(ppo_epochs=int(metrics["update/steps"]), lr=1e-2)
    shorter.train_step(PROMPTS)
    assert same(weights(held), weights(shorter))


# -- what adapts -----------------------------------------------------------------------------------------------------


def test_the_kl_coefficient_follows_its_target(make_trainer) -> None:
    """1909.08593: times 1 + clip(KL / target - 1, +-0.2) * samples / horizon, after every step."""
    trainer = make_trainer(kl_coef=0.1, kl_target=1e-6, kl_horizon=60, lr=1e-2)
    first = trainer.train_step(PROMPTS)  # KL 0: down by the most, 0.2 * 12 / 60
    assert first["update/kl_coef"] == pytest.approx(0.1 * 0.96)
    second = trainer.train_step(PROMPTS)  # KL far above the target: up by the most
    assert second["policy/kl_ref"] > 1e-5
    assert second["update/kl_coef"] == pytest.approx(0.1 * 0.96 * 1.04)
    assert trainer.current.kl_coef == second["update/kl_coef"]


def test_the_entropy_bonus_follows_its_target(make_trainer) -> None:
    low = make_trainer(entropy_coef=0.01, entropy_target=100.0, entropy_step=0.002)  # always below the target
    assert "loss/entropy" not in low.train_step(PROMPTS)  # not measured before the first step
    second = low.train_step(PROMPTS)
    assert second["update/entropy_coef"] == pytest.approx(0.014)
    assert second["loss/entropy"] == pytest.approx(
        -0.012 * second["policy/entropy"], rel=0.2
    )  # its mean is by sequence
    high = make_trainer(entropy_coef=0.003, entropy_target=0.1, entropy_step=0.002)  # always above it
    for expected in (0.001, 0.0, 0.0):
        metrics = high.train_step(PROMPTS)
        assert metrics["update/entropy_coef"] == pytest.approx(expected)
        assert "loss/entropy" not in metrics


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)])
def test_the_reference_is_replaced_every_so_many_steps(lora, make_trainer, llama, tokenizer) -> None:
    trainer = make_trainer(
        model=Policy(llama(spread=0.1), tokenizer, lora=lora), kl_coef=0.1, reference_every=2, lr=1e-2
    )
    distances = [trainer.train_step(PROMPTS)["policy/kl_ref"] for _ in range(5)]
    # Steps 1, 3 and 5 begin where the reference is.
    assert [distances[i] == pytest.approx(0.0, abs=1e-9) for i in range(5)] == [True, False, True, False, True]


def test_a_moving_average_follows_slowly(make_trainer) -> None:
    trainer = make_trainer(kl_coef=0.1, reference_every=1, reference_mix=0.25, lr=1e-2)
    assert trainer.reference is not None and trainer.reference.model is not None
    start = weights(trainer)
    trainer.train_step(PROMPTS)
    for name, kept in trainer.reference.model.model.named_parameters():
        torch.testing.assert_close(kept, 0.75 * start[name] + 0.25 * weights(trainer)[name])


# -- a critic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_critic_learns_what_sequences_earn(kind, make_trainer) -> None:
    """All samples earn 0.7: after some steps that is what the critic says of them."""
    trainer = make_trainer(
        lambda prompt, response: 0.7,
        algorithm="ppo",
        group_size=2,
        ppo_epochs=4,
        lr=0.0 if kind == "separate" else 3e-3,
        critic=CriticConfig(model=kind, lr=3e-3, clip_range=None, coef=1.0),
    )
    steps = [trainer.train_step(PROMPTS) for _ in range(12)]
    assert steps[0]["value/return"] == pytest.approx(0.7, abs=1e-6)
    assert steps[-1]["value/error"] < 0.1 * steps[0]["value/error"]
    assert steps[-1]["value/mean"] == pytest.approx(0.7, abs=0.15)
    assert all(math.isfinite(v) for s in steps for v in s.values())
    assert steps[0]["memory/critic_gb"] > 0


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)])
def test_a_resumed_ppo_run_continues_bit_for_bit(kind, lora, make_trainer, llama, tokenizer) -> None:
    settings = {"algorithm": "ppo", "kl_coef": 0.1, "minibatches": 2, "reference_every": 2, "kl_target": 0.01}

    def fresh() -> GRPOTrainer:
        torch.manual_seed(0)  # of the adapter's start
        policy = Policy(llama(spread=0.1), tokenizer, lora=lora)
        return make_trainer(model=policy, critic=CriticConfig(model=kind, lr=1e-3), **settings)

    unbroken = fresh()
    for _ in range(3):
        unbroken.train_step(PROMPTS)
    buffer = io.BytesIO()
    torch.save(unbroken.state_dict(), buffer)
    resumed = fresh()
    resumed.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    for _ in range(2):
        assert steady(resumed.train_step(PROMPTS)) == steady(unbroken.train_step(PROMPTS))
    assert same(weights(unbroken), weights(resumed))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_an_update_that_was_interrupted_leaves_nothing_behind(kind, make_trainer, monkeypatch) -> None:
    settings = {"algorithm": "ppo", "max_batch_tokens": 30, "critic": CriticConfig(model=kind)}
    calm, broken = make_trainer(**settings), make_trainer(**settings)
    groups, _ = calm.collect(PROMPTS)
    pack, calls = broken._pack, []

    def stop_at_the_third_batch(segments: Any) -> Any:
        for batch in pack(segments):
            calls.append(batch)
            if len(calls) == 3:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(broken, "_pack", stop_at_the_third_batch)
        with pytest.raises(KeyboardInterrupt):
            broken._accumulate(next(iter(minibatches(groups, broken._prepare(groups), broken.current, 0))))
    assert any(p.grad is not None for p in broken.policy.named_parameters.values())
    assert steady(broken.update(groups)) == steady(calm.update(groups))
    assert same(weights(broken), weights(calm))


def test_the_state_of_another_algorithm_is_refused(make_trainer) -> None:
    with pytest.raises(ValueError, match="do not both have a critic"):
        make_trainer(algorithm="ppo").load_state_dict(make_trainer().state_dict())
    with pytest.raises(ValueError, match="do not both have a critic"):
        make_trainer().load_state_dict(make_trainer(algorithm="ppo").state_dict())


# -- several turns ---------------------------------------------------------------------------------------------------


def turns(request: Request, sample: int) -> Completion:
    """A call, the tool's answer, and what the policy makes of it."""
    token_ids = (65 + sample, 66, 200 + sample, 201, 202, 70, 71 + sample)
    sampled = (True, True, False, False, False, True, True)
    return Completion(token_ids, (-1.0, -1.0, 9.9, 9.9, 9.9, -1.0, -1.0), "stop", sampled=sampled)


def test_what_a_tool_wrote_is_attended_to_and_never_trained(make_trainer, plain_copy) -> None:
    trainer = make_trainer(engine=ScriptedEngine(turns), group_size=2, max_tokens=8, lr=1e-2, max_grad_norm=0.0)
    before = plain_copy(trainer.policy.base, double=True)
    groups, metrics = trainer.collect(["2+2"])
    found = trainer.update(copy.deepcopy(groups))
    assert metrics["tokens/sampled"] == found["tokens/trained"] == 8  # of 14
    # The loss of GRPO's first step is -A / (N L) times the log-probs of the policy's own four tokens, in full context.
    [group] = groups
    total = torch.zeros((), dtype=torch.float64)
    before.zero_grad()
    for rollout in group.rollouts:
        ids = torch.tensor([group.prompt_ids + rollout.completion.token_ids])
        first = len(group.prompt_ids)
        logps = torch.log_softmax(before(input_ids=ids).logits[0, first - 1 : -1], dim=1)
        own = [logps[t, rollout.completion.token_ids[t]] for t in (0, 1, 5, 6)]
        total = total - rollout.advantage * sum(own) / (2 * 4)
    total.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in before.parameters() if p.grad is not None))
    assert found["update/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_samples_of_several_turns(name: str, make_trainer) -> None:
    reward = RewardComposer({"letters": 1.0}, parts={"letters": by_letters})
    trainer = make_trainer(reward, engine=ScriptedEngine(turns), algorithm=name, max_tokens=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no refill is given")
        metrics = trainer.train_step(PROMPTS)
    assert metrics["tokens/trained"] == metrics["tokens/sampled"] == 3 * 4 * 4
    assert metrics["update/grad_norm"] > 0
    assert all(math.isfinite(v) for v in metrics.values())


# -- diagnostics -----------------------------------------------------------------------------------------------------


def test_a_step_says_what_it_did(make_trainer) -> None:
    metrics = make_trainer(kl_coef=0.1, ppo_epochs=3, lr=1e-2, clip_range=0.05).train_step(PROMPTS)
    sides = [metrics[f"policy/clip_{side}"] for side in ("high", "low")]
    signs = [metrics[f"policy/clip_{sign}"] for sign in ("positive", "negative")]
    assert sum(sides) == pytest.approx(sum(signs))
    assert sum(sides) > 0
    assert metrics["policy/ratio_min"] < 1 < metrics["policy/ratio_max"]
    assert 0 < metrics["policy/ess"] < 1
    assert metrics["policy/kl_old"] > 0
    assert metrics["policy/entropy"] > 0
    assert 0 < metrics["engine/logp_gap"] <= metrics["engine/logp_gap_max"] < 1e-4  # rounding
    blocks = [v for k, v in metrics.items() if k.startswith("grad_norm/")]
    assert {"grad_norm/layers.0", "grad_norm/layers.1", "grad_norm/embed_tokens"} <= metrics.keys()
    assert math.hypot(*blocks) == pytest.approx(metrics["update/grad_norm"], rel=0.2)  # each is a mean over the epochs
    assert metrics["advantage/max"] > 0 > metrics["advantage/min"]
    assert metrics["advantage/std"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["tokens/trained"] == metrics["tokens/sampled"]
    assert metrics["memory/peak_gb"] > 0


def test_the_effective_sample_size_by_hand() -> None:
    """Ratios 1 and 3: (4 / 2)^2 / (10 / 2) = 0.8."""
    from groupwise.metrics import over_batches, over_steps

    parts = [
        (1, {"policy/ratio": 1.0, "policy/ratio_square": 1.0}),
        (1, {"policy/ratio": 3.0, "policy/ratio_square": 9.0}),
    ]
    assert over_steps([over_batches(parts)]) == {"policy/ratio": 2.0, "policy/ess": pytest.approx(0.8)}


# -- curriculum ------------------------------------------------------------------------------------------------------


def test_a_curriculum_leaves_what_is_learned_and_what_is_hopeless(make_trainer) -> None:
    """Prompts 0 to 9; samples of the first five are always right, of the next three never, of the last two by half."""
    curriculum = Curriculum(CurriculumConfig(pool=10, hard_share=0.0), [Prompt.of(str(n)) for n in range(10)])

    def correctness(prompt: Prompt, response: str) -> float:
        number = int(prompt.text)
        return 1.0 if number < 5 else 0.0 if number < 8 else float(ord(response[0]) % 2)

    engine = ScriptedEngine(lambda request, sample: (65 + sample, 66))
    trainer = make_trainer(
        RewardComposer({"correctness": 1.0}, parts={"correctness": correctness}), engine=engine, max_tokens=4
    )
    groups, _ = trainer.collect(curriculum.pick(10, seed=0))
    curriculum.record(groups)
    assert {p.text for p in curriculum.pick(2, seed=1)} == {"8", "9"}
    assert curriculum.metrics() == {"curriculum/easy": 0.5, "curriculum/hard": 0.3, "curriculum/unseen": 0.0}
