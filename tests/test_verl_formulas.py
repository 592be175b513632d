"""The formulas that verl publishes, in float64 on padded tensors as it lays them out, and what ours gives for the same.

Everything on verl's side is computed here from [B, T] tensors and a mask: B sequences, T padded tokens. Where the two
differ by design, the test is named after the difference and asserts what relates the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms import kl
from groupwise.algorithms.adaptive import Coefficients
from groupwise.algorithms.advantages import group_advantages, whiten
from groupwise.algorithms.credit import Credit, assign
from groupwise.algorithms.losses import policy_loss, value_loss
from groupwise.algorithms.presets import Algorithm
from groupwise.algorithms.selection import select_tokens
from groupwise.algorithms.weights import token_weights
from groupwise.types import Completion, Group, Prompt, Reward, Rollout

EXACT = 1e-9
SPANS = [8, 3, 5, 1, 6, 2, 4, 7, 5]
"""Tokens of each completion, those of a tool included."""
GROUP = [0, 0, 0, 0, 1, 1, 1, 2, 2]
B, T = len(SPANS), 8
TOOL = slice(2, 4)
"""What a tool wrote in completions of at least five tokens."""
SCORES = [1.0, 0.0, 0.3, 1.0, 2.0, -0.5, 0.25, 0.7, 0.1]
GREEDY = [0.5, -0.25, 0.4]
"""The reward of the greedy answer to each prompt."""
VERL_SCALING: dict[str, Any] = {"ddof": 1, "eps": 1e-6}
"""How verl divides by the deviation of a group, in our terms."""


# -- both sides ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimiser step, tensors [B, T]; where `mask` is False, in padding and tool tokens, they hold any number."""

    mask: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    advantage: Tensor
    value: Tensor
    old_value: Tensor
    returns: Tensor
    group: tuple[int, ...] = tuple(GROUP)
    scores: tuple[float, ...] = tuple(SCORES)
    greedy: tuple[float, ...] = tuple(GREEDY)

    @property
    def lengths(self) -> list[int]:
        return self.mask.sum(1).tolist()

    @property
    def rewards(self) -> Tensor:
        """The score of each sequence at its last token."""
        last = self.mask & (self.mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(last, double(self.scores)[:, None], 0)

    def rows(self, chosen: slice) -> Step:
        """A micro-batch."""
        tensors = {name: x[chosen] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, group=self.group[chosen], scores=self.scores[chosen], **tensors)


def make_step(along_tokens: bool = False) -> Step:
    """Policies far enough apart that every bound is at work somewhere, and nowhere everywhere."""
    generator = torch.Generator().manual_seed(8)

    def noise(size: float, most: float = math.inf) -> Tensor:
        return (size * torch.randn(B, T, generator=generator, dtype=torch.float64)).clamp(-most, most)

    place, span = torch.arange(T), torch.tensor(SPANS)[:, None]
    tool = (place >= TOOL.start) & (place < TOOL.stop) & (span >= 5)
    old = -0.05 - 3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    advantage = double([1.3, -0.7, 0.4, -1.1, 0.0, -0.5, 2.0, -1.6, 0.9])[:, None].expand(B, T)
    old_value = noise(1.0)
    return Step(
        mask=(place < span) & ~tool,
        logp=(old + noise(0.8, 1.6)).minimum(0.1 * old),  # no two of them equal
        old=old,
        ref=old + noise(0.3, 0.7),
        sampler=old + noise(0.4),
        entropy=noise(1.0).abs(),
        advantage=advantage + noise(1.0) if along_tokens else advantage,
        value=old_value + noise(0.6),
        old_value=old_value,
        returns=noise(1.0),
    )


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def step() -> Step:
    return make_step()


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative to the size of what is wanted."""
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def slopes(loss: Tensor, *leaves: Tensor) -> Tensor:
    """The gradient with respect to all leaves, as one vector; zero where the loss does not depend on a leaf."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for x, g in zip(leaves, found, strict=True)])


def assert_same(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
    """In value and in gradient."""
    assert distance(ours, theirs) < EXACT
    assert slopes(theirs, *leaves).any()
    assert distance(slopes(ours, *leaves), slopes(theirs, *leaves)) < EXACT


# -- ours ------------------------------------------------------------------------------------------------------------


def groups_of(step: Step, parts: Sequence[dict[str, float]] | None = None) -> list[Group]:
    """The groups of the step in our types, its log-probs and values filled in."""
    groups = [Group(Prompt.of(f"prompt {g}"), (1, 2), [], greedy_reward=step.greedy[g]) for g in sorted({*step.group})]
    for i, g in enumerate(step.group):
        live = step.mask[i].tolist()
        span = max(t + 1 for t in range(T) if live[t])
        completion = Completion((7,) * span, (-1.0,) * span, "stop", sampled=tuple(live[:span]))
        old, ref, values = (tuple(x[i][step.mask[i]].tolist()) for x in (step.old, step.ref, step.old_value))
        reward = Reward(step.scores[i], {} if parts is None else parts[i])
        rollout = Rollout(completion, "", reward, old_logps=old, ref_logps=ref, values=(*values, 0.0))
        groups[g].rollouts.append(rollout)
    return groups


def our_credits(step: Step, cfg: Algorithm, **options: Any) -> list[Credit]:
    found = assign(groups_of(step, options.pop("parts", None)), cfg, max_tokens=T, **options)
    return [c for row in found for c in row if c is not None]


def padded(rows: Sequence[Sequence[float] | None], mask: Tensor) -> Tensor:
    """Numbers of the trained tokens, as [B, T] with zeros elsewhere."""
    flat = double([x for row in rows for x in row or ()])
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, flat)


def our_advantages(step: Step, cfg: Algorithm, **options: Any) -> Tensor:
    return padded([c.advantages for c in our_credits(step, cfg, **options)], step.mask)


def our_weights(step: Step, mode: str, max_len: int = T) -> Tensor:
    """Our weights of the aggregation that verl gives this name, one per sequence."""
    names = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum": "sum",
        "seq-mean-token-sum-norm": "constant",
        "sequences": "sequence",
    }
    weights = double(token_weights(step.lengths, names[mode], max_len))  # type: ignore[arg-type]
    if mode == "seq-mean-token-mean":  # see test_verl_adds_1e_8_to_a_length_...
        lengths = double(step.lengths)
        weights = weights * lengths / (lengths + 1e-8)
    return weights


