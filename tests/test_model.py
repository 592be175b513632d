"""Policy: log-probs against naive ones, memory, loading and saving."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

from groupwise import model as model_module
from groupwise.batch import Batch, Segment, pack
from groupwise.config import LoRA
from groupwise.model import Policy

PATHS = ["packed", "padded"]


@pytest.fixture
def make_policy(padded_policy, tokenizer):
    def make(model, path: str = "packed") -> Policy:
        made = Policy(model, tokenizer) if path == "packed" else padded_policy(model, tokenizer)
        assert made.attention == path
        return made

    return make


def some_segments() -> list[Segment]:
    prompt, other = (65, 66, 67), (70, 71, 72, 73, 74)
    return [
        Segment(prompt_ids=prompt, token_ids=(80, 81, 82, 83)),
        Segment(prompt_ids=prompt, token_ids=(90,)),
        Segment(prompt_ids=other, token_ids=(75, 76, 60), trained=(True, False, True)),
    ]


# -- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_each_answer_token_is_predicted_by_the_one_before_it(path, make_policy, counting_model, plain_copy) -> None:
    """A model that counts: prompt 3 4, answer 5 6 7 is certain, its first token included; 5 6 8 is not."""
    policy = make_policy(plain_copy(counting_model), path)
    right, _ = policy.token_logprobs(Batch.of([Segment(prompt_ids=(3, 4), token_ids=(5, 6, 7))]))
    assert right.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    wrong, _ = policy.token_logprobs(Batch.of([Segment(prompt_ids=(3, 4), token_ids=(5, 6, 8))]))
    assert wrong[:2].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert wrong[2] < -100


@pytest.mark.parametrize("path", PATHS)
def test_temperature_divides_the_logits(path, make_policy, fixed_logits) -> None:
    policy = make_policy(fixed_logits({65: 2.0, 66: 0.0}), path)
    batch = Batch.of([Segment(prompt_ids=(65,), token_ids=(65, 66))])
    for temperature, by_hand in ((0.5, [-0.01815, -4.01815]), (1.0, [-0.12693, -2.12693])):
        logps, _ = policy.token_logprobs(batch, temperature=temperature)
        assert logps.tolist() == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_equal_naive_float64_ones(
    path, temperature, make_policy, llama, plain_copy, naive_logprobs
) -> None:
    policy = make_policy(llama(), path)
    segments = some_segments()
    exact = plain_copy(llama(), double=True)
    logps, entropies = policy.token_logprobs(Batch.of(segments), temperature=temperature, entropy=True)
    expected = naive_logprobs(exact, segments, temperature)
    assert logps.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    wanted = []
    for s in segments:
        logits = exact(torch.tensor([s.prompt_ids + s.token_ids])).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        rows = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        wanted += [h for h, kept in zip(rows.tolist(), s.trained or (True,) * len(rows), strict=True) if kept]
    assert entropies is not None
    assert entropies.tolist() == pytest.approx(wanted, abs=1e-4)


def test_entropy_of_a_known_distribution(make_policy, fixed_logits) -> None:
    policy = make_policy(fixed_logits({65: math.log(0.5), 66: math.log(0.25), 67: math.log(0.25)}))
    _, entropy = policy.token_logprobs(Batch.of([Segment(prompt_ids=(1,), token_ids=(65,))]), entropy=True)
    assert entropy is not None
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_longer_neighbour_does_not_shift_positions(path, make_policy, plain_copy, naive_logprobs, randomize) -> None:
    """Learned positions: a prompt 50 tokens longer in the same batch must not move the short one."""
    config = GPT2Config(
        vocab_size=268, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    model = randomize(GPT2LMHeadModel(config))
    plain = plain_copy(model)
    policy = make_policy(model, path)
    short = Segment(prompt_ids=(65, 66), token_ids=(70, 71, 72))
    long = Segment(prompt_ids=tuple(range(100, 152)), token_ids=(70, 71, 72))
    alone, _ = policy.token_logprobs(Batch.of([short]))
    together, _ = policy.token_logprobs(Batch.of([long, short]))
    assert together[3:].tolist() == pytest.approx(alone.tolist(), abs=1e-4)
    assert alone.tolist() == pytest.approx(naive_logprobs(plain, [short]).tolist(), abs=1e-4)


def test_micro_batches_have_the_log_probs_of_the_whole(policy) -> None:
    segments = some_segments() * 3
    whole, _ = policy.token_logprobs(Batch.of(segments))
    parts = torch.cat([policy.token_logprobs(batch)[0] for batch in pack(segments, max_tokens=8)])
    assert len(pack(segments, max_tokens=8)) > 3
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_bfloat16_weights_give_float32_log_probs_and_equal_models_no_kl(llama, tokenizer) -> None:
    policy, reference = (Policy(llama().to(torch.bfloat16), tokenizer) for _ in range(2))
    one = Batch.of(some_segments()[:1])
    logps, _ = policy.token_logprobs(one)
    again, _ = reference.token_logprobs(one)
    assert logps.dtype == torch.float32
    assert torch.equal(logps, again)
    # In another batch shape, products may be summed in another order: within bfloat16's three digits.
    many, _ = policy.token_logprobs(Batch.of(some_segments() * 8))
    assert (many[:4] - logps).abs().max() < 0.1
    # Log-softmax itself is float32: probabilities of all tokens sum to 1 far closer than bfloat16 could tell.
    rows = [Segment(prompt_ids=(65, 66), token_ids=(v,)) for v in range(len(tokenizer))]
    total = policy.token_logprobs(Batch.of(rows))[0].double().exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-5)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_at_once", [1, 3, 5])
def test_the_head_in_chunks_equals_the_head_at_once(tokens_at_once, policy, monkeypatch) -> None:
    batch = Batch.of(some_segments() * 2)
    weight = torch.linspace(-1, 1, len(batch.target_T))

    def run() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        policy.model.zero_grad()
        logps, entropies = policy.token_logprobs(batch, temperature=0.7, entropy=True)
        assert entropies is not None
        ((logps + 0.3 * entropies) * weight).sum().backward()
        return logps.detach(), entropies.detach(), [p.grad.clone() for p in policy.named_parameters.values()]

    whole = run()
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", len(policy.tokenizer) * tokens_at_once)
    chunked = run()
    torch.testing.assert_close(chunked[0], whole[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(chunked[1], whole[1], rtol=0, atol=1e-5)
    for a, b in zip(chunked[2], whole[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_only_trained_tokens_go_through_the_head_and_no_logits_are_kept(policy, monkeypatch) -> None:
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", len(policy.tokenizer) * 2)
    batch = Batch.of([Segment(prompt_ids=tuple(range(65, 95)), token_ids=(80, 81, 82, 83, 84)) for _ in range(2)])
    seen: list[int] = []
    kept: list[tuple[int, ...]] = []
    head = policy.base.get_output_embeddings()
    hook = head.register_forward_hook(lambda _m, _args, out: seen.append(out.shape[0]))

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        policy.token_logprobs(batch)
    hook.remove()
    assert seen == [2, 2, 2, 2, 2]  # ten trained tokens of seventy
    assert not [shape for shape in kept if shape[-1:] == (len(policy.tokenizer),)], "logits are recomputed, not kept"


# -- loading and saving ----------------------------------------------------------------------------------------------


def test_the_builtin_model_is_drawn_from_its_seed() -> None:
    one, same, other = (Policy.load("builtin:tiny", seed=s, device="cpu") for s in (1, 1, 2))
    pairs = zip(one.named_parameters.values(), same.named_parameters.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(*(next(iter(p.named_parameters.values())) for p in (one, other)))
    assert one.attention == "packed"


def test_loading_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Policy.load("builtin:tiny", seed=1, device="cpu")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)])
def test_a_saved_folder_is_an_ordinary_model(lora, llama, tokenizer, tmp_path, naive_logprobs) -> None:
    policy = Policy(llama(), tokenizer, lora=lora)
    with torch.no_grad():
        for weight in policy.named_parameters.values():  # an adapter begins at zero effect: move it
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    expected, _ = policy.token_logprobs(Batch.of(some_segments()))
    policy.save(tmp_path / "model")
    after, _ = policy.token_logprobs(Batch.of(some_segments()))
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)  # saving leaves the policy as it was
    assert policy.base.config._attn_implementation == "groupwise_shared_prefix"

    assert "groupwise" not in (tmp_path / "model" / "config.json").read_text()
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert {n for n, _ in ordinary.named_parameters()} == {n for n, _ in llama().named_parameters()}
    torch.testing.assert_close(naive_logprobs(ordinary, some_segments()), expected, rtol=0, atol=1e-4)

    again = Policy.load(tmp_path / "model", device="cpu")
    torch.testing.assert_close(again.token_logprobs(Batch.of(some_segments()))[0], expected, rtol=0, atol=1e-4)
    assert again.chat.prompt_text([{"role": "user", "content": "hi"}]) == "<|user|>hi<|assistant|>"


def test_a_source_that_is_no_model(tmp_path, llama) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        Policy.load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        Policy.load(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="pass tokenizer="):
        Policy.load(llama())


def test_end_tokens_of_the_generation_settings_are_stop_tokens(llama, tokenizer) -> None:
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert Policy(model, tokenizer).chat.stop_ids == (tokenizer.eos_token_id, 7, 9)
    model.generation_config = GenerationConfig(eos_token_id=7)
    assert Policy(model, tokenizer).chat.stop_ids == (tokenizer.eos_token_id, 7)


# -- adapters --------------------------------------------------------------------------------------------------------


def test_the_reference_under_an_adapter_is_the_model_without_it(llama, tokenizer, naive_logprobs, plain_copy) -> None:
    policy = Policy(llama(), tokenizer, lora=LoRA(rank=4, alpha=8))
    assert all("lora_" in name for name in policy.trainable_state())
    with torch.no_grad():
        for weight in policy.named_parameters.values():
            weight.add_(0.2)
    batch = Batch.of(some_segments())
    base = naive_logprobs(plain_copy(llama()), some_segments())
    with policy.adapter_off() as reference:
        torch.testing.assert_close(reference.token_logprobs(batch)[0], base, rtol=0, atol=1e-4)
    assert (policy.token_logprobs(batch)[0] - base).abs().max() > 0.1


def test_an_adapter_begins_as_its_seed_says(llama, tokenizer) -> None:
    def start(seed: int) -> list[torch.Tensor]:
        lora = LoRA(rank=4, alpha=8)
        return list(Policy.load(llama(), tokenizer=tokenizer, lora=lora, seed=seed).trainable_state().values())

    torch.manual_seed(1)
    one = start(0)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(one, start(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, start(3), strict=True))


def test_a_checkpoint_of_other_weights_is_refused(llama, tokenizer) -> None:
    whole = Policy(llama(), tokenizer)
    adapter = Policy(llama(), tokenizer, lora=LoRA(rank=4, alpha=8))
    narrow = {name: weight[..., :1] for name, weight in whole.trainable_state().items()}  # which copying would spread
    for state in (adapter.trainable_state(), narrow):
        with pytest.raises(ValueError, match="or `lora` changed"):
            whole.load_trainable_state(state)
    twin = Policy(llama(seed=9), tokenizer)
    twin.load_trainable_state(whole.trainable_state())
    batch = Batch.of(some_segments())
    assert torch.equal(twin.token_logprobs(batch)[0], whole.token_logprobs(batch)[0])
