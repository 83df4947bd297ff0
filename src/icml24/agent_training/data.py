"""Tasks with verifiable answers: generated problems, questions about tables, full data sets.

The problems come from the generators of the package reasoning-gym (Apache-2.0, third-party); this
package carries a fixed draw of them, see ``data/NOTICE.md``. The tables are real, the questions
about them are made here from templates.
"""

from __future__ import annotations

import csv
import gzip
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from icml24.agent_training.tasks import (
    Scorer,
    Task,
    TaskSet,
    close_match,
    exact_match,
    render_answer,
)
from icml24.core.data import DataSource

__all__ = [
    "DOMAINS",
    "TABLE_TYPES",
    "families",
    "load_gaia",
    "load_math",
    "load_reasoning_gym",
    "load_tables",
    "load_tabmwp",
    "make_table_qa",
]

_POOL = DataSource(
    "reasoning-gym draw",
    "08892e46329cbbd0f2993531a9c178b3ffabcf81fff8961d0dcba1a8607608b4",
    "Apache-2.0, the reasoning-gym authors",
    extract="icml24.agent_training:data/reasoning_gym.json.gz",
)
_TABLES = DataSource(
    "tables",
    "5f90a9266fcb528696a40a9d6ab31ff004651ab01582220d29e8c1f8b5cf4e70",
    "public domain, see data/NOTICE.md",
    extract="icml24.agent_training:data/tables.json",
)

#: Families of problems by domain. The first three groupings are ours; ``rg_arithmetic`` is the
#: package's own category "arithmetic", for a grouping that we did not choose.
DOMAINS: dict[str, tuple[str, ...]] = {
    "arithmetic": (
        "basic_arithmetic",
        "chain_sum",
        "products",
        "gcd",
        "lcm",
        "count_bits",
        "power_function",
        "prime_factorization",
    ),
    "number_theory": (
        "gcd",
        "lcm",
        "prime_factorization",
        "count_primes",
        "fraction_simplification",
        "base_conversion",
    ),
    "strings": (
        "letter_counting",
        "spell_backward",
        "word_sorting",
        "word_sequence_reversal",
        "number_sorting",
    ),
    "rg_arithmetic": (
        "basic_arithmetic",
        "bitwise_arithmetic",
        "calendar_arithmetic",
        "chain_sum",
        "count_bits",
        "decimal_arithmetic",
        "decimal_chain_sum",
        "dice",
        "fraction_simplification",
        "gcd",
        "lcm",
        "leg_counting",
        "number_format",
        "power_function",
        "prime_factorization",
        "products",
        "time_intervals",
    ),
}
# Families that ask for rounded numbers; the generators' own scorers are as lenient.
_SCORERS: dict[str, Scorer] = {"power_function": close_match(5e-3)}


@lru_cache(maxsize=1)
def _pool() -> dict[str, list[list[str]]]:
    return json.loads(gzip.decompress(_POOL.load().content))["families"]


def families() -> tuple[str, ...]:
    """Return the names of the families that the package carries."""
    return tuple(_pool())