def our_loss(
    cfg: Algorithm,
    step: Step,
    logp: Tensor,
    weights: Tensor,
    *,
    entropy: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    mask = step.mask
    return policy_loss(
        logp[mask],
        step.old[mask],
        step.advantage[mask],
        weights[:, None].expand(mask.shape)[mask],
        cfg=cfg,
        segment_T=torch.arange(len(mask))[:, None].expand(mask.shape)[mask],
        ref_logp_T=step.ref[mask],
        sampler_logp_T=step.sampler[mask],
        entropy_T=None if entropy is None else entropy[mask],
        selected_T=None if selected is None else selected[mask],
    )[0]


def without_kl(algorithm: str = "grpo", **parts: Any) -> Algorithm:
    return Algorithm(**{"algorithm": algorithm, "kl_coef": 0.0, **parts})


# -- verl: advantages, [B, T] from rewards [B, T] --------------------------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum() / mask.sum()


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """With Bessel's correction."""
    return (torch.where(mask, x - masked_mean(x, mask), 0) ** 2).sum() / (mask.sum() - 1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, (x - masked_mean(x, mask)) / (masked_variance(x, mask) + 1e-8).sqrt(), 0)


def per_group(step: Step, formula: Callable[[Tensor, Tensor], Tensor], scores: Tensor) -> Tensor:
    """`formula` of the scores and lengths of each group."""
    found, group, lengths = torch.zeros_like(scores), torch.tensor(step.group), double(step.lengths)
    for g in {*step.group}:
        found[group == g] = formula(scores[group == g], lengths[group == g])
    return found


def on_all_tokens(formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Step, Tensor], Tensor]:
    """An advantage of the whole sequence, from the rewards of its tokens added up."""

    def estimate(step: Step, rewards: Tensor) -> Tensor:
        return per_group(step, formula, rewards.sum(1))[:, None] * step.mask

    return estimate


def verl_grpo(scores: Tensor, lengths: Tensor) -> Tensor:
    mean, deviation = (scores.mean(), scores.std()) if len(scores) > 1 else (0.0, 1.0)
    return (scores - mean) / (deviation + 1e-6)


def verl_centred(scores: Tensor, lengths: Tensor) -> Tensor:
    return scores - scores.mean()


def verl_passk(scores: Tensor, lengths: Tensor) -> Tensor:
    best, second = scores.topk(2).values
    found = torch.zeros_like(scores)
    found[scores.argmax()] = (best - second) / (scores.std() + 1e-6)
    return found


def verl_rloo(scores: Tensor, lengths: Tensor) -> Tensor:
    n = len(scores)
    return n / (n - 1) * (scores - scores.mean()) if n > 1 else scores


def verl_opo(scores: Tensor, lengths: Tensor) -> Tensor:
    return scores - (lengths * scores).sum() / lengths.sum()


def verl_gpg(step: Step) -> Tensor:
    scores = step.rewards.sum(1)
    alpha = len(scores) / scores.count_nonzero()
    return (alpha * per_group(step, verl_centred, scores))[:, None] * step.mask


def verl_gae(gamma: float, lam: float) -> Callable[[Step, Tensor], Tensor]:
    """Before it is whitened; masked tokens hand on what follows them."""

    def estimate(step: Step, rewards: Tensor) -> Tensor:
        found = torch.zeros_like(rewards)
        following, value_after = torch.zeros(len(rewards)).double(), torch.zeros(len(rewards)).double()
        for t in reversed(range(T)):
            live, value = step.mask[:, t], step.old_value[:, t]
            here = rewards[:, t] + gamma * value_after - value + gamma * lam * following
            following, value_after = torch.where(live, here, following), torch.where(live, value, value_after)
            found[:, t] = torch.where(live, following, 0)
        return found

    return estimate


def verl_reinforce_plus_plus(gamma: float) -> Callable[[Step, Tensor], Tensor]:
    """Before it is whitened."""

    def estimate(step: Step, rewards: Tensor) -> Tensor:
        found, following = torch.zeros_like(rewards), torch.zeros(len(rewards)).double()
        for t in reversed(range(T)):
            following = torch.where(step.mask[:, t], rewards[:, t] + gamma * following, following)
            found[:, t] = following
        return found * step.mask

    return estimate


def verl_remax(step: Step, rewards: Tensor) -> Tensor:
    to_go = rewards.flip(1).cumsum(1).flip(1)
    return (to_go - double([step.greedy[g] for g in step.group])[:, None]) * step.mask


@dataclass(frozen=True)
class Estimator:
    """A formula of verl's and the algorithm of ours for the same."""

    theirs: Callable[[Step, Tensor], Tensor]
    ours: dict[str, Any]
    whitened: bool = False


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(verl_gae(1.0, 1.0), {"algorithm": "ppo"}, whitened=True),
    "gae, discounted": Estimator(verl_gae(0.9, 0.8), {"algorithm": "ppo", "gamma": 0.9, "lam": 0.8}, whitened=True),
    "grpo": Estimator(on_all_tokens(verl_grpo), VERL_SCALING),
    "grpo, norm_adv_by_std_in_grpo=False": Estimator(on_all_tokens(verl_centred), {"algorithm": "dr_grpo"}),
    "grpo_passk": Estimator(on_all_tokens(verl_passk), {"algorithm": "grpo_passk"}),
    "rloo": Estimator(on_all_tokens(verl_rloo), {"algorithm": "rloo"}),
    "opo": Estimator(on_all_tokens(verl_opo), {"algorithm": "opo"}),
    "reinforce_plus_plus": Estimator(verl_reinforce_plus_plus(1.0), {"algorithm": "reinforce++"}, whitened=True),
    "reinforce_plus_plus, discounted": Estimator(
        verl_reinforce_plus_plus(0.9), {"algorithm": "reinforce++", "gamma": 0.9}, whitened=True
    ),
    "reinforce_plus_plus_baseline": Estimator(
        on_all_tokens(verl_centred), {"algorithm": "reinforce++_baseline"}, whitened=True
    ),
    "remax": Estimator(verl_remax, {"algorithm": "remax"}),
}


