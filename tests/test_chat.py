"""Messages to ids and back, for tokenizers and templates of several habits."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from groupwise.chat import SYSTEM_PROMPTS, Chat, Response, render_response, split_response

USER = {"role": "user", "content": "2+2?"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>' + m['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>' }}{% endif %}"
)
MARKERS = (
    "{% for m in messages %}{{ '### Answer:' if m['role'] == 'assistant' else '### Question:' }}{{ m['content'] }}"
    "{{ '</s>' if m['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Answer:' }}{% endif %}"
)
R1 = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


def make_tokenizer(
    template: str | None,
    *,
    special: tuple[str, ...] = (),
    eos: str | None = "</s>",
    bos: str | None = None,
    pad: str | None = None,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; with `bos` its post-processor puts one before every text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet + ["".join(m) for m in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict.fromkeys([*special, *(t for t in (eos, bos, pad) if t)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in names])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, pad_token=pad)
    fast.chat_template = template
    return fast


def text_of(chat: Chat, ids: tuple[int, ...]) -> str:
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_bos_stands_once_though_template_and_tokenizer_both_add_it() -> None:
    chat = Chat(make_tokenizer(LLAMA, special=("<|head|>", "<|/head|>", "<|eot|>"), bos="<|begin|>"))
    bos = chat.tokenizer.bos_token_id
    ids = chat.prompt_ids([USER])
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert text_of(chat, ids) == "<|begin|><|head|>user<|/head|>2+2?<|eot|><|head|>assistant<|/head|>"
    context, trained = chat.example_ids([USER, {"role": "assistant", "content": "4"}])
    assert context == ids
    assert bos not in trained


def test_base_models_get_plain_text_after_one_bos() -> None:
    chat = Chat(make_tokenizer(None, bos="<s>"))
    assert text_of(chat, chat.prompt_ids([USER])) == "<s>2+2?\n\n"
    assert chat.end_of_turn == chat.tokenizer.eos_token_id
    assert text_of(Chat(make_tokenizer(None)), Chat(make_tokenizer(None)).prompt_ids([USER])) == "2+2?\n\n"


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("none", ""), ("r1", SYSTEM_PROMPTS["r1"]), ("Be brief.", "Be brief.")],
)
def test_system_prompt_by_name_or_text(tokenizer, prompt: str, shown: str) -> None:
    chat = Chat(tokenizer, prompt)
    assert chat.prompt_text([USER]) == (f"<|system|>{shown}" if shown else "") + "<|user|>2+2?<|assistant|>"


def test_a_conversation_s_own_system_message_stays_the_only_one(tokenizer) -> None:
    messages = [{"role": "system", "content": "Own."}, USER]
    assert Chat(tokenizer, "r1").prompt_text(messages) == "<|system|>Own.<|user|>2+2?<|assistant|>"


# -- where a turn ends -----------------------------------------------------------------------------------------------


def test_all_ends_of_a_turn_are_known() -> None:
    """The template ends turns with <|im_end|>, the tokenizer says <|endoftext|>, the model's settings one more."""
    tokenizer = make_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>", "<|eom|>"), eos="<|endoftext|>")
    end, eos, eom = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>", "<|eom|>"))
    chat = Chat(tokenizer, extra_stop_ids=[eom, eos])
    assert chat.end_of_turn == end
    assert chat.stop_ids == (end, eos, eom)


def test_a_tokenizer_that_cannot_end_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="neither an end-of-sequence token nor a chat template"):
        Chat(make_tokenizer(None, eos=None))


# -- examples --------------------------------------------------------------------------------------------------------


def test_the_stop_token_is_trained_though_padding_has_its_id() -> None:
    chat = Chat(make_tokenizer(None, eos="</s>", pad="</s>"))
    assert chat.tokenizer.pad_token_id == chat.tokenizer.eos_token_id
    _, trained = chat.example_ids([USER, {"role": "assistant", "content": "4"}])
    assert text_of(chat, trained) == "4</s>"


