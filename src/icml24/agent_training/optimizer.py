"""The optimizer of Algorithm 1: from a history of trajectories to changes of the functions."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from icml24.agent_training.actions import (
    Action,
    AddFunction,
    RemoveFunction,
    ReviseFunction,
    Terminate,
)
from icml24.agent_training.agent import PYTHON_TOOL, Trajectory
from icml24.agent_training.chat import ChatModel, ToolCall, Usage, parse_tool_calls
from icml24.agent_training.functions import Function, FunctionSet, InvalidFunctionError
from icml24.agent_training.tasks import Task

__all__ = ["ACTION_TOOLS", "AgentOptimizer", "LLMProposer", "Proposer", "StepResult"]

Failures = Sequence[tuple[FunctionSet, float]]


class Proposer(Protocol):
    """Anything that proposes the next action: a language model, a search, a person."""

    usage: Usage

    def propose(
        self,
        best: FunctionSet,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        failures: Failures,
        n_taken: int,
        rng: np.random.Generator,
        feedback: str | None = None,
    ) -> Action:
        """Return one action.

        Parameters
        ----------
        best : FunctionSet
            List A of the paper: the set that produced the history.
        incumbent : FunctionSet
            List B: the set after the ``n_taken`` actions of this step.
        history : sequence of Trajectory
        failures : sequence of (FunctionSet, float)
            Rejected sets and their success rates, worst first.
        n_taken : int
        rng : numpy.random.Generator
        feedback : str, optional
            What was wrong with the previous try at this action.

        Raises
        ------
        InvalidFunctionError
            If the answer cannot be read; the optimizer then retries with the message.
        """
        ...


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Parameters
    ----------
    functions : FunctionSet
        The new set, not yet evaluated.
    actions : tuple of Action
        The actions that were applied.
    n_calls : int
        Calls of the proposer.
    usage : Usage
        What the proposer spent.
    invalid : int
        Answers that could not be used.
    dropped : int
        Trajectories left out of the history to keep within ``history_tokens``.
    """

    functions: FunctionSet
    actions: tuple[Action, ...]
    n_calls: int
    usage: Usage = field(default_factory=Usage)
    invalid: int = 0
    dropped: int = 0


