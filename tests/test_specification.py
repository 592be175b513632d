"""The methods as their papers write them: plain loops over sequences and tokens, to which the package must agree.

Nothing here is shared with the package but the names of its options. Every preset has a function below that reads like
the published formula, with the published numbers in it; losses and gradients must be equal to rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.algorithms.advantages import (
    batch_advantages,
    gae,
    group_advantages,
    overlong_penalty,
    part_advantages,
    reward_to_go,
    whiten,
)
from groupwise.algorithms.losses import policy_loss
from groupwise.algorithms.presets import PRESETS, Algorithm
from groupwise.algorithms.selection import select_tokens
from groupwise.algorithms.weights import token_weights

MAX_LEN = 16
SPREADS = (2e-4, 0.05, 0.5, 2.0)
SEEDS = (0, 1, 2, 3)
PER_TOKEN = {"reinforce++", "reinforce++_baseline", "remax", "ppo"}
"""Presets whose advantages differ from token to token."""


@dataclass(frozen=True)
class Token:
    """A trained token: its log-probs now, at the start of the update, at the reference and as sampled."""

    now: Tensor
    old: float
    ref: float
    sampled: float
    advantage: float
    entropy: Tensor
    picked: bool


Sequences = list[list[Token]]
"""The trained tokens of every sequence that has any."""
Loss = Callable[[Sequences], Tensor]


def mean(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def token_mean(of: Callable[[Token], Tensor], sequences: Sequences) -> Tensor:
    return mean([of(t) for tokens in sequences for t in tokens])


def mean_of_token_means(of: Callable[[Token], Tensor], sequences: Sequences) -> Tensor:
    return mean([mean([of(t) for t in tokens]) for tokens in sequences])


def mean_of_token_sums(of: Callable[[Token], Tensor], sequences: Sequences) -> Tensor:
    return mean([sum(of(t) for t in tokens) for tokens in sequences])


# -- what formulas share ---------------------------------------------------------------------------------------------


def rho(t: Token) -> Tensor:
    return (t.now - t.old).exp()


def geometric_mean(tokens: list[Token]) -> Tensor:
    return mean([t.now - t.old for t in tokens]).exp()


def product(tokens: list[Token]) -> Tensor:
    return sum(t.now - t.old for t in tokens).exp()  # type: ignore[union-attr]


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -min(ratio * advantage, clip(ratio, low, high) * advantage)


def k1(t: Token) -> Tensor:
    return t.now - t.ref


def k2(t: Token) -> Tensor:
    return (t.now - t.ref) ** 2 / 2


def k3(t: Token) -> Tensor:
    return (t.ref - t.now).exp() - (t.ref - t.now) - 1


# -- the methods -----------------------------------------------------------------------------------------------------


def grpo(sequences: Sequences) -> Tensor:
    # DeepSeekMath, 2402.03300, equations 3 and 4
    return mean_of_token_means(lambda t: clipped(rho(t), t.advantage, 0.8, 1.2) + 0.04 * k3(t), sequences)


def dr_grpo(sequences: Sequences) -> Tensor:
    # Dr. GRPO, 2503.20783: one constant instead of the length
    return mean([sum(clipped(rho(t), t.advantage, 0.8, 1.2) for t in tokens) / MAX_LEN for tokens in sequences])


def dapo(sequences: Sequences) -> Tensor:
    # DAPO, 2503.14476, equation 8
    return token_mean(lambda t: clipped(rho(t), t.advantage, 0.8, 1.28), sequences)


def token_mean_ppo(sequences: Sequences) -> Tensor:
    # PPO, 1707.06347, equation 7, the expectation being over tokens
    return token_mean(lambda t: clipped(rho(t), t.advantage, 0.8, 1.2), sequences)


def gspo(sequences: Sequences) -> Tensor:
    # GSPO, 2507.18071, equations 5 and 7
    return mean([clipped(geometric_mean(s), s[0].advantage, 1 - 3e-4, 1 + 4e-4) for s in sequences])


def gspo_token(sequences: Sequences) -> Tensor:
    # GSPO, 2507.18071, equations 13 and 14: s_it = sg(s_i) pi_it / sg(pi_it)
    def one(tokens: list[Token]) -> Tensor:
        s = geometric_mean(tokens).detach()
        return mean([clipped(s * (t.now - t.now.detach()).exp(), t.advantage, 1 - 3e-4, 1 + 4e-4) for t in tokens])

    return mean([one(tokens) for tokens in sequences])


def luspo(sequences: Sequences) -> Tensor:
    # LUSPO, 2602.05261: GSPO with every sequence multiplied by its length
    return mean([len(s) * clipped(geometric_mean(s), s[0].advantage, 1 - 2e-3, 1 + 2.5e-3) for s in sequences])


def cispo(sequences: Sequences) -> Tensor:
    # ScaleRL, 2510.13786: the weight is truncated above only, at 5
    return token_mean(lambda t: -min(rho(t).item(), 5.0) * t.advantage * t.now, sequences)


def cispo_clip(sequences: Sequences) -> Tensor:
    # MiniMax-M1, 2506.13585, equations 4 and 5
    return token_mean(lambda t: -clip(rho(t), 0.8, 1.2).detach() * t.advantage * t.now, sequences)


def sapo(sequences: Sequences, positive: float = 1.0, other: float = 1.05) -> Tensor:
    # SAPO, 2511.20347
    def gate(t: Token) -> Tensor:
        tau = positive if t.advantage > 0 else other
        return torch.sigmoid(tau * (rho(t) - 1)) * 4 / tau

    return mean_of_token_means(lambda t: -gate(t) * t.advantage, sequences)


def gmpo(sequences: Sequences) -> Tensor:
    # GMPO, 2507.20673, clipped to (e^-0.4, e^0.4)
    def one(tokens: list[Token]) -> Tensor:
        advantage = tokens[0].advantage
        sign = 1 if advantage > 0 else -1
        result = torch.ones((), dtype=torch.float64)
        for t in tokens:
            signed = rho(t) ** sign
            result = result * min(signed, clip(signed, math.exp(-0.4), math.exp(0.4))) ** sign
        return -(result ** (1 / len(tokens))) * advantage

    return mean([one(tokens) for tokens in sequences])


Pair = tuple[float, float]


def vespo(sequences: Sequences, positive: Pair = (2.0, 3.0), negative: Pair = (3.0, 2.0)) -> Tensor:
    # VESPO, 2602.10693: phi(w) = w^k exp(lambda (1 - w)), w the ratio of the sequence
    def per_token(tokens: list[Token]) -> list[Tensor]:
        w = product(tokens).item()
        k, lam = positive if tokens[0].advantage >= 0 else negative
        return [-(w**k) * math.exp(lam * (1 - w)) * t.advantage * t.now for t in tokens]

    return mean([loss for tokens in sequences for loss in per_token(tokens)])


def dppo(
    sequences: Sequences, distance: Callable[[float, float], float], down: float, up: float, cap: float = 20.0
) -> Tensor:
    # DPPO, 2602.04879: no clip, but a mask where the policy has moved too far in the direction of the advantage
    def one(t: Token) -> Tensor:
        p, q = math.exp(t.now.item()), math.exp(t.old)
        outwards = p > q if t.advantage > 0 else p < q
        masked = outwards and distance(p, q) > (up if p > q else down)
        return t.now * (0.0 if masked else -min(p / q, cap) * t.advantage)

    return token_mean(one, sequences)


def total_variation(p: float, q: float) -> float:
    return abs(p - q)


def binary_kl(p: float, q: float) -> float:
    """KL(old || new) of "this token" and "any other"."""
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dppo_tv(sequences: Sequences) -> Tensor:
    # DPPO, 2602.04879, binary total variation
    return dppo(sequences, total_variation, 0.15, 0.15)


def dppo_kl(sequences: Sequences) -> Tensor:
    # DPPO, 2602.04879, binary KL
    return dppo(sequences, binary_kl, 0.05, 0.05)


def clip_cov(sequences: Sequences) -> Tensor:
    # Clip-Cov, 2505.22617: the tokens picked have no gradient; its recipe clips by 1 and 1, and dually by 10
    def one(t: Token) -> Tensor:
        loss = clipped(rho(t), t.advantage, 0.0, 2.0)
        return 0.0 * t.now if t.picked else min(loss, -10.0 * t.advantage + 0.0 * t.now) if t.advantage < 0 else loss

    return token_mean(one, sequences)


def kl_cov(sequences: Sequences) -> Tensor:
    # KL-Cov, 2505.22617: a KL penalty on the tokens picked
    return token_mean(lambda t: -rho(t) * t.advantage + (abs(t.now - t.old) if t.picked else 0.0), sequences)


def rloo(sequences: Sequences) -> Tensor:
    # RLOO, 2402.14740: the whole completion is one action; clipped as in PPO
    return mean([clipped(product(s), s[0].advantage, 0.8, 1.2) for s in sequences])


def reinforce_pp_baseline(sequences: Sequences) -> Tensor:
    # REINFORCE++, 2501.03262: with a group baseline the KL is k2, in the loss
    return token_mean(lambda t: clipped(rho(t), t.advantage, 0.8, 1.2) + 0.01 * k2(t), sequences)


def reinforce(sequences: Sequences) -> Tensor:
    # ReMax, 2310.10505; OPO, 2505.23585: the policy gradient of a whole sequence
    return mean_of_token_sums(lambda t: -t.advantage * t.now, sequences)


def gpg(sequences: Sequences) -> Tensor:
    # GPG, 2504.02546
    return token_mean(lambda t: -t.advantage * t.now, sequences)


SPECIFICATION: dict[str, Loss] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "bnpo": token_mean_ppo,
    "lite_ppo": token_mean_ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "cispo": cispo,
    "cispo_clip": cispo_clip,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "rloo": rloo,
    "reinforce++": token_mean_ppo,
    "reinforce++_baseline": reinforce_pp_baseline,
    "remax": reinforce,
    "opo": reinforce,
    "gpg": gpg,
    "maxrl": token_mean_ppo,
    "grpo_passk": grpo,
    "gdpo": grpo,
    "ppo": token_mean_ppo,
}


def test_every_preset_has_a_formula_here() -> None:
    assert SPECIFICATION.keys() == PRESETS.keys()


# -- random batches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Ragged sequences whose tokens, trained and masked, lie in random order."""

    columns: dict[str, list[float]]
    segment: list[int]
    trained: list[bool]
    picked: list[bool]

    @property
    def lengths(self) -> list[int]:
        found = [0] * (max(self.segment) + 1)
        for s, trained in zip(self.segment, self.trained, strict=True):
            found[s] += trained
        return found

    def sequences(self, now: Tensor, entropy: Tensor) -> Sequences:
        """What the formulas see; gradients flow to `now` and `entropy`."""
        found: Sequences = [[] for _ in self.lengths]
        for i, (s, trained) in enumerate(zip(self.segment, self.trained, strict=True)):
            if trained:
                numbers = {name: column[i] for name, column in self.columns.items() if name not in ("now", "entropy")}
                found[s].append(Token(now=now[i], entropy=entropy[i], picked=self.picked[i], **numbers))
        return [tokens for tokens in found if tokens]


