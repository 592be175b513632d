"""Policy: a causal language model with its tokenizer. The only file that knows Hugging Face model classes.

F flat tokens, T trained tokens, N sequences, V vocabulary.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.attention import ATTENTION, PackedLayout, UnroutableAttentionError, flat_inputs
from groupwise.batch import Batch, Segment
from groupwise.chat import Chat
from groupwise.config import LoRA
from groupwise.tiny import tiny_model, tiny_tokenizer

BUILTIN_TINY = "builtin:tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LOGITS_AT_ONCE = 1 << 24
"""Elements of the [tokens, vocabulary] logits that exist at a time: 64 MiB in float32."""


class Policy:
    """A model that completes prompts and scores its own tokens.

    `attention` is "packed" (prompts shared, no padding) or, where the model's attention cannot be routed through
    `groupwise.attention`, "padded": slower, equally right. `version` counts the optimiser steps of the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: LoRA | None = None,
        system_prompt: str = "none",
        seed: int = 0,
    ) -> None:
        stop = model.generation_config.eos_token_id if model.generation_config is not None else None
        extra = [] if stop is None else stop if isinstance(stop, list) else [stop]
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, system_prompt, extra)
        self.base = model
        self.model: Any = model if lora is None else _with_adapters(model, lora, seed)
        self.model.eval()  # dropout would make the ratio of new to old log-probs random
        self.version = 0
        self.attention: Literal["packed", "padded"] = "packed"
        reason = self._route_attention()
        if reason is not None:
            self.attention = "padded"
            warnings.warn(
                f"{type(model).__name__} cannot use packed attention ({reason}); using the padded path, which is "
                "slower and gives the same results",
                stacklevel=2,
            )

    @classmethod
    def load(
        cls,
        source: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora: LoRA | None = None,
        system_prompt: str = "none",
        dtype: str = "float32",
        device: str | torch.device | None = None,
        seed: int = 0,
    ) -> Policy:
        """Load a policy from a folder, a hub id, a `.gguf` file, `builtin:tiny` or a loaded transformers model.

        Args:
            source: the model; a PEFT adapter folder is loaded onto its base model and merged.
            tokenizer: needed with a loaded model whose `name_or_path` has none.
            lora: train adapters instead of all weights; the reference is then the model without them.
            device: CUDA where there is one, else the CPU.
            seed: of the weights that `builtin:tiny` starts from, and of an adapter's.

        Raises:
            ValueError: the source is no model, or its tokenizer cannot be found.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(source, PreTrainedModel):
            model, found = source, tokenizer
            if found is None:
                found = _load_tokenizer(source.name_or_path)
            return cls(model, found, lora=lora, system_prompt=system_prompt, seed=seed)
        name = str(source)
        if name == BUILTIN_TINY:
            found = tokenizer or tiny_tokenizer()
            model = tiny_model(len(found), found.eos_token_id, found.pad_token_id, seed)
        else:
            folder, extra = _locate(name)
            try:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **extra)
            except (OSError, ValueError, KeyError, struct.error) as error:
                raise ValueError(f"model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
            if extra:
                _forget_quantisation(model)
            found = tokenizer or _load_tokenizer(folder, **extra)
        return cls(model.to(device, DTYPES[dtype]), found, lora=lora, system_prompt=system_prompt, seed=seed)

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.base.get_input_embeddings().weight.device

    @property
    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trainable ones by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for."""
        return int(getattr(self.base.config.get_text_config(), "max_position_embeddings", 1 << 30))

    @property
    def has_adapter(self) -> bool:
        return self.model is not self.base

    @contextmanager
    def adapter_off(self) -> Iterator[Policy]:
        """The frozen model underneath a LoRA adapter: its reference, at no memory."""
        with self.model.disable_adapter():
            yield self

    # -- forward -------------------------------------------------------------------------------------------------

    def hidden_states(self, token_ids_F: Tensor, position_F: Tensor, layout: Any) -> Tensor:
        """Last hidden states of a flat sequence, [F, D]."""
        with self._autocast():
            out = self.base.get_decoder()(**flat_inputs(token_ids_F, position_F, layout))
        return out.last_hidden_state[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits [N, V] of hidden states."""
        with self._autocast():
            logits = self.base.get_output_embeddings()(hidden_ND)
        logits = logits.float()
        cap = getattr(self.base.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def token_logprobs(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, detach_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the trained tokens, [T], and their entropies, [T], if asked for.

        Log-softmax of logits / temperature over the full vocabulary, in float32. An entropy that is only looked at is
        cheaper without a gradient (`detach_entropy`).
        """
        if self.attention == "padded":
            row, column = _places(batch, self.device)
            logits = self._padded_forward(batch).logits[row, column].float()
            logps, entropies = _target_logprobs(logits, batch.target_T, temperature, entropy, detach_entropy)
            return logps, entropies if entropy else None
        hidden_TD = self.trained_hidden(batch)
        return self.head_logprobs(
            hidden_TD, batch.target_T, temperature=temperature, entropy=entropy, detach_entropy=detach_entropy
        )

    def trained_hidden(self, batch: Batch) -> Tensor:
        """The last hidden state that predicts each trained token, [T, D]."""
        if self.attention == "padded":
            row, column = _places(batch, self.device)
            return self._padded_forward(batch, output_hidden_states=True).hidden_states[-1][row, column]
        return self.hidden_states(batch.token_ids_F, batch.position_F, PackedLayout(batch))[batch.source_T]

    def head_logprobs(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        detach_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`token_logprobs` from hidden states: through the head in chunks that are recomputed in the backward pass.

        Only trained tokens go through it, and no [T, V] tensor is kept.
        """

        def chunk_logprobs(hidden_TD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
            return _target_logprobs(self.logits(hidden_TD), target_T, temperature, entropy, detach_entropy)

        vocabulary = self.base.get_output_embeddings().weight.shape[0]
        size = max(1, LOGITS_AT_ONCE // vocabulary)
        parts = []
        for hidden, target in zip(hidden_TD.split(size), target_T.split(size), strict=True):
            if len(target_T) > size and torch.is_grad_enabled():
                parts.append(checkpoint(chunk_logprobs, hidden, target, use_reentrant=False))
            else:
                parts.append(chunk_logprobs(hidden, target))
        logps, entropies = zip(*parts, strict=True)
        return torch.cat(logps), torch.cat(entropies) if entropy else None

    def next_token_logits(self, token_ids_NL: Tensor) -> Tensor:
        """Float32 logits [N, V] of the token that follows each row, by the model's own forward without a cache."""
        with self._autocast():
            return self.model(input_ids=token_ids_NL, use_cache=False).logits[:, -1].float()

    def _padded_forward(self, batch: Batch, **options: Any) -> Any:
        """The model's own forward on one right-padded row per segment, for any causal model whatever."""
        rows = [torch.tensor(s.prompt_ids + s.token_ids[:-1]) for s in batch.segments]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True).to(self.device)
        with self._autocast():
            return self.model(input_ids=token_ids, attention_mask=mask, use_cache=False, **options)

    def _autocast(self) -> Any:
        """Float32 weights compute in bfloat16 on a GPU; on a CPU bfloat16 is emulated, and slow."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _route_attention(self) -> str | None:
        """Switch the model to the registered attention and prove on a probe that it gives the model's own log-probs.

        Returns the reason if it does not; the model then keeps its attention.
        """
        before = self.base.config._attn_implementation
        vocabulary = self.base.get_output_embeddings().weight.shape[0]
        ids = [i % vocabulary for i in (7, 11, 5, 3, 13, 2, 17, 19, 23, 29)]
        probe = Batch.of([Segment(prompt_ids=tuple(ids[:4]), token_ids=tuple(ids[k:])) for k in (4, 6, 9)], self.device)
        with torch.no_grad():
            self.attention = "padded"
            expected, _ = self.token_logprobs(probe)
            self.attention = "packed"
            try:
                self.base.set_attn_implementation(ATTENTION)
                if self.base.config._attn_implementation != ATTENTION:
                    return "it has an attention of its own"
                layout = PackedLayout(probe)
                self.hidden_states(probe.token_ids_F, probe.position_F, layout)
                if _declares_window(self.base.config.get_text_config()) and set(layout.masks) == {None}:
                    raise UnroutableAttentionError("the model puts its attention window into its mask alone")
                actual, _ = self.token_logprobs(probe)
            except (UnroutableAttentionError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
            else:
                tolerance = 1e-3 if self.base.dtype == torch.float32 and self.device.type == "cpu" else 0.1
                if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance):
                    return None
                reason = "a probe gave other log-probs than the model's own attention"
        self.base.set_attn_implementation(before)
        return reason

    # -- disk ----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` and `Policy.load` read: adapters merged in."""
        model = self.base
        if self.has_adapter:
            with torch.no_grad():
                self.model.merge_adapter()
            state = _merged_state(self.base)
        else:
            state = model.state_dict()
        implementation = model.config._attn_implementation_internal
        model.config._attn_implementation_internal = None
        try:
            model.save_pretrained(folder, state_dict=state)
        finally:
            model.config._attn_implementation_internal = implementation
            if self.has_adapter:
                self.model.unmerge_adapter()
        self.tokenizer.save_pretrained(folder)

    def trainable_state(self) -> dict[str, Tensor]:
        """The trainable weights by name: what a checkpoint must hold."""
        return {name: p.detach() for name, p in self.named_parameters.items()}

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        own = self.trainable_state()
        if {name: w.shape for name, w in own.items()} != {name: w.shape for name, w in state.items()}:
            raise ValueError(
                "the checkpoint holds other weights than this model trains; was the model or `lora` changed?"
            )
        for name, weight in own.items():
            weight.copy_(state[name])


def _places(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, column) in padded rows of what predicts each trained token; both [T]."""
    index = [
        (n, len(s.prompt_ids) + t - 1)
        for n, s in enumerate(batch.segments)
        for t in range(len(s.token_ids))
        if s.trained is None or s.trained[t]
    ]
    row, column = torch.tensor(index, device=device).unbind(1)
    return row, column


def _target_logprobs(
    logits: Tensor, target_T: Tensor, temperature: float, entropy: bool, detach_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and, if asked for, entropies (else nothing), from float32 logits [T, V]."""
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    normaliser = torch.logsumexp(logits, dim=1)
    logps = logits.gather(1, target_T[:, None]).squeeze(1) - normaliser
    if not entropy:
        return logps, logps.new_empty(0)
    if detach_entropy:
        logits, normaliser = logits.detach(), normaliser.detach()
    shares = torch.exp(logits - normaliser[:, None])
    return logps, normaliser - (shares * logits).sum(1)


def _declares_window(config: Any) -> bool:
    """Whether, by its configuration, some layer of the model sees less than everything before it."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    limited = kinds is None or not {"sliding_attention", "chunked_attention"}.isdisjoint(kinds)
    return window is not None and limited and window < getattr(config, "max_position_embeddings", window + 1)


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """(folder or hub id, extra arguments of from_pretrained)."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return (str(path), {}) if path.exists() else (name, {})


def _forget_quantisation(model: PreTrainedModel) -> None:
    """A GGUF file's weights are plain floats once loaded; transformers would refuse to save what it calls quantised."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _load_tokenizer(source: str, **extra: Any) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source, **extra)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer found for model {source!r}; pass tokenizer=") from error


def _with_adapters(model: PreTrainedModel, lora: LoRA, seed: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("lora needs the peft library; install it with: pip install 'groupwise[lora]'") from error
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """State dict of a model with merged adapters, under the names of the model without them."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
