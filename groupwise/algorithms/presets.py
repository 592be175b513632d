"""A method is a small record of orthogonal parts; a preset is a named record. Any part can be overridden by its key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from groupwise.schema import Strict, nearest

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]
RatioLevel = Literal["token", "sequence"]
KLKind = Literal["k1", "k2", "k3"]
Weighting = Literal["sequence", "token", "constant"]

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Algorithm(Strict):
    """What distinguishes one group-relative method from another.

    `algorithm` names the preset that parts not given are taken from:

    >>> Algorithm(algorithm="dapo", kl_coef=0.001).clip_bounds
    (0.8, 1.28)
    """

    algorithm: str = "grpo"
    """The preset that gives every part that is not set here: grpo, dr_grpo, dapo or gspo."""
    baseline: Baseline = "mean"
    """What a reward is compared with: the mean of its group, or the mean of the others in it (leave-one-out)."""
    scale: Scale = "std"
    """What the difference is divided by: the standard deviation of the group, or nothing (Dr. GRPO)."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of that deviation: 0 population, 1 sample (TRL, verl)."""
    eps: NonNegative = 1e-8
    """Added to the deviation before dividing."""
    ratio: RatioLevel = "token"
    """Level of the importance ratio: each token's own, or the geometric mean of its sequence (GSPO)."""
    clip_range: NonNegative = 0.2
    """The ratio is clipped below at 1 - clip_range, and above at 1 + clip_range unless clip_range_high is set. From 1
    up there is no lower bound (R1 trained with 10)."""
    clip_range_high: NonNegative | None = None
    """The upper clip range where it differs from the lower one (DAPO's clip-higher)."""
    kl_coef: NonNegative = 0.04
    """Weight of the KL penalty to the reference in the loss; 0 turns it off, and no reference is evaluated."""
    kl: KLKind = "k3"
    """Estimator of that KL."""
    weighting: Weighting = "sequence"
    """How tokens are averaged over the optimiser step: mean of sequence means, token mean, or constant length."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus."""
    sampler_cap: NonNegative | None = None
    """Truncate the sampler-mismatch weight exp(old - sampler log-prob) at this value; None leaves it out."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        name = given.get("algorithm", "grpo") if isinstance(given, dict) else None
        if not isinstance(name, str):
            return given
        if name not in PRESETS:
            raise ValueError(f"algorithm must be one of {', '.join(PRESETS)}, got {name!r}{nearest(name, PRESETS)}")
        return {**PRESETS[name], **given}

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(lowest, highest) unclipped ratio."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return 1 - self.clip_range, 1 + high


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},  # DeepSeekMath, arXiv 2402.03300
    "dr_grpo": {"scale": "none", "weighting": "constant", "kl_coef": 0.0},  # arXiv 2503.20783
    "dapo": {"weighting": "token", "clip_range_high": 0.28, "kl_coef": 0.0},  # arXiv 2503.14476
    "gspo": {"ratio": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4, "kl_coef": 0.0},  # arXiv 2507.18071
}
"""By name, the parts in which a method differs from GRPO."""
