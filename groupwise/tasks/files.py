"""Your own data: JSONL, Parquet or CSV, with a mapping of its columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from groupwise.schema import Strict
from groupwise.tasks.table import Columns, Table, check_columns, make_table

Row = tuple[str, Mapping[str, Any]]
"""(id, row): the id names the file and the line."""


class FilesConfig(Strict):
    """Every row is checked before a run begins."""

    kind: Literal["files"]
    path: str
    """A .jsonl, .parquet or .csv file."""
    test_path: str | None = None
    """Held-out rows; without it, `test_fraction` of the rows are held out by the hash of their prompts."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    columns: Columns = Columns(answer="answer")


def files_task(config: FilesConfig) -> Table:
    """Read and check the files.

    Raises:
        ValueError: a file is missing, malformed or empty, a mapped column is absent, or a row cannot be used.
    """
    rows = read_rows(Path(config.path), config.columns)
    test = None if config.test_path is None else read_rows(Path(config.test_path), config.columns)
    return make_table("files", rows, test, config.columns, config.test_fraction)


def read_rows(path: Path, columns: Columns) -> list[Row]:
    """All rows of a file, with their ids `name:line`.

    Raises:
        ValueError: see `files_task`.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: unknown kind of file; give a {', '.join(readers)} file")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = readers[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"{path}: the file holds no row")
    for place, row in rows:
        check_columns(columns, list(row), place)
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # beside bad JSON: a number of 5,000 digits, endless nesting
            raise ValueError(f"{path} line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number}: a row is an object with columns, got {line.strip()[:60]}")
        rows.append((f"{path.name}:{number}", row))
    return rows


def _read_csv(path: Path) -> list[Row]:
    reader = csv.DictReader(io.StringIO(_text(path)), strict=True)
    rows: list[Row] = []
    try:
        header = list(reader.fieldnames or ())
        if twice := {name for name in header if header.count(name) > 1}:
            raise ValueError(f"{path}: the header names {', '.join(sorted(twice))} twice")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"{path} line {reader.line_num}: has not as many fields as the header")
            rows.append((f"{path.name}:{reader.line_num}", row))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not valid CSV: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    return [(f"{path.name}:{number}", row) for number, row in enumerate(table.to_pylist(), start=1)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: byte {error.start} cannot be read") from error
