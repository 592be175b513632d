"""A method is a small record of orthogonal parts; a preset is a named record. Any part can be overridden by its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from groupwise.schema import Strict, nearest

Baseline = Literal["mean", "leave_one_out", "length_weighted", "best_of_others", "greedy", "critic", "none"]
Scale = Literal["std", "batch_std", "mean", "signal_share", "none"]
Credit = Literal["sequence", "token"]
Whitening = Literal["none", "samples", "tokens"]
RatioLevel = Literal["token", "sequence", "sequence_token", "sequence_product"]
SurrogateKind = Literal["clip", "ratio", "cispo", "reinforce", "sapo", "gmpo", "vespo", "dppo_tv", "dppo_kl"]
Selection = Literal["all", "top_entropy", "clip_cov", "kl_cov"]
KLKind = Literal["k1", "k2", "k3"]
KLGradient = Literal["direct", "weighted", "straight_through"]
SamplerCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Weighting = Literal["sequence", "token", "sum", "constant"]

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[tuple[float, float], Field(strict=False)]
PositivePair = Annotated[tuple[Positive, Positive], Field(strict=False)]

GROUP_BASELINES = ("mean", "leave_one_out", "length_weighted", "best_of_others")
"""Baselines that compare the samples of one prompt, so that a group of one says nothing."""


class Algorithm(Strict):
    """What distinguishes one policy-gradient method from another.

    `algorithm` names the preset that parts not given are taken from:

    >>> Algorithm(algorithm="dapo", kl_coef=0.001).clip_bounds
    (0.8, 1.28)
    """

    algorithm: str = "grpo"
    """The preset that gives every part that is not set here; `groupwise algorithms` lists them."""

    # -- the advantage ---------------------------------------------------------------------------------------------
    baseline: Baseline = "mean"
    """What a reward is compared with: the mean of its group, the mean of the others in it (leave-one-out), the mean
    weighted by length (OPO), the best of the others (pass@k), the reward of the greedy answer (ReMax), a critic's
    values (PPO), or nothing."""
    scale: Scale = "std"
    """What the difference is divided by: the standard deviation of the group or of the batch, the mean of the group
    (MaxRL), the share of groups with signal (GPG), or nothing (Dr. GRPO)."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of deviations: 0 population, 1 sample (TRL, verl)."""
    eps: NonNegative = 1e-8
    """Added to what is divided by."""
    per_part: bool = False
    """Compute the advantage for each reward part and add them up by weight (GDPO), not from the weighted total."""
    whiten: Whitening = "none"
    """Bring advantages to mean 0 and deviation 1 over the whole step: one number per sample, or every token."""
    credit: Credit = "sequence"
    """What a token is credited with: all that its sample earned, or what was earned from this token on."""
    gamma: Share = 1.0
    """Discount per token, with credit `token`."""
    lam: Share = 1.0
    """GAE's lambda, with the baseline `critic`."""
    overlong_share: Share = 0.0
    """The last share of `max_tokens` in which the reward falls linearly by up to 1 (DAPO's soft overlong penalty)."""

    # -- the surrogate ---------------------------------------------------------------------------------------------
    ratio: RatioLevel = "token"
    """Level of the importance ratio: each token's own; the geometric mean of its sequence (GSPO); that value with the
    gradient of the token alone (GSPO-token); or the product over the sequence (RLOO)."""
    surrogate: SurrogateKind = "clip"
    """How ratio and advantage make a loss; see `groupwise.algorithms.surrogates`."""
    clip_range: NonNegative = 0.2
    """The ratio is clipped below at 1 - clip_range, and above at 1 + clip_range unless clip_range_high is set. From 1
    up there is no lower bound (R1 trained with 10). `gmpo` clips log-ratios; `dppo` bounds probability differences
    (`dppo_tv`) or divergences (`dppo_kl`); `sapo`, `vespo`, `ratio` and `reinforce` clip nothing."""
    clip_range_high: NonNegative | None = None
    """The upper clip range where it differs from the lower one (DAPO's clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage A, the loss is at most dual_clip * |A| (arXiv 1912.09729)."""
    ratio_cap: Positive = 20.0
    """Where `dppo` truncates the ratio that weighs its gradient."""
    sapo_temperatures: PositivePair = (1.0, 1.05)
    """`sapo`: temperature of the soft gate for positive and for other advantages."""
    vespo_positive: PositivePair = (2.0, 3.0)
    """`vespo`: (k, lambda) of w^k exp(lambda (1 - w)) for advantages >= 0."""
    vespo_negative: PositivePair = (3.0, 2.0)
    """`vespo`: the same for negative advantages."""
    selection: Selection = "all"
    """Which tokens are treated apart: only those of highest entropy are trained (`top_entropy`); some of high
    covariance are not (`clip_cov`); those of highest covariance are held near the old policy (`kl_cov`)."""
    selection_share: Share = 0.2
    """The share of the step's trained tokens that `selection` picks, at least one."""
    cov_bounds: Pair = (1.0, 5.0)
    """`clip_cov`: tokens with a covariance between these may be picked."""
    cov_kl_coef: NonNegative = 1.0
    """`kl_cov`: weight of |logp - old logp| on the picked tokens."""
    weighting: Weighting = "sequence"
    """How tokens are averaged over the optimiser step: mean of sequence means, token mean, mean of sequence sums, or
    sums divided by the constant length `max_tokens`."""

    # -- KL and entropy --------------------------------------------------------------------------------------------
    kl_coef: NonNegative = 0.04
    """Weight of the KL penalty to the reference; 0 turns it off, and no reference is evaluated."""
    kl: KLKind = "k3"
    """Estimator of that KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the penalty is added to the loss, or taken from the reward before advantages are computed."""
    kl_gradient: KLGradient = "direct"
    """In the loss: the estimator's own gradient; that of ratio * estimator (DeepSeek-V3.2, arXiv 2512.02556); or, with
    the estimator's value, the gradient of k2, which is that of the true KL in expectation."""
    kl_target: Positive | None = None
    """Adapt kl_coef after every step so that the KL per token nears this (arXiv 1909.08593)."""
    kl_horizon: Positive = 10_000.0
    """The adaptive coefficient moves by (relative error, at most 20 %) * samples / kl_horizon per step."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus; with `entropy_target`, where the adaptive weight starts."""
    entropy_target: NonNegative | None = None
    """Give the bonus only while the entropy is at or below this, and adapt its weight (Skywork-OR1, 2505.22312)."""
    entropy_step: NonNegative = 0.005
    """How far the adaptive weight moves per optimiser step."""
    kl_stop: Positive | None = None
    """End the epochs over a step's rollouts once the KL from the old policy, per token, exceeds this."""

    # -- stale, mismatched and truncated samples -------------------------------------------------------------------
    sampler_correction: SamplerCorrection = "none"
    """Weigh the surrogate by exp(old - sampler log-prob), per token or as the product over the sequence, where sampler
    and trainer differ: truncated into [sampler_floor, sampler_cap], or masked to 0 outside. `vespo` takes the mismatch
    into its own weight as it is."""
    sampler_cap: Positive = 2.0
    """The largest weight of `sampler_correction`."""
    sampler_floor: NonNegative = 0.0
    """Its smallest weight."""
    off_policy_limit: NonNegative | None = None
    """Do not train a sequence of negative advantage whose log-probs fell by more than this per token on average since
    it was sampled (DeepSeek-V3.2's off-policy sequence mask, arXiv 2512.02556)."""
    mask_truncated: bool = False
    """Do not train completions that were cut off (they still count in their group's baseline)."""
    resample_rounds: Annotated[int, Field(ge=0)] = 0
    """Dynamic sampling (DAPO): replace groups without signal by fresh prompts, in up to this many more rounds, and
    leave those without signal out of the averages. 0 turns it off."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        default = cls.model_fields["algorithm"].default
        name = given.get("algorithm", default) if isinstance(given, dict) else None
        if not isinstance(name, str):
            return given
        if name not in PRESETS:
            raise ValueError(f"algorithm must be one of {', '.join(PRESETS)}, got {name!r}{nearest(name, PRESETS)}")
        return {**PRESETS[name].parts, **given}

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> Algorithm:
        if mistakes := list(_impossible(self)):
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(lowest, highest) unclipped ratio."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage comes from the other samples of the prompt."""
        return self.baseline in GROUP_BASELINES

    @property
    def credits_by_model(self) -> bool:
        """Whether advantages depend on what models make of the tokens, and not on the rewards alone."""
        return self.baseline == "critic" or (self.kl_coef > 0 and self.kl_in == "reward")

    @property
    def needs_every_group(self) -> bool:
        """Whether a group without advantage still has a gradient, from the KL, the entropy or a penalty."""
        loss_kl = self.kl_coef > 0 and self.kl_in == "loss"
        return loss_kl or self.gives_entropy_bonus or self.selection == "kl_cov" or self.baseline == "critic"

    @property
    def scores_every_group(self) -> bool:
        """Whether the tokens of groups without advantage count: they are trained, or others are chosen among them."""
        return self.needs_every_group or self.selection != "all"

    @property
    def gives_entropy_bonus(self) -> bool:
        return self.entropy_coef > 0 or self.entropy_target is not None


WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], Callable[[Algorithm], bool], str], ...] = (
    (("lam",), lambda cfg: cfg.baseline == "critic", "baseline: critic"),
    (("gamma",), lambda cfg: cfg.credit == "token", "credit: token"),
    (("sapo_temperatures",), lambda cfg: cfg.surrogate == "sapo", "surrogate: sapo"),
    (("vespo_positive", "vespo_negative"), lambda cfg: cfg.surrogate == "vespo", "surrogate: vespo"),
    (("ratio_cap",), lambda cfg: cfg.surrogate in ("dppo_tv", "dppo_kl"), "surrogate: dppo_tv or dppo_kl"),
    (
        ("clip_range", "clip_range_high"),
        lambda cfg: cfg.surrogate in ("clip", "cispo", "gmpo", "dppo_tv", "dppo_kl"),
        "a surrogate that clips",
    ),
    (("selection_share",), lambda cfg: cfg.selection != "all", "a selection"),
    (("cov_bounds",), lambda cfg: cfg.selection == "clip_cov", "selection: clip_cov"),
    (("cov_kl_coef",), lambda cfg: cfg.selection == "kl_cov", "selection: kl_cov"),
    (("kl", "kl_in", "kl_gradient"), lambda cfg: cfg.kl_coef > 0, "a kl_coef above 0"),
    (("kl_horizon",), lambda cfg: cfg.kl_target is not None, "kl_target"),
    (("entropy_step",), lambda cfg: cfg.entropy_target is not None, "entropy_target"),
    (("sampler_cap", "sampler_floor"), lambda cfg: cfg.sampler_correction != "none", "sampler_correction"),
)
"""(keys, whether they matter, what they need): a key that does nothing is a mistake about what runs."""


