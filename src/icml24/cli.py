"""The command line: ``icml24 list | show | run | scorecard | new``."""

from __future__ import annotations

import importlib
import json
import re
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Column, Table

from icml24.bookkit.chapters import chapters, count_verdicts, stored_records
from icml24.bookkit.claims import Claim
from icml24.core.experiments import ResultCache
from icml24.core.experiments import run as run_experiment
from icml24.core.statistics import mean_interval

app = typer.Typer(
    help="ICML 2024, executed: look up the tested claims, and run the experiments behind them.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
console = Console()
STYLE = {"reproduced": "green", "partly": "yellow", "not reproduced": "red"}


class Scale(StrEnum):
    """Size of an experiment: what the book runs, or what the paper ran."""

    laptop = "laptop"
    paper = "paper"


def _fail(message: str) -> typer.Exit:
    typer.echo(f"icml24: {message}", err=True)
    return typer.Exit(2)


def _verdict(claim: Claim) -> str:
    style = STYLE.get(claim.verdict, "dim")
    return f"[{style}]{claim.verdict}[/{style}]"


@app.command("list")
def list_chapters() -> None:
    """List the chapters with their claims and verdicts."""
    records = stored_records()
    verdicts = [name.replace(" ", "\n") for name in (*STYLE, "not testable here")]
    table = Table(Column("chapter", min_width=22), "all", *verdicts)
    for chapter in chapters():
        claims = [c for c in records.values() if c.declaration.slug == chapter.slug]
        if not claims:  # its chapter is not in the book yet
            continue
        counts = [str(n) for n in count_verdicts(claims).values()]
        table.add_row(f"[bold]{chapter.slug}[/bold]\n{chapter.title}", str(len(claims)), *counts)
    console.print(table)


@app.command()
def show(claim: Annotated[str, typer.Argument(help="slug/id, or a chapter's slug")]) -> None:
    """Show one claim (or all of a chapter) with paper value, our value and verdict."""
    records = stored_records()
    found = [c for key, c in records.items() if claim in (key, key.split("/")[0])]
    if not found:
        known = ", ".join(records) or "none yet"
        raise _fail(f"there is no claim {claim!r}; known are: {known}.")
    for entry in found:
        console.print(str(entry), highlight=False, markup=False)
        console.print(f"  abstract: {entry.declaration.abstract}\n", highlight=False, markup=False)


@app.command()
def scorecard(
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Print every claim of every abstract with its verdict."""
    records = stored_records()
    if as_json:
        typer.echo(json.dumps([c.record() for c in records.values()], indent=1, ensure_ascii=False))
        return
    table = Table("claim", "holds if", "paper", "measured here", "verdict")
    for claim in records.values():
        d = claim.declaration
        table.add_row(d.key, claim.accepted(), d.paper, claim.measured(), _verdict(claim))
    console.print(table)


def _column(slug: str) -> Any:
    if not resources.files("icml24").joinpath(slug, "experiments.py").is_file():
        root = resources.files("icml24")
        known = sorted(f.name for f in root.iterdir() if f.joinpath("experiments.py").is_file())
        known = [name for name in known if name not in ("core", "bookkit")]
        raise _fail(f"there is no column {slug!r}; there are: {', '.join(known)}.")
    return importlib.import_module(f"icml24.{slug}.experiments")


def summarise(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean and 95 % interval over seeds of every number in the records.

    Parameters
    ----------
    frame : pandas.DataFrame
        As returned by :func:`icml24.core.experiments.run`.
    by : list of str
        Columns that tell the settings apart.

    Returns
    -------
    pandas.DataFrame
        One row for each setting and number, columns ``quantity``, ``mean [95 % interval]``, ``n``.
    """
    numbers = frame.drop(columns=[*by, "seed"]).select_dtypes("number").columns
    rows = []
    groups = frame.groupby(by, sort=False) if by else [((), frame)]
    for key, group in groups:
        setting = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        for name in numbers:
            values = group[name].to_numpy(float)
            values = values[np.isfinite(values)]
            text = str(mean_interval(values)) if values.size else "–"
            row = {**setting, "quantity": name, "mean [95 % interval]": text, "n": values.size}
            rows.append(row)
    return pd.DataFrame(rows)


@app.command()
def run(
    slug: Annotated[str, typer.Argument(help="Name of the column.")],
    experiment: Annotated[
        str | None, typer.Option(help="Run only this experiment (default: all of the column).")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    jobs: Annotated[int, typer.Option(help="Processes; -1 takes all cores.")] = 1,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    scale: Annotated[Scale, typer.Option(help="Laptop (the book) or paper.")] = Scale.laptop,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the runs to this CSV file.")] = None,
) -> None:
    """Run a column's experiments over seeds; print means with intervals."""
    module = _column(slug)
    chosen = module.EXPERIMENTS
    if experiment is not None:
        if experiment not in chosen:
            raise _fail(f"{slug} has no experiment {experiment!r}; it has: {', '.join(chosen)}.")
        chosen = {experiment: chosen[experiment]}
    if out is not None and not out.parent.is_dir():
        raise _fail(f"the folder {out.parent} does not exist; create it first.")
    config = getattr(module.Config, scale.value)()
    cache = None if fresh else ResultCache()
    frames = []
    for name, function in chosen.items():
        frame = run_experiment(function, config, seeds, jobs=jobs, dask=dask, cache=cache)
        summary = summarise(frame, [])
        table = Table(*summary.columns, title=f"{slug}: {name} ({scale.value} scale)")
        for row in summary.itertuples(index=False):
            table.add_row(*map(str, row))
        console.print(table)
        frames.append(frame.assign(experiment=name))
    if out is not None:
        scratch = out.with_suffix(out.suffix + ".tmp")
        pd.concat(frames).to_csv(scratch, index=False)
        scratch.replace(out)
        console.print(f"wrote {out}")


@app.command()
def new(
    slug: Annotated[str, typer.Argument(help="Name of the new column, like_this.")],
    root: Annotated[Path, typer.Option(help="A checkout of the book.")] = Path("."),
) -> None:
    """Start a new chapter: package, tests, pages and claims of a column, from the template."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        raise _fail(f"{slug!r} is no column name: use lower-case letters, digits and _.")
    if not (root / "src" / "icml24").is_dir() or not (root / "_toc.yml").is_file():
        raise _fail(f"{root.resolve()} is no checkout of the book: run this at its top folder.")
    targets = {
        "package": root / "src" / "icml24" / slug,
        "tests": root / "tests" / slug,
        "book": root / "book" / slug,
    }
    for target in targets.values():
        if target.exists():
            raise _fail(f"{target} exists already; choose another name.")
    title = slug.replace("_", " ").capitalize()
    for part, target in targets.items():
        folder = resources.files("icml24").joinpath("bookkit", "template", part)
        target.mkdir(parents=True)
        for file in folder.iterdir():
            text = file.read_text("utf-8").replace("SLUG", slug).replace("TITLE", title)
            name = file.name.removesuffix(".txt")
            (target / name).write_text(text, "utf-8")
            console.print(f"wrote {target / name}", highlight=False)
    console.print(
        f"Next: name the pages of book/{slug} in _toc.yml and {slug} in the import contracts of "
        f"pyproject.toml, then make run NB=book/{slug}/01_idea.md (steps in CONTRIBUTING.md).",
        highlight=False,
    )
