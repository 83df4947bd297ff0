"""A language-model-free optimizer: programs found by search, printed as Python functions.

:class:`SynthesisProposer` reads the same history as a language model would and answers with the
same actions, so that the whole training loop really runs offline. It is **not** a language model:
it searches a typed grammar bottom-up, with exact observational equivalence, for the smallest
program that explains the failed tasks. ``error_rate`` makes it err on purpose; that models the
fallibility of an optimizer and measures no particular one.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from icml24.agent_training.actions import (
    Action,
    AddFunction,
    RemoveFunction,
    ReviseFunction,
    Terminate,
)
from icml24.agent_training.agent import Trajectory, match_score
from icml24.agent_training.chat import Usage
from icml24.agent_training.functions import Function, FunctionSet
from icml24.agent_training.slots import SLOT_TYPES, content_words, extract_slots
from icml24.agent_training.tasks import Task, render_answer

__all__ = ["Operator", "Program", "SynthesisProposer", "default_grammar", "synthesize"]

Expression = tuple[Any, ...]


# --- helpers of operators: their source is printed into the functions that use them ------------


def guarded_power(base, exponent):  # type: ignore[no-untyped-def]
    """Power with a bound on the exponent, so that no call can run away."""
    if abs(exponent) > 64:
        raise ValueError("exponent out of range")
    return base**exponent


def prime_factors(n):  # type: ignore[no-untyped-def]
    """Prime factors of an integer from 2 to 1e9, ascending."""
    if not 2 <= n <= 10**9 or n != int(n):
        raise ValueError("need an integer from 2 to 1e9")
    factors, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors + [n] if n > 1 else factors


def count_primes(low, high):  # type: ignore[no-untyped-def]
    """Count the primes from low to high, both included, below 100,000."""
    if not 0 <= low <= high <= 10**5 or low != int(low) or high != int(high):
        raise ValueError("need integers 0 <= low <= high <= 100000")
    sieve = bytearray([1]) * (high + 1)
    sieve[:2] = b"\0\0"[: high + 1]
    for i in range(2, int(high**0.5) + 1):
        if sieve[i]:
            sieve[i * i :: i] = bytes(len(range(i * i, high + 1, i)))
    return sum(sieve[low:])


def reduced_fraction(a, b):  # type: ignore[no-untyped-def]
    """Reduce a fraction and write it as text, also when the denominator is one."""
    import math

    divisor = math.gcd(a, b)
    return f"{a // divisor}/{b // divisor}"


def to_base(n, base):  # type: ignore[no-untyped-def]
    """Write a non-negative integer in a base from 2 to 36."""
    if not (2 <= base <= 36 and n >= 0 and n == int(n) and base == int(base)):
        raise ValueError("need n >= 0 and a base from 2 to 36")
    digits = ""
    while n:
        n, digit = divmod(n, base)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits or "0"


_HELPERS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (guarded_power, prime_factors, count_primes, reduced_fraction, to_base)
}


@cache
def _helper_source(name: str) -> str:
    source = inspect.getsource(_HELPERS[name])
    return source.replace("  # type: ignore[no-untyped-def]", "")


@dataclass(frozen=True)
class Operator:
    """One production of the grammar.

    Parameters
    ----------
    name : str
        A noun for the result; function names are built from it.
    arguments : tuple of str
        Types: "number", "numbers", "string", "strings".
    result : str
        Type of the result.
    template : str
        Python expression with ``{0}``, ``{1}`` for the arguments. The interpreter runs this very
        expression, so what is searched and what is printed cannot differ.
    modules : tuple of str, optional
        Standard modules that the expression uses.
    helper : str, optional
        Name of the helper function that the expression calls.

    Examples
    --------
    >>> Operator("gcd", ("numbers",), "number", "math.gcd(*{0})", ("math",)).run([12, 18])
    6
    """

    name: str
    arguments: tuple[str, ...]
    result: str
    template: str
    modules: tuple[str, ...] = ()
    helper: str = ""
    run: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [f"x{i}" for i in range(len(self.arguments))]
        source = f"lambda {', '.join(names)}: {self.template.format(*names)}"
        scope = {"math": math, "statistics": statistics, **_HELPERS}
        object.__setattr__(self, "run", eval(source, scope))

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.name, self.arguments, self.result, self.template, self.modules, self.helper)
        return Operator, state


def default_grammar() -> tuple[Operator, ...]:
    """Return the operators of the default grammar: numbers, lists, strings, tables."""
    n, ns, s, ss = "number", "numbers", "string", "strings"
    op = Operator
    return (
        op("gcd", (ns,), n, "math.gcd(*{0})", ("math",)),
        op("lcm", (ns,), n, "math.lcm(*{0})", ("math",)),
        op("total", (ns,), n, "sum({0})"),
        op("product", (ns,), n, "math.prod({0})", ("math",)),
        op("first", (ns,), n, "{0}[0]"),
        op("second", (ns,), n, "{0}[1]"),
        op("last", (ns,), n, "{0}[-1]"),
        op("largest", (ns,), n, "max({0})"),
        op("smallest", (ns,), n, "min({0})"),
        op("mean", (ns,), n, "statistics.fmean({0})", ("statistics",)),
        op("median", (ns,), n, "statistics.median({0})", ("statistics",)),
        op("spread", (ns,), n, "(max({0}) - min({0}))"),
        op("change", (ns,), n, "({0}[-1] - {0}[0])"),
        op("length", (ns,), n, "len({0})"),
        op("rest", (ns,), ns, "{0}[1:]"),
        op("ascending", (ns,), ns, "sorted({0})"),
        op("reverse", (ns,), ns, "{0}[::-1]"),
        op("popcount", (n,), n, 'bin({0}).count("1")'),
        op("prime_factors", (n,), ns, "prime_factors({0})", (), "prime_factors"),
        op("absolute", (n,), n, "abs({0})"),
        op("digit_sum", (n,), n, "sum(map(int, str(abs({0}))))"),
        op("divide", (n, n), n, "({0} / {1})"),
        op("subtract", (n, n), n, "({0} - {1})"),
        op("multiply", (n, n), n, "({0} * {1})"),
        op("add", (n, n), n, "({0} + {1})"),
        op("remainder", (n, n), n, "({0} % {1})"),
        op("power", (n, n), n, "guarded_power({0}, {1})", (), "guarded_power"),
        op("count_primes", (n, n), n, "count_primes({0}, {1})", (), "count_primes"),
        op("fraction", (n, n), s, "reduced_fraction({0}, {1})", (), "reduced_fraction"),
        op("base_digits", (n, n), s, "to_base({0}, {1})", (), "to_base"),
        op("product_text", (ns,), s, '" × ".join(map(str, {0}))'),
        op("reverse_text", (s,), s, "{0}[::-1]"),
        op("lower", (s,), s, "{0}.lower()"),
        op("upper", (s,), s, "{0}.upper()"),
        op("text_length", (s,), n, "len({0})"),
        op("count_in_text", (s, s), n, "{0}.count({1})"),
        op("words", (s,), ss, "{0}.split()"),
        op("first_item", (ss,), s, "{0}[0]"),
        op("last_item", (ss,), s, "{0}[-1]"),
        op("item_count", (ss,), n, "len({0})"),
        op("ascending_items", (ss,), ss, "sorted({0})"),
        op("reverse_items", (ss,), ss, "{0}[::-1]"),
        op("comma_list", (ss,), s, '", ".join({0})'),
        op("joined", (ss,), s, '"".join({0})'),
        op("item_of_largest", (ss, ns), s, "{0}[{1}.index(max({1}))]"),
        op("item_of_smallest", (ss, ns), s, "{0}[{1}.index(min({1}))]"),
        op("count_above", (ns, n), n, "sum(x > {1} for x in {0})"),
        op("count_below", (ns, n), n, "sum(x < {1} for x in {0})"),
    )


# --- programs ----------------------------------------------------------------------------------


class _Failure:
    """The value of a program that raised an error on an example."""

    def __repr__(self) -> str:
        return "<failure>"


_FAILED = _Failure()
_VALID = {
    "number": (int, float),
    "numbers": (list,),
    "string": (str,),
    "strings": (list,),
}


def _checked(value: Any) -> Any:
    """Reject what must not enter the search: NaN, infinities, complex and huge values."""
    if isinstance(value, (bool, complex)):
        return _FAILED
    if isinstance(value, float):
        return value if math.isfinite(value) else _FAILED
    if isinstance(value, int):
        return value if value.bit_length() <= 256 else _FAILED
    return value if len(value) <= 2000 else _FAILED


def _run(operator: Operator, arguments: Sequence[Any]) -> Any:
    try:
        return _checked(operator.run(*arguments))
    except (ArithmeticError, ValueError, TypeError, IndexError, AttributeError):
        return _FAILED


@dataclass(frozen=True)
class Program:
    """An expression over slots, for example ``("gcd", ("tail_numbers",))``.

    Parameters
    ----------
    expression : tuple
        ``(slot,)`` for a leaf, else ``(operator, child, ...)``.
    grammar : tuple of Operator
    explained : int, optional
        How many of the shown tasks it solved.
    """

    expression: Expression
    grammar: tuple[Operator, ...] = field(repr=False)
    explained: int = 0

    @property
    def operators(self) -> dict[str, Operator]:
        """The grammar by name."""
        return {operator.name: operator for operator in self.grammar}

    @property
    def size(self) -> int:
        """Number of nodes."""
        return _size(self.expression)

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots it reads, in order of appearance."""
        return tuple(dict.fromkeys(_leaves(self.expression)))

    def evaluate(self, slots: Mapping[str, Any]) -> Any:
        """Interpret the program.

        Raises
        ------
        ValueError
            If a slot is missing or an operation fails.
        """
        value = _interpret(self.expression, slots, self.operators)
        if value is _FAILED:
            raise ValueError("The program fails on these slots.")
        return value

    def swap(self, rng: np.random.Generator) -> Program:
        """Replace one operator by another of the same signature, if there is one."""
        spots = _operator_spots(self.expression, self.operators)
        choices = [
            (path, other.name)
            for path, operator in spots
            for other in self.grammar
            if other.name != operator.name
            and (other.arguments, other.result) == (operator.arguments, operator.result)
        ]
        if not choices:
            return self
        path, name = choices[rng.integers(len(choices))]
        return Program(_replace(self.expression, path, name), self.grammar, 0)

    def to_function(
        self, name: str, description: str, example: Mapping[str, Any] | None
    ) -> Function:
        """Print the program as a Python function with a doctest.

        Parameters
        ----------
        name, description : str
        example : dict or None
            Slots for the doctest.
        """
        operators = self.operators
        used = [operators[op] for op in _names(self.expression) if op in operators]
        modules = sorted({module for operator in used for module in operator.modules})
        helpers = sorted({operator.helper for operator in used if operator.helper})
        doc = f'"""{_one_line(description)}\n'
        if example is not None:
            arguments = ", ".join(repr(example[slot]) for slot in self.slots)
            doc += f"\n>>> {name}({arguments})\n{self.evaluate(example)!r}\n"
        body = [doc + '"""']
        body += [f"import {module}" for module in modules]
        body += [_helper_source(helper) for helper in helpers]
        body.append(f"return {_print(self.expression, operators)}")
        code = f"def {name}({', '.join(self.slots)}):\n" + textwrap.indent("\n".join(body), "    ")
        properties = {slot: _SCHEMAS[SLOT_TYPES.get(slot, "string")] for slot in self.slots}
        schema = {"type": "object", "properties": properties, "required": list(self.slots)}
        return Function(name, description, schema, code + "\n")


