"""The run directory: everything appears whole or not at all, and comes back as it was."""

import json

import numpy as np
import pytest

from groupwise.run import RunDir, StageDir, hash_files, read_jsonl
from groupwise.types import Completion, Group, Prompt, Reward, Rollout


@pytest.fixture
def stage(tmp_path):
    folder = RunDir(tmp_path / "run").stage(1, "rl")
    folder.open({"seed": 0})
    return folder


def test_stages_are_numbered_in_order(tmp_path):
    assert RunDir(tmp_path).stage(0, "cold-start").path.name == "01-cold-start"


def test_rollouts_come_back_bit_for_bit(stage):
    logps = tuple(float(x) for x in np.float32([-0.1, -1e-7, -33.3]))
    prompt = Prompt("答:1", ({"role": "user", "content": "一加一？"},), "2", {"列": [1, None], "f": 0.1})
    rollouts = [
        Rollout(
            Completion((5, 6, 7), logps, "stop", 12),
            "<think>“一”\n</think>",
            Reward(0.1 + 0.2, {"correctness": 1.0, "own": None}, {"own": "own: broken"}),
            1 / 3,
        ),
        Rollout(Completion((5,), logps[:1], "length", 12), "", Reward(None, {"correctness": None}), None),
    ]
    groups = [Group(prompt, (1, 2), rollouts), Group(Prompt("b", prompt.messages, None), (3,), rollouts[:1])]
    groups[0].greedy_reward = 0.5
    turns = Completion((5, 6, 7), logps, "stop", 12, sampled=(True, False, True))
    scores = {"old_logps": logps[:2], "entropies": logps[1:], "ref_logps": logps[:2], "values": logps}
    groups[1].rollouts.append(Rollout(turns, "", Reward(1.0), 0.25, **scores))
    stage.save_rollouts(3, groups, prompts_too_long=2)
    assert stage.load_rollouts(3) == groups
    assert stage.prompts_left_out(3) == 2
    assert stage.load_rollouts(4) is None


def test_a_folder_that_fails_leaves_the_old_one(stage):
    def write(text, *, fail=False):
        with stage.new_folder("model") as folder:
            (folder / "weights").write_text(text)
            if fail:
                raise RuntimeError

    write("old")
    with pytest.raises(RuntimeError):
        write("half", fail=True)
    assert (stage.model / "weights").read_text() == "old"
    write("new")
    assert (stage.model / "weights").read_text() == "new"


def test_the_newest_two_checkpoints_are_kept(stage):
    assert stage.latest_checkpoint() is None
    for step in (1, 2, 10):
        with stage.new_checkpoint(step):
            pass
    assert [p.name for p in sorted((stage.path / "checkpoints").iterdir())] == ["step-000002", "step-000010"]
    assert stage.latest_checkpoint() == (10, stage.path / "checkpoints" / "step-000010")


def test_what_a_kill_left_half_written_is_removed(stage):
    (stage.path / "checkpoints" / ".step-000003.tmp").mkdir(parents=True)
    (stage.path / ".DONE.tmp").write_text("")
    stage.open({})
    assert not list(stage.path.rglob(".*.tmp"))
    assert not stage.is_done


def test_a_torn_last_line_is_left_out(stage):
    stage.log(0, {"reward/total": 1.0})
    stage.log(1, {"reward/total": 2.0})
    with (stage.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert [m["step"] for m in stage.metrics()] == [0, 1]
    stage.forget_metrics_from(1)
    stage.log(1, {"reward/total": 3.0})
    rows = [json.loads(line) for line in (stage.path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["reward/total"]) for r in rows] == [(0, 1.0), (1, 3.0)]


def test_done_is_written_by_finish_alone(stage):
    stage.write_json("eval.json", {"准确率": 1})
    assert not stage.is_done
    stage.finish({"seconds": 1.0})
    assert StageDir(stage.path).is_done
    assert stage.read_json("DONE")["seconds"] == 1.0
    assert stage.read_json("eval.json") == {"准确率": 1}
    assert stage.read_json("nothing.json") is None


def test_a_hash_sees_names_and_contents(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    first = hash_files(tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    second = hash_files(tmp_path / "a")
    (tmp_path / "a" / "y").write_text("2")
    assert len({first, second, hash_files(tmp_path / "a")}) == 3


def test_a_missing_jsonl_file_has_no_rows(tmp_path):
    assert read_jsonl(tmp_path / "gone.jsonl") == []


def test_damaged_files_are_named_with_the_remedy(stage):
    (stage.path / "DONE").write_text("{torn")
    with pytest.raises(ValueError, match=r"DONE is damaged.*delete"):
        stage.read_json("DONE")
    stage.save_rollouts(0, [])
    file = stage.path / "rollouts" / "step-000000.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step-000000.parquet is damaged.*drawn again"):
        stage.load_rollouts(0)


def test_rollouts_of_another_version_are_named_with_the_remedy(stage):
    import pyarrow.parquet as pq

    prompt = Prompt.of("1 + 1")
    groups = [Group(prompt, (1,), [Rollout(Completion((5,), (-1.0,), "stop"), "", Reward(1.0), 0.0)])]
    stage.save_rollouts(0, groups)
    file = stage.path / "rollouts" / "step-000000.parquet"
    for column in ("sampled", "ref_logps"):
        pq.write_table(pq.read_table(file).drop_columns([column]), file)
        with pytest.raises(ValueError, match=f"has no column {column}.* delete it, and the step is drawn again"):
            stage.load_rollouts(0)
        stage.save_rollouts(0, groups)


def test_a_malformed_line_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{bad\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is not JSON"):
        read_jsonl(file)
