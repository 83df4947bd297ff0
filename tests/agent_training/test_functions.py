"""Function sets: immutability, rules, export."""

import doctest
import importlib.util
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml24.agent_training import (
    AddFunction,
    Function,
    FunctionSet,
    InvalidFunctionError,
    RemoveFunction,
    ReviseFunction,
    Terminate,
)
from icml24.agent_training.actions import action_from_state_dict

from .conftest import make

INC = make("inc", "def inc(x):\n    return x + 1", x="integer")
DEC = make("dec", "def dec(x):\n    return x - 1", x="integer")


def triple(x: int, scale: float = 3.0) -> float:
    """Multiply by three.

    More text.
    """
    return scale * x


def test_changes_return_new_sets_and_leave_the_old_one_alone():
    empty = FunctionSet()
    one = empty.add(INC)
    two = one.add(DEC)
    assert (list(empty), list(one), list(two)) == ([], ["inc"], ["inc", "dec"])
    assert two.remove("dec") == one and two.remove("dec").digest == one.digest
    with pytest.raises(TypeError):
        one["inc"] = DEC
    with pytest.raises(AttributeError):
        INC.name = "other"


def test_revise_keeps_the_place_and_add_needs_a_new_name():
    both = FunctionSet([INC, DEC])
    better = make("inc", "def inc(x):\n    return 1 + x", x="integer")
    assert list(both.revise(better)) == ["inc", "dec"]
    assert both.revise(better)["inc"] == better and both["inc"] == INC
    with pytest.raises(InvalidFunctionError, match="exists already"):
        both.add(INC)
    with pytest.raises(InvalidFunctionError, match="there is no 'sq'"):
        both.revise(make("sq", "def sq(x):\n    return x * x", x="integer"))
    with pytest.raises(InvalidFunctionError, match="there is no 'sq'"):
        both.remove("sq")
    with pytest.raises(InvalidFunctionError, match="two functions"):
        FunctionSet([INC, INC])
    with pytest.raises(TypeError, match="from_callable"):
        FunctionSet([len])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (make("not good", "def f():\n    return 1"), "identifier"),
        (make("class", "x = 1"), "identifier"),
        (make("f", "def g():\n    return 1"), "defines g"),
        (make("f", "x = 1"), "defines none"),
        (make("f", "def f(:"), "not valid Python"),
        (make("f", "def f(x):\n    return x", x="float"), "'float'"),
        (make("f", "def f(x):\n    return x", y="integer"), "no arguments of 'f'"),
        (make("f", "def f():\n    return 1\n" + "#" * 100_000), "at most"),
        (make("f", "def f():\n    return 1", description=" "), "description"),
        (Function("f", "d", {"properties": {}, "required": ["x"]}, "def f(): 1"), "required"),
        (Function("f", "d", {"properties": {"x": "integer"}}, "def f(x): 1"), "integer"),
    ],
)
def test_invalid_functions_are_refused_with_the_reason(function, message):
    with pytest.raises(InvalidFunctionError, match=message):
        FunctionSet().add(function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "lacks"),
        ({"x": "1"}, "must be a integer"),
        ({"x": True}, "must be a integer"),
        ({"x": 1, "y": 2}, "no arguments"),
        ([1], "JSON object"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, message):
    assert INC.check_arguments({"x": 4}) == {"x": 4}
    with pytest.raises(InvalidFunctionError, match=message):
        INC.check_arguments(arguments)


def test_from_callable_reads_source_docstring_and_types():
    f = Function.from_callable(triple)
    assert f.description == "Multiply by three."
    assert f.parameters["properties"] == {"x": {"type": "integer"}, "scale": {"type": "number"}}
    assert f.parameters["required"] == ["x"]
    scope = {}
    exec(f.code, scope)
    assert scope["triple"](2) == 6
    with pytest.raises(InvalidFunctionError, match="lambda"):
        Function.from_callable(lambda x: x)
    with pytest.raises(InvalidFunctionError, match="source"):
        Function.from_callable(len)


def test_complexity_counts_decisions():
    code = (
        "def f(x):\n    if x and x > 1:\n        return [i for i in x if i]\n"
        "    for _ in x:\n        pass\n    return 1 if x else 2"
    )
    # if, and, comprehension + its if, for, conditional expression: 6 decisions
    assert make("f", code, x="array").complexity == 7


def test_tools_are_complete_for_a_chat_api():
    tool = FunctionSet([INC]).tools()[0]
    assert tool["type"] == "function"
    assert tool["function"]["parameters"]["required"] == ["x"]


def test_state_json_and_actions_round_trip(tmp_path):
    both = FunctionSet([INC, DEC])
    assert FunctionSet.from_state_dict(json.loads(json.dumps(both.state_dict()))) == both
    both.save(tmp_path / "f.json")
    assert FunctionSet.load(tmp_path / "f.json") == both
    for action in (AddFunction(INC), ReviseFunction(INC), RemoveFunction("x"), Terminate()):
        assert action_from_state_dict(json.loads(json.dumps(action.state_dict()))) == action
    assert Terminate().apply(both) is both
    with pytest.raises(InvalidFunctionError):
        action_from_state_dict({"kind": "explode"})


def _import(path):
    spec = importlib.util.spec_from_file_location("learnt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_saved_module_imports_runs_and_passes_its_doctests(tmp_path):
    helper = "def helper(x):\n    return x + {}\n\ndef {}(x):\n    {}\n    return helper(x)"
    a = make(
        "plus_one", helper.format(1, "plus_one", '"""Add.\n\n    >>> plus_one(1)\n    2\n    """')
    )
    b = make(
        "plus_ten", helper.format(10, "plus_ten", '"""Add.\n\n    >>> plus_ten(1)\n    11\n    """')
    )
    path = tmp_path / "tools.py"
    FunctionSet([INC, a, b]).save_module(path)
    module = _import(path)
    # two helpers of the same name must not get in each other's way
    assert (module.inc(1), module.plus_one(1), module.plus_ten(1)) == (2, 2, 11)
    assert module.__all__ == ["inc", "plus_one", "plus_ten"]
    result = doctest.testmod(module)
    assert result.attempted == 2 and result.failed == 0


def test_diff_shows_what_changed():
    old, new = FunctionSet([INC]), FunctionSet([INC, DEC])
    added = [line for line in old.diff(new).splitlines() if line.startswith("+")]
    assert any("def dec" in line for line in added)
    assert old.diff(old) == ""


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "rev", "rem"]))))
def test_any_sequence_of_actions_behaves_like_a_dictionary(steps):
    functions, model = FunctionSet(), {}
    for k, (name, kind) in enumerate(steps):
        f = make(name, f"def {name}():\n    return {k}")
        before = dict(functions)
        try:
            if kind == "add":
                functions = functions.apply(AddFunction(f))
                assert name not in model
            elif kind == "rev":
                functions = functions.apply(ReviseFunction(f))
                assert name in model
            else:
                functions = functions.apply(RemoveFunction(name))
            if kind == "rem":
                del model[name]
            else:
                model[name] = f
        except InvalidFunctionError:
            assert (name in model) == (kind == "add")
        assert dict(functions) == model
        assert all(before[n].name == n for n in before)