def random_batch(seed: int, spread: float, per_token: bool = False) -> Batch:
    """Seven sequences, one of them without a trained token, one with an advantage of 0; `spread` of the log-ratio."""
    rng = random.Random(f"{seed} {spread}")
    junk = (1e30, -1e30, 1e9, math.inf, math.nan)
    rows: list[tuple[int, bool, dict[str, float]]] = []
    for s, length in enumerate((3, 1, 7, 2, 0, 5, 4)):
        advantage = 0.0 if s == 3 else rng.choice((-1, 1)) * rng.uniform(0.2, 2.0)
        drift = rng.gauss(0, spread / 2)
        for _ in range(length):
            old = rng.choice((rng.uniform(-7.0, -3.0), rng.uniform(-3.0, -0.2)))
            row = {
                "now": min(old + drift + rng.gauss(0, spread), -0.01 * rng.random() - 1e-3),
                "old": old,
                "ref": old + rng.gauss(0, 0.5),
                "sampled": old + rng.gauss(0, 0.4),
                "advantage": rng.gauss(0, 1) if per_token else advantage,
                "entropy": rng.uniform(0, 3),
            }
            rows.append((s, True, row))
        rows += [(s, False, {name: rng.choice(junk) for name in COLUMNS}) for _ in range(rng.randint(1, 3))]
    rng.shuffle(rows)
    return Batch(
        {name: [row[name] for _, _, row in rows] for name in COLUMNS},
        [s for s, _, _ in rows],
        [trained for _, trained, _ in rows],
        [rng.random() < 0.3 for _ in rows],
    )


COLUMNS = ("now", "old", "ref", "sampled", "advantage", "entropy")


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def call(
    cfg: Algorithm, batch: Batch, *, dtype: torch.dtype = torch.float64, **left_out: None
) -> tuple[Tensor, Tensor, Tensor]:
    """The package's loss and its gradients with respect to log-probs and entropies."""
    column = {name: double(values).to(dtype) for name, values in batch.columns.items()}
    per_sequence = token_weights(batch.lengths, cfg.weighting, MAX_LEN)
    weight = [per_sequence[s] * trained for s, trained in zip(batch.segment, batch.trained, strict=True)]
    now, entropy = column["now"].requires_grad_(), column["entropy"].requires_grad_()
    given: dict[str, Any] = {
        "segment_T": torch.tensor(batch.segment),
        "ref_logp_T": column["ref"],
        "sampler_logp_T": column["sampled"],
        "entropy_T": entropy,
        "selected_T": torch.tensor(batch.picked),
    }
    loss, metrics = policy_loss(
        now, column["old"], column["advantage"], double(weight).to(dtype), cfg=cfg, **{**given, **left_out}
    )
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
    return loss.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in (now, entropy))


