"""How per-token losses become one number: a weight per token, over the whole optimiser step.

Every loss is `(weight_T * per_token_T).sum()`, so micro-batches, packing and ranks cannot change it beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.algorithms.presets import Weighting


def token_weights(lengths_N: Sequence[int], mode: Weighting, max_len: int | None = None) -> list[float]:
    """The weight of each trained token of the N sequences of one optimiser step; one number per sequence.

    `sequence`: mean over sequences of the mean over tokens, 1 / (N L_i) (GRPO, arXiv 2402.03300). `token`: mean over
    all tokens, 1 / sum(L) (DAPO, 2503.14476). `sum`: mean over sequences of the sum over tokens, 1 / N (LUSPO,
    2602.05261). `constant`: 1 / (N max_len) (Dr. GRPO, 2503.20783). Sequences with nothing to train (L = 0) weigh 0 and
    are not counted in N.

    Raises:
        ValueError: `constant` without a positive `max_len`, or an unknown mode.

    >>> token_weights([1, 3], "sequence"), token_weights([1, 3], "token"), token_weights([1, 3], "constant", max_len=4)
    ([0.5, 0.16666666666666666], [0.25, 0.25], [0.125, 0.125])
    """
    count = sum(length > 0 for length in lengths_N)
    match mode:
        case "sequence":
            return [1 / (count * length) if length else 0.0 for length in lengths_N]
        case "token":
            total = sum(lengths_N)
            return [1 / total if length else 0.0 for length in lengths_N]
        case "sum":
            return [1 / count if length else 0.0 for length in lengths_N]
        case "constant":
            if not max_len or max_len < 1:
                raise ValueError(f"weighting 'constant' divides by max_len, which must be >= 1, got {max_len}")
            return [1 / (count * max_len) if length else 0.0 for length in lengths_N]
    raise ValueError(f"weighting must be one of sequence, token, sum, constant, got {mode!r}")
