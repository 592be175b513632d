"""RunDir: the only state on disk, and the only interface between stages, dashboards and later runs.

    runs/<name>/
      recipe.yaml                       the resolved recipe
      01-cold-start/                    one folder per stage, in order
        lineage.json                    what made it: parents, config, code, seed, all hashed
        metrics.jsonl                   one line per step, appended
        rollouts/step-000012.parquet    every sample: text, ids, log-probs, reward parts, advantage
        checkpoints/step-000020/        to continue from; the newest two
        model/                          an ordinary Hugging Face folder
        DONE                            written last: whatever stands beside it is complete

Files and folders are written under a temporary name and renamed into place. No torch here.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from groupwise.types import Completion, Group, Prompt, Reward, Rollout

KEEP_CHECKPOINTS = 2
LEFT_OUT = b"prompts_too_long"
"""Key in the metadata of a rollout file."""


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def hash_files(path: Path) -> str:
    """Hash of a file, or of the names and contents of all files below a folder."""
    digest = blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    return rows


class RunDir:
    """The folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def recipe_file(self) -> Path:
        return self.root / "recipe.yaml"

    def stage(self, index: int, name: str) -> StageDir:
        """The folder of the stage at `index` (from 0)."""
        return StageDir(self.root / f"{index + 1:02d}-{name}")


class StageDir:
    """The folder of one stage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def model(self) -> Path:
        return self.path / "model"

    def open(self, lineage: Mapping[str, Any]) -> None:
        """Start or take up the stage: remove what a kill left half-written, note what makes this stage."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.rglob(".*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self.write_json("lineage.json", lineage)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Declare the stage complete. Everything it made must be in place by now."""
        write_atomically(self.path / "DONE", json.dumps({"finished": time.time(), **result}, indent=2) + "\n")

    # -- small files -----------------------------------------------------------------------------------------------

    def read_json(self, name: str) -> Any:
        """The parsed file, or None if it is not there.

        Raises:
            ValueError: it is damaged.
        """
        file = self.path / name
        if not file.exists():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); delete {self.path} to make the stage again") from error

    def write_json(self, name: str, value: Any) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    # -- metrics ---------------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")

    def forget_metrics_from(self, step: int) -> None:
        """Drop the lines of steps that are about to be taken again, and a torn last line."""
        kept = [m for m in self.metrics() if m["step"] < step]
        if (self.path / "metrics.jsonl").exists():
            write_atomically(self.path / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in kept))

    # -- checkpoints and models ------------------------------------------------------------------------------------

    @contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """A temporary folder that becomes `name` when the block ends well, replacing what was there."""
        final = self.path / name
        temporary = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder for the state after `step` steps; older checkpoints but one are removed afterwards."""
        with self.new_folder(f"checkpoints/step-{step:06d}") as folder:
            yield folder
        for old in self._checkpoints()[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(old)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(steps taken, folder) of the newest checkpoint."""
        found = self._checkpoints()
        return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step-*"))

    # -- rollouts --------------------------------------------------------------------------------------------------

    def save_rollouts(self, step: int, groups: Sequence[Group], prompts_too_long: int = 0) -> None:
        """Write every sample of a step to rollouts/step-NNNNNN.parquet, one row each, and what was left out."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        rows = [_row(g, i, sample, r) for i, g in enumerate(groups) for sample, r in enumerate(g.rollouts)]
        final = folder / f"step-{step:06d}.parquet"
        temporary = final.with_name(f".{final.name}.tmp")
        schema = _schema().with_metadata({LEFT_OUT: str(prompts_too_long)})
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
        temporary.replace(final)

    def prompts_left_out(self, step: int) -> int:
        """Prompts that were too long for the step whose rollouts were saved."""
        import pyarrow.parquet as pq

        metadata = pq.read_schema(self.path / "rollouts" / f"step-{step:06d}.parquet").metadata
        return int(metadata[LEFT_OUT])

    def load_rollouts(self, step: int) -> list[Group] | None:
        """The groups of a step as they were saved, or None.

        Raises:
            ValueError: the file is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.path / "rollouts" / f"step-{step:06d}.parquet"
        if not file.exists():
            return None
        try:
            table = pq.read_table(file)
            if missing := [name for name in _schema().names if name not in table.column_names]:
                raise OSError(f"it has no column {missing[0]}, another version wrote it")
            rows = table.to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file} is damaged ({error}); delete it, and the step is drawn again") from error
        groups: list[Group] = []
        for row in rows:
            if row["sample"] == 0:
                prompt = Prompt(
                    row["prompt_id"], tuple(json.loads(row["messages"])), row["answer"], json.loads(row["data"])
                )
                groups.append(Group(prompt, tuple(row["prompt_ids"]), [], row["greedy_reward"]))
            completion = Completion(
                tuple(row["token_ids"]),
                tuple(row["logps"]),
                row["finish_reason"],
                row["policy_version"],
                _tuple(row["sampled"]),
            )
            reward = Reward(row["reward"], dict(row["reward_parts"]), dict(row["reward_errors"]))
            scores = {name: _tuple(row[name]) for name in TOKEN_SCORES}
            groups[-1].rollouts.append(Rollout(completion, row["text"], reward, row["advantage"], **scores))
        return groups


TOKEN_SCORES = ("old_logps", "entropies", "ref_logps", "values")
"""What a `Rollout` may know of each token beside the sampler's log-prob; float32 in the models, and so on disk."""


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        {
            "group": pa.int32(),
            "sample": pa.int32(),
            "prompt_id": pa.string(),
            "messages": pa.string(),
            "answer": pa.string(),
            "data": pa.string(),
            "prompt_ids": pa.list_(pa.int32()),
            "text": pa.string(),
            "token_ids": pa.list_(pa.int32()),
            "logps": pa.list_(pa.float32()),
            "sampled": pa.list_(pa.bool_()),
            "finish_reason": pa.string(),
            "policy_version": pa.int64(),
            "reward": pa.float64(),
            "reward_parts": pa.map_(pa.string(), pa.float64()),
            "reward_errors": pa.map_(pa.string(), pa.string()),
            "greedy_reward": pa.float64(),
            "advantage": pa.float64(),
            **{name: pa.list_(pa.float32()) for name in TOKEN_SCORES},
        }
    )


def _row(group: Group, index: int, sample: int, rollout: Rollout) -> dict[str, Any]:
    return {
        "group": index,
        "sample": sample,
        "prompt_id": group.prompt.id,
        "messages": json.dumps([dict(m) for m in group.prompt.messages], ensure_ascii=False),
        "answer": group.prompt.answer,
        "data": json.dumps(dict(group.prompt.data), ensure_ascii=False, default=str),
        "prompt_ids": group.prompt_ids,
        "text": rollout.text,
        "token_ids": rollout.completion.token_ids,
        "logps": rollout.completion.logps,
        "sampled": rollout.completion.sampled,
        "finish_reason": rollout.completion.finish_reason,
        "policy_version": rollout.completion.policy_version,
        "reward": rollout.reward.total,
        "reward_parts": list(rollout.reward.parts.items()),
        "reward_errors": list(rollout.reward.errors.items()),
        "greedy_reward": group.greedy_reward,
        "advantage": rollout.advantage,
        **{name: getattr(rollout, name) for name in TOKEN_SCORES},
    }