def _impossible(cfg: Algorithm) -> Iterator[str]:
    """Combinations of parts that have no meaning, each with the reason and the remedy."""
    if cfg.scale in ("std", "batch_std", "mean") and not cfg.compares_groups:
        yield f"scale {cfg.scale!r} goes with a baseline from the group, not {cfg.baseline!r}; set scale: none"
    if cfg.scale == "mean" and cfg.baseline != "mean":
        yield f"scale 'mean' (MaxRL) is derived for baseline 'mean', not {cfg.baseline!r}"
    if cfg.scale == "mean" and cfg.overlong_share > 0:
        yield "scale 'mean' needs rewards >= 0, which the overlong penalty makes negative; set overlong_share: 0"
    if cfg.scale == "mean" and cfg.kl_coef > 0 and cfg.kl_in == "reward":
        yield "scale 'mean' needs rewards >= 0, which a KL makes negative; set kl_in: loss"
    if cfg.scale == "signal_share" and not cfg.compares_groups:
        yield f"scale 'signal_share' counts groups whose rewards differ, which baseline {cfg.baseline!r} does not need"
    if cfg.baseline == "critic" and cfg.credit != "token":
        yield "baseline 'critic' values every token, so it needs credit: token"
    if cfg.credit == "token" and cfg.scale != "none":
        yield f"credit 'token' adds up rewards along the sequence unscaled; set scale: none, got {cfg.scale!r}"
    if cfg.credit == "token" and cfg.whiten == "samples":
        yield "credit 'token' gives each token an advantage of its own; set whiten: tokens"
    if cfg.per_part and cfg.credit == "token":
        yield "per_part adds up advantages of whole samples; set credit: sequence"
    if cfg.per_part and not cfg.compares_groups:
        yield f"per_part compares the parts within a group, which baseline {cfg.baseline!r} does not"
    if cfg.per_part and cfg.kl_coef > 0 and cfg.kl_in == "reward":
        yield "per_part has no total to take the KL from; set kl_in: loss"
    if cfg.per_part and cfg.overlong_share > 0:
        yield "per_part has no total to take the overlong penalty from; set overlong_share: 0"
    if cfg.surrogate in ("gmpo", "reinforce", "dppo_tv", "dppo_kl") and cfg.ratio != "token":
        yield f"surrogate {cfg.surrogate!r} starts from token ratios; set ratio: token, got {cfg.ratio!r}"
    if cfg.surrogate == "vespo" and cfg.ratio != "sequence_product":
        yield f"surrogate 'vespo' weighs whole sequences; set ratio: sequence_product, got {cfg.ratio!r}"
    if cfg.surrogate == "gmpo" and cfg.selection == "top_entropy":
        yield "surrogate 'gmpo' trains a sequence by one mean over its tokens; set selection: all"
    if cfg.dual_clip is not None and cfg.surrogate != "clip":
        yield f"dual_clip bounds the clipped surrogate, not {cfg.surrogate!r}; set dual_clip: null"
    elif cfg.dual_clip is not None and cfg.dual_clip <= cfg.clip_bounds[1]:
        yield f"dual_clip must be above the clip at {cfg.clip_bounds[1]:g}, got {cfg.dual_clip:g}"
    if cfg.kl_coef > 0 and cfg.kl_in == "reward" and cfg.kl_gradient != "direct":
        yield f"kl_gradient {cfg.kl_gradient!r} has no effect in the reward; set kl_gradient: direct or kl_in: loss"
    if cfg.kl_coef > 0 and cfg.kl_in == "loss" and cfg.kl == "k1" and cfg.kl_gradient == "direct":
        yield (
            "kl 'k1' in the loss has a gradient of mean 0 and holds nothing back; set kl: k3, kl_gradient: "
            "straight_through, or kl_in: reward"
        )
    if cfg.kl_target is not None and cfg.kl_coef == 0:
        yield "kl_target adapts kl_coef, which must start above 0"
    if cfg.cov_bounds[0] >= cfg.cov_bounds[1]:
        yield f"cov_bounds must rise, got {cfg.cov_bounds[0]:g} and {cfg.cov_bounds[1]:g}"
    if cfg.sampler_floor > cfg.sampler_cap:
        yield f"sampler_floor {cfg.sampler_floor:g} is above sampler_cap {cfg.sampler_cap:g}"
    if cfg.scale == "signal_share" and cfg.resample_rounds > 0:
        yield "scale 'signal_share' makes up for groups without signal, which are then left out; set resample_rounds: 0"
    if cfg.baseline == "greedy" and cfg.overlong_share > 0:
        yield "baseline 'greedy' is a reward without the overlong penalty; set overlong_share: 0"
    if cfg.resample_rounds > 0 and not cfg.compares_groups:
        yield (
            f"resample_rounds looks for groups whose rewards differ, which baseline {cfg.baseline!r} does not need; "
            "set resample_rounds: 0"
        )
    for keys, at_work, needed in WITHOUT_EFFECT:
        for key in keys:
            value = getattr(cfg, key)
            default = PRESETS[cfg.algorithm].parts.get(key, type(cfg).model_fields[key].default)
            if value != default and not at_work(cfg):
                yield f"{key} {value} has no effect without {needed}; leave it out"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named method: where it comes from, and the parts in which it differs from GRPO."""

    paper: str
    """arXiv id, or where else it was described."""
    parts: Mapping[str, Any]


NO_KL: dict[str, Any] = {"kl_coef": 0.0}
IN_REWARD: dict[str, Any] = {"kl_in": "reward", "kl": "k1", "kl_coef": 0.05}
TOKEN_MEAN: dict[str, Any] = {"weighting": "token"}
ON_POLICY: dict[str, Any] = {"scale": "none", "surrogate": "reinforce", "weighting": "sum"}
ALONG_TOKENS: dict[str, Any] = {"scale": "none", "credit": "token", "whiten": "tokens", "ddof": 1, **TOKEN_MEAN}

PRESETS: dict[str, Preset] = {
    name: Preset(paper, parts)
    for name, paper, parts in (
        ("grpo", "2402.03300", {}),
        ("dr_grpo", "2503.20783", {"scale": "none", "weighting": "constant", **NO_KL}),
        (
            "dapo",
            "2503.14476",
            {"clip_range_high": 0.28, "overlong_share": 0.2, "resample_rounds": 4, **TOKEN_MEAN, **NO_KL},
        ),
        ("bnpo", "TRL's name", {**TOKEN_MEAN, **NO_KL}),
        ("lite_ppo", "2508.08221", {"scale": "batch_std", **TOKEN_MEAN, **NO_KL}),
        ("gspo", "2507.18071", {"ratio": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4, **NO_KL}),
        ("gspo_token", "2507.18071", {"ratio": "sequence_token", "clip_range": 3e-4, "clip_range_high": 4e-4, **NO_KL}),
        (
            "luspo",
            "2602.05261",
            {"ratio": "sequence", "clip_range": 2e-3, "clip_range_high": 2.5e-3, "weighting": "sum", **NO_KL},
        ),
        (
            "cispo",
            "2510.13786",
            {"surrogate": "cispo", "clip_range": 1.0, "clip_range_high": 4.0, **TOKEN_MEAN, **NO_KL},
        ),
        ("cispo_clip", "2506.13585", {"surrogate": "cispo", **TOKEN_MEAN, **NO_KL}),
        ("sapo", "2511.20347", {"surrogate": "sapo", **NO_KL}),
        ("gmpo", "2507.20673", {"surrogate": "gmpo", "clip_range": 0.4, **NO_KL}),
        ("vespo", "2602.10693", {"surrogate": "vespo", "ratio": "sequence_product", **TOKEN_MEAN, **NO_KL}),
        ("dppo_tv", "2602.04879", {"surrogate": "dppo_tv", "clip_range": 0.15, **TOKEN_MEAN, **NO_KL}),
        ("dppo_kl", "2602.04879", {"surrogate": "dppo_kl", "clip_range": 0.05, **TOKEN_MEAN, **NO_KL}),
        (
            "clip_cov",
            "2505.22617",
            {
                "selection": "clip_cov",
                "selection_share": 2e-4,
                "clip_range": 1.0,
                "dual_clip": 10.0,
                **TOKEN_MEAN,
                **NO_KL,
            },
        ),
        (
            "kl_cov",
            "2505.22617",
            {"selection": "kl_cov", "selection_share": 2e-3, "surrogate": "ratio", **TOKEN_MEAN, **NO_KL},
        ),
        (
            "rloo",
            "2402.14740",
            {"baseline": "leave_one_out", "scale": "none", "ratio": "sequence_product", **IN_REWARD},
        ),
        ("reinforce++", "2501.03262", {"baseline": "none", **ALONG_TOKENS, **IN_REWARD, "kl_coef": 0.01}),
        (
            "reinforce++_baseline",
            "2501.03262",
            {"scale": "none", "whiten": "tokens", "ddof": 1, "kl": "k2", "kl_coef": 0.01, **TOKEN_MEAN},
        ),
        ("remax", "2310.10505", {"baseline": "greedy", "credit": "token", **ON_POLICY, **IN_REWARD}),
        ("opo", "2505.23585", {"baseline": "length_weighted", **ON_POLICY, **NO_KL}),
        ("gpg", "2504.02546", {"scale": "signal_share", "surrogate": "reinforce", **TOKEN_MEAN, **NO_KL}),
        ("maxrl", "2602.02710", {"scale": "mean", **TOKEN_MEAN, **NO_KL}),
        ("grpo_passk", "2503.19595", {"baseline": "best_of_others", "ddof": 1, "eps": 1e-6}),
        ("gdpo", "2601.05242", {"per_part": True, "whiten": "samples", "ddof": 1, "eps": 1e-4}),
        ("ppo", "1707.06347", {"baseline": "critic", **ALONG_TOKENS, **IN_REWARD}),
    )
}
"""By name, where a method comes from and in which parts it differs from GRPO."""