_SCHEMAS: dict[str, dict[str, Any]] = {
    "number": {"type": "number"},
    "numbers": {"type": "array", "items": {"type": "number"}},
    "string": {"type": "string"},
    "strings": {"type": "array", "items": {"type": "string"}},
}


def _one_line(text: str) -> str:
    return " ".join(text.replace("\\", " ").replace('"', "'").split())


def _size(expression: Expression) -> int:
    return 1 + sum(_size(child) for child in expression[1:])


def _leaves(expression: Expression) -> list[str]:
    if len(expression) == 1:
        return [expression[0]]
    return [leaf for child in expression[1:] for leaf in _leaves(child)]


def _names(expression: Expression) -> list[str]:
    return [expression[0]] + [name for child in expression[1:] for name in _names(child)]


def _interpret(
    expression: Expression, slots: Mapping[str, Any], operators: Mapping[str, Operator]
) -> Any:
    if len(expression) == 1:
        return slots.get(expression[0], _FAILED)
    values = [_interpret(child, slots, operators) for child in expression[1:]]
    if any(value is _FAILED for value in values):
        return _FAILED
    return _run(operators[expression[0]], values)


def _print(expression: Expression, operators: Mapping[str, Operator]) -> str:
    if len(expression) == 1:
        return str(expression[0])
    parts = [_print(child, operators) for child in expression[1:]]
    return operators[expression[0]].template.format(*parts)


