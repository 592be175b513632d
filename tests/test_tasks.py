"""Each task proves itself: its gold answer scores 1 and a wrong one 0; its draws are pure; its splits never meet."""

import ast
import contextlib
import itertools
import json
import operator
import re
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from groupwise.chat import render_response, split_response
from groupwise.rewards import RewardComposer
from groupwise.tasks import TaskConfig, make_task, normalise
from groupwise.tasks.arithmetic import reasoning
from groupwise.tasks.base import rows_without_replacement
from groupwise.tasks.countdown import evaluate
from groupwise.tasks.reasoning_gym import REFUSED
from groupwise.types import Prompt


def task_of(**spec):
    return make_task(TypeAdapter(TaskConfig).validate_json(json.dumps(spec)))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def wrong(answer: str) -> str:
    return f"{answer}1" if answer[-1:].isdigit() else f"not {answer}"


ROWS = [{"q": f"Tom has {n} pears and buys 3. How many?", "gold": n + 3, "level": n % 2} for n in range(40)]


@pytest.fixture
def gsm8k_folder(tmp_path):
    for name, start in (("train", 0), ("test", 100)):
        rows = [
            {
                "question": f"{n} cats, twice as many dogs?",
                "answer": f"2 * {n} = <<2*{n}={2 * n}>>{2 * n} dogs.\n#### {2 * n:,}",
            }
            for n in range(start + 1000, start + 1020)
        ]
        jsonl(tmp_path / f"{name}.jsonl", rows)
    return str(tmp_path)


@pytest.fixture
def tasks(tmp_path, gsm8k_folder):
    hub = tmp_path / "hub"
    hub.mkdir()
    jsonl(hub / "train.jsonl", ROWS)
    columns = {"prompt": "q", "answer": "gold"}
    return {
        "plain": task_of(kind="arithmetic", operators=["+", "-", "*"], digits=3),
        "english": task_of(kind="arithmetic", language="en", terms=3, operators=["+", "-"]),
        "chinese": task_of(kind="arithmetic", language="zh", min_digits=2),
        "countdown": task_of(kind="countdown"),
        "countdown zh": task_of(kind="countdown", numbers=4, language="zh"),
        "gsm8k": task_of(kind="gsm8k", path=gsm8k_folder),
        "files": task_of(kind="files", path=jsonl(tmp_path / "rows.jsonl", ROWS), columns=columns),
        "hub": task_of(kind="hub", name=str(hub), columns=columns),
        "chain_sum": task_of(**normalise({"kind": "reasoning_gym:chain_sum"})),
        "gcd": task_of(kind="reasoning_gym", name="gcd"),
    }


