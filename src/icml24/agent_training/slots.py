"""What can be read off a question without understanding it: numbers, quotes, lists, table cells.

The LLM-free agent binds the arguments of a function from these slots by name, and the program
synthesizer builds its functions on them. A real language model does not need them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from icml24.agent_training.tasks import Task

__all__ = ["SLOT_TYPES", "content_words", "extract_slots"]

#: Type of each slot in the grammar of :mod:`icml24.agent_training.synthesis`.
SLOT_TYPES: dict[str, str] = {
    "numbers": "numbers",
    "tail_numbers": "numbers",
    "quoted": "strings",
    "items": "strings",
    "tail": "string",
    "column": "numbers",
    "cells": "numbers",
    "labels": "strings",
}
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?<![\w.])\d+(?:\.\d+)?(?!\.?\w)")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
# fmt: off
_STOP = frozenset({
    "a", "an", "the", "of", "to", "in", "is", "are", "was", "be", "this", "that", "these",
    "those", "and", "or", "with", "as", "for", "on", "by", "it", "its", "at", "from", "your",
    "you", "i", "me", "my", "questions", "question", "about", "use", "uses",
})
# fmt: on


@lru_cache(maxsize=65536)
def content_words(text: str) -> frozenset[str]:
    """Return the words of a text, in lower case, without the most common ones.

    Examples
    --------
    >>> sorted(content_words("Find the GCD of these numbers: 4, 6"))
    ['find', 'gcd', 'numbers']
    """
    return frozenset(_WORD.findall(text.lower())) - _STOP


def _numbers(text: str) -> list[int | float]:
    return [float(n) if "." in n else int(n) for n in _NUMBER.findall(text)]


def _table_slots(question: str, table: Mapping[str, Any]) -> dict[str, Any]:
    columns, rows = table["columns"], table["rows"]
    lower = question.lower()
    named = [j for j in range(1, len(columns)) if columns[j].lower() in lower] or [1]
    named.sort(key=lambda j: -len(columns[j]))  # "armed forces" before "forces"
    column = [row[named[0]] for row in rows]
    labels = [str(row[0]) for row in rows]
    spots = {label: lower.find(label.lower()) for label in labels}
    mentioned = sorted((spot, label) for label, spot in spots.items() if spot >= 0)
    cells = [column[labels.index(label)] for _, label in mentioned]
    return {"labels": labels, "column": column} | ({"cells": cells} if cells else {})


def extract_slots(task: Task) -> dict[str, Any]:
    """Return the slots of a question that are not empty.

    Parameters
    ----------
    task : Task

    Returns
    -------
    dict
        ``numbers`` and ``tail_numbers`` (after the last colon), ``quoted`` strings, ``tail`` (the
        text after the last colon), its comma-separated ``items``; for a table ``labels``, the
        ``column`` that the question names and the ``cells`` of the rows that it names.

    Examples
    --------
    >>> extract_slots(Task("Find the GCD of these numbers: 4, 6", "2"))["tail_numbers"]
    [4, 6]
    """
    return _cached_slots(task.key, task)


def _cached_slots(key: str, task: Task) -> dict[str, Any]:
    if key not in _CACHE:
        if len(_CACHE) > 50_000:
            _CACHE.clear()
        _CACHE[key] = _slots(task)
    return _CACHE[key]


_CACHE: dict[str, dict[str, Any]] = {}


def _slots(task: Task) -> dict[str, Any]:
    question = task.question
    slots: dict[str, Any] = {
        "numbers": _numbers(question),
        "quoted": re.findall(r'"([^"]*)"', question),
    }
    if ":" in question:
        tail = question.rsplit(":", 1)[1].strip()
        slots["tail"] = tail
        slots["tail_numbers"] = _numbers(tail)
        if "," in tail:
            slots["items"] = [item.strip() for item in tail.split(",")]
    if task.context is not None:
        slots |= _table_slots(question, task.context)
    return {name: value for name, value in slots.items() if value}
