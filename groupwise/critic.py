"""The critic: a model of what a sequence will earn, for PPO. What GRPO does without.

T: trained tokens of a packed batch; D: width of the model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.algorithms.losses import value_loss
from groupwise.batch import Batch
from groupwise.config import CriticConfig, OptimConfig
from groupwise.model import Policy
from groupwise.optim import Optimizer


class Critic:
    """Values of the states before each trained token: a linear head on hidden states (arXiv 1707.06347, 1506.02438).

    The hidden states are those of a model of its own, which begins as a copy of the policy and has its own optimiser
    (`separate`), or the policy's (`shared`), whose optimiser then trains the head too. The head begins at 0.

    Raises:
        ValueError: the head is to be shared with a policy whose hidden states are not to be had.
    """

    def __init__(
        self, policy: Policy, config: CriticConfig, optim: OptimConfig, total_steps: int | None = None
    ) -> None:
        self.config = config
        self.shares_policy = config.model == "shared"
        if self.shares_policy and policy.attention != "packed":
            raise ValueError("critic.model 'shared' needs packed attention, which this model has not; set separate")
        self.body = policy if self.shares_policy else _twin(policy)
        width = policy.base.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.optimizer: Optimizer | None = None
        if not self.shares_policy:
            self.optimizer = Optimizer(self.named_parameters, optim.model_copy(update={"lr": config.lr}), total_steps)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained for the values alone."""
        head = {f"value_head.{name}": p for name, p in self.head.named_parameters()}
        return head if self.shares_policy else self.body.named_parameters | head

    @property
    def gigabytes(self) -> float:
        """What the critic adds to the memory for weights, gradients and the two moments of AdamW."""
        trained = list(self.named_parameters.values())
        frozen = [] if self.shares_policy else [p for p in self.body.model.parameters() if not p.requires_grad]
        return sum(p.numel() * p.element_size() for p in [*frozen, *trained * 4]) / 1e9

    def values(self, batch: Batch) -> Tensor:
        """The value before each trained token, [T]."""
        return self.values_of(self.body.trained_hidden(batch))

    def values_of(self, hidden_TD: Tensor) -> Tensor:
        """The same from hidden states, float32."""
        return self.head(hidden_TD.float()).squeeze(1)

    def loss(self, value_T: Tensor, batch: Batch, weight_T: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The clipped value loss of a batch whose segments know their old values and their returns."""
        old_value_T, return_T = (
            batch.flat(s.values for s in batch.segments),
            batch.flat(s.returns for s in batch.segments),
        )
        assert old_value_T is not None and return_T is not None
        return value_loss(value_T, old_value_T, return_T, weight_T, clip_range=self.config.clip_range)

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: p.detach() for name, p in self.named_parameters.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters.items():
                parameter.copy_(state["weights"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


def _twin(policy: Policy) -> Policy:
    """A copy of the policy that is trained apart from it: its adapters only, where it has some."""
    twin = copy.copy(policy)
    twin.model = copy.deepcopy(policy.model)
    twin.base = twin.model.get_base_model() if policy.has_adapter else twin.model
    # The language model's own head gives no values. It may be tied to the embeddings, which stay trained.
    if not policy.base.config.get_text_config().tie_word_embeddings:
        twin.base.get_output_embeddings().requires_grad_(False)
    return twin
