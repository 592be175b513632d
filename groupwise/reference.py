"""Reference: the frozen policy that the KL penalty measures against, and how it is brought up to date."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from groupwise.model import Policy


class Reference:
    """A frozen policy beside the one that is trained.

    Under LoRA it costs no memory: the model without its adapter, or with the adapter that `refresh` kept. Otherwise it
    is a copy of the model, or `source`.
    """

    def __init__(self, policy: Policy, source: Policy | None = None) -> None:
        self.policy = policy
        self.is_refreshed = False
        self._adapter: dict[str, Tensor] | None = None
        self.model: Policy | None = None
        """The frozen model; None where it is the trained one with another adapter, or none."""
        if source is not None or not policy.has_adapter:
            self.model = _frozen(policy if source is None else source, policy)

    @contextmanager
    def scoring(self) -> Iterator[Policy]:
        """The policy to score tokens with."""
        if self.model is not None:
            yield self.model
        elif self._adapter is None:
            with self.policy.adapter_off() as bare:
                yield bare
        else:
            own = {name: weight.clone() for name, weight in self.policy.trainable_state().items()}
            self.policy.load_trainable_state(self._adapter)
            try:
                yield self.policy
            finally:
                self.policy.load_trainable_state(own)

    def refresh(self, mix: float = 1.0) -> None:
        """Move the reference towards the policy: to `mix` * policy + (1 - `mix`) * reference.

        1 replaces it, as DeepSeek-R1 does every 400 steps (arXiv 2501.12948); a small number after every step makes it
        a moving average.

        Raises:
            ValueError: the two are different models, or a part of an adapter is asked for: the average of two
                adapters' factors is not the adapter of the average.
        """
        self.require_same_model()
        if self.model is None and mix != 1:
            raise ValueError(f"reference_mix must be 1 with LoRA, got {mix}; adapters cannot be averaged")
        with torch.no_grad():
            if self.model is None:
                self._adapter = {name: weight.clone() for name, weight in self.policy.trainable_state().items()}
            else:
                kept = self._weights(self.model)
                for name, weight in self.policy.trainable_state().items():
                    kept[name].lerp_(weight, mix) if mix != 1 else kept[name].copy_(weight)
        self.is_refreshed = True

    def state_dict(self) -> dict[str, Tensor] | None:
        """Its weights if they have moved; None while they are what the run began with."""
        if not self.is_refreshed:
            return None
        return self._adapter if self.model is None else self._weights(self.model)

    def require_same_model(self) -> None:
        """Make sure that the reference can be refreshed.

        Raises:
            ValueError: it is another model than the policy.
        """
        if self.model is None:
            return
        own, other = ({n: p.shape for n, p in m.model.named_parameters()} for m in (self.policy, self.model))
        if own != other:
            name = next(n for n in {**own, **other} if own.get(n) != other.get(n))
            raise ValueError(
                f"the reference is another model than the policy (they differ in {name}); set reference_every: 0"
            )

    def load_state_dict(self, state: dict[str, Tensor] | None) -> None:
        if state is None:
            return
        self.is_refreshed = True
        if self.model is None:
            self._adapter = {name: weight.to(self.policy.device) for name, weight in state.items()}
        else:
            for name, weight in self._weights(self.model).items():
                weight.copy_(state[name])

    def _weights(self, model: Policy) -> dict[str, Tensor]:
        """The reference's own copies of what the policy trains."""
        found = {name: p.detach() for name, p in model.model.named_parameters()}
        return {name: found[name] for name in self.policy.trainable_state()}


def _frozen(source: Policy, policy: Policy) -> Policy:
    reference = source
    if reference.base is policy.base:  # a copy, which does not move with the policy
        reference = copy.copy(reference)
        reference.base = reference.model = copy.deepcopy(policy.base)
    reference.model.requires_grad_(False)
    return reference