def matching_eps(raw: Tensor, mask: Tensor) -> float:
    """What added to the deviation is as much as 1e-8 added to the variance."""
    variance = float(masked_variance(raw, mask))
    return math.sqrt(variance + 1e-8) - math.sqrt(variance)


def verl_kl(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Per token; a plus has the value of its kind and the gradient of k2."""
    d = ref - logp
    k2 = d**2 / 2
    of = {"k1": -d, "k2": k2, "k3": (d.clamp(-20, 20).exp() - d - 1).clamp(-10, 10)}[kind.rstrip("+")]
    return k2 + (of - k2).detach() if kind.endswith("+") else of


@pytest.mark.parametrize("kind", ["none", "k1", "k2", "k3"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_those_of_verl_s_estimator_with_and_without_a_kl_in_the_reward(
    name: str, kind: str, step: Step
) -> None:
    case, parts, rewards = ESTIMATORS[name], {"kl_coef": 0.0}, step.rewards
    if kind != "none":
        parts = {"kl_coef": 0.3, "kl_in": "reward", "kl": kind}
        rewards = rewards - 0.3 * verl_kl(step.old, step.ref, kind) * step.mask
    theirs = case.theirs(step, rewards)
    if case.whitened:
        parts["eps"] = matching_eps(theirs, step.mask)
        theirs = masked_whiten(theirs, step.mask)
    assert distance(our_advantages(step, Algorithm(**{**case.ours, **parts})), theirs) < EXACT


def test_every_estimator_above_gives_other_advantages(step: Step) -> None:
    found = [
        masked_whiten(raw, step.mask) if case.whitened else raw
        for case in ESTIMATORS.values()
        for raw in [case.theirs(step, step.rewards)]
    ]
    assert all(distance(a, b) > 1e-3 for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8)])
def test_what_the_critic_learns_is_the_advantage_before_whitening_plus_the_value(
    gamma: float, lam: float, step: Step
) -> None:
    cfg = Algorithm(algorithm="ppo", gamma=gamma, lam=lam, kl_coef=0.0)
    theirs = (verl_gae(gamma, lam)(step, step.rewards) + step.old_value) * step.mask
    assert distance(padded([c.returns for c in our_credits(step, cfg)], step.mask), theirs) < EXACT


PARTS = [
    {"right": right, "form": form}
    for right, form in zip(SCORES, [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0], strict=True)
]
PART_WEIGHTS = {"right": 1.5, "form": 0.4}


def verl_gdpo(step: Step) -> Tensor:
    """Before it is whitened."""
    columns = {name: double([parts[name] for parts in PARTS]) for name in PART_WEIGHTS}
    total = sum(w * per_group(step, verl_grpo, columns[name]) for name, w in PART_WEIGHTS.items())
    return torch.as_tensor(total)[:, None] * step.mask


def test_gdpo_normalises_each_part_in_its_group_and_whitens_the_sum_over_tokens(step: Step) -> None:
    raw = verl_gdpo(step)
    given: dict[str, Any] = {"parts": PARTS, "part_weights": PART_WEIGHTS}
    bare = Algorithm(algorithm="gdpo", whiten="none", **VERL_SCALING)
    assert distance(our_advantages(step, bare, **given), raw) < EXACT
    white = whiten(raw[step.mask].tolist(), ddof=1, eps=matching_eps(raw, step.mask))
    assert distance(padded([white], step.mask), masked_whiten(raw, step.mask)) < EXACT
    # Both at once: one eps of ours stands for two numbers of verl's.
    ours = our_advantages(step, Algorithm(algorithm="gdpo", whiten="tokens", **VERL_SCALING), **given)
    variance = masked_variance(raw, step.mask)
    theirs = masked_whiten(raw, step.mask) * (variance + 1e-8).sqrt()
    assert distance(ours * (variance.sqrt() + 1e-6), theirs) < EXACT


# -- the differences: in the advantages ------------------------------------------------------------------------------


def test_verl_divides_by_the_sample_deviation_and_ours_by_that_of_the_population() -> None:
    """By default: GRPO's definition has no Bessel correction."""
    rewards = double([0.0, 0.001, 0.002, 0.005])
    ours, theirs = double(group_advantages(rewards.tolist())), verl_grpo(rewards, rewards)  # type: ignore[arg-type]
    assert distance(ours * (rewards.std(correction=0) + 1e-8), theirs * (rewards.std() + 1e-6)) < EXACT
    assert 0.1 < distance(ours, theirs) < 0.2  # sqrt(4/3) - 1


@pytest.mark.parametrize(
    ("theirs", "parts", "worth"),
    [
        (verl_grpo, VERL_SCALING, 0.7 / (1 + 1e-6)),
        (verl_rloo, {"baseline": "leave_one_out", "scale": "none"}, 0.7),
    ],
)
def test_verl_credits_a_group_of_one_with_its_reward_and_ours_with_nothing(
    theirs: Callable[[Tensor, Tensor], Tensor], parts: dict[str, Any], worth: float
) -> None:
    """A sample that is compared with nobody says nothing about what to do."""
    assert theirs(double([0.7]), double([3])).item() == pytest.approx(worth, rel=EXACT)
    assert group_advantages([0.7], **parts) == [0.0]


def test_verl_cannot_take_the_second_best_of_a_group_of_one_and_ours_credits_it_with_nothing() -> None:
    """A group reduced to one by failures must not end a run."""
    with pytest.raises(RuntimeError):
        verl_passk(double([0.7]), double([3]))
    assert group_advantages([0.7], baseline="best_of_others", **VERL_SCALING) == [0.0]


def test_verl_scales_differences_of_rounding_up_and_ours_gives_zero() -> None:
    """Rewards within 1e-9 of each other are equal."""
    rewards = [0.5, 0.5 + 8e-10]
    theirs = verl_grpo(double(rewards), double([1, 1]))
    assert theirs.abs().tolist() == pytest.approx([4e-4, 4e-4], rel=1e-2)
    assert group_advantages(rewards, **VERL_SCALING) == [0.0, 0.0]


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_verl_adds_1e_8_to_the_variance_and_ours_eps_to_the_deviation(size: float, step: Step) -> None:
    """One eps has one meaning wherever ours divides by a deviation; verl's is worth 1e-4 beside a small one."""
    raw = size * step.advantage
    deviation = masked_variance(raw, step.mask).sqrt()
    theirs = masked_whiten(raw, step.mask)
    ours = padded([whiten(raw[step.mask].tolist(), ddof=1, eps=1e-8)], step.mask)  # type: ignore[list-item]
    assert distance(ours * (deviation + 1e-8), theirs * (deviation**2 + 1e-8).sqrt()) < EXACT
    assert (distance(ours, theirs) > 0.2) == (size <= 1e-4)


def test_verl_whitens_gdpo_over_tokens_and_ours_over_samples(step: Step) -> None:
    """A sample counts once, however long it is; `whiten: tokens` is verl's."""
    raw = verl_gdpo(step)
    cfg = Algorithm(algorithm="gdpo", eps=1e-6)
    assert (cfg.whiten, cfg.ddof) == ("samples", 1)
    of_samples = raw[:, 0]
    expected = (of_samples - of_samples.mean()) / (of_samples.std() + 1e-6)
    ours = our_advantages(step, cfg, parts=PARTS, part_weights=PART_WEIGHTS)
    assert distance(ours, expected[:, None] * step.mask) < EXACT
    assert distance(ours, masked_whiten(raw, step.mask)) > 0.05


@pytest.mark.parametrize(
    ("scores", "signal", "nonzero"),
    [
        ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], 4, 3),  # all right says as little as all wrong
        ([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], 7, 6),
        ([2.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0, -1.0, 1.0], 6, 6),  # a reward of 0 only where there is no signal
    ],
)
def test_verl_scales_gpg_by_the_share_of_rewards_other_than_zero_and_ours_by_that_of_samples_with_a_signal(
    scores: list[float], signal: int, nonzero: int, step: Step
) -> None:
    """Groups without spread are what the factor makes up for, and a reward of 0 is not one of them."""
    step = replace(step, scores=tuple(scores))
    ours, theirs = our_advantages(step, Algorithm(algorithm="gpg")), verl_gpg(step)
    assert distance(ours * signal, theirs * nonzero) < EXACT
    assert (distance(ours, theirs) < EXACT) == (signal == nonzero)


