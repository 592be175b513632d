"""Attention in which every continuation of a prompt shares the prompt's keys and values, for any Hugging Face decoder.

One function is registered with `transformers.AttentionInterface`. It hands queries, keys and values to the `Layout`
that came with the forward call; without one it is plain scaled dot-product attention: a model keeps working as usual.
There are two layouts: `PackedLayout` for whole packed batches (training, scoring, prefill), and `DecodeLayout` for one
new token per row against caches. No model is rewritten: the model computes projections, rotary positions and MLPs on a
flat sequence of tokens, and only attention knows which token may see which.

F flat tokens, B prompts, R rows (continuations), P longest prompt, L longest continuation, H query heads, K key/value
heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from groupwise.batch import Batch

ATTENTION = "groupwise_shared_prefix"
"""The name under which the attention function is registered."""


class Layout(Protocol):
    """Which token sees which, for one forward call."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of one layer over flat tokens: query [H, F, D], key and value [K, F, D]; returns [F, H, D].

        `window`: a token sees itself and the window - 1 positions before it; None is unlimited.
        """
        ...


class UnroutableAttentionError(Exception):
    """The model asks its attention for something that a layout does not compute."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if layout is None:
        if sliding_window is not None:
            options["sliding_window"] = sliding_window
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if options.get(name) is not None:
            raise UnroutableAttentionError(f"the model's attention uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def flat_inputs(token_ids_F: Tensor, position_F: Tensor, layout: Layout) -> dict[str, Any]:
    """Keyword arguments for a decoder's forward over flat tokens.

    The mask is a placeholder of four dimensions, which transformers takes as ready-made: no [F, F] mask is built.
    """
    return {
        "input_ids": token_ids_F[None],
        "position_ids": position_F[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids_F.device),
        "use_cache": False,
        "layout": layout,
    }


class PackedLayout:
    """A packed `Batch`: prompts see themselves causally, continuations see their prompt and themselves.

    Inside attention only, tokens are gathered into padded rows: [B, P] for the prompts, [R, L] for the continuations.
    With `keep_prefix`, each layer's prompt keys and values [B, K, P, D] are kept in `prefix_kv` for decoding.
    """

    def __init__(self, batch: Batch, *, keep_prefix: bool = False) -> None:
        device = batch.device
        starts_B = torch.tensor([p.start for p in batch.prefixes], device=device)
        self.prompt_length_B = torch.tensor([p.length for p in batch.prefixes], device=device)
        rows = [c for c in batch.continuations if c.length]
        starts_R = torch.tensor([c.start for c in rows], dtype=torch.long, device=device)
        length_R = torch.tensor([c.length for c in rows], dtype=torch.long, device=device)
        self.prompt_R = torch.tensor([c.prefix for c in rows], dtype=torch.long, device=device)
        self.prompt_index_BP, in_prompt_BP = _padded_index(starts_B, self.prompt_length_B)
        self.row_index_RL, in_row_RL = _padded_index(starts_R, length_R)
        # Where each flat token's output stands once the padded outputs of prompts and rows are laid end to end.
        flat = torch.cat([self.prompt_index_BP[in_prompt_BP], self.row_index_RL[in_row_RL]])
        slots = torch.cat([in_prompt_BP.flatten(), in_row_RL.flatten()]).nonzero().squeeze(1)
        self.slot_F = torch.empty_like(flat).scatter_(0, flat, slots)
        self.in_prompt_BP, self.in_row_RL = in_prompt_BP, in_row_RL
        self.masks: dict[int | None, tuple[Tensor | None, Tensor]] = {}
        self.prefix_kv: dict[int, tuple[Tensor, Tensor]] | None = {} if keep_prefix else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = self._prompt_mask(window), self._row_mask(window)
        prompt_mask, row_mask = self.masks[window]
        gqa = query.shape[0] != key.shape[0]
        kp, vp = _gather(key, self.prompt_index_BP), _gather(value, self.prompt_index_BP)
        if self.prefix_kv is not None:
            self.prefix_kv[layer] = kp, vp
        out = scaled_dot_product_attention(
            _gather(query, self.prompt_index_BP),
            kp,
            vp,
            attn_mask=prompt_mask,
            is_causal=prompt_mask is None,
            scale=scale,
            enable_gqa=gqa,
        )
        outputs = [out.transpose(1, 2).flatten(0, 1)]
        if len(self.prompt_R):
            out = scaled_dot_product_attention(
                _gather(query, self.row_index_RL),
                torch.cat([kp[self.prompt_R], _gather(key, self.row_index_RL)], dim=2),
                torch.cat([vp[self.prompt_R], _gather(value, self.row_index_RL)], dim=2),
                attn_mask=row_mask,
                scale=scale,
                enable_gqa=gqa,
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.slot_F)

    def _prompt_mask(self, window: int | None) -> Tensor | None:
        """[P, P], or None where plain causal masking does: prompts are padded on the right, out of causal sight."""
        longest = self.prompt_index_BP.shape[1]
        if window is None or window >= longest:
            return None
        distance = _distance(longest, longest, self.slot_F.device)
        return (distance >= 0) & (distance < window)

    def _row_mask(self, window: int | None) -> Tensor:
        """[R, 1, L, P + L]: the row's prompt, and the row itself causally; distances count positions, not padding."""
        rows, longest_row = self.row_index_RL.shape
        longest = self.prompt_index_BP.shape[1]
        device = self.slot_F.device
        own = _distance(longest_row, longest_row, device).expand(rows, -1, -1)
        length_R = self.prompt_length_B[self.prompt_R]
        to_prompt = _distance(longest_row, longest, device) + length_R[:, None, None]
        distance = torch.cat([to_prompt, own], dim=2)
        real = torch.cat([self.in_prompt_BP[self.prompt_R], self.in_row_RL], dim=1)[:, None, :]
        seen = real & (distance >= 0)
        if window is not None:
            seen &= distance < window
        # Padded queries see the first prompt token, so that no softmax runs over nothing.
        seen[:, :, 0] |= ~self.in_row_RL
        return seen[:, None]


class DecodeLayout:
    """One new token per row, against the row's shared prompt cache and its own growing cache.

    The prompt's keys and values exist once per prompt; the rows of a prompt attend to them in one matrix product.
    All rows have generated the same number of tokens (`length`). `keep` drops rows that have finished.
    """

    def __init__(
        self, prefix_kv: dict[int, tuple[Tensor, Tensor]], prompt_length_B: Tensor, prompt_R: Tensor, capacity: int
    ) -> None:
        self.prefix_kv, self.prompt_length_B = prefix_kv, prompt_length_B
        self.capacity, self.length = capacity, 0
        self.own_kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._set_rows(prompt_R)

    @property
    def position_R(self) -> Tensor:
        """Position of the token that is about to be fed, per row."""
        return self.prompt_length_B[self.prompt_R] + self.length

    def advance(self) -> None:
        """Call after each forward: one more token is cached per row."""
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows (indices into the current ones), and their prompts once half of those are done."""
        prompts, prompt_R = self.prompt_R[rows].unique(return_inverse=True)
        if 2 * len(prompts) <= len(self.prompt_length_B):
            self.prompt_length_B = self.prompt_length_B[prompts]
            self.prefix_kv = {layer: (k[prompts], v[prompts]) for layer, (k, v) in self.prefix_kv.items()}
        else:
            prompt_R = self.prompt_R[rows]
        self._set_rows(prompt_R)
        for layer, (key, value) in self.own_kv.items():
            self.own_kv[layer] = self._grown(key, rows), self._grown(value, rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        heads, rows, size = query.shape
        kv_heads = key.shape[0]
        own_k, own_v = self._append(layer, key, value)
        prefix_k, prefix_v = self.prefix_kv[layer]
        query_R = (query * scale).transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, size)
        to_prompt = self._by_row(torch.matmul(self._by_prompt(query_R), prefix_k.transpose(2, 3)), heads // kv_heads)
        to_own = torch.matmul(query_R, own_k.transpose(2, 3))
        scores = torch.cat([to_prompt + self._prompt_bias(window), to_own], dim=3)
        if window is not None and window < self.length + 1:
            scores[..., prefix_k.shape[2] : -window] = float("-inf")
        shares = torch.softmax(scores.float(), dim=3).to(value.dtype)
        to_prompt, to_own = shares.split([prefix_k.shape[2], self.length + 1], dim=3)
        from_prompt = self._by_row(torch.matmul(self._by_prompt(to_prompt), prefix_v), heads // kv_heads)
        return (from_prompt + torch.matmul(to_own, own_v)).flatten(1, 2)

    def _by_prompt(self, x_R: Tensor) -> Tensor:
        """[R, K, H/K, *] -> [B, K, S * H/K, *]: all queries against a prompt's keys, as one long query."""
        return x_R[self.slot_BS].transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_B: Tensor, share: int) -> Tensor:
        """The inverse, with `share` query heads per key head."""
        return x_B.unflatten(2, (-1, share)).transpose(1, 2)[self.prompt_R, self.place_R]

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Cache this step's keys and values; returns all of the rows' own, [R, K, length + 1, D]."""
        key_R, value_R = key.transpose(0, 1), value.transpose(0, 1)
        if layer not in self.own_kv:
            shape = (*key_R.shape[:2], self.capacity)
            self.own_kv[layer] = key.new_empty(*shape, key.shape[2]), value.new_empty(*shape, value.shape[2])
        own_k, own_v = self.own_kv[layer]
        own_k[:, :, self.length], own_v[:, :, self.length] = key_R, value_R
        return own_k[:, :, : self.length + 1], own_v[:, :, : self.length + 1]

    def _grown(self, cache: Tensor, rows: Tensor) -> Tensor:
        """The cache of the kept rows; only the filled part is copied."""
        kept = cache.new_empty(len(rows), *cache.shape[1:])
        kept[:, :, : self.length] = cache[rows, :, : self.length]
        return kept

    def _set_rows(self, prompt_R: Tensor) -> None:
        """`slot_BS` lists each prompt's rows (short prompts repeat row 0); `place_R` is a row's place in that list."""
        self.prompt_R = prompt_R
        prompts = len(self.prompt_length_B)
        one_hot = torch.nn.functional.one_hot(prompt_R, prompts)
        self.place_R = (one_hot.cumsum(0) - 1).gather(1, prompt_R[:, None]).squeeze(1)
        slots = int(one_hot.sum(0).max())
        self.slot_BS = torch.zeros(prompts, slots, dtype=torch.long, device=prompt_R.device)
        self.slot_BS[prompt_R, self.place_R] = torch.arange(len(prompt_R), device=prompt_R.device)
        self._biases: dict[int | None, Tensor] = {}

    def _prompt_bias(self, window: int | None) -> Tensor:
        """[R, 1, 1, P]: 0 for prompt tokens in sight, -inf for padding and for what the window has left behind."""
        if window is not None or None not in self._biases:
            longest = next(iter(self.prefix_kv.values()))[0].shape[2]
            position_P = torch.arange(longest, device=self.prompt_R.device)
            length_R1 = self.prompt_length_B[self.prompt_R][:, None]
            seen = position_P < length_R1
            if window is not None:
                seen = seen & (length_R1 + self.length - position_P < window)
            bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None, None]
            if window is not None:
                return bias
            self._biases[None] = bias
        return self._biases[None]


def _padded_index(start_N: Tensor, length_N: Tensor) -> tuple[Tensor, Tensor]:
    """(index, real), both [N, longest]: flat indices of N spans; padding points at the span's first token."""
    longest = int(length_N.max()) if len(length_N) else 0
    offset = torch.arange(longest, device=start_N.device)
    real = offset < length_N[:, None]
    return start_N[:, None] + offset * real, real


def _gather(flat: Tensor, index_NL: Tensor) -> Tensor:
    """[heads, F, D] -> [N, heads, L, D]."""
    rows, length = index_NL.shape
    return flat.transpose(0, 1).index_select(0, index_NL.flatten()).unflatten(0, (rows, length)).transpose(1, 2)


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys]: index of the query minus index of the key."""
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