KINDS = ["plain", "english", "chinese", "countdown", "countdown zh", "gsm8k", "files", "hub", "chain_sum", "gcd"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gold_answer_scores_1_and_a_wrong_one_0(kind, tasks):
    task = tasks[kind]
    reward = RewardComposer({"correctness": 1.0}, verify=task.verify)
    for prompt in [*task.sample(15, (3, 0)), *task.sample(3, 3, "test")]:
        assert reward.compute_reward(prompt, render_response("-", prompt.answer)) == 1.0, prompt
        assert reward.compute_reward(prompt, render_response("-", wrong(prompt.answer))) == 0.0, prompt


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_pure_and_the_splits_never_meet(kind, tasks):
    task = tasks[kind]
    assert task.sample(10, (5, 2)) == task.sample(10, (5, 2))
    assert [p.text for p in task.sample(10, (5, 2))] != [p.text for p in task.sample(10, (6, 2))]
    train = {p.text for step in range(8) for p in task.sample(12, (1, step))}
    test = {p.text for seed in range(8) for p in task.sample(12, seed, "test")}
    assert test
    assert not train & test


@pytest.mark.parametrize("kind", ["plain", "english", "chinese", "countdown", "countdown zh"])
def test_traces_earn_every_part_of_the_reward(kind, tasks):
    task = tasks[kind]
    reward = RewardComposer({"correctness": 1, "format": 1, "reasoning": 1, "safety": 1}, verify=task.verify)
    examples, prompts = task.traces(60, 9), task.sample(60, 9)
    for example, prompt in zip(examples, prompts, strict=True):
        assert example.messages[:-1] == tuple(dict(m) for m in prompt.messages)
        assert reward.score(prompt, example.messages[-1]["content"]).parts == {
            "correctness": 1.0,
            "format": 1.0,
            "reasoning": 1.0,
            "safety": 1.0,
        }


def test_gsm8k_traces_are_its_solutions_without_calculator_marks(tasks):
    (trace,) = {
        e.messages[-1]["content"] for e in tasks["gsm8k"].traces(20, 0) if "2 * 1007" in e.messages[-1]["content"]
    }
    assert trace == "<think>2 * 1007 = 2014 dogs.</think><answer>2014</answer>"


@pytest.mark.parametrize("kind", ["files", "chain_sum"])
def test_a_task_without_traces_says_where_to_get_some(kind, tasks):
    with pytest.raises(ValueError, match=r"no worked examples.*data"):
        tasks[kind].traces(4, 0)


# -- arithmetic ------------------------------------------------------------------------------------------------------

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(text: str) -> Fraction:
    def walk(node):
        match node:
            case ast.BinOp(left, op, right):
                return _OPERATORS[type(op)](walk(left), walk(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -walk(operand)
            case ast.Constant(value):
                return Fraction(value)
        raise AssertionError(ast.dump(node))

    return walk(ast.parse(text, mode="eval").body)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=4), st.sampled_from("+-*"))
def test_every_worked_step_is_true(operands, sign):
    operands = operands[:2] if sign == "*" else operands
    steps = reasoning(Prompt("", (), data={"operands": operands, "operator": sign})).split(";")
    assert len(steps) >= 2
    for step in steps:
        left, right = step.split("=")
        assert value_of(left) == value_of(right), step


def test_worked_columns_as_a_person_writes_them():
    def steps(a, sign, b):
        return reasoning(Prompt("", (), data={"operands": [a, b], "operator": sign}))

    assert steps(37, "+", 48) == "7+8=15;3+4+1=8"
    assert steps(5, "+", 61) == "5+1=6;0+6+0=6"
    assert steps(52, "-", 37) == "12-7=5;5-1-3=1"
    assert steps(37, "-", 52) == "12-7=5;5-1-3=1;-(52-37)=-15"
    assert steps(37, "*", 48) == "37*8=296;37*40=1480;296+1480=1776"
    assert steps(37, "*", 4) == steps(4, "*", 37) == "4*7=28;4*30=120;28+120=148"
    assert steps(7, "*", 7) == "7*6=42;42+7*1=49"


@pytest.mark.parametrize("sign", ["+", "-", "*"])
def test_worked_steps_of_single_digits_are_two_different_ones(sign):
    for a, b in itertools.product(range(10), repeat=2):
        first, second, *_ = reasoning(Prompt("", (), data={"operands": [a, b], "operator": sign})).split(";")
        assert first != second


def test_digits_bound_the_operands():
    task = task_of(kind="arithmetic", digits=3, min_digits=3)
    operands = [x for p in task.sample(300, 0) for x in p.data["operands"]]
    assert min(operands) >= 100
    assert max(operands) <= 999


# -- countdown -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("2 * 3 + 7", 1.0),
        ("(2×3)+7 = 13", 1.0),
        (r"7 + 2 \times 3", 1.0),
        ("７＋２×３", 1.0),
        (r"$7 + 2 \cdot 3$", 1.0),
        ("2 + 3 + 7", 0.0),  # another value
        ("13", 0.0),  # not the numbers
        ("6 + 7", 0.0),
        ("2 * 3 + 7 + 7 - 7", 0.0),  # a number twice
        ("2 * 3 + 7 = 14", 0.0),
        ("7 / (2 - 2) + 3", 0.0),
        ("__import__('os')", 0.0),
        ("2 ** 3 + 7", 0.0),
        ("(" * 10_000, 0.0),
        ("", 0.0),
    ],
)
def test_countdown_counts_numbers_and_value(answer, score):
    prompt = Prompt("", (), data={"numbers": [2, 3, 7], "target": 13})
    assert task_of(kind="countdown").verify(prompt, answer) == score


