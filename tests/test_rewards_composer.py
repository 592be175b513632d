"""Correctness and the composer: weights, abstentions, failures, and what users may pass as a reward."""

import math
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from groupwise.chat import render_response
from groupwise.rewards import BUILTIN_PARTS, RewardComposer, RewardError, as_reward, load_part
from groupwise.rewards.correctness import CorrectnessReward
from groupwise.types import Prompt, Reward

IDEAL = render_response("7+8=15;2+4+1=7;", "75")
SUM = Prompt.of("27 + 48 = ?", answer="75")


def give(value):
    """A part that returns `value`, or raises it."""

    def part(prompt, response):
        if isinstance(value, BaseException):
            raise value
        return value

    return part


@dataclass
class FixedJudge:
    value: float
    asked: list = field(default_factory=list)

    def score(self, prompt, response):
        self.asked.append((prompt.text, response))
        return self.value


# -- correctness -------------------------------------------------------------------------------------------------------


def test_correctness_compares_with_the_gold_answer():
    reward = CorrectnessReward()
    assert [reward(SUM, r) for r in (IDEAL, r"It is \boxed{75.0}", r"\boxed{74}", "75 came up", "")] == [1, 1, 0, 0, 0]
    assert reward(SUM, r"<think>\boxed{75}</think>So \boxed{74}.") == 0.0
    assert CorrectnessReward(answer_style="hash")(SUM, r"\boxed{75}") == 0.0


def test_correctness_does_not_exchange_gold_and_answer():
    inequality, interval = Prompt.of("solve", answer="x<3"), Prompt.of("solve", answer=r"(-\infty,3)")
    assert CorrectnessReward()(inequality, r"\boxed{(-\infty,3)}") == 1.0
    assert CorrectnessReward()(interval, r"\boxed{x<3}") == 1.0
    assert CorrectnessReward()(Prompt.of("line?", answer="2x+y=3"), r"\boxed{3-2x}") == 0.0
    assert CorrectnessReward()(Prompt.of("y?", answer="3-2x"), r"\boxed{y=3-2x}") == 1.0


def test_the_tasks_own_verifier_comes_first():
    seen = []

    def verify(prompt, answer):
        seen.append((prompt, answer))
        return 0.5

    judge = FixedJudge(1.0)
    reward = CorrectnessReward(verify=verify, judge=judge)
    assert reward(SUM, IDEAL) == 0.5
    assert reward(SUM, "no answer") == 0.0
    assert seen == [(SUM, "75")]
    assert judge.asked == []


def test_the_judge_is_asked_only_without_a_gold_answer():
    judge = FixedJudge(0.75)
    reward = CorrectnessReward(judge=judge)
    assert reward(SUM, IDEAL) == 1.0
    assert reward(Prompt.of("Write a poem"), "Roses") == 0.75
    assert judge.asked == [("Write a poem", "Roses")]


def test_nothing_to_compare_with_is_an_error_that_names_the_remedy():
    with pytest.raises(ValueError, match="give the prompt an answer, a task with a verifier, or a judge"):
        CorrectnessReward()(Prompt.of("Write a poem"), "Roses")


def test_unreadable_gold_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match=r"the gold answer '%%&&' of prompt .* cannot be read"):
        CorrectnessReward()(Prompt.of("q", answer="%%&&"), "<answer>5</answer>")
    assert CorrectnessReward()(Prompt.of("q", answer="%%&&"), "<answer>@@##</answer>") == 0.0


def test_unknown_answer_style_is_refused():
    with pytest.raises(ValueError, match="answer_style must be one of auto, boxed"):
        RewardComposer({"format": 1.0}, answer_style="latex")


# -- totals ------------------------------------------------------------------------------------------------------------


