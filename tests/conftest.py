"""Small models, and the naive computations that the package's own are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from groupwise.batch import Segment
from groupwise.tiny import tiny_tokenizer

torch.set_num_threads(1)  # the models here are far too small for a second thread to be worth waiting for

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

VOCABULARY = len(tiny_tokenizer())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def randomize() -> Callable[..., PreTrainedModel]:
    """Weights far from their initialisation, so that distributions are peaked and mistakes show."""

    def apply(model: PreTrainedModel, seed: int = 0, spread: float = 0.2) -> PreTrainedModel:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                offset = 1.0 if weight.dim() == 1 else 0.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread + offset)
        return model.eval()

    return apply


@pytest.fixture(scope="session")
def llama(randomize: Callable[..., PreTrainedModel]) -> Callable[..., LlamaForCausalLM]:
    """A small Llama model; equal arguments give equal weights."""

    def build(seed: int = 0, spread: float = 0.2, **changes: object) -> LlamaForCausalLM:
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return randomize(LlamaForCausalLM(LlamaConfig(**(settings | changes))), seed, spread)

    return build


@pytest.fixture
def policy(llama: Callable[..., LlamaForCausalLM], tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    from groupwise.model import Policy

    return Policy(llama(), tokenizer)


@pytest.fixture(scope="session")
def padded_policy() -> Callable[..., object]:
    """A policy on the path for models whose attention cannot be routed."""
    from groupwise.model import Policy

    def build(model: PreTrainedModel, tokenizer: Tokenizer) -> Policy:
        made = Policy(model, tokenizer)
        model.set_attn_implementation("eager")
        made.attention = "padded"
        return made

    return build


@pytest.fixture(scope="session")
def fixed_logits() -> Callable[..., GPT2LMHeadModel]:
    """A model that predicts the same distribution everywhere: these logits for the ids given, -1000 for the rest."""

    def build(logits: dict[int, float], vocabulary: int = VOCABULARY, positions: int = 64) -> GPT2LMHeadModel:
        config = GPT2Config(
            vocab_size=vocabulary,
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.copy_(torch.eye(8)[0])
            model.lm_head.weight.zero_()[:, 0] = -1000.0
            for token, logit in logits.items():
                model.lm_head.weight[token, 0] = logit
        return model

    return build


@pytest.fixture(scope="session")
def counting_model() -> LlamaForCausalLM:
    """A model whose next token is always the current one plus 1."""
    size = 272
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.eye(size).roll(1, 0) * 10)
    return model


@pytest.fixture(scope="session")
def naive_logprobs() -> Callable[..., Tensor]:
    """Log-probs of the trained tokens by one plain unpadded forward per segment; differentiable."""

    def compute(model: PreTrainedModel, segments: Sequence[Segment], temperature: float = 1.0) -> Tensor:
        parts = []
        for segment in segments:
            ids = torch.tensor([segment.prompt_ids + segment.token_ids])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(segment.prompt_ids) - 1 : -1]
            logps = torch.log_softmax(logits / temperature, dim=-1)
            chosen = logps.gather(1, torch.tensor(segment.token_ids)[:, None]).squeeze(1)
            parts.append(chosen if segment.trained is None else chosen[torch.tensor(segment.trained)])
        return torch.cat(parts)

    return compute


@pytest.fixture(scope="session")
def naive_greedy() -> Callable[..., list[int]]:
    """Greedy decoding by one plain forward per token, over the first `vocabulary` ids."""

    def decode(
        model: PreTrainedModel,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int] = (),
        vocabulary: int = VOCABULARY,
    ) -> list[int]:
        ids = list(prompt_ids)
        with torch.no_grad():
            for _ in range(max_tokens):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, :vocabulary]
                ids.append(int(logits.argmax()))
                if ids[-1] in stop_ids:
                    break
        return ids[len(prompt_ids) :]

    return decode


@pytest.fixture(scope="session")
def plain_copy() -> Callable[..., PreTrainedModel]:
    """An independent copy of a model with the attention of its own, in float64 if asked."""

    def build(model: PreTrainedModel, double: bool = False) -> PreTrainedModel:
        twin = copy.deepcopy(model)
        twin.set_attn_implementation("eager")
        return twin.double() if double else twin

    return build


@pytest.fixture
def make_trainer(llama, tokenizer) -> Callable[..., object]:  # type: ignore[no-untyped-def]
    """A trainer of a small random model; equal arguments give equal trainers.

    By default its reward is without meaning, and differs between nearly all responses.
    """
    from groupwise.config import GRPOConfig
    from groupwise.trainer import GRPOTrainer

    def by_letters(prompt: object, response: str) -> float:
        return sum(map(ord, response)) % 11 / 10

    def make(
        reward: object = by_letters, *, model: object = None, engine: object = None, **config: object
    ) -> GRPOTrainer:
        settings = {"group_size": 4, "max_tokens": 6, "lr": 1e-3, "kl_coef": 0.0, **config}
        return GRPOTrainer(
            llama(spread=0.1) if model is None else model,
            reward_model=reward,
            tokenizer=tokenizer,
            config=GRPOConfig(**settings),
            engine=engine,
        )

    return make