# -- verl: losses, [B, T] from log-probs [B, T] ----------------------------------------------------------------------

Loss = Callable[[Step, Tensor], Tensor]


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    ranks: int = 1,
    tokens: int | None = None,
    sequences: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """verl's agg_loss; `tokens` and `sequences` are those of the whole step where `mask` is that of one rank.

    "sequences" is the plain mean of a loss per sequence.
    """
    if mode == "sequences":
        return loss.mean()
    sums, lengths = torch.where(mask, loss, 0).sum(1), mask.sum(1).double()
    if mode == "token-mean":
        return sums.sum() / (tokens or lengths.sum()) * ranks
    if mode == "seq-mean-token-mean":
        live = lengths > 0
        return (sums / (lengths + 1e-8))[live].sum() / (sequences or live.sum()) * ranks
    total = sums.sum() / (sequences or len(mask)) * ranks
    return total if mode == "seq-mean-token-sum" else total / (scale or mask.shape[1])


def held_ratio(step: Step, logp: Tensor) -> Tensor:
    return (logp - step.old).clamp(-20, 20).exp()


def ppo_clip(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)


def verl_vanilla(low: float, high: float, c: float = 3.0) -> Loss:
    def loss(step: Step, logp: Tensor) -> Tensor:
        clipped = ppo_clip(held_ratio(step, logp), step.advantage, low, high)
        return torch.where(step.advantage < 0, torch.minimum(clipped, -c * step.advantage), clipped)

    return loss