def test_countdown_never_recurses_out_of_the_stack():
    prompt = Prompt("", (), data={"numbers": [2, 3, 7], "target": 13})
    task = task_of(kind="countdown")

    def at_depth(depth):
        return at_depth(depth - 1) if depth else task.verify(prompt, "(" * 198)

    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    assert at_depth(max(sys.getrecursionlimit() - depth - 400, 0)) == 0.0


def test_countdown_calculates_exactly():
    assert evaluate("1/3 + 1/6") == (Fraction(1, 2), [1, 3, 1, 6])
    assert evaluate("2 - -3 * (4 - 6)")[0] == Fraction(-4)


# -- finite data -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5))
def test_rows_are_walked_without_replacement(rows, n, seed):
    walk = [i for step in range(3 * rows) for i in rows_without_replacement(rows, n, (seed, step))]
    for start in range(0, len(walk) - rows + 1, rows):
        assert sorted(walk[start : start + rows]) == list(range(rows))


def test_five_of_eight_rows_at_a_time_as_the_docs_say():
    first, second = (rows_without_replacement(8, 5, (0, step)) for step in (0, 1))
    assert len({*first, *second[:3]}) == 8


def test_equal_questions_with_different_answers_stay_two_rows(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"q": "?", "gold": "1"}, {"q": "?", "gold": "2"}])
    task = task_of(kind="files", path=path, test_fraction=0, columns={"prompt": "q", "answer": "gold"})
    prompts = task.sample(2, 0)
    assert sorted(p.answer for p in prompts) == ["1", "2"]
    assert {p.id for p in prompts} == {"t.jsonl:1", "t.jsonl:2"}


def test_other_columns_stay_with_their_row(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"q": f"{i}?", "gold": i, "solution": f"s{i}"} for i in range(20)])
    task = task_of(kind="files", path=path, columns={"prompt": "q", "answer": "gold"})
    for prompt in task.sample(30, (0, 1)):
        assert prompt.data == {"solution": f"s{prompt.answer}"}
        assert prompt.text == f"{prompt.answer}?"


def test_files_of_every_kind_give_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"问题": f"{i} 加 1，“等于”多少？", "答案": str(i + 1)} for i in range(12)]
    jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.csv").write_text(
        "\ufeff问题,答案\n" + "".join(f"{r['问题']},{r['答案']}\n" for r in rows), encoding="utf-8"
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"prompt": "问题", "answer": "答案"}
    seen = []
    for suffix in ("jsonl", "csv", "parquet"):
        task = task_of(kind="files", path=str(tmp_path / f"a.{suffix}"), test_fraction=0, columns=columns)
        seen.append({(p.text, p.answer) for p in task.sample(12, 0)})
    assert seen[0] == seen[1] == seen[2] == {(r["问题"], r["答案"]) for r in rows}


def test_numbers_are_kept_as_they_are_written(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"q": "a", "gold": 123456789012345678901234567890}\n\n{"q": "b", "gold": 0.5}\n', "utf-8")
    task = task_of(kind="files", path=str(path), test_fraction=0, columns={"prompt": "q", "answer": "gold"})
    assert {p.id: p.answer for p in task.sample(2, 0)} == {
        "t.jsonl:1": "123456789012345678901234567890",
        "t.jsonl:3": "0.5",
    }


