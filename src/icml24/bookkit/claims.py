"""Claims: declared before the run, recorded by the notebook that measures them.

A column declares its claims in ``claims.toml``. A notebook measures one and ends the cell with
``claims.record("id", estimate)``; the record then lives inside the stored output, where the
scorecard, the README table, the numbers in prose and nbval read it. There is no second place.
"""

from __future__ import annotations

import html
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from icml24.core.statistics import Estimate

__all__ = ["MIME", "VERDICTS", "Claim", "Claims", "Declaration", "declarations", "read_records"]

MIME = "application/vnd.icml24.claim+json"
VERDICTS = ("reproduced", "partly", "not reproduced", "not testable here")
REQUIRED = ("id", "abstract", "statement", "metric", "paper")
COLOR = dict(zip(VERDICTS, ("#00664f", "#7a5200", "#a33a00", "#555555"), strict=True))


@dataclass(frozen=True)
class Declaration:
    """A claim as fixed before the run; see ``claims.toml`` of a column.

    Parameters
    ----------
    slug, id : str
        Column, and name of the claim within it.
    abstract, statement, metric : str
        What the abstract says (our words), what is tested, and what is measured.
    paper : str
        The paper's own number, or "qualitative".
    accept : tuple of float, optional
        Closed interval of values for which the claim holds.
    not_testable : str, optional
        Why it cannot be tested here; takes the place of ``accept``.
    """

    slug: str
    id: str
    abstract: str
    statement: str
    metric: str
    paper: str
    accept: tuple[float, float] | None = None
    not_testable: str | None = None

    def __post_init__(self) -> None:
        where = f"Claim {self.slug}/{self.id}"
        if (self.accept is None) == (self.not_testable is None):
            raise ValueError(f"{where} needs either accept = [low, high] or not_testable = reason.")
        if self.accept is not None and not self.accept[0] < self.accept[1]:
            raise ValueError(f"{where} needs accept = [low, high] with low < high.")

    @property
    def key(self) -> str:
        """Name of the claim in the whole book, ``slug/id``."""
        return f"{self.slug}/{self.id}"

    def verdict(self, value: float, low: float, high: float) -> str:
        """Judge a measured value and its interval.

        Returns
        -------
        str
            "reproduced" when the whole interval lies in the acceptance region, "partly" when only
            the value does, else "not reproduced".
        """
        if self.accept is None:
            return "not testable here"
        inside = [self.accept[0] <= x <= self.accept[1] for x in (value, low, high)]
        return "reproduced" if all(inside) else "partly" if inside[0] else "not reproduced"


def declarations(slug: str) -> dict[str, Declaration]:
    """Read ``claims.toml`` of a column.

    Parameters
    ----------
    slug : str
        Name of the column; its package is found but not imported.

    Returns
    -------
    dict from str to Declaration
        In the order of the file.

    Raises
    ------
    ValueError
        If the column has no such file, a key is missing, or an id occurs twice.
    """
    file = resources.files("icml24").joinpath(slug, "claims.toml")
    if not file.is_file():
        raise ValueError(f"The column {slug!r} declares no claims: there is no {slug}/claims.toml.")
    found: dict[str, Declaration] = {}
    for entry in tomllib.loads(file.read_text("utf-8")).get("claim", []):
        missing = [name for name in REQUIRED if name not in entry]
        if missing:
            raise ValueError(f"A claim in {slug}/claims.toml lacks {', '.join(missing)}.")
        if entry["id"] in found:
            raise ValueError(f"The claim id {entry['id']!r} occurs twice in {slug}/claims.toml.")
        accept = entry.pop("accept", None)
        accept = None if accept is None else (float(accept[0]), float(accept[1]))
        found[entry["id"]] = Declaration(slug, accept=accept, **entry)
    return found


def css_class(verdict: str) -> str:
    """Name the style of a verdict, for example ``verdict-not-reproduced``."""
    return "verdict-" + verdict.replace(" ", "-")


def _number(x: float) -> str:
    return {math.inf: "∞", -math.inf: "−∞"}.get(x, f"{x:.3g}".replace("-", "−"))


