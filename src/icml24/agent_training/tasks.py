"""Tasks with answers that a program can check: the training data of an agent."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

__all__ = ["Task", "TaskSet", "close_match", "exact_match", "render_answer"]

Scorer = Callable[[str, str], bool]


def render_answer(value: Any) -> str:
    """Write a JSON value as an answer: whole floats without ``.0``, lists with commas.

    Examples
    --------
    >>> render_answer(3.0), render_answer([1, 2]), render_answer("a b ")
    ('3', '1, 2', 'a b')
    """
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list | tuple):
        return ", ".join(render_answer(item) for item in value)
    return str(value)


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) else None


def exact_match(answer: str, expected: str) -> bool:
    """Tell whether two answers agree as text (up to white space) or as numbers.

    Integers must be equal exactly, other numbers up to a relative error of 1e-9.

    Examples
    --------
    >>> exact_match("3.50", "3.5"), exact_match(" a  b", "a b"), exact_match("10", "11")
    (True, True, False)
    """
    if answer == expected:
        return True
    left, right = _number(answer), _number(expected)
    if left is None or right is None:
        return " ".join(answer.split()) == " ".join(expected.split())
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return _close(left, right, 1e-9)


def _close(left: float, right: float, rtol: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=rtol, abs_tol=1e-12)
    except OverflowError:
        return False


def close_match(rtol: float) -> Scorer:
    """Return a scorer that accepts numbers within a relative error, and else exact text.

    Examples
    --------
    >>> close_match(0.01)("9.36e-18", "9.360000138304076e-18")
    True
    """

    def score(answer: str, expected: str) -> bool:
        left, right = _number(answer), _number(expected)
        if left is None or right is None:
            return exact_match(answer, expected)
        return _close(left, right, rtol)

    score.__name__ = f"close_match_{rtol:g}"
    return score


@dataclass(frozen=True)
class Task:
    """A question with its answer.

    Parameters
    ----------
    question : str
        What the agent is asked.
    answer : str
        The right answer, as text.
    context : dict, optional
        A table: ``{"title": str, "columns": [str], "rows": [[label, number, ...]]}``.
    domain : str, optional
        Family of the task, for reports only.
    scorer : callable, optional
        ``scorer(answer, expected) -> bool``; by default :func:`exact_match`.

    Examples
    --------
    >>> task = Task("What is 2 + 2?", "4")
    >>> task.score("4.0"), task.score(None)
    (True, False)
    """

    question: str
    answer: str
    context: Mapping[str, Any] | None = field(default=None, hash=False)
    domain: str = ""
    scorer: Scorer = field(default=exact_match, compare=False, repr=False)
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.question, str) or not self.question.strip():
            raise ValueError("A task needs a question, a non-empty string.")
        if not isinstance(self.answer, str):
            raise TypeError(
                f"The answer must be a string, got {type(self.answer).__name__}; "
                "render_answer(value) makes one."
            )
        content = json.dumps([self.question, self.answer, self.context], sort_keys=True)
        object.__setattr__(self, "key", hashlib.sha256(content.encode()).hexdigest()[:16])

    @property
    def prompt(self) -> str:
        """The question, preceded by its table if it has one."""
        if self.context is None:
            return self.question
        rows = [self.context["columns"], *self.context["rows"]]
        table = "\n".join(" | ".join(str(cell) for cell in row) for row in rows)
        return f"{self.context.get('title', 'Table')}\n{table}\n\n{self.question}"

    def score(self, answer: str | None) -> bool:
        """Tell whether an answer is right; no answer is wrong."""
        return answer is not None and bool(self.scorer(answer, self.answer))


class TaskSet(Sequence[Task]):
    """An immutable list of tasks.

    Parameters
    ----------
    tasks : iterable of Task, or of (question, answer) pairs

    Examples
    --------
    >>> tasks = TaskSet([("What is 1 + 1?", "2"), ("What is 1 + 2?", "3")])
    >>> train, test = tasks.split(1, 1, seed=0)
    >>> len(train), len(test)
    (1, 1)
    """

    def __init__(self, tasks: Iterable[Task | tuple[str, str]]) -> None:
        items = []
        for entry in tasks:
            if isinstance(entry, tuple) and len(entry) == 2:
                entry = Task(*entry)
            if not isinstance(entry, Task):
                raise TypeError(
                    "tasks must be Task objects or (question, answer) pairs, "
                    f"got {type(entry).__name__}."
                )
            items.append(entry)
        self._tasks = tuple(items)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSet: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSet:
        if isinstance(index, slice):
            return TaskSet(self._tasks[index])
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __repr__(self) -> str:
        return f"TaskSet({len(self)} tasks)"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the tasks and their order."""
        return hashlib.sha256("".join(task.key for task in self).encode()).hexdigest()[:16]

    def split(self, n_train: int, n_test: int, seed: int = 0) -> tuple[TaskSet, TaskSet]:
        """Return two disjoint random subsets.

        Raises
        ------
        ValueError
            If there are fewer than ``n_train + n_test`` tasks, or a number is negative.
        """
        if min(n_train, n_test) < 0 or n_train + n_test > len(self):
            raise ValueError(
                f"n_train + n_test must be at most the {len(self)} tasks, got {n_train} + {n_test}."
            )
        order = np.random.default_rng(seed).permutation(len(self))
        chosen = [self._tasks[i] for i in order[: n_train + n_test]]
        return TaskSet(chosen[:n_train]), TaskSet(chosen[n_train:])
