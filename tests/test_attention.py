"""Packed attention with shared prompts equals one plain forward per sequence, values and gradients, for each family."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from groupwise.attention import DecodeLayout, PackedLayout
from groupwise.batch import Batch, Segment
from groupwise.model import Policy

SIZES = {
    "vocab_size": 268,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GPT2_SIZES = {
    "vocab_size": 268,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}

PACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=MIXED, final_logit_softcapping=5.0)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "gpt2 scaled by layer": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, scale_attn_by_inverse_layer_idx=True)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
}
"""Families whose attention is routed."""

PADDED: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2 (capped scores)": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4)),
    "bloom (biased scores)": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=268, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    ),
    "mamba (no attention)": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=268, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=None)
    ),
    "granite (scaled logits)": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=2.0)),
    "qwen2-moe (window in the mask only)": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=0,
            layer_types=["sliding_attention"] * 3,
        )
    ),
}
"""Models that need something of their attention, or of their head, that is not routed."""


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ragged_segments() -> list[Segment]:
    """Long and short prompts, several continuations each, of one token too; masked tokens; two groups of one prompt."""
    long, short, twice, single = ids(1, 21), ids(2, 3), ids(3, 6), ids(4, 1)
    continuations = [(long, 5), (long, 1), (long, 12), (short, 7), (short, 2), (twice, 3), (twice, 9)]
    continuations += [(twice, 1), (twice, 4), (single, 1), (single, 1), (single, 8)]
    segments = [Segment(prompt_ids=p, token_ids=ids(100 + i, n)) for i, (p, n) in enumerate(continuations)]
    segments[2].trained = (False, False, True, True, False, True, True, True, False, False, True, False)
    segments[4].trained = (False, True)
    segments[8].trained = (False, False, False, False)
    return segments


def gradients(model: PreTrainedModel, logp_T: Tensor, weight_T: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logp_T * weight_T).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equals_plain_forwards(policy: Policy, plain: PreTrainedModel, naive_logprobs: Callable[..., Tensor]) -> None:
    segments = ragged_segments()
    expected = naive_logprobs(plain, segments)
    actual, entropies = policy.token_logprobs(Batch.of(segments))
    assert entropies is None
    assert expected.std() > 0.5, "distributions must be far from flat for this to say anything"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(len(expected), generator=torch.Generator().manual_seed(5))
    wanted, found = gradients(plain, expected, weight), gradients(policy.base, actual, weight)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max().item() + 1e-6
        assert (found[name] - gradient).abs().max().item() < 1e-4 * scale, name


@pytest.mark.parametrize("family", PACKED)
def test_packed_equals_plain_forwards(family, randomize, plain_copy, naive_logprobs, tokenizer) -> None:
    model = randomize(PACKED[family](), seed=1)
    plain = plain_copy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*packed attention.*")
        policy = Policy(model, tokenizer)
    assert policy.attention == "packed"
    assert_equals_plain_forwards(policy, plain, naive_logprobs)


@pytest.mark.parametrize("family", PADDED)
def test_what_cannot_be_routed_is_told_and_gives_the_same(
    family, randomize, plain_copy, naive_logprobs, tokenizer
) -> None:
    model = randomize(PADDED[family](), seed=1)
    plain = plain_copy(model)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} cannot use packed attention"):
        policy = Policy(model, tokenizer)
    assert policy.attention == "padded"
    assert_equals_plain_forwards(policy, plain, naive_logprobs)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_window_matters_in_these_sequences(family, randomize, plain_copy, naive_logprobs) -> None:
    """The comparisons above would notice a window that is ignored, or counted in padded tokens."""
    model = randomize(PACKED[family](), seed=1)
    windowed = naive_logprobs(plain_copy(model), ragged_segments())
    wide = plain_copy(model)
    wide.config.sliding_window = 64
    for module in wide.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 64
    assert (naive_logprobs(wide, ragged_segments()) - windowed).abs().max() > 0.1


def test_prompts_alone_without_any_continuation(llama, naive_logprobs, plain_copy, policy) -> None:
    """One-token answers add nothing to the flat sequence: there are prompts only."""
    segments = [Segment(prompt_ids=ids(i, n), token_ids=(7,)) for i, n in enumerate((4, 1, 9))]
    actual, _ = policy.token_logprobs(Batch.of(segments))
    torch.testing.assert_close(actual, naive_logprobs(plain_copy(llama()), segments), rtol=1e-4, atol=1e-4)


def test_a_continuation_sees_nothing_of_its_siblings_nor_of_other_prompts(policy) -> None:
    """Changing one segment leaves the log-probs of the others as they were."""
    segments = ragged_segments()
    before = Batch.of(segments)
    first, _ = policy.token_logprobs(before)
    segments[0] = Segment(prompt_ids=segments[0].prompt_ids, token_ids=ids(999, 5))
    second, _ = policy.token_logprobs(Batch.of(segments))
    others = before.segment_T != 0
    torch.testing.assert_close(first[others], second[others], rtol=0, atol=1e-5)
    assert (first - second)[~others].abs().max() > 0.1


def test_packing_two_examples_equals_two_separate_runs(policy) -> None:
    one, two = (
        Segment(prompt_ids=(1,), token_ids=(2, 3)),
        Segment(prompt_ids=(4,), token_ids=(5, 6, 7, 8)),
    )
    together, _ = policy.token_logprobs(Batch.of([one, two]))
    apart = torch.cat([policy.token_logprobs(Batch.of([s]))[0] for s in (one, two)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    # The packed mean is the mean of both, each weighing as many tokens as it has.
    assert together.mean().item() == pytest.approx((2 * apart[:2].mean() + 4 * apart[2:].mean()).item() / 6, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
@torch.no_grad()
def test_a_routed_model_used_plainly_gives_its_ordinary_logits(family, randomize, plain_copy, tokenizer) -> None:
    model = randomize(PACKED[family](), seed=2)
    plain = plain_copy(model)
    routed = Policy(model, tokenizer).base
    tokens = torch.tensor([ids(1, 12), ids(2, 12)])
    torch.testing.assert_close(routed(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    found, wanted = (m(tokens, attention_mask=mask).logits for m in (routed, plain))
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    cached = [m.generate(tokens[:1], max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (routed, plain)]
    assert cached[0].tolist() == cached[1].tolist()


# -- the layouts alone, against attention written out ----------------------------------------------------------------


def attend_by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of one unpadded sequence, token by token: [heads, length, size] -> [length, heads, size]."""
    group = query.shape[0] // key.shape[0]
    rows = []
    for t in range(query.shape[1]):
        start = 0 if window is None else max(0, t + 1 - window)
        heads = []
        for h in range(query.shape[0]):
            scores = key[h // group, start : t + 1] @ query[h, t] * scale
            heads.append(torch.softmax(scores, 0) @ value[h // group, start : t + 1])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_decoding_against_the_caches_equals_whole_sequences(window: int | None) -> None:
    """Two prompts of different length, three rows; a row leaves after the second token, and with it a prompt."""
    g = torch.Generator().manual_seed(0)
    heads, kv_heads, size, scale = 4, 2, 8, 0.3
    lengths, prompt_of = [4, 2], [0, 1, 0]
    steps = 5

    def draw_qkv(length: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.randn(h, length, size, generator=g) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]

    prompts = [draw_qkv(n) for n in lengths]
    own = [draw_qkv(steps) for _ in prompt_of]
    batch = Batch.of(
        [Segment(prompt_ids=tuple(range(1 + i, 1 + i + n)), token_ids=(0,)) for i, n in enumerate(lengths)]
    )
    packed = PackedLayout(batch, keep_prefix=True)
    flat = [torch.cat([p[i] for p in prompts], dim=1) for i in range(3)]
    out = packed.attend(0, *flat, scale, window)
    expected = torch.cat([attend_by_hand(*p, scale, window) for p in prompts])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    whole = [
        attend_by_hand(*(torch.cat([prompts[p][i], own[r][i]], dim=1) for i in range(3)), scale, window)
        for r, p in enumerate(prompt_of)
    ]
    assert packed.prefix_kv is not None
    layout = DecodeLayout(packed.prefix_kv, packed.prompt_length_B, torch.tensor(prompt_of), capacity=steps)
    rows = [0, 1, 2]
    for t in range(steps):
        assert layout.position_R.tolist() == [lengths[prompt_of[r]] + t for r in rows]
        step = [torch.stack([own[r][i][:, t] for r in rows], dim=1) for i in range(3)]
        out = layout.attend(0, *step, scale, window)
        layout.advance()
        expected = torch.stack([whole[r][lengths[prompt_of[r]] + t] for r in rows])
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        if t == 1:
            rows = [0, 2]
            layout.keep(torch.tensor(rows))
        if t == 3:
            rows = [2]
            layout.keep(torch.tensor([1]))