def _operator_spots(
    expression: Expression, operators: Mapping[str, Operator], path: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], Operator]]:
    if len(expression) == 1:
        return []
    spots = [(path, operators[expression[0]])]
    for i, child in enumerate(expression[1:], 1):
        spots += _operator_spots(child, operators, (*path, i))
    return spots


def _replace(expression: Expression, path: tuple[int, ...], name: str) -> Expression:
    if not path:
        return (name, *expression[1:])
    i = path[0]
    return (*expression[:i], _replace(expression[i], path[1:], name), *expression[i + 1 :])


# --- search ------------------------------------------------------------------------------------


def _compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [
        (head, *rest)
        for head in range(1, total - parts + 2)
        for rest in _compositions(total - head, parts - 1)
    ]


def synthesize(
    tasks: Sequence[Task],
    *,
    grammar: Sequence[Operator] | None = None,
    max_size: int = 5,
    budget: int = 5000,
    min_support: int = 2,
) -> Program | None:
    """Find the program that solves most of the tasks; among those, the smallest.

    Programs are enumerated by size. Two programs are the same if they give *exactly* the same
    values on all shown tasks (``repr`` of the values: no rounding, no digits dropped), and only the
    first is kept.

    Parameters
    ----------
    tasks : sequence of Task
        The examples.
    grammar : sequence of Operator, optional
        By default :func:`default_grammar`.
    max_size : int, default 5
        Largest number of nodes.
    budget : int, default 5000
        How many different programs may be kept.
    min_support : int, default 2
        A program must solve at least this many of the tasks.

    Returns
    -------
    Program or None

    Examples
    --------
    >>> tasks = [Task("The GCD of: 12, 18", "6"), Task("The GCD of: 10, 4", "2")]
    >>> synthesize(tasks).expression
    ('gcd', ('numbers',))
    """
    if not tasks:
        raise ValueError("synthesize needs at least one task.")
    operators = tuple(default_grammar() if grammar is None else grammar)
    examples = [extract_slots(task) for task in tasks]
    scorer = _Explains(tasks)
    best: tuple[int, int, Expression] | None = None
    bank: dict[str, dict[int, list[tuple[Expression, tuple[Any, ...]]]]] = {t: {} for t in _VALID}
    seen: set[tuple[str, str]] = set()
    kept = 0

    def keep(kind: str, size: int, expression: Expression, values: tuple[Any, ...]) -> None:
        nonlocal best, kept
        key = (kind, repr(values))
        if key in seen or all(value is _FAILED for value in values):
            return
        seen.add(key)
        kept += 1
        bank[kind].setdefault(size, []).append((expression, values))
        explained = scorer.count(values)
        if explained >= min_support and (best is None or explained > best[0]):
            best = (explained, size, expression)

    for slot, kind in SLOT_TYPES.items():
        keep(kind, 1, (slot,), tuple(example.get(slot, _FAILED) for example in examples))
    for size in range(2, max_size + 1):
        if best is not None and best[0] == len(tasks):
            break
        for operator in operators:
            for sizes in _compositions(size - 1, len(operator.arguments)):
                pools = [bank[k].get(s, []) for k, s in zip(operator.arguments, sizes, strict=True)]
                for children in itertools.product(*pools):
                    if kept >= budget:
                        break
                    expression = (operator.name, *(child[0] for child in children))
                    values = tuple(
                        _FAILED
                        if any(argument is _FAILED for argument in arguments)
                        else _run(operator, arguments)
                        for arguments in zip(*(child[1] for child in children), strict=True)
                    )
                    keep(operator.result, size, expression, values)
    return None if best is None else Program(best[2], operators, best[0])