@dataclass(frozen=True)
class Claim:
    """A claim with its measurement, as it shows and stores itself in a notebook."""

    declaration: Declaration
    value: float | None
    low: float | None
    high: float | None
    n: int

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        if self.value is None or self.low is None or self.high is None:
            return "not testable here"
        return self.declaration.verdict(self.value, self.low, self.high)

    def record(self) -> dict[str, Any]:
        """Return the claim as plain data, the form stored in the notebook."""
        d = self.declaration
        accept = None if d.accept is None else [str(x) for x in d.accept]
        return {
            "id": d.key,
            "abstract": d.abstract,
            "statement": d.statement,
            "metric": d.metric,
            "paper": d.paper,
            "accept": accept,
            "reason": d.not_testable,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "verdict": self.verdict,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Claim:
        """Rebuild a claim from its stored form."""
        slug, _, name = record["id"].partition("/")
        accept = record["accept"] and (float(record["accept"][0]), float(record["accept"][1]))
        fields = {key: record[key] for key in ("abstract", "statement", "metric", "paper")}
        declared = Declaration(slug, name, **fields, accept=accept, not_testable=record["reason"])
        return cls(declared, *(record[key] for key in ("value", "low", "high", "n")))

    def measured(self) -> str:
        """Write out value and interval, or a dash."""
        if self.value is None or self.low is None or self.high is None:
            return "–"
        if self.low == self.high:
            return _number(self.value)
        return f"{_number(self.value)} [{_number(self.low)}, {_number(self.high)}]"

    def accepted(self) -> str:
        """Write out the acceptance region."""
        if self.declaration.accept is None:
            return "–"
        low, high = self.declaration.accept
        if math.isinf(high):
            return f"≥ {_number(low)}"
        if math.isinf(low):
            return f"≤ {_number(high)}"
        if _number(low) == _number(high):
            return f"{_number((low + high) / 2)} ± {_number((high - low) / 2)}"
        return f"{_number(low)} to {_number(high)}"

    def __str__(self) -> str:
        lines = [f"Claim {self.declaration.key}: {self.verdict}", f"  {self.declaration.statement}"]
        if self.declaration.not_testable:
            lines.append(f"  why not: {self.declaration.not_testable}")
        else:
            runs = f" (n = {self.n})" if self.n > 1 else ""
            lines.append(f"  {self.declaration.metric}: {self.measured()}{runs}")
            lines.append(f"  holds if {self.accepted()}; paper: {self.declaration.paper}")
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the card that the page shows."""
        e, d = html.escape, self.declaration
        runs = f", {self.n} runs" if self.n > 1 else ""
        if d.not_testable:
            body = f"<p>{e(d.not_testable)}</p>"
        else:
            body = (
                f"<dl><dt>{e(d.metric)}</dt><dd>{e(self.measured())}{runs}</dd>"
                f"<dt>holds if</dt><dd>{e(self.accepted())}</dd>"
                f"<dt>paper</dt><dd>{e(d.paper)}</dd></dl>"
            )
        return (
            f'<div class="claim" style="border-left:4px solid {COLOR[self.verdict]};'
            f'padding:.4em 1em"><p><strong class="verdict {css_class(self.verdict)}">'
            f"{self.verdict}</strong> {e(d.statement)}</p>{body}</div>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), "text/html": self.to_html(), MIME: self.record()}


class Claims:
    """The claims of one column, to be recorded one by one.

    Parameters
    ----------
    slug : str
        Name of the column.

    Examples
    --------
    >>> claims = Claims("additive_models")
    >>> sorted(claims)[0] in claims
    True
    """

    def __init__(self, slug: str) -> None:
        self.slug = slug
        self._declared = declarations(slug)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __getitem__(self, name: str) -> Declaration:
        try:
            return self._declared[name]
        except KeyError:
            known = ", ".join(self._declared)
            raise KeyError(
                f"{self.slug} declares no claim {name!r}; it declares {known}."
            ) from None

    def record(self, name: str, measured: Estimate | float | None = None) -> Claim:
        """Attach a measurement to a declared claim; make it the last line of its cell.

        Parameters
        ----------
        name : str
            Id of the claim.
        measured : Estimate or float, optional
            The measurement; a plain number stands for an exact result. Leave it out only for a
            claim that is declared not testable.

        Returns
        -------
        Claim
            Shows itself as a card with the verdict.

        Raises
        ------
        KeyError
            If the claim is not declared.
        ValueError
            If a testable claim gets no finite measurement, or an untestable one gets any.
        """
        declared = self[name]
        if declared.not_testable is not None:
            if measured is not None:
                raise ValueError(
                    f"{declared.key} is declared not testable: record it without value."
                )
            return Claim(declared, None, None, None, 0)
        if measured is None:
            raise ValueError(f"{declared.key} needs a measurement: an Estimate or a number.")
        if not isinstance(measured, Estimate):
            measured = Estimate(float(measured), float(measured), float(measured))
        value, low, high = float(measured.value), float(measured.low), float(measured.high)
        if not all(map(math.isfinite, (value, low, high))):
            raise ValueError(f"{declared.key} needs finite numbers, got {measured}.")
        return Claim(declared, value, low, high, measured.n)


@lru_cache(maxsize=512)
def _records_of(path: Path, _mtime: int) -> tuple[dict[str, Any], ...]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return tuple(output["data"][MIME] for output in outputs if MIME in output.get("data", {}))


def read_records(root: str | Path) -> dict[str, tuple[Path, Claim]]:
    """Collect the claims recorded in all stored notebooks below a folder.

    Parameters
    ----------
    root : path-like
        Usually the folder ``book``.

    Returns
    -------
    dict from str to (Path, Claim)
        ``slug/id`` to the notebook that recorded it and the claim, in order of the paths.

    Raises
    ------
    ValueError
        If two cells record the same claim.
    """
    found: dict[str, tuple[Path, Claim]] = {}
    for path in sorted(Path(root).rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        for record in _records_of(path, path.stat().st_mtime_ns):
            key = record["id"]
            if key in found:
                raise ValueError(
                    f"The claim {key} is recorded twice: in {found[key][0]} and in {path}."
                )
            found[key] = (path, Claim.from_record(record))
    return found
