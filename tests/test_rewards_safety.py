"""Secrets, personal data and refused words. All data here is made up or taken from public examples."""

import pytest

from groupwise.rewards.safety import RULES, SafetyReward
from groupwise.types import Prompt

QUESTION = Prompt.of("What is 2 + 2?")

UNSAFE = [
    ("private key", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn"),
    ("AWS access key", "use AKIAIOSFODNN7EXAMPLE here"),
    ("API key or token", "sk-abcdefghij0123456789"),
    ("API key or token", "ghp_" + "a1B2" * 9),
    ("API key or token", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"),
    ("password", "password: hunter2hunter2"),
    ("password", "密码：abc12345"),
    ("password in a URL", "postgres://admin:pw@db.example.org/x"),
    ("e-mail address", "write to jo.doe@example.org."),
    ("phone number", "call 415-555-2671"),
    ("phone number", "call (415) 555-2671"),
    ("phone number", "+44 20 7946 0958"),
    ("phone number", "+86 138 1234 5678"),
    ("phone number", "138-1234-5678"),
    ("phone number", "手机号13812345678"),
    ("phone number", "手机号１３８１２３４５６７８"),
    ("resident identity number", "11010519491231002X"),
    ("social security number", "my SSN is 219-09-9999"),
    ("card number", "4111 1111 1111 1111"),
    ("card number", "3782-822463-10005"),
    ("card number", "my card is 4111111111111111"),
]


@pytest.mark.parametrize(("rule", "response"), UNSAFE)
def test_unsafe(rule, response):
    reward = SafetyReward()
    assert reward(QUESTION, response) == 0.0
    assert rule in reward.violations(QUESTION, response)


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES} == {name for name, _ in UNSAFE}


@pytest.mark.parametrize(
    "response",
    [
        "<think>7+8=15;4+5+1=10;</think><answer>105</answer>",
        "13812345678 * 2 = 27624691356",
        "The product is 13812345678.",
        "2^100 = 1267650600228229401496703205376",
        "4111111111111111",
        "4111 1111 1111 1112",  # fails the Luhn check
        "110105194912310021",  # fails its check character
        "110105194913310024",  # no month 13
        "415-555-2671 = -2811",
        "so x = 415-555-2671",
        "219-09-9999 = -9789",
        "12 + 34 56 78 90",
        "@dataclass",
        "https://example.org/a:b",
        "a password is required",
        "-----BEGIN PUBLIC KEY-----",
        "3:30, 2026-01-31, 192.168.1.10, 1,234,567.89",
    ],
)
def test_safe(response):
    assert list(SafetyReward().violations(QUESTION, response)) == []
    assert SafetyReward()(QUESTION, response) == 1.0


def test_what_the_user_wrote_is_no_leak():
    prompt = Prompt.of([{"role": "user", "content": "I am jo@example.org, 13812345678."}, *QUESTION.messages])
    reward = SafetyReward()
    assert reward(prompt, "Dear jo@example.org, is 手机 13812345678 right?") == 1.0
    assert reward(prompt, "Dear jo@example.org, I am al@example.org.") == 0.0


def test_blocklist():
    reward = SafetyReward(blocklist=["Grue", "magic word", "咒语"])
    refused = ["a grue!", "GRUE", "ｇｒｕｅ", "的grue是", "the magic word is", "这是咒语的意思"]
    assert [reward(QUESTION, r) for r in refused] == [0.0] * 6
    assert [reward(QUESTION, r) for r in ["gruesome", "congrue", "magic words", "咒 语"]] == [1.0] * 4
    assert reward(Prompt.of("What is a grue?"), "A grue is") == 0.0  # the prompt excuses data, not words
    assert list(reward.violations(QUESTION, "a Grue")) == ["blocked word 'Grue'"]


@pytest.mark.parametrize("blocklist", ["grue", [""], ["grue", " "]])
def test_blocklist_is_checked(blocklist):
    with pytest.raises(ValueError, match="blocklist must be a list of words"):
        SafetyReward(blocklist=blocklist)


@pytest.mark.parametrize("unit", ["a", "1 ", "-", "1-", "a@", "a.", "eyJ", "phone ", "password=", "sk-", "a://", "+1 "])
def test_long_input_comes_back(unit):
    """A pattern that backtracks would take hours here."""
    assert SafetyReward()(QUESTION, unit * 50_000) in (0.0, 1.0)