def assert_agrees(cfg: Algorithm, formula: Loss, batch: Batch, **left_out: None) -> None:
    now, entropy = (double(batch.columns[name]).requires_grad_() for name in ("now", "entropy"))
    expected = formula(batch.sequences(now, entropy))
    slopes = torch.autograd.grad(expected, (now, entropy), allow_unused=True)
    found, *gradients = call(cfg, batch, **left_out)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-11)
    for gradient, slope in zip(gradients, slopes, strict=True):
        by_hand = torch.zeros_like(now) if slope is None else slope
        assert gradient.tolist() == pytest.approx(by_hand.tolist(), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_are_the_paper_s(name: str, spread: float) -> None:
    for seed in SEEDS:
        batch = random_batch(seed, spread, per_token=name in PER_TOKEN)
        assert_agrees(Algorithm(algorithm=name), SPECIFICATION[name], batch)


@pytest.mark.parametrize(
    ("low", "high", "measure"),
    [
        (0.8, 1.28, lambda s: [rho(t).item() for t in s]),
        (1 / 3, 3.0, lambda s: [rho(t).item() for t in s]),
        (math.exp(-0.4), math.exp(0.4), lambda s: [rho(t).item() for t in s]),
        (1 - 3e-4, 1 + 4e-4, lambda s: [geometric_mean(s).item()]),
        (1 - 2e-3, 1 + 2.5e-3, lambda s: [geometric_mean(s).item()]),
        (0.8, 1.2, lambda s: [product(s).item()]),
        (-0.15, 0.15, lambda s: [math.exp(t.now.item()) - math.exp(t.old) for t in s]),
    ],
    ids=["DAPO", "dual clip", "GMPO", "GSPO", "LUSPO", "RLOO", "DPPO"],
)
def test_the_batches_reach_both_sides_of_every_clip(
    low: float, high: float, measure: Callable[[list[Token]], list[float]]
) -> None:
    seen = set()
    for spread in SPREADS:
        for seed in SEEDS:
            batch = random_batch(seed, spread)
            for tokens in batch.sequences(double(batch.columns["now"]), double(batch.columns["entropy"])):
                sign = math.copysign(1, tokens[0].advantage)
                seen |= {(sign, "low" if x < low else "high" if x > high else "inside") for x in measure(tokens)}
    assert len(seen) == 6


# -- gradients, derived by hand --------------------------------------------------------------------------------------


def inside(ratio: float, advantage: float, low: float, high: float) -> bool:
    """Whether a clipped surrogate still has a gradient."""
    return ratio <= high if advantage > 0 else ratio >= low


def grpo_slope(t: Token, tokens: list[Token]) -> float:
    r = rho(t).item()
    surrogate = -r * t.advantage if inside(r, t.advantage, 0.8, 1.2) else 0.0
    return (surrogate + 0.04 * (1 - math.exp(t.ref - t.now.item()))) / len(tokens)


def gspo_slope(t: Token, tokens: list[Token]) -> float:
    # 2507.18071, equation 10
    s = geometric_mean(tokens).item()
    return -s * t.advantage / len(tokens) if inside(s, t.advantage, 1 - 3e-4, 1 + 4e-4) else 0.0


def luspo_slope(t: Token, tokens: list[Token]) -> float:
    s = geometric_mean(tokens).item()
    return -s * t.advantage if inside(s, t.advantage, 1 - 2e-3, 1 + 2.5e-3) else 0.0


def gmpo_slope(t: Token, tokens: list[Token]) -> float:
    # 2507.20673
    def bounded(x: Token) -> float:
        log_ratio = x.now.item() - x.old
        return min(log_ratio, 0.4) if t.advantage > 0 else max(log_ratio, -0.4)

    free = bounded(t) == t.now.item() - t.old
    return -t.advantage * math.exp(mean([bounded(x) for x in tokens])) / len(tokens) * free


def sapo_slope(t: Token, tokens: list[Token]) -> float:
    # 2511.20347: 4 p (1 - p) = sech^2(tau (rho - 1) / 2)
    tau = 1.0 if t.advantage > 0 else 1.05
    weight = 1 / math.cosh(tau / 2 * (rho(t).item() - 1)) ** 2
    return -weight * rho(t).item() * t.advantage / len(tokens)


def rloo_slope(t: Token, tokens: list[Token]) -> float:
    r = product(tokens).item()
    return -r * t.advantage if inside(r, t.advantage, 0.8, 1.2) else 0.0


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("grpo", grpo_slope),
        ("gspo", gspo_slope),
        ("gspo_token", gspo_slope),
        ("luspo", luspo_slope),
        ("gmpo", gmpo_slope),
        ("sapo", sapo_slope),
        ("rloo", rloo_slope),
    ],
)
def test_gradient_is_the_one_derived_by_hand(
    name: str, spread: float, slope: Callable[[Token, list[Token]], float]
) -> None:
    for seed in SEEDS:
        batch = random_batch(seed, spread)
        sequences = batch.sequences(double(batch.columns["now"]), double(batch.columns["entropy"]))
        by_hand = {t.now.item(): slope(t, tokens) / len(sequences) for tokens in sequences for t in tokens}
        _, gradient, _ = call(Algorithm(algorithm=name), batch)
        expected = [by_hand[x] if live else 0.0 for x, live in zip(batch.columns["now"], batch.trained, strict=True)]
        assert gradient.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-11)


# -- options that no preset sets -------------------------------------------------------------------------------------


def surrogate(t: Token) -> Tensor:
    """GRPO's, without KL."""
    return clipped(rho(t), t.advantage, 0.8, 1.2)


def dual_clip(sequences: Sequences) -> Tensor:
    # Dual-clip PPO, 1912.09729
    def one(t: Token) -> Tensor:
        both = min(rho(t) * t.advantage, clip(rho(t), 0.8, 1.2) * t.advantage)
        return -(max(both, both * 0 + 3.0 * t.advantage) if t.advantage < 0 else both)

    return mean_of_token_means(one, sequences)


def gspo_dual_clip(sequences: Sequences) -> Tensor:
    # The same with the ratio of a sequence
    def one(tokens: list[Token]) -> Tensor:
        s, advantage = geometric_mean(tokens), tokens[0].advantage
        both = min(s * advantage, clip(s, 1 - 3e-4, 1 + 4e-4) * advantage)
        return -(max(both, both * 0 + 1.1 * advantage) if advantage < 0 else both)

    return mean([one(tokens) for tokens in sequences])


def with_kl(kl: Callable[[Token], Tensor]) -> Loss:
    return lambda sequences: mean_of_token_means(lambda t: surrogate(t) + 0.7 * kl(t), sequences)


def weighted(kl: Callable[[Token], Tensor]) -> Callable[[Token], Tensor]:
    # DeepSeek-V3.2, 2512.02556, equation 7
    return lambda t: rho(t) * kl(t)


def straight_through(kl: Callable[[Token], Tensor]) -> Callable[[Token], Tensor]:
    # The value of one estimator, the gradient of k2: logp - logp of the reference
    return lambda t: kl(t).detach() + (t.now - t.now.detach()) * (t.now.item() - t.ref)


