"""The chapters of the book, as each column describes itself in ``claims.toml``."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from icml24.bookkit.claims import VERDICTS, Claim

__all__ = ["Chapter", "chapters", "count_verdicts", "stored_records"]


@dataclass(frozen=True)
class Chapter:
    """What the landing page, the README and the command line say of a column.

    Parameters
    ----------
    slug, title, question : str
        Name of the column, title of the chapter, and the question it answers in one sentence.
    paper, authors, part : str
        Title and authors of the paper; part of the book.
    read, run : int
        Minutes to read the chapter, and to run its notebooks on two cores.
    order : int
        Number of the chapter.
    """

    slug: str
    title: str
    question: str
    paper: str
    authors: str
    part: str
    read: int
    run: int
    order: int


def chapters() -> list[Chapter]:
    """List the chapters in order; a column that has no ``[chapter]`` table yet is left out.

    Returns
    -------
    list of Chapter
    """
    found = []
    for folder in resources.files("icml24").iterdir():
        file = folder.joinpath("claims.toml")
        if folder.is_dir() and file.is_file():
            table = tomllib.loads(file.read_text("utf-8")).get("chapter")
            if table is not None:
                found.append(Chapter(folder.name, **table))
    return sorted(found, key=lambda chapter: chapter.order)


def stored_records() -> dict[str, Claim]:
    """Read the results that the package carries, ``scorecard.json``.

    The file is written from the stored notebooks by ``tools/records.py``, and a test compares both.

    Returns
    -------
    dict from str to Claim
        Keyed by ``slug/id``.
    """
    file = resources.files("icml24").joinpath("scorecard.json")
    records: list[Mapping[str, Any]] = json.loads(file.read_text("utf-8"))
    return {record["id"]: Claim.from_record(dict(record)) for record in records}


def count_verdicts(claims: Iterable[Claim]) -> dict[str, int]:
    """Count the claims by verdict, all four verdicts in fixed order.

    Returns
    -------
    dict from str to int
    """
    counts = Counter(claim.verdict for claim in claims)
    return {verdict: counts[verdict] for verdict in VERDICTS}