class AgentOptimizer:
    """Progressive function update (Algorithm 1), with the manners of ``torch.optim``.

    It holds the functions as ``torch.optim`` holds parameters: :meth:`record` what the agent did,
    :meth:`step`, evaluate, and :meth:`rollback` if the step was no improvement.

    Parameters
    ----------
    functions : FunctionSet
        The initial set, usually empty.
    proposer : Proposer
    max_actions : int, default 3
        Most actions of one step (the paper's MAX_NUM).
    max_retries : int, default 1
        Tries after an unusable answer, with the error shown; then the action is skipped.
    history_tokens : int, optional
        Length of history shown, estimated at four characters a token. Solved trajectories are
        dropped first, oldest first.

    Raises
    ------
    ValueError
        If ``max_actions < 1`` or ``max_retries < 0``.

    Examples
    --------
    >>> from icml24.agent_training import SynthesisProposer
    >>> optimizer = AgentOptimizer(FunctionSet(), SynthesisProposer())
    >>> for a, b, gcd in [(4, 6, 2), (9, 6, 3)]:
    ...     task = Task(f"Greatest divisor of: {a}, {b}", str(gcd))
    ...     optimizer.record(Trajectory(task, (), (), None, False))
    >>> result = optimizer.step(np.random.default_rng(0))
    >>> [action.kind for action in result.actions], list(optimizer.functions)
    (['add_function'], ['gcd'])
    >>> optimizer.rollback(performance=0.0)
    >>> list(optimizer.functions), len(optimizer.failures)
    ([], 1)
    """

    def __init__(
        self,
        functions: FunctionSet,
        proposer: Proposer,
        *,
        max_actions: int = 3,
        max_retries: int = 1,
        history_tokens: int | None = None,
    ) -> None:
        if not isinstance(functions, FunctionSet):
            raise TypeError(f"functions must be a FunctionSet, got {type(functions).__name__}.")
        if max_actions < 1:
            raise ValueError(f"max_actions must be at least 1, got {max_actions}.")
        if max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {max_retries}.")
        if history_tokens is not None and history_tokens < 1:
            raise ValueError(f"history_tokens must be at least 1, got {history_tokens}.")
        self.functions, self.proposer = functions, proposer
        self.max_actions, self.max_retries = max_actions, max_retries
        self.history_tokens = history_tokens
        self.history: list[Trajectory] = []
        self._failures: list[tuple[FunctionSet, float]] = []
        self._before = functions

    @property
    def failures(self) -> list[tuple[FunctionSet, float]]:
        """The failure record: rejected sets with their success rates, worst first."""
        return sorted(self._failures, key=lambda entry: entry[1])

    def record(self, trajectory: Trajectory) -> None:
        """Add a trajectory to the history."""
        self.history.append(trajectory)

    def zero_history(self) -> None:
        """Forget the trajectories, as ``zero_grad`` forgets gradients."""
        self.history.clear()

    def clear_failures(self) -> None:
        """Forget the rejected sets; called at every improvement."""
        self._failures.clear()

    def rollback(self, performance: float | None = None) -> None:
        """Return to the set before the last step.

        Parameters
        ----------
        performance : float, optional
            Success rate of the rejected set; given, the set enters the failure record.
        """
        if performance is not None:
            self._failures.append((self.functions, float(performance)))
        self.functions = self._before

    def step(
        self,
        rng: np.random.Generator | int | None = None,
        *,
        regenerate: bool = False,
        max_actions: int | None = None,
    ) -> StepResult:
        """Change the functions by at most ``max_actions`` actions (Algorithm 1).

        Parameters
        ----------
        rng : numpy.random.Generator or int, optional
            Source of the proposer's randomness.
        regenerate : bool, default False
            Start from an empty set and propose everything anew: the paper's ablation without
            progressive update.
        max_actions : int, optional
            Overrides the setting for this step.

        Returns
        -------
        StepResult

        Raises
        ------
        ValueError
            If nothing was recorded.
        """
        if not self.history:
            raise ValueError("step() needs a history: call record(trajectory) first.")
        rng = np.random.default_rng(rng)
        history, dropped = _truncate(self.history, self.history_tokens)
        best = self.functions
        if regenerate:
            history, best = [_untried(t) for t in history], FunctionSet()
        current, spent = best, self.proposer.usage
        actions: list[Action] = []
        n_calls = invalid = 0
        for n_taken in range(max_actions or self.max_actions):
            feedback: str | None = None
            action: Action | None = None
            for _ in range(self.max_retries + 1):
                n_calls += 1
                try:
                    action = self.proposer.propose(
                        best, current, history, self.failures, n_taken, rng, feedback
                    )
                    changed = action.apply(current)
                    break
                except InvalidFunctionError as error:
                    invalid, action, feedback = invalid + 1, None, str(error)
            if action is None:
                continue
            if isinstance(action, Terminate):
                break
            current = changed
            actions.append(action)
        self._before, self.functions = self.functions, current
        usage = self.proposer.usage - spent
        return StepResult(current, tuple(actions), n_calls, usage, invalid, dropped)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store; trajectories refer to tasks by key."""
        return {
            "functions": self.functions.state_dict(),
            "before": self._before.state_dict(),
            "failures": [[s.state_dict(), p] for s, p in self._failures],
            "history": [trajectory.state_dict() for trajectory in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any], tasks: Sequence[Task] = ()) -> None:
        """Restore :meth:`state_dict`.

        Parameters
        ----------
        state : dict
        tasks : sequence of Task
            The tasks that the recorded trajectories are about.

        Raises
        ------
        ValueError
            If a trajectory's task is not among them.
        """
        by_key = {task.key: task for task in tasks}
        if missing := {t["task"] for t in state["history"]} - set(by_key):
            raise ValueError(f"{len(missing)} tasks of the recorded history were not passed.")
        self.functions = FunctionSet.from_state_dict(state["functions"])
        self._before = FunctionSet.from_state_dict(state["before"])
        self._failures = [(FunctionSet.from_state_dict(s), p) for s, p in state["failures"]]
        self.history = [Trajectory.from_state_dict(t, by_key) for t in state["history"]]


def _untried(trajectory: Trajectory) -> Trajectory:
    """Forget what the functions did: only the work of the initial tool counts."""
    if trajectory.function in ("", PYTHON_TOOL):
        return trajectory
    return replace(trajectory, calls=(), answer=None, correct=False, function="")


def _tokens(trajectory: Trajectory) -> int:
    return sum(len(json.dumps(message)) for message in trajectory.messages) // 4 + 1


def _truncate(history: Sequence[Trajectory], limit: int | None) -> tuple[list[Trajectory], int]:
    kept = list(history)
    if limit is None:
        return kept, 0
    total = sum(map(_tokens, kept))
    for trajectory in sorted(history, key=lambda t: not t.correct):  # stable: oldest success first
        if total <= limit or len(kept) == 1:
            break
        kept.remove(trajectory)
        total -= _tokens(trajectory)
    return kept, len(history) - len(kept)


# --- a language model as the proposer -----------------------------------------------------------

#: Version of the prompt; cassettes recorded with another version do not replay.
PROMPT_VERSION = 1
DEFAULT_TEMPLATE = """\
You maintain the list of Python functions that an assistant may call. Below are the \
assistant's conversations on some tasks and whether each was solved. Improve the list by one \
action at a time, so that the assistant solves more tasks, including new ones of the same \
kind.

