"""The form of a response: exactly one reasoning, then exactly one answer, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.chat import render_response
from groupwise.rewards.format import format_reward
from groupwise.types import Prompt

QUESTION = Prompt.of("2 + 2 = ?")

GOOD = [
    "<think>a</think><answer>b</answer>",
    "\n<think>\na\n</think>\n\n<answer> b </answer>\n",
    "<think>a < b, so <b>this</b></think><answer><b>b</b></answer>",
    "<think>\na\n</think>\n<answer>4</answer>",  # the template wrote the opening tag, and the response includes it
]
BAD = [
    "",
    "a\n</think>\n<answer>4</answer>",  # nobody wrote the opening tag
    "<think>a</think>The answer is 4.",  # the answer element is required
    "<think></think>a",
    "<think></think><answer>b</answer>",
    "<think> \n</think><answer>b</answer>",
    "<think>a</think><answer></answer>",
    "<think>a</think><answer>\t</answer>",
    "<think>a</think><think>b</think><answer>c</answer>",
    "<think>a</think></think><answer>b</answer>",
    "<think>a</think><answer>b</answer></answer>",
    "<think>a</think><answer>b</answer><answer>c</answer>",
    "Sure! <think>a</think><answer>b</answer>",
    "<think>a</think><answer>b</answer> Done.",
    "<think>a</think><answer>b</answer>\nDone.",
    "<think>a</think> so <answer>b</answer>",
    "<think>a<answer>b</answer></think>",
    "<think>a<answer></think>b</answer>",
    "<answer>b</answer><think>a</think>",
    "</think>a<think><answer>b</answer>",
    "<think>a</think></answer>b<answer>",
    "<think>a</think><answer>b",
    "<think>a",
    "<Think>a</Think><Answer>b</Answer>",
]


@pytest.mark.parametrize("response", GOOD)
def test_well_formed(response):
    assert format_reward(QUESTION, response) == 1.0


@pytest.mark.parametrize("response", BAD)
def test_not_well_formed(response):
    assert format_reward(QUESTION, response) == 0.0


WORDS = st.text(alphabet="ab <>/\n", min_size=1).filter(str.strip)


@given(WORDS, WORDS)
def test_what_is_rendered_for_training_is_well_formed(reasoning, answer):
    assert format_reward(QUESTION, render_response(reasoning, answer)) == 1.0
