"""Rows of a table -> prompts: what files and hub data sets share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any

from groupwise.chat import THINK_END, render_response
from groupwise.schema import Strict, nearest
from groupwise.tasks.base import Seed, Split, no_traces, rows_without_replacement
from groupwise.types import Example, Message, Prompt, stable_hash


class Columns(Strict):
    """Which column holds what. A prompt is text or a list of chat messages."""

    prompt: str = "prompt"
    answer: str | None = None
    """The ground truth; leave it out where a judge scores."""
    trace: str | None = None
    """Worked reasoning, for a cold start; put in form with the answer, unless it is a response with `</think>`."""
    system: str | None = None
    """A system message per row."""


def check_columns(columns: Columns, present: Sequence[str], where: str) -> None:
    """Refuse mapped columns that are not there.

    Raises:
        ValueError: names the column, its use, what there is, and the nearest.
    """
    for use, name in columns.model_dump().items():
        if name is not None and name not in present:
            raise ValueError(
                f"{where} has no column {name!r} (columns.{use}){nearest(name, present)}; it has {', '.join(present)}"
            )


def to_prompt(row: Mapping[str, Any], columns: Columns, id: str) -> Prompt:  # noqa: A002
    """One row as a prompt; every column that is not mapped goes to `Prompt.data`.

    Raises:
        ValueError: the prompt is empty or no text or conversation, or the answer is missing.
    """
    value = row[columns.prompt]
    if not value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{id}: column {columns.prompt!r} is empty")
    try:
        messages: tuple[Message, ...] = Prompt.of(value).messages
    except ValueError as error:
        raise ValueError(f"{id}: column {columns.prompt!r}: {error}") from error
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"{id}: column {columns.prompt!r}: a conversation must end with what the user says")
    if columns.system is not None and row[columns.system]:
        if messages[0]["role"] == "system":
            raise ValueError(f"{id}: two system messages, in columns {columns.prompt!r} and {columns.system!r}")
        messages = ({"role": "system", "content": str(row[columns.system])}, *messages)
    answer = None
    if columns.answer is not None:
        try:
            answer = answer_text(row[columns.answer])
        except ValueError as error:
            raise ValueError(f"{id}: column {columns.answer!r} (the ground truth) {error}") from error
    mapped = set(columns.model_dump().values())
    return Prompt(id, messages, answer, {k: v for k, v in row.items() if k not in mapped})


def to_example(row: Mapping[str, Any], columns: Columns, id: str) -> Example:  # noqa: A002
    """One row as a worked example.

    Raises:
        ValueError: as `to_prompt`; or the trace is empty, or is reasoning without an answer to end with.
    """
    assert columns.trace is not None
    prompt = to_prompt(row, columns, id)
    response = row[columns.trace]
    if not isinstance(response, str) or not response.strip():
        raise ValueError(f"{id}: column {columns.trace!r} (the trace) is empty or no text")
    if THINK_END not in response:
        if prompt.answer is None:
            raise ValueError(f"{id}: column {columns.trace!r} (the trace) has no answer; map columns.answer")
        response = render_response(response.strip(), prompt.answer)
    return Example((*prompt.messages, {"role": "assistant", "content": response}), {"prompt": id})


def answer_text(value: Any) -> str:
    """A gold answer as text: numbers as they are written, big ones whole.

    Raises:
        ValueError: there is none, or it is neither text nor a finite number.

    >>> answer_text(12345678901234567890), answer_text(0.5), answer_text(3.0)
    ('12345678901234567890', '0.5', '3.0')
    """
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        raise ValueError("is empty")
    if isinstance(value, str | bool):
        return str(value)
    if not isinstance(value, int | float | Decimal) or not isfinite(value):
        raise ValueError(f"is neither text nor a number: {value!r:.60}")
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


class Table:
    """A task over finite rows: `train` and `test` prompts, and worked examples of training rows, if there are any."""

    verify = None

    def __init__(
        self, kind: str, train: Sequence[Prompt], test: Sequence[Prompt], examples: Sequence[Example] = ()
    ) -> None:
        self.kind, self.train, self.test, self.examples = kind, train, test, examples

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        if split == "test":
            return list(self.test[:n])
        return [self.train[i] for i in rows_without_replacement(len(self.train), n, seed)]

    def traces(self, n: int, seed: Seed) -> list[Example]:
        """At most as many as there are."""
        if not self.examples:
            raise no_traces(self.kind)
        numbers = rows_without_replacement(len(self.examples), min(n, len(self.examples)), (stable_hash(seed), 0))
        return [self.examples[i] for i in numbers]


def make_table(
    kind: str,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    test_rows: Sequence[tuple[str, Mapping[str, Any]]] | None,
    columns: Columns,
    test_fraction: float,
) -> Table:
    """The task of (id, row) pairs. Without rows to test on, rows are held out by the hash of their prompt:
    rows that ask the same are on the same side.

    Raises:
        ValueError: a row cannot be used; its id is named.
    """
    held_out = {
        i for i, row in rows if test_rows is None and stable_hash("split", row[columns.prompt]) < test_fraction * 2**64
    }
    train = [(i, row) for i, row in rows if i not in held_out]
    if not train:
        raise ValueError(f"{kind}: no row is left to train on: {len(rows)} rows, test_fraction {test_fraction}")
    test = test_rows if test_rows is not None else [(i, row) for i, row in rows if i in held_out]
    return Table(
        kind,
        [to_prompt(row, columns, i) for i, row in train],
        [to_prompt(row, columns, i) for i, row in test],
        [to_example(row, columns, i) for i, row in train] if columns.trace else (),
    )
