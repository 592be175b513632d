"""The clipped policy loss, as one pure function of log-probs.

T: the trained tokens of a packed batch, in any order; N: sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.algorithms import kl
from groupwise.algorithms.presets import Algorithm


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
) -> tuple[Tensor, dict[str, float]]:
    """Clipped surrogate (arXiv 1707.06347, 2402.03300) with KL penalty and entropy bonus; returns (loss, metrics).

    loss = sum_t weight_t (-min(rho A, clip(rho) A) w + kl_coef KL_t - entropy_coef H_t), where rho =
    exp(logp - old_logp), or its geometric mean over a sequence (`cfg.ratio == "sequence"`, GSPO 2507.18071), and
    w = min(exp(old_logp - sampler_logp), cfg.sampler_cap), detached, when both are given. Tokens of weight 0 are not
    trained, whatever their numbers. Exponents are capped at `kl.EXPONENT_CAP`.

    Args:
        logp_T: log-probs under the policy being trained; the only input that needs a gradient, with entropy_T.
        old_logp_T: log-probs at the start of the update, detached.
        advantage_T: the advantage of each token's sample.
        weight_T: from `weights.token_weights`; carries the whole normalisation.
        segment_T: index (0..N-1) of the sequence of each token; needed by the sequence ratio.
        ref_logp_T: log-probs under the reference; needed when cfg.kl_coef > 0.
        sampler_logp_T: log-probs as the sampler reported them.
        entropy_T: entropy of the policy at each token; needed when cfg.entropy_coef > 0.

    Returns:
        The loss, and metrics: `loss/*` are weighted sums (they add up over micro-batches); `policy/*` are means, and
        for `_max` the maximum, over the trained tokens. A clip is counted where it takes the gradient away.

    Raises:
        ValueError: an input that cfg needs is missing.
    """
    live_T = weight_T != 0
    zero = torch.zeros((), dtype=logp_T.dtype, device=logp_T.device)
    log_ratio_T = torch.where(live_T, logp_T - old_logp_T, zero)
    advantage_T = torch.where(live_T, advantage_T, zero)
    if cfg.ratio == "sequence":
        log_ratio_T = _sequence_mean(log_ratio_T, live_T, segment_T)
    ratio_T = torch.exp(log_ratio_T.clamp(-kl.EXPONENT_CAP, kl.EXPONENT_CAP))
    low, high = cfg.clip_bounds
    clipped_T = ratio_T.clamp(low, high)
    surrogate_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if cfg.sampler_cap is not None and sampler_logp_T is not None:
        gap_T = torch.where(live_T, old_logp_T - sampler_logp_T, zero).clamp(max=kl.EXPONENT_CAP)
        surrogate_T = surrogate_T * torch.exp(gap_T).clamp(max=cfg.sampler_cap).detach()
    policy = (weight_T * surrogate_T).sum()
    loss = policy

    sums = {"loss/policy": policy}
    means = {
        "policy/clip_high": (ratio_T > high) & (advantage_T > 0),
        "policy/clip_low": (ratio_T < low) & (advantage_T < 0),
        "policy/ratio": ratio_T,
    }
    if cfg.kl_coef > 0:
        if ref_logp_T is None:
            raise ValueError(f"kl_coef is {cfg.kl_coef}, so ref_logp_T is needed; set kl_coef to 0 to train without it")
        kl_T = kl.estimate(torch.where(live_T, logp_T, zero), torch.where(live_T, ref_logp_T, zero), cfg.kl)
        sums["loss/kl"] = cfg.kl_coef * (weight_T * kl_T).sum()
        means["policy/kl_ref"] = kl_T
        means["policy/kl_capped"] = ref_logp_T - logp_T > kl.EXPONENT_CAP
        loss = loss + sums["loss/kl"]
    if entropy_T is not None:
        means["policy/entropy"] = entropy_T
    if cfg.entropy_coef > 0:
        if entropy_T is None:
            raise ValueError(f"entropy_coef is {cfg.entropy_coef}, so entropy_T is needed")
        sums["loss/entropy"] = -cfg.entropy_coef * (weight_T * torch.where(live_T, entropy_T, zero)).sum()
        loss = loss + sums["loss/entropy"]
    with torch.no_grad():
        values = [x.detach().double() for x in sums.values()]
        values += [torch.where(live_T, x.double(), 0.0).sum() / live_T.sum().clamp(min=1) for x in means.values()]
        values.append(torch.where(live_T, ratio_T, zero).max().double() if len(ratio_T) else zero.double())
        names = [*sums, *means, "policy/ratio_max"]
        metrics = dict(zip(names, torch.stack(values).tolist(), strict=True))  # one transfer from the device
    return loss, metrics


def _sequence_mean(log_ratio_T: Tensor, live_T: Tensor, segment_T: Tensor | None) -> Tensor:
    """The mean log-ratio over the live tokens of each token's sequence, shape [T]."""
    if segment_T is None:
        raise ValueError("ratio 'sequence' needs segment_T, the index of each token's sequence")
    count = int(segment_T.max()) + 1 if len(segment_T) else 0
    total_N = log_ratio_T.new_zeros(count).index_add(0, segment_T, log_ratio_T)
    length_N = log_ratio_T.new_zeros(count).index_add(0, segment_T, live_T.to(log_ratio_T.dtype))
    return (total_N / length_N.clamp(min=1))[segment_T]
