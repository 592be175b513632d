"""Messages to token ids and back: the only file that knows chat templates, `<think>`/`<answer>` tags and stop ids.

Prompts are rendered once and never re-encoded: SFT examples, sampling and training all begin with the very ids that
`Chat.prompt_ids` gives, and continue with the answer's own ids. So what is trained is what is sampled, whatever the
tokenizer would do across the border between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from groupwise.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

SYSTEM_PROMPTS = {
    "none": "",
    "r1": (
        "Reason about the question first, then give the final answer. Write the reasoning between <think> and "
        "</think>, and after it only the final answer between <answer> and </answer>."
    ),
    "r1-zh": (
        "请先推理，再给出最终答案。推理过程写在 <think> 和 </think> 之间，"
        "之后只把最终答案写在 <answer> 和 </answer> 之间。"
    ),
}
"""System prompts that a recipe can name; any other text is used as it stands."""


def render_response(reasoning: str, answer: str) -> str:
    """The response shape that is trained for.

    >>> render_response("2 + 2 = 4", "4")
    '<think>2 + 2 = 4</think><answer>4</answer>'
    """
    return f"{THINK}{reasoning}{THINK_END}{ANSWER}{answer}{ANSWER_END}"


class Response(NamedTuple):
    """A response taken apart. `reasoning` and `answer` are `None` when their tags are absent.

    `conclusion` is everything outside the reasoning: where a final answer may be looked for.
    """

    reasoning: str | None
    conclusion: str
    answer: str | None


def split_response(text: str) -> Response:
    """Take a response apart, leniently: this is for reading; `rewards.format` judges the form.

    Reasoning runs from the first `<think>` to the last `</think>`; when only `</think>` is there (the opening tag stood
    in the prompt) from the start; when it is never closed, to the end, and nothing is concluded. The answer is the
    content of the last complete `<answer>` element of the conclusion.

    >>> split_response("<think>6 * 7 = 42</think><answer>42</answer>")
    Response(reasoning='6 * 7 = 42', conclusion='<answer>42</answer>', answer='42')
    >>> split_response("<think>so 41? no,")
    Response(reasoning='so 41? no,', conclusion='', answer=None)
    """
    start, end = text.find(THINK), text.rfind(THINK_END)
    if start < 0 and end < 0:
        reasoning, conclusion = None, text
    elif end < start:
        reasoning, conclusion = text[start + len(THINK) :], text[:start]
    else:
        begin = start + len(THINK) if 0 <= start < end else 0
        reasoning, conclusion = text[begin:end], text[: max(start, 0)] + text[end + len(THINK_END) :]
    close = conclusion.rfind(ANSWER_END)
    open_ = conclusion.rfind(ANSWER, 0, max(close, 0))
    answer = conclusion[open_ + len(ANSWER) : close] if 0 <= open_ < close else None
    return Response(reasoning, conclusion, answer)


class Chat:
    """A tokenizer with its chat template: renders prompts and examples, knows where a turn ends.

    Args:
        tokenizer: a Hugging Face tokenizer. Without a chat template (base models) the messages are joined by blank
            lines, after one BOS if the tokenizer adds one.
        system_prompt: a name in `SYSTEM_PROMPTS` or any text; put before conversations that have no system message.
        extra_stop_ids: more ids that end a completion, such as the model's `generation_config.eos_token_id`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str = "none", extra_stop_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        self.end_of_turn = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        ids = [self.end_of_turn, *([] if eos is None else [eos]), *extra_stop_ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ids if i is not None))
        pad = tokenizer.pad_token_id
        self._unspoken = frozenset(self.stop_ids) | (frozenset() if pad is None else {pad})
        if self.end_of_turn is None:
            raise ValueError("the tokenizer has neither an end-of-sequence token nor a chat template that ends a turn")

    # -- rendering -----------------------------------------------------------------------------------------------

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text that the assistant's answer continues: template, system prompt and generation prompt included."""
        conversation = self._with_system(messages)
        if self.tokenizer.chat_template is None:
            return "".join(f"{m['content']}\n\n" for m in conversation)
        return self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of `prompt_text`; BOS at most once, whether the template or the tokenizer adds it."""
        text = self.prompt_text(messages)
        add_bos = self.tokenizer.chat_template is None
        return tuple(self.tokenizer(text, add_special_tokens=add_bos)["input_ids"])

    def prefill(self, messages: Sequence[Message]) -> str:
        """What the template already wrote of the answer: `<think>` and what follows it, or nothing."""
        text = self.prompt_text(messages)
        return text[text.rfind(THINK) :] if text.rstrip().endswith(THINK) else ""

    def response_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer and the token that ends its turn."""
        assert self.end_of_turn is not None
        return (*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_of_turn)

    def example_ids(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt ids, trained ids) of a conversation: only the last assistant turn and its stop token are trained.

        Earlier turns, their end tokens included, are part of the prompt. A prefilled `<think>` is not repeated.

        Raises:
            ValueError: there is no prompt, or the last message is not a non-empty assistant message.
        """
        *context, last = messages
        if not context or last["role"] != "assistant" or not last["content"]:
            raise ValueError(
                f"an example is a prompt and must end with a non-empty assistant message, got {list(messages)!r}"
            )
        prefill = self.prefill(context)
        text = last["content"]
        if prefill:
            text = text.removeprefix(prefill) if text.startswith(prefill) else text.removeprefix(THINK)
        return self.prompt_ids(context), self.response_ids(text)

    def response_text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as text: without the end and padding tokens at its end, other special tokens kept."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._unspoken:
            end -= 1
        return self.tokenizer.decode(token_ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # -- internals -----------------------------------------------------------------------------------------------

    def _with_system(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        conversation = [dict(m) for m in messages]
        if self.system_prompt and conversation[0]["role"] != "system":
            conversation.insert(0, {"role": "system", "content": self.system_prompt})
        return conversation

    def _find_end_of_turn(self) -> int | None:
        """The token that the template writes after an assistant's turn; the end-of-sequence token without one."""
        marker = "groupwise"
        if self.tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": marker}]
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False)
            after = text[text.rfind(marker) + len(marker) :]
            ids = self.tokenizer(after, add_special_tokens=False)["input_ids"]
            # Not `all_special_ids`: that lists only the tokens with a role of their own (eos, pad, ...).
            added = self.tokenizer.added_tokens_decoder
            if ids and ids[0] in added and added[ids[0]].special:
                return ids[0]
        return self.tokenizer.eos_token_id
