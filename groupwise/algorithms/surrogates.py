"""The surrogate objectives: what ratio and advantage of a token make of its loss. T: tokens of a packed batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algorithms.kl import EXPONENT_CAP, bounded_exp
from groupwise.algorithms.presets import Algorithm, SurrogateKind

Surrogate = Callable[["Tokens", Algorithm], tuple[Tensor, Tensor]]
"""(loss_T, stopped_T): the loss of every token, and where its bound is at work."""

LOG_TINY = math.log(1e-8)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a surrogate may look at, every tensor [T]; tokens that are not trained are 0 throughout."""

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    log_ratio: Tensor
    """logp - old_logp at the level of `cfg.ratio`."""
    sampler_gap: Tensor
    """old_logp - sampler_logp; 0 where it is not corrected for."""
    live: Tensor
    segment: Tensor | None

    @property
    def ratio(self) -> Tensor:
        return bounded_exp(self.log_ratio)

    def sequence_sum(self, x_T: Tensor) -> Tensor:
        """The sum of a quantity over its live tokens, at each token of the sequence."""
        total_N = x_T.new_zeros(self._sequences).index_add(0, self._segment, torch.where(self.live, x_T, 0))
        return total_N[self._segment]

    def sequence_mean(self, x_T: Tensor) -> Tensor:
        """The mean of a quantity over its live tokens, at each token of the sequence."""
        return self.sequence_sum(x_T) / self.sequence_sum(torch.ones_like(x_T)).clamp(min=1)

    @property
    def _segment(self) -> Tensor:
        if self.segment is None:
            raise ValueError("a quantity of whole sequences needs segment_T, the index of each token's sequence")
        return self.segment

    @property
    def _sequences(self) -> int:
        return int(self._segment.max()) + 1 if len(self._segment) else 0


def clip(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho) A) (PPO, arXiv 1707.06347); with `dual_clip` c at most c|A| where A < 0 (1912.09729)."""
    low, high = cfg.clip_bounds
    ratio = x.ratio
    loss = -torch.minimum(ratio * x.advantage, ratio.clamp(low, high) * x.advantage)
    stopped = ((ratio > high) & (x.advantage > 0)) | ((ratio < low) & (x.advantage < 0))
    if cfg.dual_clip is not None:
        worst = -cfg.dual_clip * x.advantage
        bound = (x.advantage < 0) & (loss > worst)
        loss, stopped = torch.where(bound, worst, loss), stopped | bound
    return loss, stopped


def ratio(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-rho A, unbounded (KL-Cov, arXiv 2505.22617)."""
    return -x.ratio * x.advantage, torch.zeros_like(x.live)


def reinforce(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-A logp: the plain policy gradient, blind to how far the policy has moved."""
    return -x.advantage * x.logp, torch.zeros_like(x.live)


def cispo(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-sg(clip(rho)) A logp: the weight is bounded, the gradient never taken away (arXiv 2506.13585, 2510.13786)."""
    low, high = cfg.clip_bounds
    ratio = x.ratio
    weight = ratio.clamp(max(0.0, low), high).detach()
    return -weight * x.advantage * x.logp, (ratio < low) | (ratio > high)


def sapo(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-(4/tau) sigmoid(tau (rho - 1)) A: a soft gate instead of a clip (arXiv 2511.20347)."""
    positive, other = cfg.sapo_temperatures
    tau = torch.where(x.advantage > 0, x.logp.new_tensor(positive), x.logp.new_tensor(other))
    gate = torch.sigmoid(tau * (x.ratio - 1)) * 4 / tau
    return -gate * x.advantage, torch.zeros_like(x.live)


def gmpo(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-A exp(mean_t bounded(log rho_t)): geometric mean of token ratios, each bounded first (arXiv 2507.20673).

    Log-ratios are bounded on the side that the advantage pushes to: at clip_range_high above for A > 0, at -clip_range
    below for A < 0.
    """
    low, high = -cfg.clip_range, cfg.clip_range if cfg.clip_range_high is None else cfg.clip_range_high
    gains = x.advantage > 0
    bounded = torch.where(gains, x.log_ratio.clamp(max=high), x.log_ratio.clamp(min=low))
    stopped = torch.where(gains, x.log_ratio > high, (x.log_ratio < low) & (x.advantage < 0))
    return -x.advantage * bounded_exp(x.sequence_mean(bounded)), stopped


def vespo(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-sg(w^k exp(lambda (1 - w))) A logp, w the ratio of the whole sequence (arXiv 2602.10693).

    The sampler's mismatch, where it is corrected for, is part of w: raw, since w has bounds of its own.
    """
    k, lam = (
        torch.where(x.advantage >= 0, x.logp.new_tensor(positive), x.logp.new_tensor(negative))
        for positive, negative in zip(cfg.vespo_positive, cfg.vespo_negative, strict=True)
    )
    log_w = (x.log_ratio + x.sequence_sum(x.sampler_gap)).clamp(LOG_TINY, EXPONENT_CAP)
    weight = torch.exp(lam + k * log_w - lam * torch.exp(log_w)).detach()
    return -weight * x.advantage * x.logp, torch.zeros_like(x.live)


def dppo_tv(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """-sg(min(rho, cap)) A logp, unless the token's probability has moved too far along A (arXiv 2602.04879)."""
    low, high = _divergence_bounds(cfg)
    moved = torch.exp(x.logp.detach()) - torch.exp(x.old_logp)
    return _divergence_masked(x, cfg, torch.where(x.advantage > 0, moved > high, moved < -low))


def dppo_kl(x: Tokens, cfg: Algorithm) -> tuple[Tensor, Tensor]:
    """As `dppo_tv`, the distance being the KL divergence between "this token" and "any other" (arXiv 2602.04879)."""
    low, high = _divergence_bounds(cfg)
    largest = 1 - torch.finfo(x.logp.dtype).eps
    old, new = (torch.exp(logp).clamp(max=largest) for logp in (x.old_logp, x.logp.detach()))
    kl = old * (x.old_logp - x.logp.detach()) + (1 - old) * (torch.log1p(-old) - torch.log1p(-new))
    away_up, away_down = (x.log_ratio > 0) & (kl > high), (x.log_ratio < 0) & (kl > low)
    return _divergence_masked(x, cfg, torch.where(x.advantage > 0, away_up, away_down))


def _divergence_bounds(cfg: Algorithm) -> tuple[float, float]:
    return cfg.clip_range, cfg.clip_range if cfg.clip_range_high is None else cfg.clip_range_high


def _divergence_masked(x: Tokens, cfg: Algorithm, too_far: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.where(too_far, 0, x.ratio.clamp(max=cfg.ratio_cap)).detach()
    return -weight * x.advantage * x.logp, too_far


SURROGATES: dict[SurrogateKind, Surrogate] = {
    "clip": clip,
    "ratio": ratio,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
