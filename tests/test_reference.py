"""The reference: frozen while the policy trains, brought up to date when it is told to, with and without an adapter."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.batch import Batch, Segment
from groupwise.config import LoRA
from groupwise.model import Policy
from groupwise.reference import Reference

SEGMENTS = [
    Segment(prompt_ids=(7, 11, 5), token_ids=(3, 13, 2, 17)),
    Segment(prompt_ids=(7, 11, 5), token_ids=(19, 23), trained=(False, True)),
    Segment(prompt_ids=(29, 31), token_ids=(37, 41, 43)),
]
ADAPTER = LoRA(rank=4, alpha=8)


@pytest.fixture
def make_policy(llama, tokenizer) -> Callable[..., Policy]:
    """A policy of a small random model; equal arguments give equal policies."""

    def make(lora: LoRA | None = None, seed: int = 0, **changes: Any) -> Policy:
        torch.manual_seed(seed)  # of the adapter's start
        return Policy(llama(seed, spread=0.1, **changes), tokenizer, lora=lora)

    return make


def scores(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.token_logprobs(Batch.of(SEGMENTS))[0]


def reference_scores(reference: Reference) -> Tensor:
    with reference.scoring() as scorer:
        return scores(scorer)


def train(policy: Policy, steps: int = 3) -> None:
    """Gradient steps that make the segments likelier."""
    optimizer = torch.optim.SGD(policy.named_parameters.values(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-policy.token_logprobs(Batch.of(SEGMENTS))[0].mean()).backward()
        optimizer.step()


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def saved(reference: Reference) -> Any:
    """The state after a way through a file."""
    buffer = io.BytesIO()
    torch.save(reference.state_dict(), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


# -- a whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_the_reference_is_what_the_policy_was_and_stays_so(
    attention, make_policy, padded_policy, llama, tokenizer, plain_copy, naive_logprobs
) -> None:
    policy = make_policy() if attention == "packed" else padded_policy(llama(spread=0.1), tokenizer)
    start = plain_copy(policy.base, double=True)
    reference = Reference(policy)
    before = reference_scores(reference)
    with torch.no_grad():
        torch.testing.assert_close(before.double(), naive_logprobs(start, SEGMENTS), rtol=0, atol=1e-5)
    assert torch.equal(before, scores(policy))
    train(policy)
    assert torch.equal(reference_scores(reference), before)
    assert (scores(policy) - before).abs().max() > 0.1


def test_the_reference_has_no_gradient_and_the_policy_keeps_its_own(make_policy) -> None:
    policy = make_policy()
    reference = Reference(policy)
    assert reference.model is not None
    assert not any(p.requires_grad for p in reference.model.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in reference.model.model.parameters())


def test_a_refresh_makes_it_the_policy_of_that_moment(make_policy) -> None:
    policy = make_policy()
    reference = Reference(policy)
    for _ in range(2):
        train(policy)
        moment = scores(policy)
        assert not torch.equal(reference_scores(reference), moment)
        reference.refresh()
        assert torch.equal(reference_scores(reference), moment)
        train(policy)
        assert torch.equal(reference_scores(reference), moment)
        assert not torch.equal(scores(policy), moment)


@pytest.mark.parametrize("mix", [0.01, 0.25, 0.5, 0.9])
def test_a_partial_refresh_is_the_average_of_the_weights(mix: float, make_policy) -> None:
    policy = make_policy()
    reference = Reference(policy)
    assert reference.model is not None
    expected = {name: w.double() for name, w in weights(policy).items()}
    for _ in range(2):
        train(policy)
        own = weights(policy)
        expected = {name: mix * own[name].double() + (1 - mix) * w for name, w in expected.items()}
        reference.refresh(mix)
        assert equal(weights(policy), own)
        for name, found in weights(reference.model).items():
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(reference_scores(reference), scores(policy))


def test_a_model_of_its_own_is_scored_with_and_can_be_refreshed(make_policy) -> None:
    policy, source = make_policy(), make_policy(seed=3)
    expected = scores(source)
    reference = Reference(policy, source)
    assert torch.equal(reference_scores(reference), expected)
    assert not torch.equal(scores(policy), expected)
    train(policy)
    assert torch.equal(reference_scores(reference), expected)
    reference.refresh()
    assert torch.equal(reference_scores(reference), scores(policy))


@pytest.mark.parametrize("mix", [1.0, 0.5])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"hidden_size": 64},
        {"intermediate_size": 96},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_a_model_of_another_architecture_is_not_refreshed(changes: dict[str, Any], mix: float, make_policy) -> None:
    policy, source = make_policy(), make_policy(seed=3, **changes)
    before, expected = weights(source), scores(source)
    reference = Reference(policy, source)
    assert torch.equal(reference_scores(reference), expected)
    with pytest.raises(ValueError, match="the reference is another model than the policy"):
        reference.refresh(mix)
    assert equal(weights(source), before)
    assert torch.equal(reference_scores(reference), expected)
    assert reference.state_dict() is None


def test_a_whole_model_as_reference_of_an_adapter_is_not_refreshed(make_policy) -> None:
    policy, source = make_policy(ADAPTER), make_policy(seed=3)
    expected = scores(source)
    reference = Reference(policy, source)
    assert torch.equal(reference_scores(reference), expected)
    with pytest.raises(ValueError, match="the reference is another model than the policy"):
        reference.refresh()
    assert torch.equal(reference_scores(reference), expected)


# -- an adapter ------------------------------------------------------------------------------------------------------


def test_the_reference_of_an_adapter_is_the_model_without_it(make_policy, llama, plain_copy, naive_logprobs) -> None:
    policy = make_policy(ADAPTER)
    reference = Reference(policy)
    assert reference.model is None
    train(policy)
    with torch.no_grad():
        bare = naive_logprobs(plain_copy(llama(spread=0.1), double=True), SEGMENTS)
    torch.testing.assert_close(reference_scores(reference).double(), bare, rtol=0, atol=1e-5)
    assert (scores(policy).double() - bare).abs().max() > 0.01


def test_after_a_refresh_it_is_the_adapter_of_that_moment(make_policy) -> None:
    policy = make_policy(ADAPTER)
    reference = Reference(policy)
    for _ in range(2):
        train(policy)
        moment = scores(policy)
        reference.refresh()
        assert torch.equal(reference_scores(reference), moment)
        train(policy)
        assert torch.equal(reference_scores(reference), moment)
        assert not torch.equal(scores(policy), moment)
    assert reference.model is None


@pytest.mark.parametrize("refreshed", [False, True])
def test_scoring_leaves_the_policy_s_own_weights_alone(refreshed: bool, make_policy) -> None:
    policy = make_policy(ADAPTER)
    reference = Reference(policy)
    train(policy)
    if refreshed:
        reference.refresh()
        train(policy)
    own, expected = weights(policy), scores(policy)
    trained = list(policy.named_parameters)
    assert not torch.equal(reference_scores(reference), expected)
    assert equal(weights(policy), own)
    assert torch.equal(scores(policy), expected)
    with pytest.raises(RuntimeError, match="out of memory"), reference.scoring():
        raise RuntimeError("out of memory")
    assert equal(weights(policy), own)
    assert torch.equal(scores(policy), expected)
    assert list(policy.named_parameters) == trained


def test_adapters_are_not_averaged(make_policy) -> None:
    policy = make_policy(ADAPTER)
    reference = Reference(policy)
    train(policy)
    before = reference_scores(reference)
    with pytest.raises(ValueError, match=r"reference_mix must be 1 with LoRA, got 0\.5"):
        reference.refresh(0.5)
    assert torch.equal(reference_scores(reference), before)
    assert reference.state_dict() is None


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_it_has_a_state_once_it_has_moved(lora: LoRA | None, make_policy) -> None:
    policy = make_policy(lora)
    reference = Reference(policy)
    train(policy)
    assert reference.state_dict() is None
    reference.refresh()
    moment = scores(policy)
    state = saved(reference)
    assert state.keys() == policy.trainable_state().keys()

    resumed = Reference(make_policy(lora))
    assert not torch.equal(reference_scores(resumed), moment)
    resumed.load_state_dict(state)
    assert torch.equal(reference_scores(resumed), moment)
    assert equal(saved(resumed), state)
    train(resumed.policy)
    assert torch.equal(reference_scores(resumed), moment)


@pytest.mark.parametrize("lora", [None, ADAPTER])
def test_the_state_of_a_reference_that_has_not_moved_changes_nothing(lora: LoRA | None, make_policy) -> None:
    policy = make_policy(lora)
    reference = Reference(policy)
    before = reference_scores(reference)
    train(policy)
    reference.load_state_dict(saved(Reference(make_policy(lora))))
    assert torch.equal(reference_scores(reference), before)
    assert reference.state_dict() is None
