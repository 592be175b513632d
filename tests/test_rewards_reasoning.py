"""Steps that say something, and arithmetic that is true."""

import pytest

from groupwise.rewards.reasoning import reasoning_reward
from groupwise.types import Prompt

QUESTION = Prompt.of("q")
TWO_STEPS = "We add the two numbers first.\nThen we check the sum again.\n"


def score(reasoning):
    return reasoning_reward(QUESTION, f"<think>{reasoning}</think><answer>1</answer>")


@pytest.mark.parametrize(
    "reasoning",
    [
        "6+9=15;3+2+1=6;",
        "6＋9＝15；3＋2＋1＝6；",
        "6+9=15, 3*2=6",
        "6 + 9 = 15. Then 3 * 2 = 6.",
        "1. Take 6 from 9\n2. Multiply the rest by 4",
        "Step 1: x = 6\nStep 2: y = 9",
        "The red box holds six. The blue box holds nine.",
        "三个苹果加四个苹果等于七个。七个苹果减去两个等于五个。",
        "a < b\nb < c",
    ],
)
def test_two_real_steps(reasoning):
    assert score(reasoning) == 1.0


@pytest.mark.parametrize(
    "reasoning",
    [
        "",
        "6+9=15",
        "6+9=15;6 + 9 = 15;",
        "first, then, therefore",
        "First. Second. Then. Therefore. Finally.",
        "Step 1. Step 2. Step 3.",
        "Let me think. Think step by step. So the answer is this.",
        "so so so so. hence hence hence hence.",
        "1 2 3 4. 5 6 7 8.",
        "1=1; 2=2; 3=3",
        "首先，然后，因此。最后，所以。",
        "= = =\n= =",
    ],
)
def test_fewer_than_two_real_steps(reasoning):
    assert score(reasoning) == 0.0


@pytest.mark.parametrize(
    "statement",
    [
        "6 + 9 = 15",
        "6+9=15=5*3",
        "6 × 9 = 54, 54 ÷ 6 = 9",
        "６＋９＝１５",
        "(6 + 9) * 2 = 30",
        "-6 + 9 = 3",
        "so we get -6 + 9 = 3",
        "1/2 + 1/3 = 5/6",
        r"\frac{1}{2} + \frac{1}{3} = \frac{5}{6}",
        "0.1 + 0.2 = 0.3",
        "20 / 3 = 6.67",
        "20 / 3 = 6.7",
        "1,300 + 200 = 1,500",
        "$6 + $9 = $15",
        "5! = 120",
        "25% * 8 = 2",
        "共6+9=15个",
    ],
)
def test_true_arithmetic(statement):
    assert score(TWO_STEPS + statement) == 1.0


@pytest.mark.parametrize(
    "statement",
    [
        "6 + 9 = 16",
        "6+9=15=4*3",
        "so x = 6 + 9 = 16",
        "6 × 9 = 55",
        "６＋９＝１６",
        "(6 + 9) * 2 = 24",
        "so we get -6 + 9 = 15",
        "1/2 + 1/3 = 2/5",
        r"\frac{1}{2} + \frac{1}{3} = \frac{2}{5}",
        "20 / 3 = 6.66",
        "20 / 3 = 7",
        "1,300 + 200 = 1,600",
        "$6 + $9 = $16",
        "2) 6 + 9 = 16",
        "7 = 8",
        "9 - 5 = 4 and 4 * 3 = 13",
        "共6+9=16个",
        "(6 + 9 = 15) and 6 + 8 = 15",
    ],
)
def test_false_arithmetic(statement):
    assert score(TWO_STEPS + statement) == 0.0


@pytest.mark.parametrize(
    "statement",
    [
        "2x + 3 = 7",
        "x - 3 = 7",
        "x -3 = 7",
        "3 * 4 = 11 + y",
        "half of 10 = 5",
        "the sum of 3 and 4 = 7",
        "the square root of 16 = 4",
        "f(2) = 4",
        "log(100) = 2",
        "√16 = 4",
        "17 mod 5 = 2",
        "17 / 5 = 3 remainder 2",
        "17 ÷ 5 = 3……2",
        "17 = 5 (mod 12)",
        "6 apples - 2 apples = 4 apples",
        "gcd(12, 18) = 6",
        "11:30 + 1:15 = 12:45",
        "1/0 = 5",
        "10^10^10 = 5",
        "6 + 9 =",
        "6 + = 9",
    ],
)
def test_what_is_no_whole_statement_is_not_judged(statement):
    assert score(TWO_STEPS + statement) == 1.0


def test_only_the_reasoning_is_read():
    assert reasoning_reward(QUESTION, "6+9=15;3+2+1=6;") == 0.0
    assert reasoning_reward(QUESTION, "<answer>6+9=15;3+2+1=6;</answer>") == 0.0
    assert reasoning_reward(QUESTION, "<think>6+9=15;3+2+1=6;</think><answer>6+9=16</answer>") == 1.0
    assert reasoning_reward(QUESTION, "6+9=15;3+2+1=6;</think><answer>65</answer>") == 1.0  # tag left in the prompt


@pytest.mark.parametrize("unit", ["1+", "(", "= ", "a", "1 ", ",", "1,", "9", "-", " \n", "x 1+1=2 ", r"\frac", "{"])
def test_long_input_comes_back(unit):
    """A pattern that backtracks would take hours here."""
    assert score("6+9=15;3+2+1=6;" + unit * 50_000) == 1.0
