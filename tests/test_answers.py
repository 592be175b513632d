"""Finding and comparing final answers: cases worked out by hand, one group per kind of trouble."""

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rewards import _symbolic, answers
from groupwise.rewards._arithmetic import MAX_DEPTH, NotArithmeticError, TooLargeError, evaluate
from groupwise.rewards.answers import equal, find

LOREM = " The steps above were checked once more." * 20

FOUND = {
    "boxed": [
        (r"So it is $\boxed{\frac{3}{5}}$.", r"\frac{3}{5}"),
        (r"\boxed{\{4, 5\}}", r"\{4, 5\}"),
        (r"Perhaps \boxed{6}. Checked again: \boxed{11}.", "11"),
        (r"It is \boxed{512}. Final: \boxed{512}", "512"),
        (r"The roots are $\boxed{4}$ and $\boxed{-9}$.", "4, -9"),
        (r"$\boxed{4}$, $\boxed{4}$", "4"),
        (r"\boxed{\boxed{31}}", "31"),
        (r"\fbox{27}", "27"),
        (r"Write \boxed around it: \boxed{14}", "14"),
        (r"It is \boxed{14", None),
        (r"It is \boxed{14}. Again: \boxed{", None),
        (r"\boxed{ }", None),
        ("I saw a 14 somewhere.", None),
        (r"<think>Try \boxed{3}.</think>It is \boxed{8}.", "8"),
        (r"<think>Try \boxed{3} and", None),
        (r"\boxed{" + "+".join(f"b{i}" for i in range(40)) + "}" + LOREM, "+".join(f"b{i}" for i in range(40))),
        ("\\boxed{26}\n\nProblem: what is 2+7?\n\\boxed{9}", "26"),
    ],
    "answer-tag": [
        ("<think>1 <answer>2</answer></think><answer>5</answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"<answer>\boxed{5</answer>", None),
        ("<answer>5", None),
        ("<answer> \n</answer>", None),
    ],
    "hash": [
        ("3+9=12\n#### -12" + "\n" + LOREM, "-12"),
        ("#### 2\nno,\n#### 1,350.", "1,350."),
        ("#### 8\n\nQuestion: what is 1+1?\n#### 2", "8"),
        ("Question: 3+5?\n#### 8", "8"),
        ("8", None),
    ],
    "answer-line": [
        ("I doubt that the answer: 4 holds.\nANSWER: 17", "17"),
        ("**Final Answer:** 17", "17"),
        ("Final Answer: **17**", "17"),
        ("**Final Answer**\n\n17", "17"),
        ("So the answer is 17. Hope this helps!", "17"),
        ("Answer：D", "D"),
        ("答案是17。", "17"),
        ("答案：（D）", "（D）"),
        (r"The answer is $\boxed{17}$, as shown.", "17"),
        ("Answer:", None),
        ("17", None),
    ],
    "choice": [
        (r"\boxed{\text{(C) } 40}", "C"),
        ("Answer: d", "D"),
        ("所以选B。", "B"),
        ("Option (A) fits best.", "A"),
        ("None of it.", None),
    ],
    "last-line": [("one\n\ntwo \n \n", "two"), ("<think>one", None)],
    "code": [("```python\nx = 1\n```\nthen\n```\ny = 2\n```", "y = 2\n"), ("```python\nx = 1", None)],
    "auto": [
        (r"<answer>3</answer> or \boxed{4}", "3"),
        (r"<answer>3 or \boxed{4}", None),
        ("#### 3\nAnswer: 4", "3"),
        (r"The answer is \boxed{4", None),
        ("<think>...</think>\n42\n", "42"),
        ("18 dollars", "18 dollars"),
        ("Hm, 42 came up, but I gave up.", None),
        ("42 came up", None),
        ("", None),
    ],
}


@pytest.mark.parametrize(("style", "response", "answer"), [(s, *case) for s, cases in FOUND.items() for case in cases])
def test_find(style, response, answer):
    assert find(response, style) == answer


def test_find_names_the_styles_it_knows():
    with pytest.raises(ValueError, match=r"answer style must be one of auto, boxed, .* got 'box'"):
        find("1", "box")


SAME = [
    # fractions, decimals, mixed numbers
    (r"\frac{3}{7}", "3/7"), (r"\dfrac37", r"\tfrac{6}{14}"), (r"-\frac{5}{8}", r"\frac{-5}{8}"),
    (r"\frac{1}{10}", r"\frac{1/2}{5}"), ("7.50", "7.5"), ("0.25", ".25"), ("1/8", "0.125"), ("½", "0.5"),
    ("1/7", "0.142857143"), (r"\sqrt{3}", "1.7320508"), (r"\frac{23}{4}", r"5\frac{3}{4}"), ("23/4", "5 3/4"),
    ("-2.5", "-2 1/2"), ("042", "42"),
    # signs, thousands, currency, percent, units, scientific notation
    ("-19", "−19"), ("56789", "56,789"), (r"56{,}789", r"56\,789"), ("2500", r"\$2,500.00"), ("9 dollars", "$9"),
    ("45%", r"45\%"), ("45\\%", r"45 \text{ percent}"), ("45%", "45"), ("0.45", "45%"), ("45%", "百分之45"),
    ("60", r"60\text{ kg}"), ("60 kg", "60"), ("40", "40 miles per hour"), ("7 square meters", r"7\text{ m}^2"),
    ("30°", r"30^{\circ}"), ("30", "30 degrees"), ("20 minutes", "20 min"), ("4000000", "4 million"),
    ("4 million dollars", "$4,000,000"),
    ("45000", r"4.5 \times 10^{4}"), ("2e-3", "0.002"), (r"7.1 \times 10^{9}", "7.1e9"),
    # lists, sets, tuples, intervals, unions
    ("5, -5", r"\pm 5"), ("4, 6, 9", r"9, 6, \text{ and } 4"), ("100, 200", "100,200"), ("100,200", "100, 200"),
    ("-4, 3", r"x=3 \text{ or } x=-4"), ("2, 5", "(2,5)"), (r"\{6,4\}", r"\{4,6\}"), ("[2, 5)", "[2,5)"),
    (r"(-\infty,0]\cup[4,\infty)", r"[4, \infty) \cup (-\infty, 0]"), ("(4,\\infty)", "x>4"), ("x>4", "(4,\\infty)"),
    (r"x \in (0,\frac{1}{2})", "(0, 0.5)"), ("D=(0,2)", "(0,2)"),
    # names, equations, chains
    ("9", "x = 9"), ("x=9", "9"), ("81", "a+b = 44+37 = 81"), ("3x+2y=8", r"y = 4 - \frac{3}{2}x"),
    ("y=2x-1", "-1+2x"), ("f(x)=x^2", "x^2"),
    # symbols
    (r"2\sqrt{5}", r"\sqrt{20}"), (r"\sqrt[3]{27}", "3"), (r"\sqrt[3]{5}", r"\sqrt[3]5"), (r"3\pi", "3 pi"),
    (r"\frac{\sqrt{3}}{3}", "1/sqrt(3)"), ("x^2-9", "(x-3)(x+3)"), ("e^{3}+1", "1+e^3"), ("e", "e^1"),
    ("2-3i", "-3i + 2"),
    (r"\log_3 9", "2"), ("x^12", "x^{12}"), (r"\emptyset", r"\varnothing"),
    (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", r"\begin{bmatrix} 5 & 6 \\ 7 & 8 \end{bmatrix}"),
    # text and choices
    (r"\text{Marie}", "Marie"), ("yes", r"\text{Yes}"), ("C", "(C)"), ("C", r"\text{(C) } 40"), ("c", "C."),
    # times, ratios, bases
    ("4:15", r"4:15\text{ p.m.}"), ("3/5", "3:5"), ("1/2", "12:24"), ("1:2:3", "2:4:6"), ("2012_3", "2012_{3}"),
    ("2012_3", "2012"),
    # Chinese
    ("34", "３４"), ("5/6", "５／６"), ("7, 8", "７，８"), ("7, 8", "7、8"), ("-34", "－３４。"), ("30", "30元"),
    ("20000", "2万"), ("20000", "2万元"), ("北京", "北京。"),
    # dress
    ("73", "**73**"), ("73", "$73$."), ("73", r"\boxed{73}"), ("73", "73\x00\x00"), ("73", r"\text{73}"),
]  # fmt: skip

DIFFERENT = [
    (r"\frac{1}{4}", r"\frac{1}{3}"), ("1/3", "0.33"), (r"\pi", "3.14"), ("2000000", "2000001"), ("15", "5 15/2"),
    (r"\frac{1}{2^{80}}", r"\frac{1}{2^{81}}"), (r"\frac{1}{1500!}", r"\frac{1}{1501!}"), ("e^{-40}", "e^{-50}"),
    ("-7", "7"), (r"\pm 12", "12"), ("579", "5,7,9"), ("5678", "56，78"), ("$5", "€5"), ("0.45", "45"),
    (r"3\text{ km}", r"3\text{ m}"), ("2 hours", "2 minutes"), ("[2,5)", "(2,5)"), ("(2,5)", "(5,2)"),
    ("(2,5)", "[2,5]"), ("12", "12 came up"),
    ("D=(0,2)", "D=(0,2.5)"), ("27, 64", "64"), (r"17, 40, \text{ and } 5", r"18, 41, \text{ and } 5"),
    (r"1,2,\ldots,n", r"1,3,\ldots,2n"), ("x=4", "x=5"), ("x=5", "y=5"), ("44", "a+b = 44+37 = 81"), ("6", "5 or 6"),
    (r"\begin{pmatrix}5&6\\7&8\end{pmatrix}", r"\begin{pmatrix}5&7\\6&8\end{pmatrix}"), ("35", "3 5"), ("A, C", "AC"),
    ("x^2+9", "x^2-9"), ("i", "-i"), ("Marie", "Marei"), ("Paris", "Paris or Rome"), ("B", "D"), ("A", "A 12"),
    ("f(x)", "f'(x)"), ("4:15 am", "4:15 pm"), ("12:30", "1:30"), ("4:15:10", "4:15:20"), ("A_1", "A"),
    ("1:2:3", "1:4:9"),
    ("2012_3", "2013_3"), ("59", "2012_3"), ("11_2", "11_3"), ("上海", "北京"), ("12", "I see 12 here"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equal(gold, answer):
    assert equal(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert equal(gold, answer) is False


@pytest.mark.parametrize("gold", ["", "  ", "$$", "!!??", r"\frac{3}{", "9^{9^{9^9}}"])
def test_unreadable_gold_is_none(gold):
    assert equal(gold, "5") is None


@pytest.mark.parametrize("answer", ["", "???", r"\frac{5}{", "((((" * 400 + "5" + "))))" * 400, "5" * 5000])
def test_unreadable_answer_is_wrong(answer):
    assert equal("5", answer) is False
    assert equal("!!??", answer) is not True  # two unreadable sides are not equal


def test_gold_and_answer_are_not_exchanged(monkeypatch):
    compared = []
    monkeypatch.setattr(_symbolic._Worker, "same", lambda self, gold, answer, *_: compared.append((gold, answer)))
    equal("gold + 1", "a + 2")  # prose is compared as text
    assert not compared
    equal("g^2 + 1", "a^2 + 2")
    assert compared == [("g^2 + 1", "a^2 + 2")]


# -- hostile answers ---------------------------------------------------------------------------------------------------

ENDLESS = "y + 9^{9^{9^{9}}}"
"""Too large to compute, and not plain arithmetic, so that only the watchdog can end it."""


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(answers, "TIME_LIMIT", 0.7)


def test_endless_answer_is_wrong_and_endless_gold_is_none(short_limit):
    assert equal("y + 2", ENDLESS) is False
    assert equal(r"\sin(9^{9^{9^{9}}})", "y + 2") is None
    assert equal("y + 2", "2 + y") is True


def test_items_of_a_list_share_one_time_limit(short_limit, monkeypatch):
    ended, kill = [], _symbolic._Worker.kill
    monkeypatch.setattr(_symbolic._Worker, "kill", lambda worker: (ended.append(worker), kill(worker)))
    endless = ", ".join(f"y + {i} + 9^{{9^{{9^{{9}}}}}}" for i in range(30))
    assert equal(", ".join(f"z + {i}" for i in range(30)), endless) is False
    assert len(ended) == 1


def test_threads_share_workers_and_lose_none(short_limit):
    pairs = [("y + 2", ENDLESS) if i % 8 == 0 else (f"y + {i}", f"{i} + y") for i in range(32)]
    expected = [i % 8 != 0 for i in range(32)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            results = [pool.submit(equal, *pair) for pair in pairs]
            assert [r.result(timeout=60) for r in results] == expected
    workers = list(_symbolic._idle)
    assert 1 <= len(workers) <= _symbolic.MAX_WORKERS
    assert all(w.process.poll() is None for w in workers)
    _symbolic.close()
    assert all(w.process.poll() is not None for w in workers)


def test_answers_are_never_run(tmp_path):
    target = tmp_path / "touched"
    for answer in (f"__import__('pathlib').Path('{target}').touch()", rf"\pi+__import__('os').mkdir('{target}')"):
        assert equal("3", answer) is False
        assert equal("x+3", answer) is False
    assert not target.exists()
    assert equal("5", "4") is False  # and nothing has been redefined


@pytest.mark.parametrize("kill_parent", [False, True])
def test_no_worker_outlives_its_parent(kill_parent):
    script = (
        "import os, signal, sys\n"
        "from groupwise.rewards import _symbolic, answers\n"
        "assert answers.equal('x+1', '1+x')\n"
        "print(_symbolic._idle[0].process.pid, flush=True)\n" + "os.kill(os.getpid(), signal.SIGKILL)\n" * kill_parent
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == (-signal.SIGKILL if kill_parent else 0), done.stderr
    worker = int(done.stdout)
    for _ in range(100):
        if not _is_running(worker):
            return
        time.sleep(0.1)
    pytest.fail("the worker is still running")


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        os.kill(pid, 0)
        return True


def test_missing_worker_is_no_verdict(monkeypatch):
    monkeypatch.setattr(_symbolic, "_idle", [])
    monkeypatch.setattr(_symbolic, "__file__", os.devnull)  # a program that ends at once
    assert equal("x + 71", "71 + x") is None
    assert equal("71", "71.0") is True  # needs none


def test_wrong_answers_do_not_fill_the_log(caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        for i in range(50):
            equal("x + 1", f"x + {i + 2}")
            equal("x + 1", f"\\foo{{{i}}} @ # {i}")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_importing_rewards_loads_neither_sympy_nor_torch():
    script = "import sys, groupwise.rewards; sys.exit(any(m in sys.modules for m in ('sympy', 'math_verify', 'torch')))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.,/+-*^_=()[]{}\\$%:;!<> xyabfrcqtpm百元，（）", max_size=25))
def test_equal_survives_anything(text):
    assert equal("7, 8", text) in (True, False)
    assert equal(text, "???") is False


# -- exact arithmetic --------------------------------------------------------------------------------------------------


def _expressions():
    """(text, value) of random arithmetic; `None` where something is divided by zero."""
    numbers = st.integers(0, 99).map(lambda n: (str(n), Fraction(n)))

    def combine(operands):
        def build(left, operator, right):
            text = f"({left[0]} {operator} {right[0]})"
            if left[1] is None or right[1] is None or (operator == "/" and right[1] == 0):
                return text, None
            a, b = left[1], right[1]
            return text, a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b

        return st.builds(build, operands, st.sampled_from("+-*/"), operands)

    return st.recursive(numbers, combine, max_leaves=12)


@given(_expressions())
def test_evaluate_agrees_with_rationals(expression):
    text, value = expression
    if value is None:
        with pytest.raises(NotArithmeticError):
            evaluate(text)
    else:
        assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4 - 5", 9),
        ("2 - 3 - 4", -5),
        ("24 / 4 / 2", 3),
        ("2^3^2", 512),
        ("-3^2", -9),
        ("(-1)^1000001", -1),
        ("2^{-2}", Fraction(1, 4)),
        ("3!!", 720),
        ("2(3)(4)", 24),
        ("50% * 8", 4),
        (r"\frac{3}{4} \div \frac{3}{2}", Fraction(1, 2)),
        ("1e3", 1000),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["", "2 +", "2 3", "x", "1/0", "0^-1", "2^(1/2)", "(1]", "(1", "1)", "2.5!", "1.2.3"])
def test_what_is_not_arithmetic(text):
    with pytest.raises(NotArithmeticError):
        evaluate(text)


@pytest.mark.parametrize("text", ["10^10^10", "99999!", "1e99999", "9" * 5000, "(2^60000)*(2^60000)"])
def test_what_is_too_large(text):
    with pytest.raises(TooLargeError):
        evaluate(text)


def test_depth_is_limited():
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    with pytest.raises(NotArithmeticError, match="nested deeper"):
        evaluate("(" * 50_000)
