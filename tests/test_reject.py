"""Which samples rejection sampling keeps."""

import pytest

from groupwise.stages.reject import keep
from groupwise.types import Completion, Group, Prompt, Reward, Rollout


def group(*samples):
    """Samples are (text, correctness, format, total)."""
    done = Completion((1,), (0.0,), "stop")
    rollouts = [
        Rollout(done, text, Reward(total, {"correctness": correct, "format": form}))
        for text, correct, form, total in samples
    ]
    return Group(Prompt.of("?"), (1,), rollouts)


GROUP = group(
    ("a", 1.0, 1.0, 1.2),
    ("b", 0.0, 1.0, 0.2),
    ("a", 1.0, 1.0, 1.2),
    ("c", 1.0, 0.0, 1.0),
    ("d", 1.0, 1.0, 1.4),
    ("e", None, None, None),
)


@pytest.mark.parametrize(
    ("rule", "per_prompt", "deduplicate", "kept"),
    [
        ("correct", None, True, [0, 4]),
        ("correct", None, False, [0, 2, 4]),
        ("correct", 1, True, [4]),
        ("correct", 2, False, [0, 4]),
        ("best", None, True, [4]),
        ("best", 3, True, [0, 3, 4]),
        ("best", 3, False, [0, 2, 4]),
    ],
)
def test_rules(rule, per_prompt, deduplicate, kept):
    assert keep(GROUP, rule, per_prompt, deduplicate) == kept


def test_nothing_right_keeps_nothing():
    assert keep(group(("b", 0.0, 1.0, 0.2)), "correct", None, True) == []


def test_without_a_format_part_correctness_is_enough():
    rollout = Rollout(Completion((1,), (0.0,), "stop"), "x", Reward(1.0, {"correctness": 1.0}))
    assert keep(Group(Prompt.of("?"), (1,), [rollout]), "correct", None, True) == [0]


def test_what_was_cut_off_is_not_imitated():
    cut = Rollout(Completion((1,), (0.0,), "length"), "x", Reward(2.0, {"correctness": 1.0}))
    whole = Rollout(Completion((1,), (0.0,), "stop"), "y", Reward(1.0, {"correctness": 1.0}))
    assert keep(Group(Prompt.of("?"), (1,), [cut, whole]), "best", None, True) == [1]
