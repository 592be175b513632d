"""The policy loss, against numbers worked out by hand; every preset in full is in test_specification.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms.losses import policy_loss
from groupwise.algorithms.presets import PRESETS, Algorithm
from groupwise.algorithms.weights import token_weights

NO_KL = Algorithm(kl_coef=0.0)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio: float, advantage: float, cfg: Algorithm = NO_KL) -> tuple[float, float, dict[str, float]]:
    """(loss, d loss / d logp, metrics) of a single token of weight 1."""
    logp = t(math.log(ratio)).requires_grad_()
    loss, metrics = policy_loss(logp, t(0.0), t(advantage), t(1.0), cfg=cfg)
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item(), metrics


# -- the clipped surrogate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "high", "low"),
    [
        (1.5, +1.0, -1.2, 0.0, 1, 0),  # already raised far enough
        (1.5, -1.0, +1.5, 1.5, 0, 0),  # raised, though it was bad: must come down
        (0.5, -1.0, +0.8, 0.0, 0, 1),  # already lowered far enough
        (0.5, +1.0, -0.5, -0.5, 0, 0),  # lowered, though it was good: must go up
    ],
)
def test_the_clip_looks_at_the_sign_of_the_advantage(
    ratio: float, advantage: float, loss: float, gradient: float, high: int, low: int
) -> None:
    found, slope, metrics = one_token(ratio, advantage)
    assert found == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert (metrics["policy/clip_high"], metrics["policy/clip_low"]) == (high, low)
    assert metrics["loss/policy"] == pytest.approx(loss)


def test_shares_of_clipped_tokens() -> None:
    logp = t(1.5, 1.5, 0.5, 0.5).log()
    loss, metrics = policy_loss(logp, t(0, 0, 0, 0), t(1, -1, -1, 1), t(1, 1, 1, 1), cfg=NO_KL)
    assert loss.item() == pytest.approx(-1.2 + 1.5 + 0.8 - 0.5)
    assert metrics["policy/clip_high"] == 0.25
    assert metrics["policy/clip_low"] == 0.25
    assert metrics["policy/ratio"] == pytest.approx(1.0)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)


def test_first_update_has_ratio_one_and_a_gradient() -> None:
    logp = t(-0.7).requires_grad_()
    loss, metrics = policy_loss(logp, logp.detach(), t(1.0), t(1.0), cfg=NO_KL)
    loss.backward()
    assert loss.item() == -1.0
    assert logp.grad is not None
    assert logp.grad.item() == -1.0
    assert metrics["policy/ratio"] == metrics["policy/ratio_max"] == 1.0


def test_asymmetric_clip() -> None:
    wide = Algorithm(kl_coef=0.0, clip_range=0.2, clip_range_high=0.28)
    assert wide.clip_bounds == pytest.approx((0.8, 1.28))
    assert one_token(1.25, 1.0, wide)[0] == pytest.approx(-1.25)
    assert one_token(1.5, 1.0, wide)[0] == pytest.approx(-1.28)
    assert one_token(0.5, -1.0, wide)[0] == pytest.approx(0.8)


def test_a_clip_range_above_one_has_no_lower_bound() -> None:
    loss, gradient, _ = one_token(0.01, -1.0, Algorithm(kl_coef=0.0, clip_range=10.0))
    assert loss == pytest.approx(0.01)
    assert gradient == pytest.approx(0.01)


@pytest.mark.parametrize("difference", [1e3, -1e3])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(difference: float, advantage: float) -> None:
    logp = t(difference).requires_grad_()
    loss, metrics = policy_loss(logp, t(0.0), t(advantage), t(1.0), cfg=NO_KL)
    loss.backward()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
    assert all(math.isfinite(v) for v in [loss.item(), *metrics.values()])


# -- sequence ratio --------------------------------------------------------------------------------------------------


def test_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    cfg = Algorithm(ratio="sequence", clip_range=0.5, kl_coef=0.0)
    logp = t(0.1, 0.3, -0.2).requires_grad_()
    segment = torch.tensor([0, 0, 1])
    loss, _ = policy_loss(logp, t(0, 0, 0), t(1, 1, 2), t(0.25, 0.25, 0.5), cfg=cfg, segment_T=segment)
    first, second = math.exp(0.2), math.exp(-0.2)
    assert loss.item() == pytest.approx(-(0.5 * first + 0.5 * 2 * second))
    loss.backward()
    assert logp.grad is not None
    # Each of the two tokens moves the mean by one half, under a total weight of one half.
    assert logp.grad.tolist() == pytest.approx([-0.25 * first, -0.25 * first, -second])


def test_sequence_ratio_is_clipped_as_a_whole() -> None:
    logp = t(0.1, -0.1, 0.3).requires_grad_()  # mean 0.1: ratio 1.105
    cfg = Algorithm(algorithm="gspo")
    loss, metrics = policy_loss(
        logp, t(0, 0, 0), t(1, 1, 1), t(1 / 3, 1 / 3, 1 / 3), cfg=cfg, segment_T=torch.tensor([0, 0, 0])
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.0004)
    assert metrics["policy/clip_high"] == 1.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0, 0.0, 0.0]


def test_sequence_ratio_ignores_masked_tokens() -> None:
    cfg = Algorithm(ratio="sequence", clip_range=0.5, kl_coef=0.0)
    loss, _ = policy_loss(
        t(0.1, 5.0, 0.3), t(0, 0, 0), t(1, 1, 1), t(0.5, 0, 0.5), cfg=cfg, segment_T=torch.tensor([0, 0, 0])
    )
    assert loss.item() == pytest.approx(-math.exp(0.2))


# -- KL, entropy, sampler mismatch -----------------------------------------------------------------------------------


def test_kl_pulls_the_policy_towards_the_reference() -> None:
    logp = t(-1.0).requires_grad_()
    loss, metrics = policy_loss(logp, t(-1.0), t(0.0), t(1.0), cfg=Algorithm(kl_coef=1.0), ref_logp_T=t(-2.0))
    loss.backward()
    assert loss.item() == pytest.approx(0.3679, abs=1e-4)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(0.6321, abs=1e-4)  # descent lowers logp, and with it the KL
    assert metrics["loss/kl"] == pytest.approx(0.3679, abs=1e-4)
    assert metrics["policy/kl_ref"] == pytest.approx(0.3679, abs=1e-4)


@pytest.mark.parametrize(("kind", "value"), [("k2", 0.5), ("k3", math.exp(-1))])
def test_the_kl_is_counted_once_with_its_coefficient(kind: str, value: float) -> None:
    given = (t(-1.0), t(-1.0), t(1.0), t(1.0))
    without, _ = policy_loss(*given, cfg=Algorithm(kl_coef=0.0), ref_logp_T=t(-2.0))
    with_kl, metrics = policy_loss(*given, cfg=Algorithm(kl_coef=0.5, kl=kind), ref_logp_T=t(-2.0))
    assert (with_kl - without).item() == pytest.approx(0.5 * value)
    assert metrics["loss/policy"] == without.item()


def test_entropy_bonus_lowers_the_loss() -> None:
    entropy = t(2.0, 1.0).requires_grad_()
    cfg = Algorithm(kl_coef=0.0, entropy_coef=0.1)
    loss, metrics = policy_loss(t(0, 0), t(0, 0), t(0, 0), t(0.5, 0.5), cfg=cfg, entropy_T=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-0.15)
    assert metrics["loss/entropy"] == pytest.approx(-0.15)
    assert metrics["policy/entropy"] == pytest.approx(1.5)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_sampler_mismatch_is_weighed_and_truncated_per_token() -> None:
    cfg = Algorithm(kl_coef=0.0, sampler_correction="token_truncate")
    logp = t(-1.0, -1.0, -1.0).requires_grad_()
    sampler = t(-1.012, -3.0, -0.5).requires_grad_()  # weights e^0.012, min(e^2, 2), e^-0.5
    loss, _ = policy_loss(logp, logp.detach(), t(1, 1, 1), t(1, 1, 1), cfg=cfg, sampler_logp_T=sampler)
    loss.backward()
    by_hand = [-math.exp(0.012), -2.0, -math.exp(-0.5)]
    assert loss.item() == pytest.approx(sum(by_hand))
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx(by_hand)
    assert sampler.grad is None, "the weight itself carries no gradient"
    off, _ = policy_loss(logp, logp.detach(), t(1, 1, 1), t(1, 1, 1), cfg=NO_KL, sampler_logp_T=sampler)
    assert off.item() == pytest.approx(-3.0)


def test_a_small_gap_per_token_does_not_explode_over_a_long_answer() -> None:
    """100 tokens, each 0.012 apart: the product over the sequence is 3.32, the weight per token stays 1.012."""
    n = 100
    logp, sampler = torch.full((n,), -1.0).double(), torch.full((n,), -1.012).double()
    weights = torch.full((n,), 1 / n).double()
    cfg = Algorithm(kl_coef=0.0, sampler_correction="token_truncate", sampler_cap=3.0)
    loss, _ = policy_loss(logp, logp, torch.ones(n).double(), weights, cfg=cfg, sampler_logp_T=sampler)
    assert loss.item() == pytest.approx(-math.exp(0.012))


def test_kl_and_entropy_are_not_weighed_by_the_sampler_mismatch() -> None:
    cfg = Algorithm(kl_coef=1.0, entropy_coef=1.0, sampler_correction="token_truncate")
    loss, _ = policy_loss(
        t(-1.0), t(-1.0), t(0.0), t(1.0), cfg=cfg, ref_logp_T=t(-2.0), sampler_logp_T=t(-9.0), entropy_T=t(0.25)
    )
    assert loss.item() == pytest.approx(math.exp(-1) - 0.25)


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (Algorithm(kl_coef=0.1), "ref_logp_T"),
        (Algorithm(kl_coef=0.0, entropy_coef=0.1), "entropy_T"),
        (Algorithm(kl_coef=0.0, ratio="sequence"), "segment_T"),
    ],
)
def test_a_missing_input_is_named(cfg: Algorithm, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy_loss(t(0.0), t(0.0), t(1.0), t(1.0), cfg=cfg)


# -- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e30])
def test_a_masked_token_is_not_trained_whatever_its_numbers(ratio: str, junk: float) -> None:
    cfg = Algorithm(ratio=ratio, clip_range=0.5, kl_coef=1.0, entropy_coef=1.0, sampler_correction="token_truncate")
    live = {"old": -0.9, "advantage": 1.0, "ref": -1.5, "sampler": -1.2, "entropy": 0.3}

    def run(tail: list[float]) -> tuple[Tensor, Tensor, dict[str, float]]:
        logp = t(-1.0, *tail).requires_grad_()
        column = {name: t(value, *tail) for name, value in live.items()}
        loss, metrics = policy_loss(
            logp,
            column["old"],
            column["advantage"],
            t(1.0, *[0.0] * len(tail)),
            cfg=cfg,
            segment_T=torch.zeros(len(logp), dtype=torch.long),
            ref_logp_T=column["ref"],
            sampler_logp_T=column["sampler"],
            entropy_T=column["entropy"],
        )
        loss.backward()
        assert logp.grad is not None
        return loss, logp.grad, metrics

    alone, slope, metrics = run([])
    masked, slopes, same = run([junk, junk])
    assert masked.item() == alone.item()
    assert slopes.tolist() == [slope.item(), 0.0, 0.0]
    assert same == metrics


def test_an_infinite_ratio_at_a_masked_token() -> None:
    logp = t(-1.0, 0.0).requires_grad_()
    loss, metrics = policy_loss(logp, t(-1.0, -math.inf), t(1, 1), t(1, 0), cfg=NO_KL)
    loss.backward()
    assert loss.item() == -1.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, 0.0]
    assert metrics["policy/ratio_max"] == 1.0


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_but_masked_tokens_gives_zero(tokens: int) -> None:
    x = torch.full((tokens,), -1.0, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(tokens, dtype=torch.float64)
    cfg = Algorithm(ratio="sequence", kl_coef=1.0)
    segment = torch.zeros(tokens, dtype=torch.long)
    loss, metrics = policy_loss(x, x.detach(), zeros + 1, zeros, cfg=cfg, segment_T=segment, ref_logp_T=zeros - 2)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * tokens
    assert all(math.isfinite(v) for v in metrics.values())


# -- normalisation, micro-batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "by_hand"), [("token", 1.0), ("sequence", 2.0), ("constant", 0.5)])
def test_micro_batches_add_up_to_the_whole(mode: str, by_hand: float) -> None:
    """Sequences with losses [4] and [0, 0, 0], at most 4 tokens long; as one batch and as two."""
    advantage, segment = t(-4, 0, 0, 0), torch.tensor([0, 1, 1, 1])
    weight = t(*token_weights([1, 3], mode, max_len=4))[segment]
    whole, halves = (t(-1, -1, -1, -1).requires_grad_() for _ in range(2))
    loss, _ = policy_loss(whole, whole.detach(), advantage, weight, cfg=NO_KL)
    loss.backward()
    logged = 0.0
    for part in (slice(0, 1), slice(1, 4)):
        x = halves[part]
        loss_part, metrics = policy_loss(x, x.detach(), advantage[part], weight[part], cfg=NO_KL)
        loss_part.backward()
        logged += metrics["loss/policy"]
    assert loss.item() == pytest.approx(by_hand)
    assert logged == pytest.approx(by_hand)
    assert whole.grad is not None
    assert halves.grad is not None
    assert halves.grad.tolist() == pytest.approx(whole.grad.tolist(), abs=1e-12)
    assert whole.grad.tolist() == pytest.approx([by_hand, 0, 0, 0])


@pytest.mark.parametrize("name", PRESETS)
def test_order_of_tokens_does_not_matter(name: str) -> None:
    data = random_batch(Algorithm(algorithm=name))
    order = torch.randperm(len(data["logp_T"]), generator=torch.Generator().manual_seed(1))
    loss, _ = policy_loss(**data)
    shuffled = {k: v[order] if isinstance(v, Tensor) else v for k, v in data.items()}
    assert policy_loss(**shuffled)[0].item() == pytest.approx(loss.item(), rel=1e-12)


def random_batch(cfg: Algorithm, spread: float = 0.3) -> dict[str, Any]:
    """Four sequences with numbers that lie on both sides of every clip."""
    g = torch.Generator().manual_seed(7)
    lengths = [3, 1, 5, 2]
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    n = len(segment)
    old = -torch.rand(n, generator=g).double() - 0.1

    def near(x: Tensor) -> Tensor:
        return x + spread * torch.randn(n, generator=g).double()

    return {
        "logp_T": near(old),
        "old_logp_T": old,
        "advantage_T": t(1.2, -0.7, 0.4, -0.9)[segment],
        "weight_T": t(*token_weights(lengths, cfg.weighting, 6))[segment],
        "cfg": cfg,
        "segment_T": segment,
        "ref_logp_T": near(old),
        "sampler_logp_T": near(old),
        "entropy_T": torch.rand(n, generator=g).double(),
        "selected_T": torch.rand(n, generator=g) < 0.3,
    }