def entropy_bonus(sequences: Sequences) -> Tensor:
    return mean_of_token_means(lambda t: surrogate(t) - 0.3 * t.entropy, sequences)


def top_entropy(sequences: Sequences) -> Tensor:
    # 2506.01939: only the surrogate of the tokens picked; KL, entropy and denominator are of all tokens
    return mean_of_token_means(
        lambda t: surrogate(t) * t.picked + 0.1 * k3(t) - 0.2 * t.entropy,
        sequences,
    )


def mismatch(t: Token, tokens: list[Token], level: str, bound: str) -> float:
    """exp(old - sampled) within [0.6, 1.5]."""
    of = [t] if level == "token" else tokens
    w = math.exp(sum(x.old - x.sampled for x in of))
    if bound == "mask":
        return w if 0.6 <= w <= 1.5 else 0.0
    return min(max(w, 0.6), 1.5)


def corrected(level: str, bound: str) -> Loss:
    # Truncated importance sampling and its masked and sequence forms
    def formula(sequences: Sequences) -> Tensor:
        def one(t: Token, tokens: list[Token]) -> Tensor:
            return mismatch(t, tokens, level, bound) * surrogate(t) + 0.1 * k3(t) - 0.2 * t.entropy

        return mean([mean([one(t, tokens) for t in tokens]) for tokens in sequences])

    return formula


def off_policy_mask(since: Callable[[Token], float]) -> Loss:
    # DeepSeek-V3.2, 2512.02556, equations 8 and 9
    def formula(sequences: Sequences) -> Tensor:
        def keep(tokens: list[Token]) -> bool:
            fell_by = mean([since(t) - t.now.item() for t in tokens])
            return tokens[0].advantage >= 0 or fell_by <= 0.05

        return mean([mean([keep(tokens) * surrogate(t) + 0.1 * k3(t) for t in tokens]) for tokens in sequences])

    return formula


def product_with_kl(sequences: Sequences) -> Tensor:
    return mean([clipped(product(s), s[0].advantage, 0.8, 1.2) + mean([0.04 * k3(t) for t in s]) for s in sequences])


def vespo_reading_the_sampler(sequences: Sequences) -> Tensor:
    # VESPO, 2602.10693: w is the ratio to the policy that sampled, and there is no second weight
    def per_token(tokens: list[Token]) -> list[Tensor]:
        w = product(tokens).item() * math.exp(sum(t.old - t.sampled for t in tokens))
        k, lam = (2.0, 3.0) if tokens[0].advantage >= 0 else (3.0, 2.0)
        return [-(w**k) * math.exp(lam * (1 - w)) * t.advantage * t.now for t in tokens]

    return mean([loss for tokens in sequences for loss in per_token(tokens)])


def gspo_corrected(sequences: Sequences) -> Tensor:
    return mean(
        [
            mismatch(s[0], s, "sequence", "truncate") * clipped(geometric_mean(s), s[0].advantage, 1 - 3e-4, 1 + 4e-4)
            for s in sequences
        ]
    )


def everything(sequences: Sequences) -> Tensor:
    """Dual clip, correction, off-policy mask, selection, weighted KL and entropy at once, as a token mean."""

    def one(t: Token, tokens: list[Token]) -> Tensor:
        both = min(rho(t) * t.advantage, clip(rho(t), 0.8, 1.28) * t.advantage)
        part = -(max(both, both * 0 + 3.0 * t.advantage) if t.advantage < 0 else both)
        fell_by = mean([x.sampled - x.now.item() for x in tokens])
        keep = (t.advantage >= 0 or fell_by <= 0.05) and t.picked
        return keep * mismatch(t, tokens, "token", "truncate") * part + 0.1 * rho(t) * k3(t) - 0.2 * t.entropy

    return mean([one(t, tokens) for tokens in sequences for t in tokens])


BOUNDS = {"sampler_floor": 0.6, "sampler_cap": 1.5}
NO_KL = {"kl_coef": 0.0}
KL_AND_ENTROPY = {"kl_coef": 0.1, "entropy_coef": 0.2}
KINDS = {"k1": k1, "k2": k2, "k3": k3}

OPTIONS: list[tuple[str, dict[str, Any], Loss]] = [
    ("dual clip", {**NO_KL, "dual_clip": 3.0}, dual_clip),
    ("dual clip of a sequence", {"algorithm": "gspo", "dual_clip": 1.1}, gspo_dual_clip),
    *((f"{k} direct", {"kl": k, "kl_coef": 0.7}, with_kl(KINDS[k])) for k in ("k2", "k3")),
    *(
        (f"{k} {g.__name__}", {"kl": k, "kl_coef": 0.7, "kl_gradient": g.__name__}, with_kl(g(KINDS[k])))
        for g in (weighted, straight_through)
        for k in KINDS
    ),
    ("KL in the reward", {"kl_coef": 0.7, "kl_in": "reward"}, with_kl(lambda t: 0.0 * t.now)),
    ("entropy bonus", {**NO_KL, "entropy_coef": 0.3}, entropy_bonus),
    ("top entropy", {**KL_AND_ENTROPY, "selection": "top_entropy"}, top_entropy),
    *(
        (f"{level} {bound}", {**KL_AND_ENTROPY, **BOUNDS, "sampler_correction": f"{level}_{bound}"}, formula)
        for level in ("token", "sequence")
        for bound in ("truncate", "mask")
        for formula in [corrected(level, bound)]
    ),
    ("off-policy mask", {"kl_coef": 0.1, "off_policy_limit": 0.05}, off_policy_mask(lambda t: t.sampled)),
    (
        "soft gates of other temperatures",
        {"algorithm": "sapo", "sapo_temperatures": (0.7, 2.3)},
        lambda sequences: sapo(sequences, 0.7, 2.3),
    ),
    (
        "other weights of sequences",
        {"algorithm": "vespo", "vespo_positive": (1.3, 2.7), "vespo_negative": (0.7, 1.1)},
        lambda sequences: vespo(sequences, (1.3, 2.7), (0.7, 1.1)),
    ),
    (
        "uneven bounds on total variation",
        {"algorithm": "dppo_tv", "clip_range": 0.05, "clip_range_high": 0.1, "ratio_cap": 1.5},
        lambda sequences: dppo(sequences, total_variation, 0.05, 0.1, 1.5),
    ),
    (
        "uneven bounds on KL",
        {"algorithm": "dppo_kl", "clip_range": 0.01, "clip_range_high": 0.1, "ratio_cap": 1.5},
        lambda sequences: dppo(sequences, binary_kl, 0.01, 0.1, 1.5),
    ),
    ("product over the sequence", {"ratio": "sequence_product"}, product_with_kl),
    ("GSPO corrected", {"algorithm": "gspo", **BOUNDS, "sampler_correction": "sequence_truncate"}, gspo_corrected),
    (
        "everything at once",
        {
            **KL_AND_ENTROPY,
            **BOUNDS,
            "algorithm": "dapo",
            "dual_clip": 3.0,
            "kl_gradient": "weighted",
            "sampler_correction": "token_truncate",
            "off_policy_limit": 0.05,
            "selection": "top_entropy",
        },
        everything,
    ),
]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("parts", "formula"), [o[1:] for o in OPTIONS], ids=[o[0] for o in OPTIONS])
def test_option_changes_loss_and_gradient_as_its_paper_says(
    parts: dict[str, Any], formula: Loss, spread: float
) -> None:
    for seed in SEEDS:
        assert_agrees(Algorithm(**parts), formula, random_batch(seed, spread))


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_vespo_takes_the_sampler_s_mismatch_into_its_ratio(correction: str) -> None:
    unbounded = Algorithm(algorithm="vespo", sampler_correction=correction, sampler_cap=1e9)
    for seed in SEEDS:
        assert_agrees(unbounded, vespo_reading_the_sampler, random_batch(seed, 0.5))


