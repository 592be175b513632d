"""What must not matter does not: how an optimiser step is split, packed, padded, ordered or spread over ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from groupwise.algorithms.advantages import group_advantages
from groupwise.algorithms.losses import policy_loss
from groupwise.algorithms.presets import PRESETS, Algorithm
from groupwise.algorithms.weights import token_weights
from groupwise.batch import Batch, Segment, pack
from groupwise.model import Policy

MAX_LEN = 12

# -- the loss on log-probs -------------------------------------------------------------------------------------------


@st.composite
def token_batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """Ragged sequences of float64 numbers, some of them masked whole."""
    lengths = draw(st.lists(st.integers(1, MAX_LEN), min_size=2, max_size=6))
    masked = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = sum(lengths)

    def noise(scale: float) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64) * scale

    old = -noise(1.0).abs() - 0.05
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {
        "logp_T": old + noise(0.3),
        "old_logp_T": old,
        "advantage_T": torch.randn(len(lengths), generator=generator, dtype=torch.float64)[segment],
        "ref_logp_T": old + noise(0.3),
        "sampler_logp_T": old + noise(0.1),
        "entropy_T": noise(1.0).abs(),
        "selected_T": torch.rand(n, generator=generator) < 0.3,
        "segment_T": segment,
        "live_T": ~torch.tensor(masked)[segment],
    }


def weighed(tokens: dict[str, Tensor], cfg: Algorithm) -> Tensor:
    """The weight of each token over the whole step."""
    lengths = [
        int(n) for n in torch.bincount(tokens["segment_T"][tokens["live_T"]], minlength=tokens["segment_T"].max() + 1)
    ]
    weights = torch.tensor(token_weights(lengths, cfg.weighting, MAX_LEN), dtype=torch.float64)
    return torch.where(tokens["live_T"], weights[tokens["segment_T"]], 0.0)


def loss_and_gradient(tokens: dict[str, Tensor], weight_T: Tensor, cfg: Algorithm) -> tuple[float, Tensor]:
    logp_T = tokens["logp_T"].clone().requires_grad_()
    rest = {k: v for k, v in tokens.items() if k not in ("logp_T", "live_T")}
    loss, _ = policy_loss(logp_T, cfg=cfg, weight_T=weight_T, **rest)
    loss.backward()
    return loss.item(), logp_T.grad


def part(tokens: dict[str, Tensor], keep: Tensor) -> dict[str, Tensor]:
    """Some of the tokens; the sequences among them are counted anew."""
    found = {k: v[keep] for k, v in tokens.items()}
    found["segment_T"] = found["segment_T"].unique(return_inverse=True)[1]
    return found


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25)
@given(tokens=token_batches(), seed=st.integers(0, 2**31))
def test_neither_splitting_nor_order_changes_loss_or_gradient(name: str, tokens: dict[str, Tensor], seed: int) -> None:
    """Sequences dealt to two micro-batches at random, the tokens of each in an order of its own."""
    cfg = Algorithm(algorithm=name)
    weight_T = weighed(tokens, cfg)
    loss, gradient = loss_and_gradient(tokens, weight_T, cfg)
    generator = torch.Generator().manual_seed(seed)
    owner_N = torch.randint(0, 2, (int(tokens["segment_T"].max()) + 1,), generator=generator)
    total, gathered = 0.0, torch.zeros_like(gradient)
    for owner in (0, 1):
        places = (owner_N[tokens["segment_T"]] == owner).nonzero().squeeze(1)
        places = places[torch.randperm(len(places), generator=generator)]
        if len(places) == 0:
            continue
        one, slope = loss_and_gradient(part(tokens, places), weight_T[places], cfg)
        total, gathered[places] = total + one, slope
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gathered, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25)
@given(tokens=token_batches(), padding=st.integers(1, 5), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_changes_neither_loss_nor_gradient(
    name: str, tokens: dict[str, Tensor], padding: int, junk: float
) -> None:
    """Tokens of weight 0 at the end of the last sequence, whatever their numbers."""
    cfg = Algorithm(algorithm=name)
    weight_T = weighed(tokens, cfg)
    loss, gradient = loss_and_gradient(tokens, weight_T, cfg)
    fill = {"segment_T": int(tokens["segment_T"].max()), "selected_T": False, "live_T": False}
    padded = {k: torch.cat([v, torch.full((padding,), fill.get(k, junk), dtype=v.dtype)]) for k, v in tokens.items()}
    weights = torch.cat([weight_T, torch.zeros(padding, dtype=torch.float64)])
    one, slope = loss_and_gradient(padded, weights, cfg)
    assert one == pytest.approx(loss, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(slope[:-padding], gradient, rtol=1e-12, atol=1e-15)
    assert not slope[-padding:].any()


# -- advantages ------------------------------------------------------------------------------------------------------

rewards = st.lists(st.one_of(st.none(), st.integers(-40, 40).map(lambda n: n / 8)), min_size=2, max_size=9)


def assert_equal(found: Sequence[float | None], expected: Sequence[float | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one == pytest.approx(other, rel=1e-9, abs=1e-9)


COMPARING = ("mean", "leave_one_out", "length_weighted", "best_of_others")


@pytest.mark.parametrize("baseline", COMPARING)
@pytest.mark.parametrize("scale", ["std", "none"])
@given(rewards_G=rewards, constant=st.integers(-1000, 1000).map(lambda n: n / 4), data=st.data())
def test_a_constant_added_to_a_group_changes_nothing(
    baseline: Any, scale: Any, rewards_G: list[float | None], constant: float, data: st.DataObject
) -> None:
    lengths_G = data.draw(st.lists(st.integers(1, 50), min_size=len(rewards_G), max_size=len(rewards_G)))

    def advantages(shift: float) -> list[float | None]:
        shifted = [None if r is None else r + shift for r in rewards_G]
        return group_advantages(shifted, baseline=baseline, scale=scale, lengths_G=lengths_G)

    assert_equal(advantages(constant), advantages(0.0))


@pytest.mark.parametrize("baseline", COMPARING)
@given(rewards_G=rewards, factor=st.floats(0.01, 1e4), data=st.data())
def test_scaled_advantages_do_not_know_the_unit_of_the_reward(
    baseline: Any, rewards_G: list[float | None], factor: float, data: st.DataObject
) -> None:
    lengths_G = data.draw(st.lists(st.integers(1, 50), min_size=len(rewards_G), max_size=len(rewards_G)))

    def advantages(unit: float) -> list[float | None]:
        scaled = [None if r is None else r * unit for r in rewards_G]
        return group_advantages(scaled, baseline=baseline, scale="std", eps=0.0, lengths_G=lengths_G)

    assert_equal(advantages(factor), advantages(1.0))


@given(rewards_G=rewards, order=st.randoms(use_true_random=False))
def test_a_sample_keeps_its_advantage_wherever_it_stands(rewards_G: list[float | None], order: Any) -> None:
    places = list(range(len(rewards_G)))
    order.shuffle(places)
    moved = group_advantages([rewards_G[i] for i in places])
    expected = group_advantages(rewards_G)
    assert_equal(moved, [expected[i] for i in places])


# -- the loss of a model ---------------------------------------------------------------------------------------------


def samples(seed: int) -> list[Segment]:
    """Twelve ragged samples of three prompts; some tokens were written by a tool, and one sample is not trained."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 250, (n,), generator=generator).tolist())

    segments = []
    for prompt in [ids(5), ids(3), ids(9)]:
        for _ in range(4):
            token_ids = ids(int(torch.randint(2, 9, (1,), generator=generator)))
            mask = tuple((torch.rand(len(token_ids), generator=generator) < 0.8).tolist())
            segments.append(Segment(prompt_ids=prompt, token_ids=token_ids, trained=(*mask[:-1], True)))
    segments[3].trained = (False,) * len(segments[3].token_ids)
    for segment in segments:
        n = segment.trained_length

        def near(center: float, n: int = n) -> list[float]:
            return (center + 0.3 * torch.randn(n, generator=generator)).tolist()

        segment.advantages = [float(torch.randn(1, generator=generator))] * n
        segment.old_logps, segment.ref_logps, segment.sampler_logps = near(-5.5), near(-5.5), near(-5.5)
        segment.selected = (torch.rand(n, generator=generator) < 0.3).tolist()
    return segments