def test_ideal_response_gets_every_part():
    reward = RewardComposer({"correctness": 1.0, "format": 0.2, "reasoning": 0.2, "safety": 0.5})
    assert reward.names == BUILTIN_PARTS
    scored = reward.score(SUM, IDEAL)
    assert scored.parts == {"correctness": 1.0, "format": 1.0, "reasoning": 1.0, "safety": 1.0}
    assert scored.errors == {}
    assert scored.total == pytest.approx(1.9)


@pytest.mark.parametrize(
    "prompt", ["27 + 48 = ?", [{"role": "user", "content": "27 + 48 = ?"}], Prompt.of("27 + 48 = ?"), Prompt("p", ())]
)
def test_prompts_are_strings_messages_or_prompts(prompt):
    reward = RewardComposer({"correctness": 1.0})
    assert reward.compute_reward(prompt, IDEAL, answer="75") == 1.0
    assert reward.compute_reward(prompt, IDEAL, answer="76") == 0.0


def test_answer_argument_replaces_the_prompts_own():
    reward = RewardComposer({"correctness": 1.0})
    assert reward.compute_reward(SUM, IDEAL) == 1.0
    assert reward.compute_reward(SUM, IDEAL, answer="76") == 0.0


def test_parts_receive_the_prompt_with_its_data():
    prompt = Prompt("row-7", SUM.messages, "75", {"solution": "75.0"})
    seen = []
    reward = RewardComposer({"mine": 1.0}, parts={"mine": lambda p, r: seen.append((p.data["solution"], r)) or 1.0})
    assert reward.score(prompt, "text").total == 1.0
    assert seen == [("75.0", "text")]


def test_weights_multiply_and_weight_zero_is_only_logged():
    parts = {"a": give(1.0), "b": give(1), "c": give(9.0)}
    scored = RewardComposer({"a": 1.0, "b": 0.5, "c": 0.0}, parts=parts).score("q", "r")
    assert scored == Reward(1.5, {"a": 1.0, "b": 1.0, "c": 9.0})


def test_user_parts_replace_builtin_ones():
    assert RewardComposer({"format": 2.0}, parts={"format": give(0.25)}).compute_reward("q", "r") == 0.5


@pytest.mark.parametrize(
    ("first", "second", "total"), [(1.0, None, 1.0), (None, 1.0, 1.0), (0.0, 0.5, 0.5), (None, None, None)]
)
def test_a_part_that_abstains_is_left_out(first, second, total):
    reward = RewardComposer({"f": 1.0, "g": 1.0}, parts={"f": give(first), "g": give(second)})
    assert reward.score("q", "r") == Reward(total, {"f": first, "g": second}, {})


def test_all_abstaining_has_no_reward():
    reward = RewardComposer({"f": 1.0, "format": 0.0}, parts={"f": give(None)})
    with pytest.raises(RewardError, match="every weighted reward part abstained"):
        reward.compute_reward("q", "r")


# -- failures ----------------------------------------------------------------------------------------------------------

FAILURES = [
    (OSError("no route to host"), "f: OSError: no route to host"),
    (math.nan, "f: a reward must be finite, got nan"),
    (math.inf, "f: a reward must be finite, got inf"),
    (np.float32("nan"), "f: a reward must be finite, got nan"),
    ("1.0", "f: a reward is one number per response, got '1.0'"),
    ([1.0], "f: a reward is one number per response, got 1 value (list)"),
    (np.ones(7), "f: a reward is one number per response, got 7 values (ndarray)"),
    (1j, "f: a reward is one number per response, got 1j"),
]


@pytest.mark.parametrize(("value", "error"), FAILURES)
def test_a_failed_part_is_none_and_leaves_no_total(value, error):
    reward = RewardComposer({"f": 0.1, "format": 1.0}, parts={"f": give(value)})
    assert reward.score("q", IDEAL) == Reward(None, {"f": None, "format": 1.0}, {"f": error})
    with pytest.raises(RewardError) as raised:
        reward.compute_reward("q", IDEAL)
    assert str(raised.value) == error