def test_off_policy_mask_goes_by_the_old_policy_where_the_sampler_s_log_probs_are_unknown() -> None:
    cfg = Algorithm(kl_coef=0.1, off_policy_limit=0.05)
    for seed in SEEDS:
        assert_agrees(cfg, off_policy_mask(lambda t: t.old), random_batch(seed, 0.5), sampler_logp_T=None)


@pytest.mark.parametrize("spread", SPREADS)
def test_gspo_token_has_an_advantage_per_token(spread: float) -> None:
    for seed in SEEDS:
        assert_agrees(Algorithm(algorithm="gspo_token"), gspo_token, random_batch(seed, spread, per_token=True))


@pytest.mark.parametrize("mode", ["sequence", "token", "sum", "constant"])
def test_weights_are_those_of_the_mean_they_stand_for(mode: str) -> None:
    rng = random.Random(mode)
    for _ in range(20):
        lengths = [rng.choice((0, 1, 2, 5, 16)) for _ in range(rng.randint(1, 9))]
        counted, total = sum(n > 0 for n in lengths), sum(lengths)
        of = {
            "sequence": lambda n, counted=counted: 1 / (counted * n),
            "token": lambda n, total=total: 1 / total,
            "sum": lambda n, counted=counted: 1 / counted,
            "constant": lambda n, counted=counted: 1 / (counted * MAX_LEN),
        }[mode]
        expected = [of(n) if n else 0.0 for n in lengths]
        assert token_weights(lengths, mode, MAX_LEN) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


# -- which tokens are picked -----------------------------------------------------------------------------------------


def random_tokens(seed: int, n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    columns = ("logp_T", "advantage_T", "entropy_T")
    found = dict(zip(columns, 2 * torch.randn(3, n, generator=g, dtype=torch.float64), strict=True))
    return {**found, "entropy_T": found["entropy_T"].abs()}


def covariances(logp: list[float], advantage: list[float]) -> list[float]:
    # 2505.22617, equation 8
    mean_logp, mean_advantage = mean(logp), mean(advantage)
    return [(x - mean_logp) * (a - mean_advantage) for x, a in zip(logp, advantage, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 9, 50, 1000])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.5])
def test_top_entropy_picks_what_reaches_the_quantile(n: int, share: float) -> None:
    tokens = random_tokens(n, n)
    ordered = sorted(tokens["entropy_T"].tolist())
    place = (1 - share) * (n - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = below + (above - below) * (place - math.floor(place))
    cfg = Algorithm(selection="top_entropy", selection_share=share)
    found = select_tokens(cfg, **tokens, seed=0).tolist()
    assert found == [h >= threshold - 1e-12 for h in tokens["entropy_T"].tolist()]
    assert any(found)


@pytest.mark.parametrize("n", [1, 2, 9, 50, 1000])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.5])
def test_kl_cov_picks_the_highest_covariances(n: int, share: float) -> None:
    tokens = random_tokens(n, n)
    cov = covariances(tokens["logp_T"].tolist(), tokens["advantage_T"].tolist())
    picked = sorted(range(n), key=lambda i: -cov[i])[: max(1, int(share * n))]
    found = select_tokens(Algorithm(algorithm="kl_cov", selection_share=share), **tokens, seed=0)
    assert sorted(picked) == found.nonzero().flatten().tolist()


@pytest.mark.parametrize("n", [50, 1000])
@pytest.mark.parametrize("share", [0.002, 0.01, 0.9])
def test_clip_cov_draws_from_the_covariances_within_its_bounds(n: int, share: float) -> None:
    tokens = random_tokens(n, n)
    cov = covariances(tokens["logp_T"].tolist(), tokens["advantage_T"].tolist())
    eligible = {i for i in range(n) if 1.0 < cov[i] < 5.0}
    cfg = Algorithm(algorithm="clip_cov", selection_share=share)
    draws = []
    for seed in (0, 0, 1, 2, 3):
        found = set(select_tokens(cfg, **tokens, seed=seed).nonzero().flatten().tolist())
        assert len(found) == min(len(eligible), max(1, int(share * n)))
        assert found <= eligible
        draws.append(found)
    assert draws[0] == draws[1]
    if share < 0.9:
        assert any(draw != draws[0] for draw in draws)


@pytest.mark.parametrize(("name", "count"), [("clip_cov", 2), ("kl_cov", 20)])
def test_shares_of_tokens_picked_are_the_paper_s(name: str, count: int) -> None:
    # 2505.22617: 2e-4 for Clip-Cov, 2e-3 for KL-Cov
    assert select_tokens(Algorithm(algorithm=name), **random_tokens(1, 10_000), seed=0).sum() == count


def test_clip_cov_picks_nothing_where_no_covariance_is_within_its_bounds() -> None:
    zeros = torch.zeros(9)
    found = select_tokens(Algorithm(algorithm="clip_cov"), logp_T=zeros, advantage_T=zeros, entropy_T=zeros, seed=0)
    assert found.tolist() == [False] * 9


# -- advantages ------------------------------------------------------------------------------------------------------

Rewards = list[float | None]


def scored(rewards: Sequence[float | None]) -> list[float]:
    return [r for r in rewards if r is not None]


def deviation(values: list[float], ddof: int) -> float:
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def others(rewards: Rewards, i: int) -> list[float]:
    return [r for j, r in enumerate(rewards) if j != i and r is not None]


def has_signal(rewards: Rewards) -> bool:
    found = scored(rewards)
    return len(found) >= 2 and max(found) - min(found) > 1e-9


def gap(rewards: Rewards, i: int, baseline: str, lengths: list[int], greedy: float) -> float:
    """By how much a reward beats what it is compared with."""
    reward = rewards[i]
    assert reward is not None
    if baseline == "mean":  # 2402.03300
        return reward - mean(scored(rewards))
    if baseline == "leave_one_out":  # 2402.14740
        return reward - mean(others(rewards, i))
    if baseline == "length_weighted":  # 2505.23585
        pairs = [(n, r) for n, r in zip(lengths, rewards, strict=True) if r is not None]
        return reward - sum(n * r for n, r in pairs) / sum(n for n, _ in pairs)
    if baseline == "best_of_others":  # 2503.19595: max over all minus max over the others
        return max(scored(rewards)) - max(others(rewards, i))
    if baseline == "greedy":  # 2310.10505
        return reward - greedy
    return reward