def test_only_the_last_turn_and_its_own_end_are_trained() -> None:
    tokenizer = make_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    chat = Chat(tokenizer)
    turns = [m for answer in "abc" for m in (USER, {"role": "assistant", "content": answer})]
    context, trained = chat.example_ids(turns)
    assert text_of(chat, trained) == "c<|im_end|>"
    assert context.count(tokenizer.eos_token_id) == 5  # the earlier turns with their ends are context
    assert text_of(chat, context).endswith("b<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("merges", [(), ((":", "4"), ("\n", "#")), (("4", "2"), (":", "42"))], ids=str)
@pytest.mark.parametrize("question", ["6*7?", "6*7?\n"])
def test_the_answer_is_found_whatever_the_tokenizer_merges_at_its_border(merges, question) -> None:
    """The text '### Answer:42' as a whole has other tokens than the prompt and the answer have apart."""
    merges = tuple(("Ċ" if a == "\n" else a, b) for a, b in merges)
    chat = Chat(make_tokenizer(MARKERS, merges=merges))
    user = {"role": "user", "content": question}
    context, trained = chat.example_ids([user, {"role": "assistant", "content": "42"}])
    assert context == chat.prompt_ids([user])  # as it is when answers are sampled
    assert text_of(chat, trained) == "42</s>"
    assert trained == chat.response_ids("42")


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": ""}])
def test_an_example_without_anything_to_train_is_an_error(tokenizer, last: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must end with a non-empty assistant message"):
        Chat(tokenizer).example_ids([USER, last])


# -- prefilled reasoning ---------------------------------------------------------------------------------------------


def test_a_prefilled_tag_is_neither_lost_nor_repeated() -> None:
    chat = Chat(make_tokenizer(R1, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"))
    assert chat.prompt_text([USER]).endswith("<|im_start|>assistant\n<think>\n")
    assert chat.prefill([USER]) == "<think>\n"
    for content in ("<think>\na</think>4", "<think>a</think>4"):
        context, trained = chat.example_ids([USER, {"role": "assistant", "content": content}])
        assert text_of(chat, context + trained).count("<think>") == 1
        assert text_of(chat, trained) == "a</think>4<|im_end|>"


def test_no_prefill_where_the_template_writes_none(tokenizer) -> None:
    chat = Chat(tokenizer)
    assert chat.prefill([USER]) == ""
    assert chat.prefill([{"role": "user", "content": "What does <think> mean?"}]) == ""


# -- sampled ids to text ---------------------------------------------------------------------------------------------


def test_end_and_padding_tokens_never_reach_the_text() -> None:
    tokenizer = make_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|endoftext|>", pad="<|pad|>")
    chat = Chat(tokenizer)
    for tail in ("<|im_end|>", "<|im_end|><|endoftext|>", "<|endoftext|><|pad|><|pad|>", ""):
        ids = tokenizer("<answer>4</answer>" + tail, add_special_tokens=False)["input_ids"]
        assert chat.response_text(ids) == "<answer>4</answer>"
    assert chat.response_text([]) == ""
    assert chat.response_text([tokenizer.eos_token_id]) == ""


def test_tags_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer = make_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>", "<think>", "</think>"), eos="<|im_end|>")
    assert tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids("<think>")].special
    ids = tokenizer("<think>a</think>4<|im_end|>", add_special_tokens=False)["input_ids"]
    assert Chat(tokenizer).response_text(ids) == "<think>a</think>4"


@pytest.mark.parametrize(
    "text", ["<think>6 * 7</think><answer>42</answer>", "答案：四十二 🙂", " leading, trailing \n", "it 's . here"]
)
def test_text_survives_the_way_through_ids(tokenizer, text: str) -> None:
    chat = Chat(tokenizer)
    ids = chat.response_ids(text)
    assert ids[-1] == chat.end_of_turn
    assert chat.response_text(ids) == text


# -- taking a response apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "conclusion", "answer"),
    [
        ("<think>a</think><answer>4</answer>", "a", "<answer>4</answer>", "4"),
        ("just 4", None, "just 4", None),
        ("a</think>b", "a", "b", None),  # the opening tag stood in the prompt
        ("<think>never closed <answer>4</answer>", "never closed <answer>4</answer>", "", None),
        ("<think><answer>5</answer></think>4", "<answer>5</answer>", "4", None),
        ("<think>a</think>b</think><answer>4</answer>", "a</think>b", "<answer>4</answer>", "4"),
        (
            "<think>a</think><answer>3</answer>no, <answer>4</answer>",
            "a",
            "<answer>3</answer>no, <answer>4</answer>",
            "4",
        ),
        ("<think>a</think><answer>4", "a", "<answer>4", None),
        ("before <think>a</think> after", "a", "before  after", None),
        ("</think>x<think>y", "y", "</think>x", None),
        ("", None, "", None),
    ],
)
def test_split_response(text: str, reasoning: str | None, conclusion: str, answer: str | None) -> None:
    assert split_response(text) == Response(reasoning, conclusion, answer)


def test_what_is_rendered_can_be_split() -> None:
    assert render_response("a", "4") == "<think>a</think><answer>4</answer>"
    assert split_response(render_response("a", "4"))[::2] == ("a", "4")