@pytest.mark.parametrize(("value", "error"), FAILURES)
def test_a_failed_part_of_weight_zero_is_only_recorded(value, error):
    reward = RewardComposer({"f": 0.0, "format": 1.0}, parts={"f": give(value)})
    assert reward.score("q", IDEAL) == Reward(1.0, {"f": None, "format": 1.0}, {"f": error})


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.int64(1), np.bool_(True), True, 1])
def test_numbers_of_any_kind_are_scores(value):
    total = RewardComposer({"f": 1.0}, parts={"f": give(value)}).score("q", "r").total
    assert type(total) is float
    assert total == value


def test_all_errors_are_told():
    reward = RewardComposer({"f": 1.0, "g": 1.0}, parts={"f": give(OSError("x")), "g": give("y")})
    with pytest.raises(RewardError, match=r"f: OSError: x; g: a reward is one number"):
        reward.compute_reward("q", "r")


def test_unreadable_gold_has_no_total():
    scored = RewardComposer({"correctness": 1.0, "format": 0.2}).score("q", render_response("a", "5"), answer="%%&&")
    assert scored.total is None
    assert "the gold answer '%%&&'" in scored.errors["correctness"]


def test_interrupts_are_not_failures():
    with pytest.raises(KeyboardInterrupt):
        RewardComposer({"f": 1.0}, parts={"f": give(KeyboardInterrupt())}).score("q", "r")


def test_a_part_called_wrongly_gives_a_readable_error():
    error = RewardComposer({"f": 1.0}, parts={"f": lambda completions: 1.0}).score("q", "r").errors["f"]
    assert "takes 1 positional argument but 2 were given" in error


# -- many at a time ----------------------------------------------------------------------------------------------------


def test_score_many_keeps_the_order_and_each_its_own_gold():
    pairs = [(Prompt.of("same text", answer=str(i)), f"<answer>{j}</answer>") for i in range(4) for j in range(4)]
    totals = [r.total for r in RewardComposer({"correctness": 1.0}).score_many(pairs)]
    assert totals == [float(i == j) for i in range(4) for j in range(4)]


def test_judge_is_asked_in_threads_and_an_outage_touches_only_its_own_samples():
    barrier = threading.Barrier(2, timeout=20)

    class Judge:
        def score(self, prompt, response):
            barrier.wait()  # passes only if two calls run at a time
            if response in "25":
                raise ConnectionError("service down")
            return int(response) / 10

    pairs = [(Prompt.of("open question"), str(i)) for i in range(8)]
    rewards = RewardComposer({"correctness": 1.0}, judge=Judge()).score_many(pairs)
    assert [r.total for r in rewards] == [0.0, 0.1, None, 0.3, 0.4, None, 0.6, 0.7]
    assert {tuple(r.errors.values()) for r in rewards if r.total is None} == {
        ("correctness: ConnectionError: service down",)
    }


# -- weights -----------------------------------------------------------------------------------------------------------


def test_negative_weight_is_refused_with_the_remedy():
    with pytest.raises(ValueError) as raised:
        RewardComposer({"format": -1, "safety": 1.0})
    assert str(raised.value) == (
        "rewards.format.weight must be >= 0, got -1; set it to 0 to log the part without training on it"
    )


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True])
def test_weights_are_finite_numbers(weight):
    with pytest.raises(ValueError, match=r"rewards\.format\.weight must be .*>= 0, got"):
        RewardComposer({"format": weight})


def test_unknown_part_is_refused_with_the_nearest_known_one():
    with pytest.raises(ValueError, match=r"rewards\.corectness is not a known part; did you mean 'correctness'\?"):
        RewardComposer({"corectness": 1.0})
    with pytest.raises(ValueError, match="did you mean 'brevity'"):
        RewardComposer({"brevty": 1.0}, parts={"brevity": give(1.0)})


@pytest.mark.parametrize("weights", [{}, {"format": 0, "safety": 0.0}])
def test_some_weight_must_be_above_zero(weights):
    with pytest.raises(ValueError, match="at least one weight above 0"):
        RewardComposer(weights)