def test_prompts_may_be_conversations(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = jsonl(tmp_path / "t.jsonl", [{"messages": messages, "gold": "2"}])
    task = task_of(kind="files", path=path, test_fraction=0, columns={"prompt": "messages", "answer": "gold"})
    assert task.sample(1, 0)[0].messages == tuple(messages)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.jsonl", None, ["gone.jsonl", "no such file"]),
        ("t.txt", b"x", ["t.txt", ".jsonl"]),
        ("t.jsonl", b"", ["no row"]),
        ("t.jsonl", b'{"q": "a", "gold": "1"}\n{"q": "b"', ["line 2", "JSON"]),
        ("t.jsonl", b'{"q": "a", "gold": "1"}\n[1]\n', ["line 2", "object"]),
        ("t.jsonl", b'{"question": "a", "gold": "1"}\n', ["'q'", "columns.prompt", "question"]),
        ("t.jsonl", b'{"q": "a", "golden": "1"}\n', ["'gold'", "columns.answer", "golden"]),
        ("t.jsonl", b'{"q": "a", "gold": "1"}\n{"q": " ", "gold": "1"}\n', ["t.jsonl:2", "empty"]),
        ("t.jsonl", b'{"q": "a", "gold": "1"}\n{"q": "b", "gold": null}\n', ["t.jsonl:2", "ground truth"]),
        ("t.jsonl", b'{"q": "a", "gold": "1"}\n{"q": "b", "gold": NaN}\n', ["t.jsonl:2", "ground truth", "nan"]),
        ("t.jsonl", b'{"q": "a", "gold": ["1"]}\n', ["t.jsonl:1", "ground truth", "neither text nor a number"]),
        ("t.jsonl", b'{"q": "a", "gold": ' + b"9" * 5000 + b"}\n", ["t.jsonl", "line 1", "digits"]),
        ("t.jsonl", b"[" * 100_000, ["t.jsonl", "line 1", "recursion"]),
        ("t.jsonl", b'{"q": 7, "gold": "1"}\n', ["t.jsonl:1", "'q'"]),
        ("t.jsonl", b'{"q": [{"role": "user"}], "gold": "1"}\n', ["t.jsonl:1", "content"]),
        ("t.jsonl", b'{"q": "\xff"}\n', ["UTF-8"]),
        ("t.jsonl", b'{"q": [{"role": "user", "content": " "}], "gold": "1"}\n', ["t.jsonl:1", "user"]),
        ("t.jsonl", b'{"q": [{"role": "assistant", "content": "x"}], "gold": "1"}\n', ["t.jsonl:1", "user"]),
        ("t.csv", b"q,gold\na,1\nb\n", ["line 3", "fields"]),
        ("t.csv", b"q,q,gold\na,b,1\n", ["t.csv", "q twice"]),
        ("t.parquet", b"not parquet", ["t.parquet"]),
    ],
)
def test_faults_of_a_file_are_named(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        task_of(kind="files", path=str(tmp_path / name), test_fraction=0, columns={"prompt": "q", "answer": "gold"})
    for word in words:
        assert word in str(error.value), error.value


def test_unicode_line_separators_end_no_row(tmp_path):
    for suffix, text in (("csv", "q,gold\na\u2028b\x85c,1\n"), ("JSONL", '{"q": "a\u2028b\x85c", "gold": 1}\n')):
        (tmp_path / f"t.{suffix}").write_text(text, encoding="utf-8")
        path = str(tmp_path / f"t.{suffix}")
        task = task_of(kind="files", path=path, test_fraction=0, columns={"prompt": "q", "answer": "gold"})
        assert [(p.text, p.answer) for p in task.sample(1, 0)] == [("a\u2028b\x85c", "1")]


def test_two_system_messages_are_refused(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = jsonl(tmp_path / "t.jsonl", [{"q": messages, "s": "Be long.", "gold": 2}])
    with pytest.raises(ValueError, match=r"t\.jsonl:1: two system messages"):
        task_of(kind="files", path=path, test_fraction=0, columns={"prompt": "q", "answer": "gold", "system": "s"})


def test_gsm8k_answers_need_their_mark(tmp_path):
    for name in ("train", "test"):
        jsonl(tmp_path / f"{name}.jsonl", [{"question": "?", "answer": "It is 4."}])
    with pytest.raises(ValueError, match=r"train.jsonl:1.*####"):
        task_of(kind="gsm8k", path=str(tmp_path))


def test_traces_may_be_reasoning_alone(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"q": "1+1?", "gold": 2, "work": "1+1=2"}])
    columns = {"prompt": "q", "answer": "gold", "trace": "work"}
    (example,) = task_of(kind="files", path=path, test_fraction=0, columns=columns).traces(1, 0)
    assert example.messages[-1]["content"] == render_response("1+1=2", "2")
    with pytest.raises(ValueError, match=r"t\.jsonl:1.*columns\.answer"):
        task_of(kind="files", path=path, test_fraction=0, columns=columns | {"answer": None})