def weigh(segments: Sequence[Segment], cfg: Algorithm) -> None:
    weights = token_weights([s.trained_length for s in segments], cfg.weighting, MAX_LEN)
    for segment, weight in zip(segments, weights, strict=True):
        segment.weight = weight


def accumulate(policy: Policy, batches: Sequence[Batch], cfg: Algorithm) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of all weights, over micro-batches."""
    policy.model.zero_grad()
    total = 0.0
    for batch in batches:
        logp_T, entropy_T = policy.token_logprobs(batch, entropy=True)
        numbers = {
            f"{key}_T": batch.flat(getattr(s, f"{name}s") for s in batch.segments)
            for key, name in (
                ("old_logp", "old_logp"),
                ("advantage", "advantage"),
                ("ref_logp", "ref_logp"),
                ("sampler_logp", "sampler_logp"),
            )
        }
        selected_T = batch.flat(s.selected for s in batch.segments)
        loss, _ = policy_loss(
            logp_T,
            weight_T=batch.per_token(s.weight for s in batch.segments),
            cfg=cfg,
            segment_T=batch.segment_T,
            entropy_T=entropy_T,
            selected_T=selected_T.bool(),
            **numbers,
        )
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in policy.named_parameters.items()}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    """Equal beyond float32 rounding, relative to the largest entry of each weight's gradient."""
    assert found[0] == pytest.approx(expected[0], rel=2e-5, abs=1e-6)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-8, name


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=10)
@given(budget=st.integers(8, 120), order=st.randoms(use_true_random=False))
def test_neither_packing_nor_the_order_of_samples_changes_the_step(
    name: str, budget: int, order: Any, policy_of
) -> None:
    cfg = Algorithm(algorithm=name)
    policy, segments = policy_of(), samples(seed=1)
    weigh(segments, cfg)
    segments = [s for s in segments if s.weight]
    expected = accumulate(policy, [Batch.of(segments)], cfg)
    order.shuffle(segments)
    assert_same(accumulate(policy, pack(segments, budget), cfg), expected)