def each(rewards: Rewards, of: Callable[[int], float]) -> Rewards:
    return [None if r is None else of(i) for i, r in enumerate(rewards)]


def no_signal(rewards: Rewards) -> Rewards:
    return each(rewards, lambda i: 0.0)


def random_group(rng: random.Random) -> Rewards:
    size = rng.randint(1, 9)
    kind = rng.random()
    if kind < 0.2:
        return [rng.choice((0.0, 1.0, 0.3))] * size
    if kind < 0.5:
        return [rng.choice((0.0, 1.0, None)) for _ in range(size)]
    return [None if rng.random() < 0.1 else rng.uniform(0, 3) for _ in range(size)]


def random_groups(seed: str, count: int = 8) -> tuple[list[Rewards], list[list[int]], Rewards]:
    rng = random.Random(seed)
    groups = [random_group(rng) for _ in range(count)]
    return groups, [[rng.randint(1, 50) for _ in g] for g in groups], [rng.uniform(0, 1) for _ in groups]


def assert_equal(found: Sequence[float | None], expected: Rewards) -> None:
    assert [x is None for x in found] == [x is None for x in expected]
    assert scored(found) == pytest.approx(scored(expected), rel=1e-9, abs=1e-9)


GROUP_BASELINES = ("mean", "leave_one_out", "length_weighted", "best_of_others")


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "mean", "none"])
@pytest.mark.parametrize("baseline", GROUP_BASELINES)
def test_group_advantages_with_each_baseline_and_scale(baseline: str, scale: str, ddof: int) -> None:
    groups, lengths, _ = random_groups(f"{baseline} {scale} {ddof}", 40)
    for rewards, length in zip(groups, lengths, strict=True):
        expected = no_signal(rewards)
        if has_signal(rewards):
            by = {"std": lambda x: deviation(x, ddof) + 1e-4, "mean": lambda x: mean(x) + 1e-4, "none": lambda x: 1.0}
            divisor = by[scale](scored(rewards))
            expected = each(rewards, lambda i, r=rewards, n=length, d=divisor: gap(r, i, baseline, n, 0.0) / d)
        found = group_advantages(
            rewards,
            baseline=baseline,  # type: ignore[arg-type]
            scale=scale,  # type: ignore[arg-type]
            ddof=ddof,
            eps=1e-4,
            lengths_G=length,
        )
        assert_equal(found, expected)


@pytest.mark.parametrize("baseline", ["greedy", "none", "critic"])
def test_baselines_that_need_no_group_take_a_lone_reward_and_equal_ones(baseline: str) -> None:
    groups, lengths, greedy = random_groups(baseline, 40)
    for rewards, length, start in zip(groups, lengths, greedy, strict=True):
        assert start is not None
        expected = each(rewards, lambda i, r=rewards, n=length, g=start: gap(r, i, baseline, n, g))
        found = group_advantages(rewards, baseline=baseline, scale="none", greedy=start)  # type: ignore[arg-type]
        assert_equal(found, expected)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("baseline", GROUP_BASELINES)
def test_batch_deviation_is_that_of_all_rewards_of_the_step(baseline: str, ddof: int) -> None:
    # Lite PPO, 2508.08221: centred per group, scaled per batch
    cfg = Algorithm(baseline=baseline, scale="batch_std", ddof=ddof, eps=1e-6)  # type: ignore[arg-type]
    for seed in SEEDS:
        groups, lengths, _ = random_groups(f"{baseline} {seed}")
        divisor = deviation([r for g in groups for r in scored(g)], ddof) + 1e-6
        found = batch_advantages(groups, cfg=cfg, lengths_PG=lengths)
        for rewards, length, values in zip(groups, lengths, found, strict=True):
            expected = no_signal(rewards)
            if has_signal(rewards):
                expected = each(rewards, lambda i, r=rewards, n=length, d=divisor: gap(r, i, baseline, n, 0.0) / d)
            assert_equal(values, expected)


@pytest.mark.parametrize("baseline", GROUP_BASELINES)
def test_signal_share_counts_the_samples_of_groups_whose_rewards_differ(baseline: str) -> None:
    # GPG, 2504.02546: alpha = B / (B - M), M the samples without gradient
    cfg = Algorithm(baseline=baseline, scale="signal_share", eps=0.0)  # type: ignore[arg-type]
    for seed in SEEDS:
        groups, lengths, _ = random_groups(f"{baseline} {seed}")
        with_signal = sum(len(scored(g)) for g in groups if has_signal(g))
        alpha = sum(len(scored(g)) for g in groups) / with_signal
        found = batch_advantages(groups, cfg=cfg, lengths_PG=lengths)
        for rewards, length, values in zip(groups, lengths, found, strict=True):
            expected = no_signal(rewards)
            if has_signal(rewards):
                expected = each(rewards, lambda i, r=rewards, n=length, a=alpha: gap(r, i, baseline, n, 0.0) * a)
            assert_equal(values, expected)


def grpo_advantage(rewards: list[float]) -> list[float]:
    # 2402.03300, with the population deviation
    centre, width = mean(rewards), deviation(rewards, 0)
    return [(r - centre) / (width + 1e-8) for r in rewards]


def dr_grpo_advantage(rewards: list[float]) -> list[float]:
    # 2503.20783
    return [r - mean(rewards) for r in rewards]


def rloo_advantage(rewards: list[float]) -> list[float]:
    # 2402.14740, rearranged: k / (k - 1) times the distance from the mean
    k = len(rewards)
    return [k / (k - 1) * (r - mean(rewards)) for r in rewards]


def passk_advantage(rewards: list[float]) -> list[float]:
    # 2503.19595: the best alone is credited, with its lead over the second; sample deviation
    best, second = sorted(rewards, reverse=True)[:2]
    lead = (best - second) / (deviation(rewards, 1) + 1e-6)
    return [lead if r == best else 0.0 for r in rewards]


def maxrl_advantage(rewards: list[float]) -> list[float]:
    # 2602.02710: the gradient of log p(right), (r - mean) / mean
    return [(r - mean(rewards)) / (mean(rewards) + 1e-8) for r in rewards]


GROUPWISE: dict[str, Callable[[list[float]], list[float]]] = {
    **dict.fromkeys(
        [name for name in PRESETS if name.startswith(("gspo", "cispo", "dppo"))]
        + ["grpo", "dapo", "bnpo", "luspo", "sapo", "gmpo", "vespo", "clip_cov", "kl_cov"],
        grpo_advantage,
    ),
    "dr_grpo": dr_grpo_advantage,
    "reinforce++_baseline": dr_grpo_advantage,
    "rloo": rloo_advantage,
    "grpo_passk": passk_advantage,
    "maxrl": maxrl_advantage,
}
ELSEWHERE = {"lite_ppo", "gpg", "opo", "remax", "reinforce++", "ppo", "gdpo"}
"""Presets whose advantages take more than the rewards of one group; each has a test of its own."""