Actions
- add_function: a new function. Make it general: nothing from a particular task may be written \
into the code, every name and number is a parameter. Example of a good one: \
evaluate_expression(expression), which parses a formula with sympy and returns its value.
- revise_function: replace a function. Look first at the failed tasks and the errors of their \
calls. A failed call had wrong arguments or wrong code; prefer to mend the code. Leave \
functions that work alone. Name and code must agree.
- remove_function: take away a function that future tasks will not need.
- If, and only if, the list cannot be improved, answer with the one word TERMINATE.

Fields of a function: name; description; arguments, a JSON object written as a string that \
maps each argument to its JSON Schema, with the types string, integer, number, boolean, array, \
object; packages, the imported packages separated by commas; code, Python source that defines \
the function and returns a value that JSON can hold."""


def _schema(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {k: {"type": "string", "description": v} for k, v in properties.items()},
        "required": [name for name in properties if name != "packages"],
    }


_FIELDS = {
    "name": "name of the function, equal to the def",
    "description": "what it does, for the assistant to choose it",
    "arguments": "JSON object as a string: argument name to JSON Schema",
    "packages": "imported packages, separated by commas",
    "code": "Python source",
}
#: Tool definitions of the three actions; TERMINATE is a plain answer.
ACTION_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in (
        ("add_function", "Add a new function.", _schema(**_FIELDS)),
        ("revise_function", "Replace an existing function.", _schema(**_FIELDS)),
        ("remove_function", "Remove a function.", _schema(name="name of the function")),
    )
]


def _required_arguments(code: str, name: str) -> list[str] | None:
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # validate() says what is wrong
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            positional = [a.arg for a in node.args.posonlyargs + node.args.args]
            return positional[: len(positional) - len(node.args.defaults)]
    return None


class LLMProposer:
    """A language model as the optimizer, as in the paper.

    The prompt holds the rules, both lists, the failure record, the conversations and a table of
    what was solved. Of several tool calls in one answer only the first is taken, so that no answer
    can exceed the limit on actions.

    Parameters
    ----------
    chat : ChatModel
    template : str, optional
        The rules at the head of the prompt.
    temperature : float, default 0
    max_tokens : int, default 2048
    show_answers : bool, default True
        Whether the right answers of the training tasks are shown.
    """

    def __init__(
        self,
        chat: ChatModel,
        template: str = DEFAULT_TEMPLATE,
        *,
        temperature: float = 0.0,
        max_tokens: int = 2048,
        show_answers: bool = True,
    ) -> None:
        self.chat, self.template = chat, template
        self.temperature, self.max_tokens = temperature, max_tokens
        self.show_answers = show_answers
        self.usage = Usage()

    def propose(
        self,
        best: FunctionSet,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        failures: Failures,
        n_taken: int,
        rng: np.random.Generator,
        feedback: str | None = None,
    ) -> Action:
        """Return one action; see :class:`Proposer`."""
        messages = [
            {"role": "system", "content": self.template},
            {"role": "user", "content": self.prompt(best, incumbent, history, failures, n_taken)},
        ]
        if feedback is not None:
            note = f"Your last answer could not be used: {feedback} Please correct it."
            messages.append({"role": "user", "content": note})
        seed = int(rng.integers(2**31)) if self.temperature > 0 else None
        result = self.chat.complete(
            messages,
            tools=ACTION_TOOLS,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=seed,
        )
        self.usage += result.usage
        calls = result.tool_calls or parse_tool_calls(result.content)
        if calls:
            return _action(calls[0])
        if "TERMINATE" in result.content:
            return Terminate()
        raise InvalidFunctionError(
            "The answer holds neither a call of add_function, revise_function or remove_function "
            "nor the word TERMINATE."
        )

    def prompt(
        self,
        best: FunctionSet,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        failures: Failures,
        n_taken: int,
    ) -> str:
        """Return the user message: lists, failure record, conversations."""
        solved = sum(t.correct for t in history)
        rate = f"{solved} of {len(history)}"
        parts = [
            f"List A, used in the conversations below ({rate} tasks solved):\n{_listing(best)}",
            f"List B, after the {n_taken} actions you took so far:\n{_listing(incumbent)}",
        ]
        if failures:
            lines = [f"success rate {p:.2f}:\n{_listing(functions)}" for functions, p in failures]
            parts.append(
                "Lists that were tried and were no better than A, worst first:\n" + "\n".join(lines)
            )
        for i, trajectory in enumerate(history, 1):
            lines = [f"{m['role']}: {m.get('content', '')}" for m in trajectory.messages]
            verdict = "solved" if trajectory.correct else "not solved"
            if self.show_answers and not trajectory.correct:
                verdict += f"; the right answer is {trajectory.task.answer}"
            parts.append("\n".join([f"Conversation {i} ({verdict})", *lines]))
        table = ", ".join(f"{i}: {int(t.correct)}" for i, t in enumerate(history, 1))
        parts.append(f"Solved (1) or not (0) by conversation: {table}")
        parts.append(
            "Take one action now. Acting is better than TERMINATE: even a function that replaces "
            "Python code which the assistant writes again and again helps."
        )
        return "\n\n".join(parts)


def _listing(functions: FunctionSet) -> str:
    if not functions:
        return "(empty)"
    return "\n".join(json.dumps(function.state_dict()) for function in functions.values())


def _action(call: ToolCall) -> Action:
    """Read an action off a tool call; every fault becomes a message for the model."""
    arguments = call.arguments
    if arguments is None:
        raise InvalidFunctionError(f"The arguments of {call.name} are not a JSON object.")
    name = str(arguments.get("name", ""))
    if call.name == "remove_function":
        return RemoveFunction(name)
    if call.name not in ("add_function", "revise_function"):
        raise InvalidFunctionError(f"There is no action {call.name!r}.")
    code = arguments.get("code", "")
    if not isinstance(code, str):
        raise InvalidFunctionError("The field code must be a string of Python source.")
    properties = arguments.get("arguments", {})
    if isinstance(properties, str):
        try:
            properties = json.loads(properties or "{}")
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidFunctionError(f"The field arguments is not JSON: {error}.") from None
    if isinstance(properties, dict) and isinstance(properties.get("properties"), dict):
        properties = properties["properties"]
    if not isinstance(properties, dict):
        raise InvalidFunctionError("The field arguments must be a JSON object.")
    packages = arguments.get("packages") or ""
    if isinstance(packages, str):
        packages = packages.replace(",", " ").split()
    required = _required_arguments(code, name)
    names = [p for p in properties if required is None or p in required]
    schema = {"type": "object", "properties": properties, "required": names}
    description = str(arguments.get("description", ""))
    function = Function(name, description, schema, code, tuple(map(str, packages)))
    function.validate()
    return AddFunction(function) if call.name == "add_function" else ReviseFunction(function)