def load_reasoning_gym(
    names: str | Sequence[str],
    n: int,
    seed: int = 0,
    source: Literal["extract", "package"] = "extract",
) -> TaskSet:
    """Draw tasks from families of generated problems, equally many from each (up to one).

    Parameters
    ----------
    names : str or sequence of str
        A key of :data:`DOMAINS`, or names of families.
    n : int
        Number of tasks.
    seed : int, default 0
    source : {"extract", "package"}
        The draw of up to 300 problems a family that this package carries, or the generators
        themselves (``pip install reasoning-gym==0.1.25``).

    Returns
    -------
    TaskSet
        In random order.

    Raises
    ------
    ValueError
        If a family is unknown, or the extract has too few problems.

    Examples
    --------
    >>> tasks = load_reasoning_gym("strings", 10)
    >>> len(tasks), sorted({task.domain for task in tasks})[0]
    (10, 'letter_counting')
    """
    chosen = DOMAINS.get(names, (names,)) if isinstance(names, str) else tuple(dict.fromkeys(names))
    if not chosen or n < 1:
        raise ValueError("names must hold at least one family, and n must be at least 1.")
    rng = np.random.default_rng(seed)
    counts = np.full(len(chosen), n // len(chosen))
    counts[rng.permutation(len(chosen))[: n % len(chosen)]] += 1
    tasks: list[Task] = []
    for name, count in zip(chosen, counts, strict=True):
        if source == "package":
            pairs = _generate(name, int(count), int(rng.integers(2**31)))
        else:
            pool = _pool().get(name)
            if pool is None:
                raise ValueError(f"There is no family {name!r}; families() lists them.")
            if count > len(pool):
                raise ValueError(
                    f"The package carries {len(pool)} problems of {name!r}, {count} were asked "
                    "for; source='package' generates more."
                )
            picked = rng.choice(len(pool), count, replace=False)
            pairs = [(pool[i][0], pool[i][1]) for i in picked]
        scorer = _SCORERS.get(name, exact_match)
        tasks += [Task(q, a, domain=name, scorer=scorer) for q, a in pairs]
    return TaskSet(tasks[i] for i in rng.permutation(len(tasks)))


def _generate(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("source='package' needs: pip install reasoning-gym==0.1.25") from error
    data = reasoning_gym.create_dataset(name, size=count, seed=seed)
    return [(entry["question"], str(entry["answer"])) for entry in data]


# --- questions about tables ---------------------------------------------------------------------


@lru_cache(maxsize=1)
def load_tables() -> dict[str, dict[str, Any]]:
    """Return the five real tables: wheat, cars, statecrime, longley, grunfeld.

    Returns
    -------
    dict
        Of ``{"title", "columns", "rows"}``; the first column holds labels.
    """
    return json.loads(_TABLES.load().content)


def _two(rng: np.random.Generator, n: int) -> tuple[int, int]:
    i, j = sorted(rng.choice(n, 2, replace=False))
    return int(i), int(j)


Maker = Callable[[np.random.Generator, str, str, list[str], list[float]], tuple[str, Any]]


def _pick(rng: np.random.Generator, *texts: str) -> str:
    return texts[rng.integers(len(texts))]


def _sum(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    q = _pick(rng, f"What is the total {col} of all rows?", f"Add up the {col}: what is the total?")
    return q, sum(x)


def _difference(
    rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]
) -> Any:
    i, j = _two(rng, len(x))
    q = _pick(
        rng,
        f"What is the difference in {col} from {labels[i]} to {labels[j]}?",
        f"By how much does the {col} differ, going from {labels[i]} to {labels[j]}? "
        "Give the difference.",
    )
    return q, x[j] - x[i]


def _mean(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    return _pick(rng, f"What is the mean {col}?", f"Find the mean of the {col}."), sum(x) / len(x)


def _median(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    q = _pick(rng, f"What is the median {col}?", f"Find the median of the {col}.")
    return q, statistics.median(x)


def _range(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    q = _pick(rng, f"What is the range of the {col}?", f"Find the range of {col} values.")
    return q, max(x) - min(x)


def _most(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    q = _pick(rng, f"Which {key} has the highest {col}?", f"Name the {key} with the highest {col}.")
    return q, labels[x.index(max(x))]


def _least(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    q = _pick(rng, f"Which {key} has the lowest {col}?", f"Name the {key} with the lowest {col}.")
    return q, labels[x.index(min(x))]


def _above(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    low, high = np.quantile(x, [0.2, 0.8])
    bound = round(float(rng.uniform(low, high)), 1)
    q = _pick(
        rng,
        f"How many rows have a {col} above {bound}?",
        f"Count the rows whose {col} is above {bound}: how many are there?",
    )
    return q, sum(value > bound for value in x)


def _cost(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    i, units = int(rng.integers(len(x))), int(rng.integers(2, 10))
    q = _pick(
        rng,
        f"Take the {col} of {labels[i]} as the price of one unit. What do {units} units cost?",
        f"If one unit costs the {col} of {labels[i]}, what is the price of {units} units?",
    )
    return q, x[i] * units


def _rate(rng: np.random.Generator, key: str, col: str, labels: list[str], x: list[float]) -> Any:
    i, j = _two(rng, len(x))
    q = _pick(
        rng,
        f"What was the rate of change of the {col} per year between {labels[i]} and {labels[j]}?",
        f"Between {labels[i]} and {labels[j]}, what was the yearly rate of change in {col}?",
    )
    return q, (x[j] - x[i]) / (int(labels[j]) - int(labels[i]))


#: The ten types of questions; ``rate`` needs a table by year.
TABLE_TYPES: dict[str, Maker] = {
    "sum": _sum,
    "difference": _difference,
    "mean": _mean,
    "median": _median,
    "range": _range,
    "most": _most,
    "least": _least,
    "count_above": _above,
    "cost": _cost,
    "rate": _rate,
}


def make_table_qa(n: int, seed: int = 0, types: Sequence[str] | None = None) -> TaskSet:
    """Make questions about small tables cut from real ones.

    Parameters
    ----------
    n : int
        Number of tasks, equally many of each type (up to one).
    seed : int, default 0
    types : sequence of str, optional
        Keys of :data:`TABLE_TYPES`; all by default.

    Returns
    -------
    TaskSet
        Every task has its table as context; numbers are scored with a relative error of 1e-3.

    Examples
    --------
    >>> task = make_table_qa(1, seed=1, types=["most"])[0]
    >>> task.answer in [row[0] for row in task.context["rows"]]
    True
    """
    chosen = list(TABLE_TYPES) if types is None else list(types)
    if unknown := set(chosen) - set(TABLE_TYPES):
        raise ValueError(f"Unknown types {sorted(unknown)}; known are {list(TABLE_TYPES)}.")
    if not chosen or n < 1:
        raise ValueError("types must not be empty, and n must be at least 1.")
    rng, tables = np.random.default_rng(seed), load_tables()
    by_year = [name for name, table in tables.items() if table["columns"][0] == "year"]
    scorer, tasks = close_match(1e-3), []
    order = np.tile(rng.permutation(len(chosen)), -(-n // len(chosen)))[:n]
    for kind in (chosen[i] for i in order):
        names = by_year if kind == "rate" else list(tables)
        table = tables[names[rng.integers(len(names))]]
        picked = np.sort(rng.choice(len(table["rows"]), int(rng.integers(5, 9)), replace=False))
        keep = [0, *sorted(rng.choice(np.arange(1, len(table["columns"])), 2, replace=False))]
        columns = [table["columns"][j] for j in keep]
        rows = [[table["rows"][i][j] for j in keep] for i in picked]
        j = int(rng.integers(1, 3))
        labels, values = [str(row[0]) for row in rows], [row[j] for row in rows]
        question, value = TABLE_TYPES[kind](rng, columns[0], columns[j], labels, values)
        answer = render_answer(round(value, 6) if isinstance(value, float) else value)
        context = {"title": table["title"], "columns": columns, "rows": rows}
        tasks.append(Task(question, answer, context, kind, scorer))
    return TaskSet(tasks[i] for i in rng.permutation(n))


# --- full data sets, from local copies ----------------------------------------------------------


def load_math(path: str | Path, subject: str | None = None) -> TaskSet:
    r"""Read MATH (Hendrycks et al., 2021) from its folder of JSON files.

    Parameters
    ----------
    path : path-like
        ``MATH/train`` or ``MATH/test``, holding a folder for each subject.
    subject : str, optional
        For example ``"number_theory"``.

    Returns
    -------
    TaskSet
        The answers are the contents of the last ``\boxed{}`` of each solution.
    """
    root = _existing(path)
    files = sorted(root.glob(f"{subject or '*'}/*.json"))
    if not files:
        raise ValueError(f"{root} holds no files {subject or '*'}/*.json.")
    tasks = []
    for file in files:
        entry = json.loads(file.read_text(encoding="utf-8"))
        answer = _boxed(entry["solution"])
        if answer is not None:
            tasks.append(Task(entry["problem"], answer, domain=file.parent.name))
    return TaskSet(tasks)


def _boxed(solution: str) -> str | None:
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin, len(solution)):
        depth += (solution[i] == "{") - (solution[i] == "}")
        if depth < 0:
            return solution[begin:i].strip()
    return None


def load_tabmwp(path: str | Path) -> TaskSet:
    """Read TabMWP (Lu et al., 2023) from ``problems_train.json`` or its like.

    Parameters
    ----------
    path : path-like
        A JSON file that maps ids to problems.

    Returns
    -------
    TaskSet
        With the table as context; numbers may carry thousands separators.
    """
    tasks = []
    for entry in json.loads(_existing(path).read_text(encoding="utf-8")).values():
        table = dict(entry.get("table_for_pd") or {})
        columns = list(table)
        rows = [[_cell(v) for v in row] for row in zip(*table.values(), strict=True)]
        context = {"title": entry.get("table_title") or "Table", "columns": columns, "rows": rows}
        choices = entry.get("choices")
        question = entry["question"] + (f" Choices: {', '.join(choices)}" if choices else "")
        answer = str(entry["answer"]).replace(",", "")
        tasks.append(Task(question, answer, context if rows else None, entry.get("ques_type", "")))
    return TaskSet(tasks)


def _cell(value: Any) -> Any:
    text = str(value).replace(",", "").lstrip("$")
    try:
        number = float(text)
    except ValueError:
        return value
    return int(number) if number.is_integer() else number


def load_gaia(path: str | Path, level: int | None = None) -> TaskSet:
    """Read GAIA (Mialon et al., 2023) from ``metadata.jsonl`` of the gated hub data set.

    Parameters
    ----------
    path : path-like
    level : int, optional
        One of the three levels.

    Returns
    -------
    TaskSet
        Questions without an attached file, since no tool here reads files.
    """
    tasks = []
    for line in _existing(path).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("file_name") or (level is not None and int(entry["Level"]) != level):
            continue
        answer = str(entry["Final answer"])
        if answer != "?":
            tasks.append(Task(entry["Question"], answer, domain=f"level {entry['Level']}"))
    return TaskSet(tasks)


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}; the data set must be downloaded first.")
    return path


def read_pairs(path: str | Path, columns: tuple[str, str] = ("question", "answer")) -> TaskSet:
    """Read your own tasks from a CSV file with a question and an answer column."""
    with open(_existing(path), newline="", encoding="utf-8") as file:
        rows: Iterable[Mapping[str, str]] = list(csv.DictReader(file))
    return TaskSet((row[columns[0]], row[columns[1]]) for row in rows)
