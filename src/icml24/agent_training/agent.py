"""Agents: they answer a task with the functions they are given."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from icml24.agent_training.chat import ChatModel, ToolCall, Usage, parse_tool_calls
from icml24.agent_training.execution import ExecutionResult, Executor
from icml24.agent_training.functions import Function, FunctionSet, InvalidFunctionError
from icml24.agent_training.slots import content_words, extract_slots
from icml24.agent_training.tasks import Task, render_answer

__all__ = [
    "Agent",
    "Call",
    "ReActAgent",
    "RetrievalAgent",
    "SchemaAgent",
    "ToolCallingAgent",
    "Trajectory",
    "evaluate_expression",
    "match_score",
]

PYTHON_TOOL = "python"


@dataclass(frozen=True)
class Call:
    """One call of a function within a trajectory."""

    function: str
    arguments: dict[str, Any]
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Trajectory:
    """How an agent went about one task: the unit of the history ``H``.

    Parameters
    ----------
    task : Task
    messages : tuple of dict
        The conversation in the chat format.
    calls : tuple of Call
    answer : str or None
        None if the agent gave none.
    correct : bool
    function : str
        The function whose result became the answer, "" if none did.
    usage : Usage
    """

    task: Task
    messages: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]
    answer: str | None
    correct: bool
    function: str = ""
    usage: Usage = field(default_factory=Usage)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store; the task goes in by its key."""
        return {
            "task": self.task.key,
            "messages": list(self.messages),
            "calls": [asdict(call) for call in self.calls],
            "answer": self.answer,
            "correct": self.correct,
            "function": self.function,
            "usage": asdict(self.usage),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], tasks: Mapping[str, Task]) -> Trajectory:
        """Inverse of :meth:`state_dict`, given the tasks by key."""
        return cls(
            tasks[state["task"]],
            tuple(state["messages"]),
            tuple(Call(**call) for call in state["calls"]),
            state["answer"],
            state["correct"],
            state["function"],
            Usage(**state["usage"]),
        )


class Agent(Protocol):
    """Anything that answers tasks with a function set."""

    def run(
        self, task: Task, functions: FunctionSet, *, rng: np.random.Generator | None = None
    ) -> Trajectory:
        """Work on one task.

        Parameters
        ----------
        task : Task
        functions : FunctionSet
            What it may call; its own Python tool comes on top.
        rng : numpy.random.Generator, optional
            Source of all its randomness.
        """
        ...


# --- the initial tool: plain arithmetic ---------------------------------------------------------

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_EXPRESSION = re.compile(r"[\d(][\d\s.+\-*/()]*[\d)]|-\s*[\d(][\d\s.+\-*/()]*[\d)]")
_INFIX = re.compile(r"[\d)]\s*[-+*/]\s*-?\s*[\d(]")


def _evaluate(node: ast.AST) -> int | float:
    if isinstance(node, ast.Expression):
        return _evaluate(node.body)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        whole = isinstance(left, int) and isinstance(right, int)
        if isinstance(node.op, ast.Div) and whole and right and left % right == 0:
            return left // right  # keep whole numbers exact
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not plain arithmetic")


def evaluate_expression(text: str) -> int | float:
    """Evaluate plain arithmetic: numbers, ``+ - * /`` and parentheses, nothing else.

    Raises
    ------
    ValueError
        If it is anything else.

    Examples
    --------
    >>> evaluate_expression("(2 + 3) * -4")
    -20
    """
    if len(text) > 500:
        raise ValueError("The expression is longer than 500 characters.")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval"))
    except (SyntaxError, ZeroDivisionError, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} cannot be evaluated: {error}.") from None


@lru_cache(maxsize=65536)
def _builtin_answer(question: str) -> tuple[str, int | float] | None:
    """Find the longest explicit expression of a question and its value."""
    for match in sorted(_EXPRESSION.findall(question), key=len, reverse=True):
        if _INFIX.search(match):
            try:
                return match.strip(), evaluate_expression(match)
            except ValueError:
                continue
    return None


# --- the LLM-free agent -------------------------------------------------------------------------


@lru_cache(maxsize=262144)
def match_score(description: str, question: str) -> float:
    """Share of the words of a description that occur in a question, long words weighing more.

    Examples
    --------
    >>> match_score("greatest common divisor", "Find the Greatest Common Divisor of 4 and 6")
    1.0
    """
    wanted = content_words(description)
    if not wanted:
        return 0.0
    found = sum(len(word) for word in wanted & content_words(question))
    return found / sum(map(len, wanted))


