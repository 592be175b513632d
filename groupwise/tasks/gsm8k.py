"""GSM8K (arXiv 2110.14168): grade-school maths, from local JSONL files or the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from groupwise.schema import Strict
from groupwise.tasks.base import Seed, Split
from groupwise.tasks.files import Row, read_rows
from groupwise.tasks.hub import load_rows
from groupwise.tasks.table import Columns, Table, make_table
from groupwise.types import Example, Prompt

HUB_NAME = "openai/gsm8k"
_COLUMNS = Columns(prompt="question", answer="answer")
_CALCULATOR = re.compile(r"<<[^>]*>>")


class GSM8KConfig(Strict):
    """Rows are `{"question": ..., "answer": "worked solution #### number"}`."""

    kind: Literal["gsm8k"]
    path: str | None = None
    """A folder that holds train.jsonl and test.jsonl; None loads the data set from the hub."""


class GSM8K:
    """The answer is the number after `####`; traces are the worked solutions without their calculator marks."""

    verify = None

    def __init__(self, config: GSM8KConfig) -> None:
        self.config = config
        if config.path is not None:
            _ = self.table  # local files are read at once, so that their faults are found before a run

    @cached_property
    def table(self) -> Table:
        if self.config.path is None:
            parts = [load_rows(HUB_NAME, "main", split, _COLUMNS) for split in ("train", "test")]
        else:
            folder = Path(self.config.path)
            if not folder.is_dir():
                raise ValueError(f"{folder}: no such folder; it should hold train.jsonl and test.jsonl")
            parts = [read_rows(folder / name, _COLUMNS) for name in ("train.jsonl", "test.jsonl")]
        train, test = ([_solved(row) for row in part] for part in parts)
        columns = Columns(prompt="question", answer="answer", trace="trace")
        return make_table("gsm8k", train, test, columns, 0.0)

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        return self.table.sample(n, seed, split)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        return self.table.traces(n, seed)


def _solved(row: Row) -> tuple[str, Mapping[str, Any]]:
    """The row with its final number as answer, and its solution as a trace."""
    place, columns = row
    solution, marker, final = str(columns["answer"]).rpartition("####")
    if not marker or not final.strip():
        raise ValueError(f"{place}: the answer has no final number after '####'")
    number = final.strip().replace(",", "")
    return place, {**columns, "answer": number, "trace": _CALCULATOR.sub("", solution)}
