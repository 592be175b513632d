"""Any data set that `datasets.load_dataset` finds: on the hub, or a folder in its form."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from groupwise.schema import Strict
from groupwise.tasks.base import Seed, Split
from groupwise.tasks.files import Row
from groupwise.tasks.table import Columns, Table, check_columns, make_table
from groupwise.types import Example, Prompt


class HubConfig(Strict):
    """Needs `pip install groupwise[hub]`."""

    kind: Literal["hub"]
    name: str
    subset: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    """Held-out rows; without it, `test_fraction` of the rows are held out by the hash of their prompts."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    columns: Columns = Columns(answer="answer")


class Hub:
    """Loaded when it is first drawn from: checking a recipe downloads nothing."""

    verify = None

    def __init__(self, config: HubConfig) -> None:
        self.config = config

    @cached_property
    def table(self) -> Table:
        cfg = self.config
        rows = load_rows(cfg.name, cfg.subset, cfg.train_split, cfg.columns)
        test = None if cfg.test_split is None else load_rows(cfg.name, cfg.subset, cfg.test_split, cfg.columns)
        return make_table("hub", rows, test, cfg.columns, cfg.test_fraction)

    def sample(self, n: int, seed: Seed, split: Split = "train") -> list[Prompt]:
        return self.table.sample(n, seed, split)

    def traces(self, n: int, seed: Seed) -> list[Example]:
        return self.table.traces(n, seed)


def load_rows(name: str, subset: str | None, split: str, columns: Columns) -> list[Row]:
    """(id, row) pairs of one split.

    Raises:
        ValueError: the library is not installed, the data set cannot be found, or a mapped column is absent.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "this task needs the datasets library; install it with: pip install 'groupwise[hub]'"
        ) from error
    try:
        data: Any = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data set {name!r} ({split}) cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    check_columns(columns, data.column_names, f"data set {name!r}")
    return [(f"{name}/{split}:{number}", row) for number, row in enumerate(data, start=1)]