@pytest.fixture(scope="module")
def policy_of(llama, tokenizer) -> Callable[[], Policy]:
    made = Policy(llama(spread=0.1), tokenizer)
    return lambda: made


@pytest.mark.parametrize("name", PRESETS)
def test_padded_rows_give_the_step_of_packed_ones(name: str, llama, tokenizer, padded_policy) -> None:
    cfg = Algorithm(algorithm=name)
    segments = samples(seed=2)
    weigh(segments, cfg)
    batches = [Batch.of([s for s in segments if s.weight])]
    expected = accumulate(Policy(llama(spread=0.1), tokenizer), batches, cfg)
    assert_same(accumulate(padded_policy(llama(spread=0.1), tokenizer), batches, cfg), expected)


# -- two processes ---------------------------------------------------------------------------------------------------


def rank_step(rank: int, folder: str, model: Any, tokenizer: Any, names: Sequence[str]) -> None:
    """One rank: a share of the groups, weights over all of them, gradients summed over the ranks."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    policy = Policy(model, tokenizer)
    for name in names:
        cfg = Algorithm(algorithm=name)
        segments = samples(seed=3)
        mine = segments[:4] if rank == 0 else segments[4:]  # one group and two: groups are never split
        lengths: list[Any] = [None, None]
        dist.all_gather_object(lengths, [s.trained_length for s in mine])
        weights = token_weights([n for share in lengths for n in share], cfg.weighting, MAX_LEN)
        for segment, weight in zip(mine, weights[:4] if rank == 0 else weights[4:], strict=True):
            segment.weight = weight
        loss, gradient = accumulate(policy, pack([s for s in mine if s.weight], 40), cfg)
        total = torch.tensor(loss)
        dist.all_reduce(total)
        for slope in gradient.values():
            dist.all_reduce(slope)
        if rank == 0:
            torch.save((total.item(), gradient), Path(folder) / f"{name}.pt")
    dist.destroy_process_group()


def test_two_ranks_take_the_step_of_one(tmp_path, llama, tokenizer) -> None:
    model = llama(spread=0.1)
    torch.multiprocessing.spawn(
        rank_step, (str(tmp_path), copy.deepcopy(model), tokenizer, list(PRESETS)), nprocs=2, join=True
    )
    policy = Policy(model, tokenizer)
    for name in PRESETS:
        cfg = Algorithm(algorithm=name)
        segments = samples(seed=3)
        weigh(segments, cfg)
        expected = accumulate(policy, [Batch.of([s for s in segments if s.weight])], cfg)
        assert_same(torch.load(tmp_path / f"{name}.pt"), expected)
