"""Agents: binding, the initial tool, the two loops on a language model."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml24.agent_training import (
    ChatResult,
    FunctionSet,
    ReActAgent,
    RetrievalAgent,
    SandboxExecutor,
    SchemaAgent,
    ScriptedChat,
    Task,
    TaskSet,
    ToolCall,
    ToolCallingAgent,
    Usage,
    exact_match,
)
from icml24.agent_training.agent import (
    Trajectory,
    _final_answer,
    evaluate_expression,
    match_score,
)
from icml24.agent_training.slots import extract_slots
from icml24.agent_training.tasks import close_match, render_answer

from .conftest import make

GCD = make(
    "gcd",
    "def gcd(numbers):\n    import math\n    return math.gcd(*numbers)",
    "Greatest common divisor",
    numbers="array",
)
BAD = make(
    "bad", "def bad(numbers):\n    return 1 / 0", "Greatest common divisor of", numbers="array"
)
TASK = Task("Find the greatest common divisor of 12 and 18", "6")


def call(name, **arguments):
    return ChatResult("", (ToolCall(name, arguments, json.dumps(arguments), "c0"),), Usage(1, 5, 5))


def test_slots_of_questions():
    slots = extract_slots(Task('Convert the base-8 number 17 ("ab" x 1.5) to: -3, 4.0', "?"))
    assert slots["numbers"] == [8, 17, 1.5, -3, 4.0] and slots["tail_numbers"] == [-3, 4.0]
    assert (
        slots["quoted"] == ["ab"] and slots["items"] == ["-3", "4.0"] and slots["tail"] == "-3, 4.0"
    )
    assert extract_slots(Task("3-4 and 688.8^-6. End 5.", "?"))["numbers"] == [3, 4, 688.8, -6, 5]
    assert extract_slots(Task("words only", "?")) == {}


def test_slots_of_tables():
    table = {"columns": ["city", "area", "armed forces"], "rows": [["Ulm", 1, 5], ["Bonn", 2, 6]]}
    slots = extract_slots(Task("Armed forces of Bonn minus Ulm?", "1", table))
    assert slots["labels"] == ["Ulm", "Bonn"]
    assert slots["column"] == [5, 6] and slots["cells"] == [6, 5]


def test_answers_are_compared_as_text_then_as_numbers():
    assert exact_match("a  b", " a b") and exact_match("1e3", "1000") and not exact_match("a", "b")
    # integers beyond the precision of floats stay distinct
    assert not exact_match(str(10**17), str(10**17 + 1))
    assert close_match(0.01)("1.005", "1") and not close_match(0.01)("1.02", "1")
    assert not close_match(0.01)("nan", "1") and not exact_match("inf", "1")
    assert exact_match("1" * 400, "1" * 400) and not close_match(0.01)("1" * 400, "1.5")


@given(st.integers() | st.text() | st.floats(allow_nan=False) | st.lists(st.integers()))
def test_an_answer_matches_itself(value):
    assert exact_match(render_answer(value), render_answer(value))


@given(st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 99))
def test_the_initial_tool_computes_exactly(a, b, c):
    assert evaluate_expression(f"({a} + {b}) * {c} - -{c}") == (a + b) * c + c
    assert evaluate_expression(f"{a * c} / {c}") == a


@pytest.mark.parametrize(
    "text", ["__import__('os')", "2 ** 999", "x", "1 if 1 else 2", "1/0", "(" * 99]
)
def test_the_initial_tool_does_arithmetic_only(text):
    with pytest.raises(ValueError, match=r"\w"):
        evaluate_expression(text)


def test_retrieval_agent_binds_calls_and_falls_back(trusted):
    agent = RetrievalAgent(trusted)
    assert agent.run(TASK, FunctionSet()).answer is None
    solved = agent.run(TASK, FunctionSet([GCD]))
    assert solved.correct and solved.function == "gcd" and len(solved.calls) == 1
    # the better match fails, the next one is called
    both = agent.run(TASK, FunctionSet([BAD, GCD]))
    assert both.correct and [c.function for c in both.calls] == ["bad", "gcd"]
    assert "ZeroDivisionError" in both.calls[0].error
    # an explicit expression is left to the initial tool
    task = Task("Calculate -1515 / 5 + -( -2842 * -5436 ) * -6892.", "106475279601")
    assert agent.run(task, FunctionSet([GCD])).function == "python"
    # arguments that cannot be bound: the function is not called
    other = make("gcd", GCD.code.replace("numbers", "missing"), GCD.description, missing="array")
    assert agent.run(TASK, FunctionSet([other])).calls == ()
    assert match_score("", "question") == 0


def test_noise_uses_the_stream_it_is_given(trusted):
    agent = RetrievalAgent(trusted, noise=1.0)
    twins = FunctionSet([GCD, BAD])
    answers = [
        [c.function for c in agent.run(TASK, twins, rng=np.random.default_rng(s)).calls]
        for s in [0, 0, *range(1, 20)]
    ]
    assert answers[0] == answers[1] and len(set(map(tuple, answers))) > 1


@pytest.fixture(scope="module")
def sandbox():
    with SandboxExecutor(timeout=2) as executor:
        yield executor


def test_tool_calling_agent_calls_and_answers(sandbox):
    chat = ScriptedChat([call("gcd", numbers=[12, 18]), "So it is.\nFINAL ANSWER: **6**"])
    result = ToolCallingAgent(chat, sandbox).run(TASK, FunctionSet([GCD]))
    assert result.correct and result.function == "gcd" and result.usage.calls == 2
    assert [t["function"]["name"] for t in chat.requests[0]["tools"]] == ["gcd", "python"]
    assert chat.requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "c0",
        "content": "6",
    }


def test_tool_calling_agent_survives_a_confused_model(sandbox):
    chat = ScriptedChat(
        [
            call("nonsense"),
            call("gcd", numbers="twelve"),
            ChatResult("", (ToolCall("gcd", None, "{oops", "c1"),)),
            call("python", code="x = 2\nimport os"),
            call("python", code="x = 5\nx + 1"),
            '```json {"name": "gcd", "arguments": {"numbers": [12, 18]}} ```',
            "FINAL ANSWER: 6",
        ]
    )
    result = ToolCallingAgent(chat, sandbox).run(TASK, FunctionSet([GCD]))
    errors = [bool(c.error) for c in result.calls]
    assert errors == [True, True, True, True, False, False] and result.correct
    assert "there are: gcd, python" in result.calls[0].error


def test_agents_stop_after_max_turns(sandbox):
    chat = ScriptedChat(lambda messages: call("python", code="print('again')"))
    result = ToolCallingAgent(chat, sandbox, max_turns=3).run(TASK, FunctionSet())
    assert len(chat.requests) == 3 and result.answer is None and not result.correct
    assert result.calls[0].value == "again"
    with pytest.raises(ValueError, match="max_turns"):
        ReActAgent(chat, sandbox, max_turns=0)


def test_react_agent_ignores_invented_observations(sandbox):
    chat = ScriptedChat(
        [
            'Thought: use it.\nAction: gcd\nAction Input: {"numbers": [12, 18]}\nObservation: 99\n'
            "FINAL ANSWER: 99",
            "I wonder.",
            "Action: gcd\nAction Input: none",
            "Thought: done.\nFINAL ANSWER: 6",
        ]
    )
    result = ReActAgent(chat, sandbox).run(TASK, FunctionSet([GCD]))
    assert result.correct and result.calls[0].value == 6 and result.calls[1].error
    last = chat.requests[-1]["messages"]
    assert "Observation: 6" in last[3]["content"] and "FINAL ANSWER" in last[5]["content"]
    assert "99" not in json.dumps(last)


def test_trajectories_round_trip(trusted):
    trajectory = RetrievalAgent(trusted).run(TASK, FunctionSet([BAD, GCD]))
    state = json.loads(json.dumps(trajectory.state_dict()))
    assert Trajectory.from_state_dict(state, {TASK.key: TASK}).state_dict() == state


def test_tasks_are_checked():
    with pytest.raises(TypeError, match="pairs"):
        TaskSet(["question"])
    with pytest.raises(TypeError, match="string"):
        Task("q", 3)
    with pytest.raises(ValueError, match="question"):
        Task(" ", "3")
    tasks = TaskSet((f"q{i}", str(i)) for i in range(10))
    train, test = tasks.split(4, 6, seed=1)
    assert {t.key for t in train} | {t.key for t in test} == {t.key for t in tasks}
    assert (
        tasks.split(4, 6, seed=1)[0].digest == train.digest != tasks.split(4, 6, seed=2)[0].digest
    )
    with pytest.raises(ValueError, match="at most the 10"):
        tasks.split(8, 3)
    assert (
        isinstance(tasks[:2], TaskSet)
        and "a | b" in Task("q", "1", {"columns": ["a", "b"], "rows": [["x", 1]]}).prompt
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\nFINAL ANSWER: **6**.", "6"),
        ("Final answer : 6.", "6"),
        ("so it is $\\boxed{6}$", "6"),
        ("\\boxed{1}, no: FINAL ANSWER: 2", "2"),
        ("I think it is 6", None),
    ],
)
def test_final_answers_are_read_leniently(text, answer):
    assert _final_answer(text) == answer


def test_schema_agent_calls_once_within_the_schema(sandbox):
    chat = ScriptedChat(['{"name": "gcd", "arguments": {"numbers": [12, 18]}}', "FINAL ANSWER: 6"])
    agent = SchemaAgent(chat, sandbox)
    with_function = agent.run(TASK, FunctionSet([GCD]))
    assert with_function.correct and with_function.function == "gcd"
    assert "def gcd(numbers)" in chat.requests[0]["messages"][0]["content"]
    alone = agent.run(TASK, FunctionSet())
    assert alone.correct and alone.calls == () and alone.function == ""
    # an answer that is no call, or a call that fails, is no answer
    for text in ("6", '{"name": "bad", "arguments": {"numbers": [1]}}'):
        failed = SchemaAgent(ScriptedChat([text]), sandbox).run(TASK, FunctionSet([GCD, BAD]))
        assert failed.answer is None and not failed.correct
