"""What is good: the parts of a reward, and the composer that weighs them. Quick to import: no torch, no sympy."""

from groupwise.rewards.composer import (
    BUILTIN_PARTS,
    RewardComposer,
    RewardError,
    RewardPart,
    Scorer,
    as_reward,
    load_part,
)
from groupwise.rewards.correctness import Judge, Verifier

__all__ = [
    "BUILTIN_PARTS",
    "Judge",
    "RewardComposer",
    "RewardError",
    "RewardPart",
    "Scorer",
    "Verifier",
    "as_reward",
    "load_part",
]
