"""Which tokens of an optimiser step are treated apart; decided once, over the whole step, before its first update.

So micro-batches, packing and ranks cannot change the choice. T: all trained tokens of the step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.presets import Algorithm


def select_tokens(cfg: Algorithm, *, logp_T: Tensor, advantage_T: Tensor, entropy_T: Tensor, seed: int) -> Tensor:
    """The tokens that `cfg.selection` picks, a bool [T].

    `top_entropy`: those whose entropy reaches the (1 - share) quantile (arXiv 2506.01939). `kl_cov`: the share of
    highest covariance (A - mean A)(logp - mean logp); `clip_cov`: as many, drawn at random from those whose covariance
    lies within `cfg.cov_bounds` (both 2505.22617). Log-probs and entropies are the old policy's.
    """
    match cfg.selection:
        case "all":
            return torch.ones_like(logp_T, dtype=torch.bool)
        case "top_entropy":
            return entropy_T >= float(np.quantile(entropy_T.double().cpu().numpy(), 1 - cfg.selection_share))
        case "kl_cov":
            chosen = covariance(logp_T, advantage_T).topk(_count(cfg, len(logp_T))).indices
        case "clip_cov":
            cov_T = covariance(logp_T, advantage_T)
            low, high = cfg.cov_bounds
            eligible = ((cov_T > low) & (cov_T < high)).nonzero().squeeze(1)
            order = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(seed)).to(eligible.device)
            chosen = eligible[order[: _count(cfg, len(logp_T))]]
    return torch.zeros_like(logp_T, dtype=torch.bool).index_fill(0, chosen, True)


def covariance(logp_T: Tensor, advantage_T: Tensor) -> Tensor:
    """Each token's share of the covariance between log-prob and advantage (arXiv 2505.22617, eq. 8).

    >>> covariance(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0])).tolist()
    [1.0, 1.0]
    """
    return (advantage_T - advantage_T.mean()) * (logp_T - logp_T.mean())


def _count(cfg: Algorithm, tokens: int) -> int:
    return min(tokens, max(1, int(cfg.selection_share * tokens)))
