"""From logits to tokens, without a random state: the uniform number of each position is a hash.

R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from groupwise.types import Sampling

_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for positions 0 .. count-1 of one sample: float32 multiples of 2^-24, shape [count].

    A counter-based generator (the finaliser of SplitMix64, Steele et al. 2014): no state, any position by itself.
    """
    with np.errstate(over="ignore"):
        stream = _mix(np.uint64(seed % 2**64) + np.uint64(_GOLDEN) * np.uint64(sample + 1))
        counter = np.arange(1, count + 1, dtype=np.uint64)
        return ((_mix(stream + np.uint64(_GOLDEN) * counter) >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling, vocabulary: int) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-prob; both [R].

    Only ids below `vocabulary` (the tokenizer's size; heads are often padded beyond it) can be drawn. Log-probs are
    those of softmax(logits / temperature) over all V entries; greedy decoding reports them at temperature 1.
    """
    greedy = sampling.temperature == 0
    scaled = logits_RV if greedy or sampling.temperature == 1 else logits_RV / sampling.temperature
    normaliser_R1 = torch.logsumexp(scaled, dim=1, keepdim=True)
    known = scaled[:, :vocabulary]
    if greedy:
        token_R = known.argmax(dim=1)
    else:
        share_RV = _filtered(torch.softmax(known, dim=1), sampling)
        cumulative = share_RV.cumsum(dim=1)
        target = uniform_R[:, None] * cumulative[:, -1:]
        token_R = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        # Rounding can put the target on the last step of the CDF: take the last token that has a share.
        last = vocabulary - 1 - (share_RV > 0).flip(1).to(torch.uint8).argmax(dim=1)
        token_R = torch.minimum(token_R, last)
    logp_R = scaled.gather(1, token_R[:, None]).squeeze(1) - normaliser_R1.squeeze(1)
    return token_R, logp_R


def _filtered(share_RV: Tensor, sampling: Sampling) -> Tensor:
    """Shares with what the filters refuse set to 0: top-k, then top-p of what is left, then min-p."""
    if 0 < sampling.top_k < share_RV.shape[1]:
        kept = share_RV.topk(sampling.top_k, dim=1)
        share_RV = torch.zeros_like(share_RV).scatter_(1, kept.indices, kept.values)
    if sampling.top_p < 1:
        ordered, order = share_RV.sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(dim=1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p * ordered.sum(dim=1, keepdim=True), 0.0)
        share_RV = torch.zeros_like(share_RV).scatter_(1, order, ordered)
    if sampling.min_p > 0:
        share_RV = share_RV.masked_fill(share_RV < sampling.min_p * share_RV.amax(dim=1, keepdim=True), 0.0)
    return share_RV