class RetrievalAgent:
    """An agent without a language model: it matches words and binds arguments by name.

    It scores every function by the words that its description shares with the question, adds
    Gaussian noise (the stand-in for a model's sampling), and calls the best ones whose arguments it
    can bind (:func:`extract_slots`) until one returns a value. At last it evaluates an explicit
    arithmetic expression, its own initial tool.

    Parameters
    ----------
    executor : Executor
    threshold : float, default 0.6
        Lowest score at which a function is called.
    noise : float, default 0
        Standard deviation of the noise on the scores.
    max_calls : int, default 3
        Calls for one task.

    Examples
    --------
    >>> from icml24.agent_training import InProcessExecutor
    >>> agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))
    >>> agent.run(Task("Calculate 2 + 3 * 4.", "14"), FunctionSet()).answer
    '14'
    """

    def __init__(
        self, executor: Executor, threshold: float = 0.6, noise: float = 0.0, max_calls: int = 3
    ) -> None:
        if noise < 0 or max_calls < 1:
            raise ValueError("noise must be at least 0 and max_calls at least 1.")
        self.executor, self.threshold = executor, threshold
        self.noise, self.max_calls = noise, max_calls

    def run(
        self, task: Task, functions: FunctionSet, *, rng: np.random.Generator | None = None
    ) -> Trajectory:
        """Work on one task; see :class:`Agent`."""
        slots = extract_slots(task)
        scores = [(match_score(f.description, task.question), f) for f in functions.values()]
        if self.noise and scores:
            rng = np.random.default_rng() if rng is None else rng
            noise = rng.normal(0.0, self.noise, len(scores))
            scores = [(s + e, f) for (s, f), e in zip(scores, noise, strict=True)]
        scores.sort(key=lambda pair: -pair[0])
        calls: list[Call] = []
        answer, used = None, ""
        for score, function in scores:
            if score < self.threshold or len(calls) >= self.max_calls:
                break
            arguments = _bind(function, slots)
            if arguments is None:
                continue
            result = self.executor.run(function, arguments)
            calls.append(Call(function.name, arguments, result.value, result.error))
            if result.ok and result.value is not None:
                answer, used = render_answer(result.value), function.name
                break
        if answer is None and (found := _builtin_answer(task.question)) is not None:
            calls.append(Call(PYTHON_TOOL, {"expression": found[0]}, found[1]))
            answer, used = render_answer(found[1]), PYTHON_TOOL
        messages = _conversation(task, calls, answer)
        return Trajectory(task, messages, tuple(calls), answer, task.score(answer), used)


def _bind(function: Function, slots: Mapping[str, Any]) -> dict[str, Any] | None:
    properties = function.parameters.get("properties", {})
    required = function.parameters.get("required", list(properties))
    if any(name not in slots for name in required):
        return None
    return {name: slots[name] for name in properties if name in slots}


def _conversation(
    task: Task, calls: Sequence[Call], answer: str | None
) -> tuple[dict[str, Any], ...]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    for call in calls:
        text = f"{call.function}({json.dumps(call.arguments)})"
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "content": call.error or render_answer(call.value)})
    messages.append({"role": "assistant", "content": answer or "I have no answer."})
    return tuple(messages)


# --- agents on a language model -----------------------------------------------------------------