def test_every_preset_has_a_formula_for_its_advantage() -> None:
    assert GROUPWISE.keys() | ELSEWHERE == PRESETS.keys()


@pytest.mark.parametrize("name", GROUPWISE)
def test_advantages_of_a_preset_are_the_paper_s(name: str) -> None:
    for seed in SEEDS:
        groups, lengths, greedy = random_groups(f"{seed}")
        found = batch_advantages(groups, cfg=Algorithm(algorithm=name), lengths_PG=lengths, greedy_P=greedy)
        for rewards, values in zip(groups, found, strict=True):
            expected = no_signal(rewards)
            if has_signal(rewards):
                by_paper = iter(GROUPWISE[name](scored(rewards)))
                expected = each(rewards, lambda i, numbers=by_paper: next(numbers))
            assert_equal(values, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Rewards (1, 0, 0, 0) and (1, 1): mean of all 1/2, deviation 1/2.
        ("lite_ppo", [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0]]),
        # Four samples of six are in a group with signal.
        ("gpg", [[1.125, -0.375, -0.375, -0.375], [0.0, 0.0]]),
        # Lengths (2, 1, 1, 1): baseline 2/5.
        ("opo", [[0.6, -0.4, -0.4, -0.4], [0.0, 0.0]]),
        # Greedy answers worth 0.25 and 0.
        ("remax", [[0.75, -0.25, -0.25, -0.25], [1.0, 1.0]]),
        ("reinforce++", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0]]),
        ("ppo", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0]]),
    ],
)
def test_advantages_of_presets_that_look_beyond_the_group(name: str, expected: list[list[float]]) -> None:
    found = batch_advantages(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0]],
        cfg=Algorithm(algorithm=name),
        lengths_PG=[[2, 1, 1, 1], [3, 4]],
        greedy_P=[0.25, 0.0],
    )
    for values, by_hand in zip(found, expected, strict=True):
        assert values == pytest.approx(by_hand, abs=1e-6)


Parts = Mapping[str, float | None]


def random_parts(seed: int) -> list[list[Parts | None]]:
    rng = random.Random(seed)

    def sample() -> Parts | None:
        if rng.random() < 0.1:
            return None
        abstains = rng.random() < 0.2
        return {"right": rng.choice((0.0, 1.0)), "form": None if abstains else rng.uniform(0, 1), "same": 0.5}

    return [[sample() for _ in range(rng.randint(2, 8))] for _ in range(6)]


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalises_every_part_before_it_adds_them_up(seed: int) -> None:
    # GDPO, 2601.05242; sample deviation and 1e-4 as in its code
    cfg, weights = Algorithm(algorithm="gdpo"), {"right": 1.0, "form": 0.25, "same": 3.0}
    groups = random_parts(seed)
    found = part_advantages(groups, weights, cfg=cfg)
    totals: list[float] = []
    for group, values in zip(groups, found, strict=True):
        expected: Rewards = [None if sample is None else 0.0 for sample in group]
        for part, weight in weights.items():
            column = [None if sample is None else sample[part] for sample in group]
            if has_signal(column):
                centre, width = mean(scored(column)), deviation(scored(column), 1)
                for i, x in enumerate(column):
                    if x is not None:
                        expected[i] += weight * (x - centre) / (width + 1e-4)  # type: ignore[operator]
        assert_equal(values, expected)
        totals += scored(expected)
    flat = [x for values in found for x in values]
    whitened = scored(whiten(flat, ddof=cfg.ddof, eps=cfg.eps))
    assert whitened == pytest.approx([(x - mean(totals)) / (deviation(totals, 1) + 1e-4) for x in totals], rel=1e-9)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.1])
def test_whitening_brings_mean_to_zero_and_deviation_to_one(ddof: int, eps: float) -> None:
    rng = random.Random(ddof)
    values: Rewards = [None if rng.random() < 0.2 else rng.gauss(3, 2) for _ in range(50)]
    known = scored(values)
    expected = each(values, lambda i: (values[i] - mean(known)) / (deviation(known, ddof) + eps))  # type: ignore[operator]
    assert_equal(whiten(values, ddof=ddof, eps=eps), expected)


@pytest.mark.parametrize("values", [[], [None], [2.0], [0.1] * 7, [None, 5.0, 5.0]], ids=str)
def test_whitening_without_spread_gives_zeros(values: Rewards) -> None:
    assert whiten(values) == no_signal(values)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_reward_to_go_is_the_discounted_sum_of_what_follows(gamma: float) -> None:
    rng = random.Random(1)
    for n in (0, 1, 2, 17):
        rewards = [rng.gauss(0, 1) for _ in range(n)]
        expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]
        assert reward_to_go(rewards, gamma) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma: float, lam: float) -> None:
    # 1506.02438, equation 16
    rng = random.Random(2)
    for n in (0, 1, 2, 17):
        rewards, values = [rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n + 1)]
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
        expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
        assert advantages == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert returns == pytest.approx([expected[t] + values[t] for t in range(n)], rel=1e-9, abs=1e-12)


def test_reinforce_plus_plus_whitens_the_reward_to_go_of_every_token() -> None:
    # REINFORCE++, 2501.03262: A_t = r - beta sum of KL from t on, then normalised over the tokens of the batch
    rng = random.Random(3)
    kls, rewards = [[rng.gauss(0, 1) for _ in range(n)] for n in (3, 1, 6)], [1.0, 0.0, 1.0]
    expected = [r - 0.01 * sum(kl[t:]) for kl, r in zip(kls, rewards, strict=True) for t in range(len(kl))]
    found = []
    for kl, reward in zip(kls, rewards, strict=True):
        found += reward_to_go([-0.01 * x for x in kl[:-1]] + [reward - 0.01 * kl[-1]])
    centre, width = mean(expected), deviation(expected, 1)
    assert scored(whiten(found)) == pytest.approx([(a - centre) / width for a in expected], abs=1e-6)


def test_overlong_penalty_is_that_of_dapo() -> None:
    # 2503.14476, equation 13, with its own numbers: 20,480 tokens of which the last 4,096 are punished
    longest, cache = 20_480, 4_096
    for length in (1, 16_383, 16_384, 16_385, 18_000, 20_479, 20_480, 20_481, 30_000):
        if length <= longest - cache:
            reward = 0.0
        elif length <= longest:
            reward = ((longest - cache) - length) / cache
        else:
            reward = -1.0
        assert overlong_penalty(length, longest, 0.2) == pytest.approx(-reward, abs=1e-9)
    assert [overlong_penalty(n, 100, 0.0) for n in (1, 99, 100)] == [0.0, 0.0, 0.0]


# -- extremes --------------------------------------------------------------------------------------------------------


def uniform_batch(lengths: list[int], now: float, old: float, advantages: list[float], trained: bool = True) -> Batch:
    segment = [s for s, n in enumerate(lengths) for _ in range(n)]
    count = len(segment)
    row = {"now": now, "old": old, "ref": old, "sampled": old, "entropy": 1.0}
    columns = {name: [value] * count for name, value in row.items()}
    columns["advantage"] = [advantages[s] for s in segment]
    return Batch(columns, segment, [trained] * count, [i % 3 == 0 for i in range(count)])


