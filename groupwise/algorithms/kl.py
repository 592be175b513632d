"""Estimators of KL(policy || reference) from the log-probs of tokens that the policy sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.algorithms.presets import KLGradient, KLKind

EXPONENT_CAP = 20.0
"""Exponents are capped here: e^20 is already far outside any trust region, and float32 stays finite."""


def bounded_exp(x_T: Tensor) -> Tensor:
    """e^x with x held within +-EXPONENT_CAP."""
    return torch.exp(x_T.clamp(-EXPONENT_CAP, EXPONENT_CAP))


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
            held_T = d_T - (d_T - EXPONENT_CAP).clamp(min=0).detach()  # the value is held, the gradient keeps its sign
            return torch.exp(held_T) - d_T - 1
    raise ValueError(f"kl must be one of k1, k2, k3, got {kind!r}")


def penalty(
    logp_T: Tensor, old_logp_T: Tensor, ref_logp_T: Tensor, kind: KLKind = "k3", gradient: KLGradient = "direct"
) -> Tensor:
    """The estimate as it stands in the loss, shape [T]: its value, and the gradient that is asked for.

    `direct` is the estimate itself. `weighted` is rho * estimate, rho = exp(logp - old_logp): unbiased when the policy
    has moved since it sampled (arXiv 2512.02556, eq. 7). `straight_through` has the value of the estimate and the
    gradient of k2, -d, whose expectation is the gradient of the KL.

    >>> logp = torch.tensor([-1.0], requires_grad=True)
    >>> penalty(logp, logp.detach(), torch.tensor([-3.0]), "k1", "straight_through").sum().backward()
    >>> logp.grad.item()
    2.0
    """
    kl_T = estimate(logp_T, ref_logp_T, kind)
    match gradient:
        case "direct":
            return kl_T
        case "weighted":
            return bounded_exp(logp_T - old_logp_T) * kl_T
        case "straight_through":
            k2_T = estimate(logp_T, ref_logp_T, "k2")
            return k2_T + (kl_T - k2_T).detach()
    raise ValueError(f"kl_gradient must be one of direct, weighted, straight_through, got {gradient!r}")