class _Explains:
    """Counts the tasks whose answer equals a program's value; fast on the common mismatch."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.numeric = []
        for task in tasks:
            try:
                self.numeric.append(float(task.answer))
            except ValueError:
                self.numeric.append(math.nan)

    def count(self, values: Sequence[Any]) -> int:
        return sum(map(self.one, self.tasks, self.numeric, values))

    @staticmethod
    def one(task: Task, number: float, value: Any) -> bool:
        if value is _FAILED:
            return False
        if isinstance(value, int | float):
            if math.isnan(number) or abs(value - number) > 0.01 * abs(number) + 1e-12:
                return False
        elif isinstance(value, list) and len(value) > 1 and not math.isnan(number):
            return False
        return task.score(render_answer(value))


# --- the proposer ------------------------------------------------------------------------------


class SynthesisProposer:
    """Propose actions by program search over the history; the offline stand-in for an LLM.

    It (1) revises or removes a function that fails more often than it succeeds, else (2) groups
    the failed tasks by their words, draws a group by size, shows at most ``context`` of its tasks
    to the search, and adds the program found, else (3) terminates.

    Parameters
    ----------
    grammar : sequence of Operator, optional
        By default :func:`default_grammar`.
    max_size, budget, min_support : int
        See :func:`synthesize`.
    context : int, default 6
        How many tasks of a group are shown: the stand-in for a context window.
    error_rate : float, default 0
        With this probability the program is corrupted (one operator swapped for another of the same
        type); with half of it the description becomes over-general; with 0.3 of it a random
        function is removed. This *models* fallibility.
    jaccard : float, default 0.4
        Words in common for two questions to be grouped.

    Notes
    -----
    Results of the search are cached by the tasks shown, so a repeated training is cheap.
    """

    def __init__(
        self,
        grammar: Sequence[Operator] | None = None,
        *,
        max_size: int = 5,
        budget: int = 5000,
        context: int = 6,
        min_support: int = 2,
        error_rate: float = 0.0,
        jaccard: float = 0.4,
    ) -> None:
        if not 0 <= error_rate <= 1:
            raise ValueError(f"error_rate must lie in [0, 1], got {error_rate}.")
        if min(max_size, budget, context, min_support) < 1:
            raise ValueError("max_size, budget, context and min_support must be at least 1.")
        self.grammar = tuple(default_grammar() if grammar is None else grammar)
        self.max_size, self.budget, self.context = max_size, budget, context
        self.min_support, self.error_rate, self.jaccard = min_support, error_rate, jaccard
        self.usage = Usage()

    def propose(
        self,
        best: FunctionSet,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        failures: Sequence[tuple[FunctionSet, float]],
        n_taken: int,
        rng: np.random.Generator,
        feedback: str | None = None,
    ) -> Action:
        """Return the next action; see :class:`icml24.agent_training.Proposer`."""
        self.usage += Usage(calls=1)
        if incumbent and rng.random() < 0.3 * self.error_rate:
            return RemoveFunction(list(incumbent)[rng.integers(len(incumbent))])
        action = self._repair(incumbent, history, best, rng)
        return action or self._extend(best, incumbent, history, rng) or Terminate()

    def _repair(
        self,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        best: FunctionSet,
        rng: np.random.Generator,
    ) -> Action | None:
        for name, function in incumbent.items():
            if best.get(name) != function:  # not yet tried, or changed in this step
                continue
            used = [t for t in history if t.function == name]
            solved = [t for t in used if t.correct]
            called = [t for t in history if any(c.function == name for c in t.calls)]
            wrong = [t.task for t in called if not t.correct or t.function == name]
            if not wrong or 2 * len(solved) > len(used):
                continue
            group = max(self._groups(wrong), key=len)
            program = self._search(group, rng)
            if program is not None:
                revised = self._print(program, group, incumbent, rng, history, name=name)
                if revised != function:
                    return ReviseFunction(revised)
            if not solved:
                return RemoveFunction(name)
        return None

    def _extend(
        self,
        best: FunctionSet,
        incumbent: FunctionSet,
        history: Sequence[Trajectory],
        rng: np.random.Generator,
    ) -> Action | None:
        fresh = [f for name, f in incumbent.items() if best.get(name) != f]
        failed = [
            t.task
            for t in history
            if not t.correct
            and not any(match_score(f.description, t.task.question) >= 0.6 for f in fresh)
        ]
        groups = [g for g in self._groups(failed) if len(g) >= self.min_support]
        while groups:
            sizes = np.array([len(group) for group in groups], float)
            group = groups.pop(rng.choice(len(groups), p=sizes / sizes.sum()))
            program = self._search(group, rng)
            if program is not None:
                return AddFunction(self._print(program, group, incumbent, rng, history))
        return None

    def _groups(self, tasks: Sequence[Task]) -> list[list[Task]]:
        groups: list[tuple[frozenset[str], list[Task]]] = []
        for task in tasks:
            words = content_words(task.question)
            for leader, members in groups:
                union = len(leader | words)
                if union and len(leader & words) >= self.jaccard * union:
                    members.append(task)
                    break
            else:
                groups.append((words, [task]))
        return [members for _, members in groups]

    def _search(self, group: Sequence[Task], rng: np.random.Generator) -> Program | None:
        if len(group) > self.context:
            picked = np.sort(rng.choice(len(group), self.context, replace=False))
            group = [group[i] for i in picked]
        shown = {task.key: task for task in group}
        settings = (self.grammar, self.max_size, self.budget, self.min_support)
        key = (tuple(sorted(shown)), *settings)
        if key not in _SEARCHES:
            if len(_SEARCHES) > 20_000:
                _SEARCHES.clear()
            _SEARCHES[key] = synthesize(
                [shown[k] for k in sorted(shown)],
                grammar=self.grammar,
                max_size=self.max_size,
                budget=self.budget,
                min_support=min(self.min_support, len(shown)),
            )
        return _SEARCHES[key]

    def _print(
        self,
        program: Program,
        group: Sequence[Task],
        incumbent: FunctionSet,
        rng: np.random.Generator,
        history: Sequence[Trajectory],
        name: str | None = None,
    ) -> Function:
        solved = [task for task in group if _solves(program, task)] or list(group)
        words = [content_words(task.question) for task in solved]
        common = sorted(frozenset.intersection(*words)) or sorted(words[0])
        if rng.random() < self.error_rate:
            program = program.swap(rng)
        if rng.random() < self.error_rate / 2:
            counts = {w: sum(w in content_words(t.task.question) for t in history) for w in common}
            common = sorted(common, key=lambda word: -counts[word])[:1]
        if name is None:
            operators = [n for n in _names(program.expression) if n in program.operators]
            base = "_of_".join((operators or list(program.slots))[:2])
            taken = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
            name = next(candidate for candidate in taken if candidate not in incumbent)
        example = next((s for s in map(extract_slots, solved) if _runs(program, s)), None)
        return program.to_function(name, "Questions about: " + " ".join(common), example)


_SEARCHES: dict[Any, Program | None] = {}


def _runs(program: Program, slots: Mapping[str, Any]) -> bool:
    return _interpret(program.expression, slots, program.operators) is not _FAILED


def _solves(program: Program, task: Task) -> bool:
    value = _interpret(program.expression, extract_slots(task), program.operators)
    return value is not _FAILED and task.score(render_answer(value))
