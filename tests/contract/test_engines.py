"""What every engine promises, and what the local one promises beyond that."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from groupwise.batch import Batch, Segment
from groupwise.engines import Engine, Request
from groupwise.engines.local import LocalEngine
from groupwise.engines.scripted import ScriptedEngine
from groupwise.model import Policy
from groupwise.types import Completion, Sampling

STOPS = (261, 97, 101, 105)
"""The tiny tokenizer's end of turn, and three common bytes, so that completions end at all lengths."""


@pytest.fixture
def stopping_policy(llama, tokenizer, padded_policy) -> Callable[[str], Policy]:
    """A random policy of which every fifth token or so is a stop token."""

    def build(path: str) -> Policy:
        model = llama(seed=3, spread=0.1)
        with torch.no_grad():
            model.lm_head.weight[list(STOPS)] *= 4
        model.generation_config = GenerationConfig(eos_token_id=list(STOPS))
        policy = Policy(model, tokenizer) if path == "packed" else padded_policy(model, tokenizer)
        policy.version = 3
        return policy

    return build


@pytest.fixture
def script() -> ScriptedEngine:
    """Sample n of a request says n + 2 bytes that depend on the seed; even samples then stop."""

    def say(request: Request, sample: int) -> list[int]:
        body = [65 + (request.seed + sample + t) % 20 for t in range(sample + 2)]
        return [*body, STOPS[sample % 4]] if sample % 2 == 0 else body

    return ScriptedEngine(say, STOPS)


@pytest.fixture(params=["local packed", "local padded", "scripted"])
def engine(request: pytest.FixtureRequest, stopping_policy, script) -> Engine:
    if request.param == "scripted":
        return script
    return LocalEngine(stopping_policy(request.param.split()[1]))


REQUESTS = [
    Request(prompt_ids=tuple(range(40, 49)), seed=11, samples=range(6)),
    Request(prompt_ids=(60, 61), seed=12, samples=range(6)),
    Request(prompt_ids=(60, 61), seed=13, samples=(4, 1, 30)),
    Request(prompt_ids=tuple(range(30, 54)), seed=14, samples=range(2)),
]
TWELVE = Sampling(max_tokens=12)


def ids_of(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in row] for row in completions]


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return list(itertools.chain.from_iterable(completions))


def assert_same(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    """Equal ids and reasons; log-probs to 1e-5."""
    assert ids_of(found) == ids_of(wanted)
    for mine, theirs in zip(flat(found), flat(wanted), strict=True):
        assert mine.finish_reason == theirs.finish_reason
        assert mine.logps == pytest.approx(theirs.logps, abs=1e-5)


# -- every engine ----------------------------------------------------------------------------------------------------


def test_one_list_per_request_one_completion_per_sample(engine: Engine) -> None:
    found = engine.generate(REQUESTS, TWELVE)
    assert [len(row) for row in found] == [6, 6, 3, 2]
    assert engine.generate([], TWELVE) == []


def test_completions_end_at_the_first_stop_token_or_at_the_limit(engine: Engine) -> None:
    completions = flat(engine.generate(REQUESTS, TWELVE))
    for c in completions:
        assert 1 <= len(c.token_ids) <= 12
        assert len(c.logps) == len(c.token_ids)
        assert all(logp <= 1e-6 for logp in c.logps)
        assert not set(c.token_ids[:-1]) & set(STOPS)
        assert (c.finish_reason == "stop") == (c.token_ids[-1] in STOPS)
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} > {STOPS[0]}, "several stop ids occur"
    assert len({len(c.token_ids) for c in completions}) >= 4, (
        "lengths differ, so that finished rows are dropped on the way"
    )


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_cuts_and_says_so(engine: Engine, limit: int) -> None:
    long = engine.generate(REQUESTS, TWELVE)
    short = engine.generate(REQUESTS, Sampling(max_tokens=limit))
    for whole, cut in zip(flat(long), flat(short), strict=True):
        assert cut.token_ids == whole.token_ids[:limit]
        assert cut.finish_reason == ("stop" if cut.token_ids[-1] in STOPS else "length")
    assert any(c.finish_reason == "length" for row in short for c in row)


def test_a_sample_is_the_same_alone_in_a_batch_and_again(engine: Engine) -> None:
    together = engine.generate(REQUESTS, TWELVE)
    assert_same(engine.generate(REQUESTS, TWELVE), together)
    for request, row in zip(REQUESTS, together, strict=True):
        for number, completion in zip(request.samples, row, strict=True):
            alone = engine.generate([dataclasses.replace(request, samples=[number])], TWELVE)
            assert_same(alone, [[completion]])