# -- what users may pass -----------------------------------------------------------------------------------------------


def test_composer_passes_through():
    reward = RewardComposer({"format": 1.0})
    assert as_reward(reward) is reward
    custom = as_reward(give(1.0))
    assert as_reward(custom) is custom


def test_function_becomes_a_reward_named_after_it():
    def brevity(prompt, response):
        return len(prompt.text) / len(response)

    reward = as_reward(brevity)
    assert reward.score(Prompt.of("ab"), "abcd") == Reward(0.5, {"brevity": 0.5})
    assert [r.total for r in reward.score_many([(Prompt.of("ab"), "abcd"), (Prompt.of("a"), "a")])] == [0.5, 1.0]


def test_object_with_score_becomes_a_reward():
    assert as_reward(FixedJudge(0.25)).score(SUM, "x") == Reward(0.25, {"FixedJudge": 0.25})
    own = Reward(0.5, {"a": 1.0})
    assert as_reward(FixedJudge(own)).score(SUM, "x") is own
    assert as_reward(FixedJudge(None)).score(SUM, "x") == Reward(None, {"FixedJudge": None})


@pytest.mark.parametrize(("value", "error"), FAILURES)
def test_failures_of_custom_rewards_are_errors(value, error):
    def f(prompt, response):
        return give(value)(prompt, response)

    assert as_reward(f).score(SUM, "x") == Reward(None, {"f": None}, {"f": error})


class Batch(FixedJudge):
    def score_many(self, pairs):
        return self.value


@pytest.mark.parametrize("count", [1, 7])
def test_wrong_number_of_scores_is_an_error_that_names_the_function(count):
    for values in ([1.0] * count, np.ones(count)):
        rewards = as_reward(Batch(values)).score_many([(SUM, IDEAL)] * 8)
        assert [r.total for r in rewards] == [None] * 8
        assert (
            f"Batch: ValueError: it must return 8 scores for 8 responses, got {count} value"
            in (rewards[0].errors["Batch"])
        )


@pytest.mark.parametrize("values", [1.0, "11111111", None])
def test_one_value_is_not_broadcast(values):
    rewards = as_reward(Batch(values)).score_many([(SUM, IDEAL)] * 8)
    assert all(r.total is None and "it must return 8 scores" in r.errors["Batch"] for r in rewards)


def test_right_number_of_scores_is_taken_in_order():
    pairs = [(SUM, IDEAL)] * 8
    values = [np.float32(i) for i in range(8)]
    assert [r.total for r in as_reward(Batch(values)).score_many(pairs)] == [float(i) for i in range(8)]
    mixed = as_reward(Batch([1.0, "1", None, Reward(2.0)])).score_many(pairs[:4])
    assert [r.total for r in mixed] == [1.0, None, None, 2.0]
    assert [len(r.errors) for r in mixed] == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [None, 1.0, {"correctness": 1.0}])
def test_what_is_no_reward_is_refused(value):
    with pytest.raises(ValueError, match="a reward is a RewardComposer, a function"):
        as_reward(value)


def test_load_part():
    assert load_part("groupwise.rewards.format:format_reward")(SUM, IDEAL) == 1.0
    assert load_part("groupwise.types:Prompt.of")("q") == Prompt.of("q")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math.sqrt", "a reward function is given as 'module:function', got 'math.sqrt'"),
        ("math:", "a reward function is given as 'module:function', got 'math:'"),
        ("no_such_module:f", "reward function 'no_such_module:f': cannot import 'no_such_module'"),
        ("math:sqr", "reward function 'math:sqr': 'math' has no 'sqr'; did you mean 'sqrt'"),
        ("groupwise.types:Prompt.off", "'groupwise.types' has no 'Prompt.off'; did you mean 'of'"),
    ],
)
def test_load_part_names_the_path_that_cannot_be_resolved(path, message):
    with pytest.raises(ValueError) as raised:
        load_part(path)
    assert message in str(raised.value)