def mean_of_row(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def verl_gspo(low: float, high: float) -> Loss:
    def loss(step: Step, logp: Tensor) -> Tensor:
        of_sequence = mean_of_row(logp - step.old, step.mask).detach()
        ratio = (logp - logp.detach() + of_sequence).clamp(max=10).exp()
        return ppo_clip(ratio, step.advantage, low, high)

    return loss


def verl_sapo(positive: float, other: float) -> Loss:
    def loss(step: Step, logp: Tensor) -> Tensor:
        tau = torch.where(step.advantage > 0, double([positive]), double([other]))
        return -4 / tau * torch.sigmoid(tau * (held_ratio(step, logp) - 1)) * step.advantage

    return loss


def verl_cispo(low: float, high: float) -> Loss:
    def loss(step: Step, logp: Tensor) -> Tensor:
        return -held_ratio(step, logp).clamp(1 - low, 1 + high).detach() * step.advantage * logp

    return loss


def verl_geo_mean(low: float, high: float) -> Loss:
    """One number per sequence."""

    def loss(step: Step, logp: Tensor) -> Tensor:
        log_ratio, sign = logp - step.old, step.advantage.sign()
        bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
        return -(mean_of_row(step.advantage, step.mask) * mean_of_row(bounded, step.mask).exp()).squeeze(1)

    return loss


def verl_dppo(distance_kept: Callable[[Tensor, Tensor, Tensor], Tensor], c: float = 3.0) -> Loss:
    def loss(step: Step, logp: Tensor) -> Tensor:
        kept = distance_kept(logp.detach().exp(), step.old.exp(), step.advantage)
        return -held_ratio(step, logp).clamp(max=c).detach() * step.advantage * logp * kept

    return loss


def within_total_variation(low: float, high: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def kept(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        return torch.where(advantage > 0, new - old <= high, new - old >= -low)

    return kept


def within_binary_kl(low: float, high: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Or on the way back to the old policy."""

    def kept(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
        up = (divergence <= high) | (new <= old)
        return torch.where(advantage > 0, up, (divergence <= low) | (new >= old))

    return kept


def verl_gpg_loss(step: Step, logp: Tensor) -> Tensor:
    return -step.advantage * logp


@dataclass(frozen=True)
class Case:
    """A loss of verl's with the aggregation it comes with, and the algorithm of ours for the same."""

    theirs: Loss
    ours: Algorithm
    mode: str = "token-mean"
    of_sequences: bool = False
    """All tokens of a sequence have the same advantage."""


CLIP: dict[str, Any] = {"clip_range": 0.1, "clip_range_high": 0.28}
LOSSES: dict[str, Case] = {
    "vanilla": Case(verl_vanilla(0.2, 0.2), without_kl("bnpo", dual_clip=3.0)),
    "vanilla, clip-higher": Case(verl_vanilla(0.1, 0.28, 2.0), without_kl("bnpo", dual_clip=2.0, **CLIP)),
    "vanilla by sequence": Case(verl_vanilla(0.2, 0.2), without_kl(dual_clip=3.0), "seq-mean-token-mean"),
    "vanilla, sums": Case(verl_vanilla(0.2, 0.2), without_kl(weighting="sum", dual_clip=3.0), "seq-mean-token-sum"),
    "vanilla, norm": Case(verl_vanilla(0.2, 0.2), without_kl("dr_grpo", dual_clip=3.0), "seq-mean-token-sum-norm"),
    "gspo": Case(verl_gspo(0.1, 0.28), without_kl("gspo_token", **CLIP), "seq-mean-token-mean"),
    "sapo": Case(verl_sapo(1.0, 1.05), without_kl("sapo"), "seq-mean-token-mean"),
    "cispo": Case(verl_cispo(0.1, 0.28), without_kl("cispo_clip", **CLIP)),
    "geo_mean": Case(verl_geo_mean(0.1, 0.28), without_kl("gmpo", **CLIP), "sequences", of_sequences=True),
    "dppo_tv": Case(
        verl_dppo(within_total_variation(0.1, 0.28)),
        without_kl("dppo_tv", ratio_cap=3.0, **CLIP),
    ),
    "dppo_kl": Case(
        verl_dppo(within_binary_kl(0.05, 0.1)),
        without_kl("dppo_kl", ratio_cap=3.0, clip_range=0.05, clip_range_high=0.1),
    ),
    "gpg": Case(verl_gpg_loss, without_kl("gpg")),
}


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_verl(name: str, along_tokens: bool) -> None:
    case = LOSSES[name]
    step = make_step(along_tokens and not case.of_sequences)
    logp = step.logp.clone().requires_grad_()
    theirs = aggregate(case.theirs(step, logp), step.mask, case.mode)
    assert_same(our_loss(case.ours, step, logp, our_weights(step, case.mode)), theirs, logp)


@pytest.mark.parametrize("along_tokens", [False, True])
def test_every_loss_above_is_another_one(along_tokens: bool) -> None:
    step, found = make_step(along_tokens), []
    for case in LOSSES.values():
        logp = step.logp.clone().requires_grad_()
        found.append(slopes(aggregate(case.theirs(step, logp), step.mask, case.mode), logp))
    assert all(distance(a, b) > 1e-2 for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("along_tokens", [False, True])
def test_every_bound_is_at_work_somewhere_and_nowhere_everywhere(along_tokens: bool) -> None:
    step = make_step(along_tokens)
    ratio = held_ratio(step, step.logp)
    of_sequence = mean_of_row(step.logp - step.old, step.mask).exp().expand_as(ratio)
    moved = step.logp.exp() - step.old.exp()
    gap = torch.where(step.mask, step.old - step.sampler, 0)
    too_far = ~within_binary_kl(0.05, 0.1)(step.logp.exp(), step.old.exp(), step.advantage)
    for name, bounded in {
        "above": (ratio > 1.28) & (step.advantage > 0),
        "below": (ratio < 0.8) & (step.advantage < 0),
        "dual clip": (ratio > 3) & (step.advantage < 0),
        "cap": ratio > 3,
        "sequence above": (of_sequence > 1.28) & (step.advantage > 0),
        "sequence below": (of_sequence < 0.9) & (step.advantage < 0),
        "moved up": (moved > 0.28) & (step.advantage > 0),
        "moved down": (moved < -0.1) & (step.advantage < 0),
        "diverged up": too_far & (step.advantage > 0),
        "diverged down": too_far & (step.advantage < 0),
        "sampler, token": gap.exp() > 2,
        "sampler, sequence": gap.sum(1, keepdim=True).exp().expand_as(ratio) > 2,
        "value": (step.value - step.old_value).abs() > 0.5,
    }.items():
        assert bounded[step.mask].any() and not bounded[step.mask].all(), name
    assert verl_kl(step.logp, step.ref, "k3")[step.mask].max() < 10


def test_ratios_are_held_at_e_to_the_20_in_both(step: Step) -> None:
    far = double([19.0, 25.0, -19.0, -25.0])
    far_step = Step(**{name: torch.zeros(4, 1).double() for name, x in vars(step).items() if isinstance(x, Tensor)})
    far_step = replace(far_step, mask=torch.ones(4, 1).bool(), advantage=-torch.ones(4, 1).double())
    logp = far[:, None].clone().requires_grad_()
    theirs = verl_vanilla(0.2, 0.2, c=1e12)(far_step, logp).mean()
    cfg = without_kl("bnpo", dual_clip=1e12)
    assert_same(our_loss(cfg, far_step, logp, our_weights(far_step, "token-mean")), theirs, logp)
    assert theirs.item() == pytest.approx((math.exp(19) + math.exp(20) + 0.8 + 0.8) / 4, rel=EXACT)


def test_the_sequence_form_of_gspo_has_the_value_and_gradient_of_verl_s_token_form(step: Step) -> None:
    """As long as all tokens of a sequence have the same advantage."""
    logp = step.logp.clone().requires_grad_()
    theirs = aggregate(verl_gspo(0.1, 0.28)(step, logp), step.mask, "seq-mean-token-mean")
    cfg = without_kl("gspo", **CLIP)
    assert_same(our_loss(cfg, step, logp, our_weights(step, "seq-mean-token-mean")), theirs, logp)


def test_reinforce_in_bypass_mode_is_cispo_from_the_sampler_s_log_probs_without_a_floor(step: Step) -> None:
    """The ratio to the sampler itself, truncated at 2, weighs the policy gradient."""
    logp = step.logp.clone().requires_grad_()
    weight = (logp - step.sampler).clamp(-20, 20).exp().clamp(max=2).detach()
    theirs = aggregate(-weight * step.advantage * logp, step.mask, "token-mean")
    cfg = without_kl("cispo", clip_range=1.0, clip_range_high=1.0)
    bypassed = replace(step, old=step.sampler)
    assert_same(our_loss(cfg, bypassed, logp, our_weights(step, "token-mean")), theirs, logp)


# -- covariances -----------------------------------------------------------------------------------------------------


def covariances(step: Step, logp: Tensor) -> Tensor:
    """(A - mean A)(logp - mean logp); -inf where masked."""
    a, x = step.advantage, logp.detach()
    return torch.where(step.mask, (a - masked_mean(a, step.mask)) * (x - masked_mean(x, step.mask)), -torch.inf)


def our_selection(cfg: Algorithm, step: Step, logp: Tensor, seed: int = 0) -> Tensor:
    mask = step.mask
    chosen_T = select_tokens(
        cfg, logp_T=logp.detach()[mask], advantage_T=step.advantage[mask], entropy_T=step.entropy[mask], seed=seed
    )
    return torch.zeros_like(mask).masked_scatter(mask, chosen_T)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("share", [0.0002, 0.1, 0.5])
def test_kl_cov_holds_the_tokens_of_highest_covariance(share: float, along_tokens: bool) -> None:
    step = make_step(along_tokens)
    logp = step.logp.clone().requires_grad_()
    count = max(1, int(share * sum(step.lengths)))
    lowest = covariances(step, logp).flatten().topk(count).values[-1]
    held = covariances(step, logp) >= lowest
    per_token = -held_ratio(step, logp) * step.advantage + torch.where(held, 0.7 * (logp - step.old).abs(), 0)
    cfg = without_kl("kl_cov", selection_share=share, cov_kl_coef=0.7)
    selected = our_selection(cfg, step, logp)
    assert selected.equal(held) and selected.sum() == count
    ours = our_loss(cfg, step, logp, our_weights(step, "token-mean"), selected=selected)
    assert_same(ours, aggregate(per_token, step.mask, "token-mean"), logp)


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize("share", [0.0002, 0.1, 1.0])
def test_clip_cov_leaves_some_tokens_of_middling_covariance_without_a_gradient(
    share: float, along_tokens: bool
) -> None:
    step = make_step(along_tokens)
    logp = step.logp.clone().requires_grad_()
    covariance = covariances(step, logp)
    eligible = (covariance > 0.2) & (covariance < 1.5)
    count = max(1, int(share * sum(step.lengths)))
    assert count < eligible.sum() or share == 1
    cfg = without_kl("clip_cov", selection_share=share, cov_bounds=(0.2, 1.5), dual_clip=None, clip_range=0.2)
    drawn = set()
    for seed in range(5):
        selected = our_selection(cfg, step, logp, seed)
        assert not (selected & ~eligible).any()
        assert selected.sum() == min(count, int(eligible.sum()))
        per_token = torch.where(selected, 0, ppo_clip(held_ratio(step, logp), step.advantage, 0.2, 0.2))
        ours = our_loss(cfg, step, logp, our_weights(step, "token-mean"), selected=selected)
        assert_same(ours, aggregate(per_token, step.mask, "token-mean"), logp)
        drawn.add(tuple(selected.flatten().tolist()))
    assert (len(drawn) > 1) == (share < 1)  # with a share of 1 all that are eligible are picked


def test_verl_does_not_draw_tokens_that_are_clipped_already_and_ours_draws_before_any_is(step: Step) -> None:
    """At the start of the update no ratio is off 1; a clipped token has no gradient to lose, only a value."""
    logp = step.logp.clone().requires_grad_()
    ratio = held_ratio(step, logp)
    per_token = ppo_clip(ratio, step.advantage, 0.2, 0.2)
    clipped = per_token > -ratio * step.advantage
    cfg = without_kl("clip_cov", selection_share=1.0, cov_bounds=(0.2, 5.0), dual_clip=None, clip_range=0.2)
    selected = our_selection(cfg, step, logp)
    assert (selected & clipped).any() and (selected & ~clipped).any()
    ours = our_loss(cfg, step, logp, our_weights(step, "token-mean"), selected=selected)
    theirs = aggregate(torch.where(selected & ~clipped, 0, per_token), step.mask, "token-mean")
    assert distance(slopes(ours, logp), slopes(theirs, logp)) < EXACT
    lost = aggregate(torch.where(selected & clipped, per_token, 0), step.mask, "token-mean")
    assert lost.abs() > 1e-3
    assert distance(ours + lost, theirs) < EXACT


def test_verl_selects_within_each_micro_batch_and_ours_over_the_whole_step() -> None:
    """Which tokens are treated apart does not depend on how the step is cut."""
    step = make_step(along_tokens=True)
    cfg = without_kl("kl_cov", selection_share=0.25)
    halves = [step.rows(slice(0, 4)), step.rows(slice(4, B))]
    by_half = torch.cat([our_selection(cfg, half, half.logp) for half in halves])
    theirs = []
    for half in halves:
        covariance = covariances(half, half.logp)
        theirs.append(covariance >= covariance.flatten().topk(int(0.25 * sum(half.lengths))).values[-1])
    assert by_half.equal(torch.cat(theirs))  # the rule is the same
    whole = our_selection(cfg, step, step.logp)
    assert not whole.equal(by_half)
    pair = [whole[: len(halves[0].mask)], whole[len(halves[0].mask) :]]
    weights = our_weights(step, "token-mean").split([4, B - 4])
    parts = [
        our_loss(cfg, half, half.logp, weight, selected=selected)
        for half, weight, selected in zip(halves, weights, pair, strict=True)
    ]
    logp = step.logp
    assert distance(sum(parts), our_loss(cfg, step, logp, our_weights(step, "token-mean"), selected=whole)) < EXACT


# -- how tokens become one number ------------------------------------------------------------------------------------

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_tokens_are_those_of_verl_s_aggregation(mode: str, step: Step) -> None:
    """Its gradient with respect to the loss of each token."""
    matrix = step.entropy.clone().requires_grad_()
    theirs = aggregate(matrix, step.mask, mode, scale=32.0)
    weights = our_weights(step, mode, max_len=32)
    assert_same((weights[:, None] * step.mask * matrix).sum(), theirs, matrix)


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_over_ranks_is_that_of_the_whole_step(mode: str, step: Step) -> None:
    """Each rank divides by the tokens or sequences of all and multiplies by the number of ranks."""
    logp = step.logp.clone().requires_grad_()
    per_token = verl_vanilla(0.2, 0.2)(step, logp)
    counts: dict[str, Any] = {"ranks": 3, "tokens": sum(step.lengths), "sequences": B}
    ranks = (slice(0, 3), slice(3, 4), slice(4, B))
    theirs = torch.stack([aggregate(per_token[r], step.mask[r], mode, **counts) for r in ranks]).mean()
    assert_same(our_loss(without_kl(dual_clip=3.0), step, logp, our_weights(step, mode)), theirs, logp)


def test_verl_adds_1e_8_to_a_length_and_ours_nothing(step: Step) -> None:
    """Sequences without a trained token are left out beforehand, so that no length is 0."""
    lengths = double(step.lengths)
    ours = double(token_weights(step.lengths, "sequence"))
    matrix = torch.ones(B, T).double().requires_grad_()
    theirs = slopes(aggregate(matrix, step.mask, "seq-mean-token-mean"), matrix).view(B, T).amax(1)
    assert ((ours / theirs - 1) * lengths).tolist() == pytest.approx([1e-8] * B, rel=1e-6)


@pytest.mark.parametrize("max_len", [T, 32])
def test_verl_divides_seq_mean_token_sum_norm_by_the_batch_and_the_padded_length_and_ours_by_max_tokens(
    max_len: int, step: Step
) -> None:
    """The longest completion of a batch is no constant; verl's loss_scale_factor makes it one."""
    logp = step.logp.clone().requires_grad_()
    per_token = verl_vanilla(0.2, 0.2)(step, logp)
    cfg = without_kl("dr_grpo", dual_clip=3.0)
    ours = our_loss(cfg, step, logp, our_weights(step, "seq-mean-token-sum-norm", max_len))
    by_default = aggregate(per_token, step.mask, "seq-mean-token-sum-norm")
    assert_same(ours * (B * max_len), by_default * (B * T), logp)
    assert_same(ours, aggregate(per_token, step.mask, "seq-mean-token-sum-norm", scale=max_len), logp)
    assert (distance(ours, by_default) < EXACT) == (max_len == T)


@pytest.mark.parametrize("mode", [*MODES, "sequences"])
def test_verl_counts_a_wholly_masked_sequence_in_some_means_and_ours_in_none(mode: str, step: Step) -> None:
    """What is not trained has no part in the step; it takes part in verl's means over sequences of sums, or of one."""
    lost = torch.arange(B) == 2
    step = replace(step, mask=step.mask & ~lost[:, None])
    logp = step.logp.clone().requires_grad_()
    case = LOSSES["geo_mean" if mode == "sequences" else "vanilla"]
    theirs = aggregate(case.theirs(step, logp), step.mask, mode)
    share = 1.0 if mode in ("token-mean", "seq-mean-token-mean") else (B - 1) / B
    assert_same(share * our_loss(case.ours, step, logp, our_weights(step, mode)), theirs, logp)


# -- KL and entropy --------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "k1": {"kl": "k1"},
    "k2": {"kl": "k2"},
    "k3": {"kl": "k3"},
    "k1+": {"kl": "k1", "kl_gradient": "straight_through"},
    "k2+": {"kl": "k2", "kl_gradient": "straight_through"},
    "k3+": {"kl": "k3", "kl_gradient": "straight_through"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimates_and_their_gradients_are_those_of_verl(kind: str, step: Step) -> None:
    logp = step.logp.clone().requires_grad_()
    how = KINDS[kind]
    ours = kl.penalty(logp, step.old, step.ref, how["kl"], how.get("kl_gradient", "direct"))
    theirs = verl_kl(logp, step.ref, kind)
    assert distance(ours[step.mask], theirs[step.mask]) < EXACT
    assert_same(ours[step.mask].sum(), theirs[step.mask].sum(), logp)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "k1"])
def test_kl_and_entropy_are_aggregated_like_the_surrogate(kind: str, mode: str, step: Step) -> None:
    logp, entropy = step.logp.clone().requires_grad_(), step.entropy.clone().requires_grad_()
    cfg = Algorithm(kl_coef=0.7, entropy_coef=0.2, dual_clip=3.0, **KINDS[kind])
    theirs = (
        aggregate(verl_vanilla(0.2, 0.2)(step, logp), step.mask, mode)
        - 0.2 * aggregate(entropy, step.mask, mode)
        + 0.7 * aggregate(verl_kl(logp, step.ref, kind), step.mask, mode)
    )
    assert_same(our_loss(cfg, step, logp, our_weights(step, mode), entropy=entropy), theirs, logp, entropy)


def test_verl_takes_k1_as_a_loss_and_ours_refuses_it(step: Step) -> None:
    """Its gradient does not depend on the reference, so that it holds nothing back."""
    logp = step.logp.clone().requires_grad_()
    assert slopes(verl_kl(logp, step.ref, "k1").sum(), logp).tolist() == [1.0] * (B * T)
    with pytest.raises(ValueError, match="kl 'k1' in the loss"):
        Algorithm(kl="k1")


@pytest.mark.parametrize("d", [2.5, 3.0, 15.0, 25.0, -10.9, -11.5, -25.0])
def test_verl_holds_k3_at_10_without_a_gradient_and_ours_its_exponent_at_20_with_one(d: float) -> None:
    """A token that has drifted far from the reference is the one to pull back."""
    logp, ref = double([-3.0]).requires_grad_(), double([-3.0 + d])
    ours, theirs = kl.estimate(logp, ref, "k3"), verl_kl(logp, ref, "k3")
    exponential = math.exp(min(d, 20.0))
    assert ours.item() == pytest.approx(exponential - d - 1, rel=EXACT)
    assert slopes(ours, logp).item() == pytest.approx(1 - exponential, rel=EXACT)
    assert theirs.item() == pytest.approx(min(ours.item(), 10.0), rel=EXACT)
    free = ours.item() < 10
    assert free == (d in (2.5, -10.9))
    assert slopes(theirs, logp).item() == pytest.approx((1 - exponential) * free, rel=EXACT)


@pytest.mark.parametrize(("mean", "same"), [(9.9, True), (12.0, False)])
def test_verl_holds_the_log_ratio_of_gspo_at_10_and_ours_at_20(mean: float, same: bool, step: Step) -> None:
    """One bound holds for every ratio."""
    one = replace(
        step.rows(slice(1, 2)), old=torch.full((1, T), -mean).double(), advantage=torch.full((1, T), -1.0).double()
    )
    logp = torch.zeros(1, T).double().requires_grad_()
    theirs = aggregate(verl_gspo(0.1, 0.28)(one, logp), one.mask, "seq-mean-token-mean")
    ours = our_loss(without_kl("gspo_token", **CLIP), one, logp, our_weights(one, "seq-mean-token-mean"))
    if same:
        assert_same(ours, theirs, logp)
    else:
        assert distance(ours, theirs * math.exp(mean - 10)) < EXACT
        assert slopes(ours, logp).any() and not slopes(theirs, logp).any()


def test_the_adaptive_coefficient_moves_as_verl_s_controller() -> None:
    cfg = Algorithm(kl_coef=0.2, kl_target=0.05, kl_horizon=1000.0)
    ours, theirs = Coefficients.of(cfg), 0.2
    for measured, samples in [(0.051, 64), (0.3, 64), (0.0, 32), (-0.4, 128), (0.055, 256), (0.046, 8)]:
        theirs *= 1 + float(double([measured / 0.05 - 1]).clamp(-0.2, 0.2)) * samples / 1000
        ours.follow_kl(cfg, measured, samples)
        assert ours.applied_to(cfg).kl_coef == pytest.approx(theirs, rel=EXACT)
    assert abs(theirs - 0.2) > 1e-3


# -- the sampler's mismatch ------------------------------------------------------------------------------------------


def rollout_weights(step: Step, level: str, cap: float = 2.0) -> Tensor:
    """Truncated at `cap`, per token or one for the sequence."""
    gap = torch.where(step.mask, step.old - step.sampler, 0)
    if level == "sequence":
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    return gap.clamp(-20, 20).exp().clamp(max=cap)


@pytest.mark.parametrize("cap", [2.0, 1.2])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", [name for name, case in LOSSES.items() if case.mode != "sequences"])
def test_truncated_weights_of_the_mismatch_multiply_the_surrogate_and_not_the_kl(
    name: str, level: str, cap: float, step: Step
) -> None:
    case = LOSSES[name]
    logp = step.logp.clone().requires_grad_()
    theirs = aggregate(case.theirs(step, logp) * rollout_weights(step, level, cap), step.mask, case.mode)
    theirs = theirs + 0.1 * aggregate(verl_kl(logp, step.ref, "k3"), step.mask, case.mode)
    parts = {"kl_coef": 0.1, "sampler_correction": f"{level}_truncate", "sampler_cap": cap}
    ours = our_loss(case.ours.model_copy(update=parts), step, logp, our_weights(step, case.mode))
    assert_same(ours, theirs, logp)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_the_mismatch_are_held_at_e_to_the_20_in_both(level: str, step: Step) -> None:
    step = replace(step, sampler=step.old - torch.where(torch.arange(T) == 0, 25.0, -0.5))
    cfg = without_kl("bnpo", dual_clip=3.0, sampler_correction=f"{level}_truncate", sampler_cap=1e12)
    logp = step.logp.clone().requires_grad_()
    weights = rollout_weights(step, level, cap=1e12)
    assert weights.max().item() == pytest.approx(math.exp(20))
    theirs = aggregate(verl_vanilla(0.2, 0.2)(step, logp) * weights, step.mask, "token-mean")
    assert_same(our_loss(cfg, step, logp, our_weights(step, "token-mean")), theirs, logp)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_can_bring_the_mean_of_these_weights_to_one_and_ours_leaves_it(level: str, step: Step) -> None:
    """Dividing by a number of the batch makes the loss depend on how the batch is cut."""
    weights = rollout_weights(step, level)
    mean = masked_mean(weights, step.mask)
    logp = step.logp.clone().requires_grad_()
    theirs = aggregate(verl_vanilla(0.2, 0.2)(step, logp) * weights / mean, step.mask, "token-mean")
    cfg = without_kl("bnpo", dual_clip=3.0, sampler_correction=f"{level}_truncate")
    ours = our_loss(cfg, step, logp, our_weights(step, "token-mean"))
    assert_same(ours, theirs * mean, logp)
    assert distance(ours, theirs) > 1e-2


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_takes_rejected_tokens_out_of_the_mean_and_ours_only_out_of_the_surrogate(level: str, step: Step) -> None:
    """The denominator is that of the step as it was sampled, and KL and entropy hold for all of its tokens."""
    weights = rollout_weights(step, level, cap=1e12)
    kept = step.mask & (weights >= 0.6) & (weights <= 1.5)
    assert kept.any() and kept.sum() < step.mask.sum()
    logp = step.logp.clone().requires_grad_()
    theirs = aggregate(verl_vanilla(0.2, 0.2)(step, logp) * weights, kept, "token-mean")
    bounds: dict[str, Any] = {"sampler_floor": 0.6, "sampler_cap": 1.5}
    cfg = without_kl("bnpo", dual_clip=3.0, sampler_correction=f"{level}_mask", **bounds)
    ours = our_loss(cfg, step, logp, our_weights(step, "token-mean"))
    assert_same(ours * step.mask.sum(), theirs * kept.sum(), logp)


# -- the critic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_is_that_of_verl(mode: str, step: Step) -> None:
    value = step.value.clone().requires_grad_()
    held = value.clamp(step.old_value - 0.5, step.old_value + 0.5)
    per_token = torch.maximum((value - step.returns) ** 2, (held - step.returns) ** 2)
    theirs = 0.5 * aggregate(per_token, step.mask, mode)
    weights_T = our_weights(step, mode)[:, None].expand(B, T)[step.mask]
    value_T, old_T, return_T = (x[step.mask] for x in (value, step.old_value, step.returns))
    ours, metrics = value_loss(value_T, old_T, return_T, weights_T, clip_range=0.5)
    assert 0 < metrics["value/clip"] < 1
    assert_same(ours, theirs, value)