def test_two_requests_for_one_prompt_differ_by_their_seed(engine: Engine) -> None:
    prompt = (60, 61)
    rows = ids_of(engine.generate([Request(prompt, seed, range(8)) for seed in (1, 2, 1)], TWELVE))
    assert rows[0] == rows[2]
    assert rows[0] != rows[1]


# -- the local engine ------------------------------------------------------------------------------------------------

local = pytest.mark.parametrize("path", ["packed", "padded"])


@local
def test_samples_of_a_group_differ(path, stopping_policy) -> None:
    [row] = LocalEngine(stopping_policy(path)).generate([Request((60, 61), 5, range(8))], TWELVE)
    assert len({c.token_ids for c in row}) >= 7


@local
def test_the_policy_version_is_stamped(path, stopping_policy) -> None:
    policy = stopping_policy(path)
    engine = LocalEngine(policy)
    assert {c.policy_version for row in engine.generate(REQUESTS, TWELVE) for c in row} == {3}
    policy.version = 4
    assert {c.policy_version for row in engine.generate(REQUESTS, TWELVE) for c in row} == {4}


@local
@pytest.mark.parametrize(
    "limits",
    [{"max_rows": 1}, {"max_rows": 4}, {"max_cached_tokens": 1}, {"max_cached_tokens": 60}],
    ids=str,
)
def test_waves_change_nothing(path, limits, stopping_policy) -> None:
    policy = stopping_policy(path)
    assert_same(
        LocalEngine(policy, **limits).generate(REQUESTS, TWELVE), LocalEngine(policy).generate(REQUESTS, TWELVE)
    )


def test_waves_keep_to_their_limits(stopping_policy) -> None:
    """At most 5 rows, and at most 70 tokens of prompts and room for completions, are held at a time."""
    engine = LocalEngine(stopping_policy("packed"), max_rows=5, max_cached_tokens=70)
    waves = [
        (sum(len(samples) for _, samples in wave), sum(len(REQUESTS[i].prompt_ids) + 12 * len(s) for i, s in wave))
        for wave in engine._waves(REQUESTS, TWELVE)
    ]
    assert sum(rows for rows, _ in waves) == 17
    assert all(rows <= 5 and tokens <= 70 for rows, tokens in waves)
    assert max(rows for rows, _ in waves) == 5


@local
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_trainer(path, temperature, stopping_policy) -> None:
    policy = stopping_policy(path)
    found = LocalEngine(policy).generate(REQUESTS, dataclasses.replace(TWELVE, temperature=temperature, top_p=0.9))
    segments = [
        Segment(prompt_ids=request.prompt_ids, token_ids=c.token_ids)
        for request, row in zip(REQUESTS, found, strict=True)
        for c in row
    ]
    with torch.no_grad():
        recomputed, _ = policy.token_logprobs(Batch.of(segments), temperature=temperature)
    assert [x for row in found for c in row for x in c.logps] == pytest.approx(recomputed.tolist(), abs=1e-4)


def test_temperature_of_a_known_distribution(fixed_logits, tokenizer) -> None:
    engine = LocalEngine(Policy(fixed_logits({65: 2.0, 66: 0.0}), tokenizer))
    [row] = engine.generate([Request((1,), 0, range(64))], Sampling(temperature=0.5, max_tokens=2))
    by_hand = {65: -0.01815, 66: -4.01815}
    for c in row:
        assert c.logps == pytest.approx([by_hand[i] for i in c.token_ids], abs=1e-4)


def test_a_filtered_known_distribution_is_drawn_from_at_every_position(fixed_logits, tokenizer) -> None:
    """Shares 0.5 0.25 0.15 0.1; top-p 0.8 leaves the first three, renormalised to 5/9 5/18 1/6."""
    logits = {65 + i: math.log(p) for i, p in enumerate((0.5, 0.25, 0.15, 0.1))}
    engine = LocalEngine(Policy(fixed_logits(logits), tokenizer))
    [row] = engine.generate([Request((1,), 7, range(1000))], Sampling(max_tokens=3, top_p=0.8))
    for position in range(3):
        counts = [sum(c.token_ids[position] == 65 + i for c in row) for i in range(4)]
        wanted = [1000 * s for s in (5 / 9, 5 / 18, 1 / 6)]
        assert counts[3] == 0
        chi_square = sum((c - w) ** 2 / w for c, w in zip(counts, wanted, strict=False))
        assert chi_square < 13.8  # 2 degrees of freedom, p = 0.001
    repeats = sum(c.token_ids[0] == c.token_ids[1] for c in row) / 1000
    assert repeats == pytest.approx((5 / 9) ** 2 + (5 / 18) ** 2 + (1 / 6) ** 2, abs=0.06)  # positions are independent


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=4), Sampling(max_tokens=4, temperature=0.0)], ids=["1", "0"])
def test_rows_of_the_head_beyond_the_tokenizer_are_never_drawn(sampling, fixed_logits, tokenizer) -> None:
    size = len(tokenizer)
    logits = {65: 1.0, 66: 0.5} | {size + i: 300.0 for i in range(12)}
    engine = LocalEngine(Policy(fixed_logits(logits, vocabulary=size + 12), tokenizer))
    [row] = engine.generate([Request((1,), 0, range(50))], sampling)
    drawn = {i for c in row for i in c.token_ids}
    assert drawn == ({65} if sampling.temperature == 0 else {65, 66})