_SYSTEM = (
    "You solve tasks with functions. Prefer a function that fits over computing by yourself. "
    "When you know the answer, write it on the last line as 'FINAL ANSWER: ...': a number, a few "
    "words, or a comma-separated list, without units."
)
_BOXED = re.compile(r"\\boxed\{([^{}]+)\}")
_FINAL = re.compile(r"final answer\s*:\s*(.+)", re.IGNORECASE)
_PYTHON_DEFINITION = {
    "type": "function",
    "function": {
        "name": PYTHON_TOOL,
        "description": "Run Python code and return the value of its last expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


def _python_function(code: str) -> Function:
    """Wrap free code into a function that returns the value of its last expression."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidFunctionError(f"The code is not valid Python: {error}.") from None
    if body and isinstance(body[-1], ast.Expr):
        body[-1] = ast.Return(body[-1].value)
    frame = ast.parse(f"def {PYTHON_TOOL}():\n    pass")
    frame.body[0].body = body or frame.body[0].body  # type: ignore[attr-defined]
    source = ast.unparse(ast.fix_missing_locations(frame))
    return Function(PYTHON_TOOL, "Free code.", {"type": "object", "properties": {}}, source)


def _final_answer(text: str) -> str | None:
    r"""Read the answer after FINAL ANSWER, or else the last plain ``\boxed{}``."""
    found = _FINAL.findall(text) or _BOXED.findall(text)
    return re.sub(r"[\s.*`$]+$", "", found[-1]).lstrip(" *`$") or None if found else None


def _perform(
    call: ToolCall, functions: FunctionSet, executor: Executor
) -> tuple[Call, ExecutionResult]:
    arguments = call.arguments or {}
    try:
        if call.arguments is None:
            raise InvalidFunctionError(f"The arguments are not a JSON object: {call.raw[:200]}")
        if call.name in functions:
            result = executor.run(functions[call.name], arguments)
        elif call.name == PYTHON_TOOL:
            result = executor.run(_python_function(str(arguments.get("code", ""))), {})
            if result.ok and result.value is None and result.output:
                result = ExecutionResult(True, result.output.strip())
        else:
            known = ", ".join([*functions, PYTHON_TOOL])
            raise InvalidFunctionError(f"There is no function {call.name!r}; there are: {known}.")
    except InvalidFunctionError as error:
        result = ExecutionResult(False, error=str(error))
    return Call(call.name, arguments, result.value, result.error), result


class ToolCallingAgent:
    """A language model that calls functions through its tool interface.

    Tool calls that a small model prints as JSON text are understood too.

    Parameters
    ----------
    chat : ChatModel
    executor : Executor
        :class:`SandboxExecutor` for anything that a model wrote.
    max_turns : int, default 8
        Answers of the model for one task.
    temperature : float, default 0
    max_tokens : int, default 512
    python_tool : bool, default True
        Whether the agent may run free Python code, its initial tool in the paper.
    """

    def __init__(
        self,
        chat: ChatModel,
        executor: Executor,
        max_turns: int = 8,
        temperature: float = 0.0,
        max_tokens: int = 512,
        python_tool: bool = True,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")
        self.chat, self.executor, self.max_turns = chat, executor, max_turns
        self.temperature, self.max_tokens, self.python_tool = temperature, max_tokens, python_tool

    def run(
        self, task: Task, functions: FunctionSet, *, rng: np.random.Generator | None = None
    ) -> Trajectory:
        """Work on one task; see :class:`Agent`."""
        tools = functions.tools() + ([_PYTHON_DEFINITION] if self.python_tool else [])
        seed = int(rng.integers(2**31)) if rng is not None and self.temperature > 0 else None
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": task.prompt},
        ]
        calls: list[Call] = []
        usage, answer = Usage(), None
        for _ in range(self.max_turns):
            result = self.chat.complete(
                messages,
                tools=tools or None,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=seed,
            )
            usage += result.usage
            wanted = result.tool_calls or parse_tool_calls(result.content)
            answer = _final_answer(result.content)
            messages.append(_assistant_message(result.content, result.tool_calls))
            if answer is not None or not wanted:
                answer = answer or result.content.strip() or None
                break
            for call in wanted:
                made, outcome = _perform(call, functions, self.executor)
                calls.append(made)
                content = render_answer(outcome.value) if outcome.ok else f"Error: {outcome.error}"
                if result.tool_calls:
                    reply = {"role": "tool", "tool_call_id": call.id, "content": content}
                else:
                    reply = {"role": "user", "content": f"{call.name} returned: {content}"}
                messages.append(reply)
        return _finish(task, messages, calls, answer, usage)


def _assistant_message(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.raw},
            }
            for call in calls
        ]
    return message


def _finish(
    task: Task,
    messages: Sequence[dict[str, Any]],
    calls: Sequence[Call],
    answer: str | None,
    usage: Usage,
) -> Trajectory:
    used = next((c.function for c in reversed(calls) if not c.error), "")
    correct = task.score(answer)
    return Trajectory(task, tuple(messages), tuple(calls), answer, correct, used, usage)


class SchemaAgent:
    """A small language model that makes one call, forced into shape by a JSON Schema.

    Models of a few hundred million parameters rarely write a valid call of their own accord; here
    the backend's grammar leaves them no other choice, and the value of the call is the answer.
    Without functions the model thinks aloud and ends with a final answer.

    Parameters
    ----------
    chat : ChatModel
        A backend that enforces ``response_schema``.
    executor : Executor
    temperature : float, default 0
    max_tokens : int, default 160
        For a call.
    think_tokens : int, default 400
        For thinking aloud.
    """

    def __init__(
        self,
        chat: ChatModel,
        executor: Executor,
        temperature: float = 0.0,
        max_tokens: int = 160,
        think_tokens: int = 400,
    ) -> None:
        self.chat, self.executor = chat, executor
        self.temperature = temperature
        self.max_tokens, self.think_tokens = max_tokens, think_tokens

    def run(
        self, task: Task, functions: FunctionSet, *, rng: np.random.Generator | None = None
    ) -> Trajectory:
        """Work on one task; see :class:`Agent`."""
        seed = int(rng.integers(2**31)) if rng is not None and self.temperature > 0 else None
        system, schema = _THINK, None
        if functions:
            system = _CHOOSE + "\n\n".join(_signature(f) for f in functions.values())
            schema = {"anyOf": [_call_schema(f) for f in functions.values()]}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.prompt},
        ]
        result = self.chat.complete(
            messages,
            response_schema=schema,
            temperature=self.temperature,
            max_tokens=self.max_tokens if functions else self.think_tokens,
            seed=seed,
        )
        messages.append({"role": "assistant", "content": result.content})
        calls: list[Call] = []
        answer = None if functions else _final_answer(result.content)
        for wanted in parse_tool_calls(result.content)[:1] if functions else ():
            made, outcome = _perform(wanted, functions, self.executor)
            calls.append(made)
            answer = render_answer(outcome.value) if outcome.ok else None
            content = answer if outcome.ok else f"Error: {outcome.error}"
            messages.append({"role": "tool", "content": content})
        return _finish(task, messages, calls, answer, result.usage)


_THINK = (
    "Solve the task. Think step by step, briefly, then write the last line as "
    "'FINAL ANSWER: ...' with the answer alone."
)
_CHOOSE = (
    "Choose the function that answers the question and copy its arguments from the question. "
    'Answer with JSON alone: {"name": ..., "arguments": {...}}.\n\nFunctions:\n\n'
)


def _signature(function: Function) -> str:
    """Show a function as its head and its documentation."""
    node = next(n for n in ast.parse(function.code).body if getattr(n, "name", "") == function.name)
    text = ast.get_docstring(node) or function.description  # type: ignore[arg-type]
    return f"def {function.name}({', '.join(function.parameters['properties'])}):\n{text}"


def _call_schema(function: Function) -> dict[str, Any]:
    arguments = {**function.parameters, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ReActAgent:
    """A language model in the Thought / Action / Action Input / Observation loop of ReAct.

    Parameters
    ----------
    chat, executor, max_turns, temperature, max_tokens
        As for :class:`ToolCallingAgent`; no tool interface is needed.
    """

    def __init__(
        self,
        chat: ChatModel,
        executor: Executor,
        max_turns: int = 8,
        temperature: float = 0.0,
        max_tokens: int = 512,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}.")
        self.chat, self.executor, self.max_turns = chat, executor, max_turns
        self.temperature, self.max_tokens = temperature, max_tokens

    def run(
        self, task: Task, functions: FunctionSet, *, rng: np.random.Generator | None = None
    ) -> Trajectory:
        """Work on one task; see :class:`Agent`."""
        listing = "\n".join(
            f"- {tool['function']['name']}: {tool['function']['description']} "
            f"Input: {json.dumps(tool['function']['parameters'])}"
            for tool in [*functions.tools(), _PYTHON_DEFINITION]
        )
        system = (
            f"{_SYSTEM}\n\nFunctions:\n{listing}\n\nWork in rounds of\nThought: ...\n"
            "Action: name of a function\nAction Input: a JSON object\n"
            "and wait for the Observation after each."
        )
        seed = int(rng.integers(2**31)) if rng is not None and self.temperature > 0 else None
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.prompt},
        ]
        calls: list[Call] = []
        usage, answer = Usage(), None
        for _ in range(self.max_turns):
            result = self.chat.complete(
                messages, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
            )
            usage += result.usage
            # whatever a model invents after the word Observation is not an observation
            content = re.split(r"\n\s*Observation\s*:", result.content)[0]
            messages.append({"role": "assistant", "content": content})
            action = re.search(r"Action\s*:\s*([^\n]+)", content)
            answer = _final_answer(content)
            if answer is not None:
                break
            if action is None:
                observation = "Write an Action with its Action Input, or a FINAL ANSWER."
            else:
                call = _react_call(action.group(1), content[action.end() :])
                made, outcome = _perform(call, functions, self.executor)
                calls.append(made)
                observation = (
                    render_answer(outcome.value) if outcome.ok else f"Error: {outcome.error}"
                )
            messages.append({"role": "user", "content": f"Observation: {observation}"})
        return _finish(task, messages, calls, answer, usage)


def _react_call(name: str, rest: str) -> ToolCall:
    start = rest.find("{")
    try:
        arguments = json.JSONDecoder().raw_decode(rest, start)[0] if start >= 0 else None
    except (json.JSONDecodeError, RecursionError):
        arguments = None
    valid = arguments if isinstance(arguments, dict) else None
    return ToolCall(name.strip().strip("`*"), valid, rest.strip()[:200])
