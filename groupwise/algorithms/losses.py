"""The policy loss and the value loss, as pure functions.

T: the trained tokens of a packed batch, in any order; N: sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.algorithms import kl
from groupwise.algorithms.presets import Algorithm, RatioLevel
from groupwise.algorithms.surrogates import SURROGATES, Tokens


def policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    *,
    cfg: Algorithm,
    segment_T: Tensor | None = None,
    ref_logp_T: Tensor | None = None,
    sampler_logp_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    selected_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The surrogate of `cfg` with its KL penalty and entropy bonus (arXiv 1707.06347, 2402.03300); (loss, metrics).

    loss = sum_t weight_t (surrogate_t s_t + kl_coef KL_t - entropy_coef H_t). The surrogate is a function of the ratio
    exp(logp - old_logp) at its level and of the advantage, see `surrogates`; s_t holds what keeps a token out of it or
    weighs it: the sampler's mismatch, the off-policy mask, the selection. Neither KL nor entropy is weighed by s_t.
    Tokens of weight 0 are not trained, whatever their numbers. Exponents are capped at `kl.EXPONENT_CAP`.

    Args:
        logp_T: log-probs under the policy being trained; the only input that needs a gradient, with entropy_T.
        old_logp_T: log-probs at the start of the update, detached.
        advantage_T: the advantage of each token.
        weight_T: from `weights.token_weights`; carries the whole normalisation.
        segment_T: index (0..N-1) of the sequence of each token; needed by what looks at whole sequences.
        ref_logp_T: log-probs under the reference; needed when the KL is in the loss.
        sampler_logp_T: log-probs as the sampler reported them; needed by `cfg.sampler_correction`.
        entropy_T: entropy of the policy at each token; needed when cfg.entropy_coef > 0.
        selected_T: from `selection.select_tokens`; needed unless cfg.selection is "all".

    Returns:
        The loss, and metrics: `loss/*` are weighted sums (they add up over micro-batches); `policy/*` are means, and
        for `_max` and `_min` the extremes, over the trained tokens. A clip is counted where it is at work.

    Raises:
        ValueError: an input that cfg needs is missing.
    """
    live_T = weight_T != 0
    zero = torch.zeros((), dtype=logp_T.dtype, device=logp_T.device)

    def trained(x_T: Tensor) -> Tensor:
        return torch.where(live_T, x_T, zero)

    gap_T = torch.zeros_like(logp_T)
    corrects = cfg.sampler_correction != "none" and sampler_logp_T is not None
    if corrects and sampler_logp_T is not None:
        gap_T = trained(old_logp_T - sampler_logp_T)
    logp_T, old_logp_T, advantage_T = trained(logp_T), trained(old_logp_T), trained(advantage_T)
    token_log_ratio_T = logp_T - old_logp_T
    tokens = Tokens(logp_T, old_logp_T, advantage_T, token_log_ratio_T, gap_T, live_T, segment_T)
    tokens = Tokens(logp_T, old_logp_T, advantage_T, _at_level(tokens, cfg.ratio), gap_T, live_T, segment_T)
    surrogate_T, stopped_T = SURROGATES[cfg.surrogate](tokens, cfg)
    sampler_T = logp_T.detach() if sampler_logp_T is None else trained(sampler_logp_T)

    left_out_T = torch.zeros_like(live_T)
    if corrects and cfg.surrogate != "vespo":  # which has the mismatch inside its own weight
        mismatch_T = _mismatch_weight(tokens, cfg)
        surrogate_T, left_out_T = surrogate_T * mismatch_T, mismatch_T == 0
    if cfg.off_policy_limit is not None:
        behaviour_T = old_logp_T if sampler_logp_T is None else sampler_T
        fell_T = tokens.sequence_mean(behaviour_T - logp_T.detach())
        left_out_T = left_out_T | ((advantage_T < 0) & (fell_T > cfg.off_policy_limit))
    if cfg.selection != "all" and selected_T is None:
        raise ValueError(f"selection is {cfg.selection!r}, so selected_T is needed; see selection.select_tokens")
    if selected_T is not None and cfg.selection in ("top_entropy", "clip_cov"):
        left_out_T = left_out_T | (selected_T == (cfg.selection == "clip_cov"))
    surrogate_T = torch.where(left_out_T, 0, surrogate_T)
    sums = {"loss/policy": (weight_T * surrogate_T).sum()}

    ratio_T = tokens.ratio
    means = {
        "policy/clip_high": stopped_T & (ratio_T > 1),
        "policy/clip_low": stopped_T & (ratio_T < 1),
        "policy/clip_positive": stopped_T & (advantage_T > 0),
        "policy/clip_negative": stopped_T & (advantage_T < 0),
        "policy/left_out": left_out_T,
        "policy/ratio": ratio_T,
        "policy/ratio_square": ratio_T.square(),
        "policy/kl_old": kl.estimate(old_logp_T, logp_T.detach(), "k3"),
    }
    if selected_T is not None and cfg.selection == "kl_cov":
        sums["loss/cov_kl"] = cfg.cov_kl_coef * (weight_T * torch.where(selected_T, token_log_ratio_T.abs(), 0)).sum()
    if cfg.kl_coef > 0 and cfg.kl_in == "loss":
        if ref_logp_T is None:
            raise ValueError(f"kl_coef is {cfg.kl_coef}, so ref_logp_T is needed; set kl_coef to 0 to train without it")
        kl_T = kl.penalty(logp_T, old_logp_T, trained(ref_logp_T), cfg.kl, cfg.kl_gradient)
        sums["loss/kl"] = cfg.kl_coef * (weight_T * kl_T).sum()
    if ref_logp_T is not None:
        means["policy/kl_ref"] = kl.estimate(logp_T.detach(), trained(ref_logp_T), cfg.kl)
        means["policy/kl_capped"] = ref_logp_T - logp_T > kl.EXPONENT_CAP
    if entropy_T is not None:
        means["policy/entropy"] = entropy_T
    if cfg.entropy_coef > 0:
        if entropy_T is None:
            raise ValueError(f"entropy_coef is {cfg.entropy_coef}, so entropy_T is needed")
        sums["loss/entropy"] = -cfg.entropy_coef * (weight_T * trained(entropy_T)).sum()
    extremes = {"policy/ratio_max": _largest(ratio_T, live_T), "policy/ratio_min": -_largest(-ratio_T, live_T)}
    if sampler_logp_T is not None:
        means["engine/logp_gap"] = (old_logp_T - sampler_T).abs()
        extremes["engine/logp_gap_max"] = _largest((old_logp_T - sampler_T).abs(), live_T)
    return torch.stack(list(sums.values())).sum(), _as_floats(sums, means, extremes, live_T)