@local
def test_more_tokens_than_the_model_has_positions_are_refused(path, fixed_logits, tokenizer, padded_policy) -> None:
    model = fixed_logits({65: 0.0}, positions=16)
    policy = Policy(model, tokenizer) if path == "packed" else padded_policy(model, tokenizer)
    engine = LocalEngine(policy)
    [[fits]] = engine.generate([Request((1,) * 6, 0, [0])], Sampling(max_tokens=10))
    assert fits.token_ids == (65,) * 10
    with pytest.raises(ValueError, match="prompt of 7 tokens and max_tokens 10 exceed the 16 positions"):
        engine.generate([Request((1,), 0, [0]), Request((1,) * 7, 0, [0])], Sampling(max_tokens=10))


# -- greedy decoding of every kind of model --------------------------------------------------------------------------

SIZES = {
    "vocab_size": 268,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            final_logit_softcapping=5.0,
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=268, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(
            vocab_size=268,
            hidden_size=32,
            n_layer=2,
            n_head=4,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
}


@pytest.mark.filterwarnings("ignore:.*cannot use packed attention")
@pytest.mark.parametrize("family", MODELS)
def test_greedy_decoding_equals_naive_decoding(family, randomize, plain_copy, naive_greedy, tokenizer) -> None:
    """Completions (20 tokens) are longer than the sliding windows, and so are some prompts."""
    model = randomize(MODELS[family](), seed=0)
    plain = plain_copy(model)
    policy = Policy(model, tokenizer)
    assert policy.attention == ("padded" if family == "bloom" else "packed")
    prompts = [tuple(range(40, 40 + n)) for n in (1, 3, 9, 20)]
    found = LocalEngine(policy).generate(
        [Request(p, 0, [0]) for p in prompts], Sampling(temperature=0.0, max_tokens=20)
    )
    for prompt, [completion] in zip(prompts, found, strict=True):
        stops = policy.chat.stop_ids
        assert list(completion.token_ids) == naive_greedy(plain, prompt, 20, stops)
    assert len({c.token_ids for [c] in found}) > 1, "what is decoded depends on the prompt"


@local
def test_greedy_decoding_with_several_stop_ids(path, stopping_policy, naive_greedy, plain_copy) -> None:
    policy = stopping_policy(path)
    plain = plain_copy(policy.base)
    prompts = [tuple(range(k, k + 5)) for k in range(30, 70, 3)]
    found = LocalEngine(policy).generate([Request(p, 0, [0]) for p in prompts], Sampling(temperature=0.0, max_tokens=4))
    for prompt, [completion] in zip(prompts, found, strict=True):
        assert list(completion.token_ids) == naive_greedy(plain, prompt, 4, STOPS)
    assert {c.finish_reason for [c] in found} == {"stop", "length"}


@local
def test_sampling_equals_naive_decoding_with_the_same_numbers(path, stopping_policy, plain_copy) -> None:
    """Each token is the inverse CDF, at that position's number, of what a plain forward over the whole prefix says."""
    from groupwise.engines.sampling import uniforms

    policy = stopping_policy(path)
    plain = plain_copy(policy.base, double=True)
    request = REQUESTS[0]
    [row] = LocalEngine(policy).generate([request], TWELVE)
    for number, completion in zip(request.samples, row, strict=True):
        numbers = uniforms(request.seed, number, 12)
        for t, token in enumerate(completion.token_ids):
            with torch.no_grad():
                seen = torch.tensor([request.prompt_ids + completion.token_ids[:t]])
                cumulative = plain(seen).logits[0, -1, : len(policy.tokenizer)].softmax(0).cumsum(0)
            below = 0.0 if token == 0 else cumulative[token - 1].item()
            assert below - 1e-5 <= numbers[t] <= cumulative[token].item() + 1e-5
