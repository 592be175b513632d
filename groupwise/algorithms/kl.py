"""Estimators of KL(policy || reference) from the log-probs of tokens that the policy sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.algorithms.presets import KLKind

EXPONENT_CAP = 20.0
"""Exponents are capped here: e^20 is already far outside any trust region, and float32 stays finite."""


def estimate(logp_T: Tensor, ref_logp_T: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token KL estimate, shape [T] (http://joschu.net/blog/kl-approx.html; k3 as in arXiv 2402.03300).

    With d = ref_logp - logp: k1 = -d is unbiased but can be negative; k2 = d^2 / 2; k3 = e^d - d - 1 is unbiased and
    never negative. The exponent is capped at `EXPONENT_CAP`.

    >>> [round(x, 4) for x in estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])).tolist()]
    [0.3679, 0.7183]
    """
    d_T = ref_logp_T - logp_T
    match kind:
        case "k1":
            return -d_T
        case "k2":
            return 0.5 * d_T.square()
        case "k3":
            return torch.exp(d_T.clamp(max=EXPONENT_CAP)) - d_T - 1
    raise ValueError(f"kl must be one of k1, k2, k3, got {kind!r}")