def value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, weight_T: Tensor, *, clip_range: float | None = 0.2
) -> tuple[Tensor, dict[str, float]]:
    """0.5 sum_t weight_t max((V - R)^2, (V' - R)^2), V' = V held within clip_range of its old value; (loss, metrics).

    As in PPO's implementations, and as 1707.06347 has it without the clip (`clip_range=None`).

    Args:
        value_T: the critic's values now; the only input that needs a gradient.
        old_value_T: its values at the start of the update.
        return_T: what was earned from each token on, A_t + V_t of `advantages.gae`.
        weight_T: the weights of the policy loss.

    >>> V, R = torch.tensor([0.9]), torch.tensor([1.0])
    >>> round(value_loss(V, torch.tensor([0.5]), R, torch.ones(1), clip_range=0.2)[0].item(), 4)
    0.045
    """
    live_T = weight_T != 0
    error_T = (value_T - return_T).square()
    worst_T = error_T
    if clip_range is not None:
        held_T = old_value_T + (value_T - old_value_T).clamp(-clip_range, clip_range)
        worst_T = torch.maximum(error_T, (held_T - return_T).square())
    loss = 0.5 * (weight_T * torch.where(live_T, worst_T, 0)).sum()
    means = {
        "value/mean": value_T,
        "value/return": return_T,
        "value/error": error_T,
        "value/return_square": return_T.square(),
        "value/clip": worst_T > error_T,
    }
    return loss, _as_floats({"loss/value": loss}, means, {}, live_T)


def _at_level(tokens: Tokens, level: RatioLevel) -> Tensor:
    """The log-ratio at each token: its own, or its sequence's."""
    match level:
        case "token":
            return tokens.log_ratio
        case "sequence":
            return tokens.sequence_mean(tokens.log_ratio)
        case "sequence_token":  # GSPO-token: the sequence's value, the token's gradient
            own = tokens.log_ratio
            return own - own.detach() + tokens.sequence_mean(own.detach())
        case "sequence_product":
            return tokens.sequence_sum(tokens.log_ratio)


def _mismatch_weight(tokens: Tokens, cfg: Algorithm) -> Tensor:
    """exp(old - sampler log-prob) of each token, or its product over the sequence, within the bounds; detached."""
    level, rule = cfg.sampler_correction.split("_")
    gap_T = tokens.sampler_gap if level == "token" else tokens.sequence_sum(tokens.sampler_gap)
    weight_T = kl.bounded_exp(gap_T).detach()
    if rule == "truncate":
        return weight_T.clamp(cfg.sampler_floor, cfg.sampler_cap)
    return torch.where((weight_T >= cfg.sampler_floor) & (weight_T <= cfg.sampler_cap), weight_T, 0)


def _largest(x_T: Tensor, live_T: Tensor) -> Tensor:
    """The largest value at a live token; 0 if there is none."""
    if not live_T.any():
        return torch.zeros((), device=x_T.device)
    return torch.where(live_T, x_T, -torch.inf).max()


def _as_floats(
    sums: dict[str, Tensor], means: dict[str, Tensor], extremes: dict[str, Tensor], live_T: Tensor
) -> dict[str, float]:
    """Metrics as numbers, in one transfer from the device; means are over the live tokens."""
    with torch.no_grad():
        count = live_T.sum().clamp(min=1)
        values = [x.detach().double() for x in sums.values()]
        values += [torch.where(live_T, x.double(), 0.0).sum() / count for x in means.values()]
        values += [x.detach().double() for x in extremes.values()]
        return dict(zip([*sums, *means, *extremes], torch.stack(values).tolist(), strict=True))
