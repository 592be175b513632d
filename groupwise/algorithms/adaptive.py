"""Coefficients that follow what they control."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeVar

from groupwise.algorithms.presets import Algorithm

A = TypeVar("A", bound=Algorithm)


@dataclass(slots=True)
class Coefficients:
    """The weights of KL and entropy as they are now; `entropy_is_low` turns an adaptive entropy bonus on."""

    kl: float
    entropy: float
    entropy_is_low: bool = False

    @classmethod
    def of(cls, cfg: Algorithm) -> Coefficients:
        return cls(cfg.kl_coef, cfg.entropy_coef)

    def applied_to(self, cfg: A) -> A:
        """`cfg` with the present coefficients."""
        if cfg.kl_target is None and cfg.entropy_target is None:
            return cfg
        active = cfg.entropy_target is None or self.entropy_is_low
        return cfg.model_copy(update={"kl_coef": self.kl, "entropy_coef": self.entropy if active else 0.0})

    def follow_kl(self, cfg: Algorithm, measured: float, samples: int) -> None:
        """After a step of `samples` samples: coef *= 1 + clip(KL / target - 1, +-0.2) samples / horizon (1909.08593).

        More samples than the horizon count as many as it has.

        >>> coefficients = Coefficients(kl=0.1, entropy=0.0)
        >>> coefficients.follow_kl(Algorithm(kl_coef=0.1, kl_target=0.01, kl_horizon=1000), 0.05, samples=100)
        >>> round(coefficients.kl, 6)
        0.102
        """
        if cfg.kl_target is not None:
            error = min(0.2, max(-0.2, measured / cfg.kl_target - 1))
            self.kl *= 1 + error * min(1.0, samples / cfg.kl_horizon)

    def follow_entropy(self, cfg: Algorithm, measured: float) -> None:
        """After an optimiser step: up by `entropy_step` below the target, else down, never under 0 (2505.22312).

        >>> coefficients = Coefficients(kl=0.0, entropy=0.0)
        >>> coefficients.follow_entropy(Algorithm(entropy_target=0.2, entropy_step=0.005), 0.1)
        >>> coefficients
        Coefficients(kl=0.0, entropy=0.005, entropy_is_low=True)
        """
        if cfg.entropy_target is not None:
            self.entropy_is_low = measured <= cfg.entropy_target
            step = cfg.entropy_step if measured < cfg.entropy_target else -cfg.entropy_step
            self.entropy = max(0.0, self.entropy + step)

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl, self.entropy, self.entropy_is_low = state["kl"], state["entropy"], bool(state["entropy_is_low"])