# -- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_scorers_that_run_answers_are_refused(tmp_path):
    """Every scorer of the library is given a program as an answer, in the forms that scorers look for."""
    import reasoning_gym

    mark = tmp_path / "mark"
    program = f"open({str(mark)!r},'w')"
    answers = [program, f"[{program}]", f"x+{program}", f"[[{program}]]", f"{{'a': {program}}}"]
    ran = set()
    slow = {"arc_agi", "rearc", "composite"}
    for name in sorted(set(reasoning_gym.factory.DATASETS) - slow):
        dataset = reasoning_gym.create_dataset(name, seed=5, size=1)
        for answer in answers:
            with contextlib.suppress(Exception):
                dataset.score_answer(answer=answer, entry=dataset[0])
            if mark.exists():
                ran.add(name)
                mark.unlink()
    assert ran == {name for name, reason in REFUSED.items() if "runs the answer" in reason}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_names_say_why(name):
    with pytest.raises(ValueError, match=f"{name} is refused: {REFUSED[name]}"):
        task_of(kind="reasoning_gym", name=name)


def test_a_scorer_that_stumbles_has_met_a_wrong_answer():
    task = task_of(kind="reasoning_gym", name="prime_factorization")
    (prompt,) = task.sample(1, 0)
    assert [task.verify(prompt, answer) for answer in (prompt.answer, "no number")] == [1.0, 0.0]


def test_scorers_see_the_tuples_that_were_made():
    task = task_of(kind="reasoning_gym", name="rearc")
    (prompt,) = task.sample(1, 0)
    again = task_of(kind="reasoning_gym", name="rearc")
    stored = Prompt(prompt.id, prompt.messages, prompt.answer, json.loads(json.dumps(prompt.data)))
    assert task.verify(prompt, prompt.answer) == again.verify(stored, prompt.answer) == 1.0


@pytest.mark.parametrize("name", ["chain_summ", "nothing_like_it"])
def test_unknown_reasoning_gym_names_are_refused(name):
    with pytest.raises(ValueError, match=name):
        task_of(kind="reasoning_gym", name=name)


def test_a_data_set_that_is_not_there_is_said_when_it_is_drawn_from(tmp_path):
    task = task_of(kind="hub", name=str(tmp_path / "gone"))  # checking a recipe downloads nothing
    with pytest.raises(ValueError, match="gone"):
        task.sample(1, 0)


def test_trace_columns_become_examples_of_training_rows_only(tmp_path):
    rows = [{"q": f"{i}?", "gold": str(i), "work": render_response("think", str(i))} for i in range(50)]
    columns = {"prompt": "q", "answer": "gold", "trace": "work"}
    task = task_of(kind="files", path=jsonl(tmp_path / "t.jsonl", rows), test_fraction=0.3, columns=columns)
    test = {p.text for p in task.sample(50, 0, "test")}
    examples = task.traces(100, 0)
    assert len(examples) == 50 - len(test)
    for example in examples:
        question, response = (m["content"] for m in example.messages)
        assert question not in test
        assert split_response(response).answer == re.match(r"\d+", question)[0]