EXTREMES: dict[str, Batch] = {
    "log-ratio +100": uniform_batch([3, 3, 1], -0.5, -100.5, [1.0, -1.0, 0.0]),
    "log-ratio -100": uniform_batch([3, 3, 1], -100.5, -0.5, [1.0, -1.0, 0.0]),
    "all tokens masked": uniform_batch([3, 2], -0.5, -0.7, [1.0, -1.0], trained=False),
    "one token": uniform_batch([1], -0.5, -0.7, [1.0]),
    "one certain token": uniform_batch([1], 0.0, 0.0, [-1.0]),
    "32,768 tokens up": uniform_batch([32_768, 1], -0.5, -0.6, [1.0, -1.0]),
    "32,768 tokens down": uniform_batch([32_768, 1], -0.6, -0.5, [-1.0, 1.0]),
    "advantages of 1e9": uniform_batch([4, 4], -0.5, -0.7, [1e9, -1e9]),
    "advantages of 1e9 and log-ratio +100": uniform_batch([2, 2], -0.5, -100.5, [1e9, -1e9]),
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("name", PRESETS)
def test_extremes_stay_finite_in_float32(name: str, case: str) -> None:
    loss, gradient, _ = call(Algorithm(algorithm=name), EXTREMES[case], dtype=torch.float32)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert gradient.isfinite().all()
    if case == "all tokens masked":
        assert loss.item() == 0.0
        assert not gradient.any()


@pytest.mark.parametrize("name", PRESETS)
def test_single_precision_is_enough(name: str) -> None:
    batch = random_batch(4, 0.05, per_token=name in PER_TOKEN)
    cfg = Algorithm(algorithm=name)
    single, double_ = call(cfg, batch, dtype=torch.float32), call(cfg, batch)
    for found, expected in zip(single, double_, strict=True):
        assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("name", [n for n in PRESETS if not Algorithm(algorithm=n).needs_every_group])
def test_without_advantage_there_is_neither_loss_nor_gradient(name: str) -> None:
    batch = random_batch(0, 0.5)
    batch.columns["advantage"][:] = [0.0] * len(batch.segment)
    loss, gradient, _ = call(Algorithm(algorithm=name), batch)
    assert loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k2", "direct"), ("k3", "direct"), ("k3", "weighted"), ("k3", "straight_through")]
)
@pytest.mark.parametrize("distance", [5.0, 19.0, 21.0, 100.0])
def test_the_kl_never_pushes_away_from_the_reference(distance: float, kind: str, gradient: str) -> None:
    """However far below the reference a log-prob is, where exponents are capped too: a step must not lower it."""
    cfg = Algorithm(kl=kind, kl_gradient=gradient, kl_coef=1.0)  # type: ignore[arg-type]
    batch = uniform_batch([1], -0.5 - distance, -0.5 - distance, [0.0])
    batch.columns["ref"][:] = [-0.5]
    _, slope, _ = call(cfg, batch)
    assert slope.item() <= 0


COMPARING = [n for n in PRESETS if Algorithm(algorithm=n).compares_groups]


@pytest.mark.parametrize("values", [[0.1] * 8, [0.35] * 8, [0.7] * 6], ids=str)
@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_in_float32_carry_no_signal_in_any_preset(name: str, values: list[float]) -> None:
    rewards = np.array(values, dtype=np.float32).tolist()
    lengths = list(range(1, len(values) + 1))
    found = batch_advantages([rewards, values], cfg=Algorithm(algorithm=name), lengths_PG=[lengths, lengths])
    assert found == [[0.0] * len(values)] * 2


@pytest.mark.parametrize("name", COMPARING)
def test_rounding_of_rewards_carries_no_signal_in_any_preset(name: str) -> None:
    groups = [[0.1, 0.1 + 1e-10, 0.1], [1e9, math.nextafter(1e9, math.inf), 1e9]]
    found = batch_advantages(groups, cfg=Algorithm(algorithm=name), lengths_PG=[[1, 2, 3]] * 2)
    assert found == [[0.0] * 3] * 2


@pytest.mark.parametrize("name", COMPARING)
def test_rewards_of_a_thousand_million_give_finite_advantages(name: str) -> None:
    groups = [[1e9, 0.0, 0.0], [1e9, 1e9 + 1, 1e9], [1e9, 1e9, 1e9], [1e9, 2.0, 1.0]]
    found = batch_advantages(groups, cfg=Algorithm(algorithm=name), lengths_PG=[[1, 2, 3]] * 4)
    assert all(x is not None and math.isfinite(x) for values in found for x in values)
    assert found[2] == [0.0, 0.0, 0.0]


def test_a_small_difference_between_large_rewards_is_still_a_signal() -> None:
    assert group_advantages([1e9, 1e9 + 1]) == pytest.approx([-1.0, 1.0], abs=1e-6)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_rewards_normalised_per_group_are_not_normalised_again_over_the_batch() -> None:
    found = batch_advantages([[1.0, 0.0], [1.0, 1.0]], cfg=Algorithm(ddof=1))
    assert found[0] == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert found[1] == [0.0, 0.0]


def test_first_update_has_loss_zero_and_a_gradient() -> None:
    loss, gradient, _ = call(Algorithm(**NO_KL), uniform_batch([2, 2], -0.7, -0.7, [1.0, -1.0]))
    assert loss.item() == 0.0
    assert gradient.tolist() == [-0.25, -0.25, 0.25, 0.25]


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"vespo"}))
def test_first_update_follows_the_policy_gradient_whatever_the_surrogate(name: str) -> None:
    """Where the policy has not moved, every surrogate has the gradient -A times the weight of the token."""
    cfg = Algorithm(algorithm=name, kl_coef=0.0, selection="all")
    batch = uniform_batch([2, 1], -0.7, -0.7, [0.5, -2.0])
    first, second = token_weights([2, 1], cfg.weighting, MAX_LEN)
    _, gradient, _ = call(cfg, batch)
    whole = 2 if cfg.ratio == "sequence_product" else 1
    assert gradient.tolist() == pytest.approx([-0.5 * first * whole, -0.5 * first * whole, 2.0 * second])


def test_vespo_weighs_a_sequence_by_its_own_ratio() -> None:
    # w = 1 at the first update: phi = 1^k e^0 = 1, so the gradient is -A / 3 per token.
    _, gradient, _ = call(Algorithm(algorithm="vespo"), uniform_batch([2, 1], -0.7, -0.7, [0.5, -2.0]))
    assert gradient.tolist() == pytest.approx([-0.5 / 3, -0.5 / 3, 2.0 / 3])
    # Two tokens, each raised by log 2: w = 4, phi = 16 e^-9.
    up = uniform_batch([2], -0.5, -0.5 - math.log(2), [1.0])
    _, gradient, _ = call(Algorithm(algorithm="vespo"), up)
    assert gradient.tolist() == pytest.approx([-8 * math.exp(-9)] * 2)
