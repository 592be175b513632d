"""The nouns: prompts from what users pass, hashes that hold across processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from groupwise.types import Completion, Group, Prompt, Reward, Rollout, stable_hash


def test_a_prompt_from_a_string_messages_or_a_prompt() -> None:
    message = {"role": "user", "content": "2+2?"}
    from_text = Prompt.of("2+2?", answer="4")
    assert from_text.messages == (message,)
    assert from_text.answer == "4"
    assert from_text.text == "2+2?"
    assert Prompt.of([message], answer="4") == from_text
    assert Prompt.of(from_text) is from_text
    assert Prompt.of("2+2?", answer="5").id != from_text.id


def test_the_question_is_the_last_user_message() -> None:
    turns = [("user", "first"), ("assistant", "reply"), ("user", "second")]
    assert Prompt.of([{"role": r, "content": c} for r, c in turns]).text == "second"
    assert Prompt.of([{"role": "system", "content": "only"}]).text == ""


@pytest.mark.parametrize("value", [3, None, [], ["text"], [{"role": "user"}], [{"role": "user", "content": 4}]])
def test_what_is_no_prompt_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"a prompt is a string|a chat message needs"):
        Prompt.of(value)  # type: ignore[arg-type]


def test_hashes_are_the_same_in_every_process() -> None:
    parts = (0, "schritt", 1.5, None, ["é", {"a": 1}])
    code = f"from groupwise.types import stable_hash; print(stable_hash(*{parts!r}))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {str(stable_hash(*parts))}
    assert len({stable_hash(0, step, index) for step in range(50) for index in range(50)}) == 2500


def test_signal_is_any_advantage_other_than_zero() -> None:
    def group(*advantages: float | None) -> Group:
        completion = Completion((1,), (0.0,), "stop")
        rollouts = [Rollout(completion, "", Reward(None if a is None else a), a) for a in advantages]
        return Group(Prompt.of("x"), (1,), rollouts)

    assert group(1.0, -1.0).has_signal
    assert not group(0.0, None, 0.0).has_signal
    assert group(1.0, None).rewards_G == [1.0, None]
