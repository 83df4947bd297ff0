"""Keep the notebook pairs: ``NN_name.md`` is the source, ``NN_name.ipynb`` its executed twin.

    python tools/nb.py run  [files]    execute, normalise, write the .ipynb
    python tools/nb.py fmt  [files]    format the code cells of both twins
    python tools/nb.py check [files]   are the twins the same, fully executed and of sensible size?

Files are .md or .ipynb paths; without any, all notebooks of the book. No file times are used.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
MAX_BYTES = 1_500_000
NOISE = ("TCP without encryption", "debugger: ")
WIDGET = "application/vnd.jupyter.widget-view+json"


def is_notebook(path: Path) -> bool:
    return path.read_text("utf-8").startswith("---\njupytext:")


def pairs(files: list[str]) -> list[tuple[Path, Path]]:
    """The (.md, .ipynb) pairs named by ``files``, or all of the book."""
    if files:
        sources = [Path(name).resolve().with_suffix(".md") for name in files]
        for path in sources:
            if not path.is_file():
                sys.exit(f"There is no notebook source {path}; write the .md first.")
            if not is_notebook(path):
                sys.exit(f"{path} is a plain page, not a notebook: it has no jupytext header.")
    else:
        sources = [path for path in sorted(BOOK.rglob("*.md")) if is_notebook(path)]
    return [(path, path.with_suffix(".ipynb")) for path in sources]


def squeeze_png(data: str) -> str:
    """Palette-compress a base64 PNG: a third of the size, and stable bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    if image.mode != "P":
        if image.mode == "RGBA":
            ground = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(ground, image)
        image = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Make the file a function of its content: stable ids, no timings, small figures."""
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        name = hashlib.sha1((cell.cell_type + cell.source).encode()).hexdigest()[:10]
        seen[name] += 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = squeeze_png(data["image/png"])
                output.metadata = {}
            data.pop(WIDGET, None)
            if "text" in output:
                output.text = ANSI.sub("", output.text)
            if "traceback" in output:
                output.traceback = [ANSI.sub("", line) for line in output.traceback]
        if "outputs" in cell:
            cell.outputs = [
                output
                for output in cell.outputs
                if not (output.output_type == "stream" and any(n in output.text for n in NOISE))
            ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    notebook.nbformat_minor = 5
    return notebook


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write in one step, so that an interrupt leaves the old file whole."""
    scratch = path.with_suffix(".ipynb.tmp")
    nbformat.write(notebook, scratch)
    scratch.replace(path)


def run(files: list[str]) -> int:
    failures = 0
    for source, target in pairs(files):
        notebook = jupytext.read(source)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        bar = tqdm(total=len(code), desc=str(source.relative_to(ROOT)), disable=None)
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            allow_errors=False,
            resources={"metadata": {"path": str(source.parent)}},
            on_cell_executed=lambda bar=bar, **_: bar.update(),
        )
        started = time.perf_counter()
        try:
            client.execute(stderr=subprocess.DEVNULL)
        except CellExecutionError as error:
            bar.close()
            print(f"{source.relative_to(ROOT)} failed; its .ipynb is left as it was.\n{error}")
            failures += 1
            continue
        bar.close()
        write(normalise(notebook), target)
        print(f"{target.relative_to(ROOT)}: {time.perf_counter() - started:.0f} s")
    return failures


def fmt(files: list[str]) -> int:
    """Format code cells with ruff, in the source and in the twin (whose outputs stay)."""
    for source, target in pairs(files):
        notebook = jupytext.read(source)
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder) / "cells.ipynb"
            nbformat.write(nbformat.from_dict(notebook), scratch)
            command = ["ruff", "format", "--quiet", "--line-length", "80", str(scratch)]
            subprocess.run([sys.executable, "-m", *command], check=True)
            formatted = nbformat.read(scratch, as_version=4)
        changed = [cell.source for cell in formatted.cells] != [c.source for c in notebook.cells]
        if not changed:
            continue
        for old, new in zip(notebook.cells, formatted.cells, strict=True):
            old.source = new.source
        _, header, _ = source.read_text("utf-8").split("---\n", 2)
        _, _, body = jupytext.writes(notebook, fmt="md:myst").split("---\n", 2)
        source.write_text("---\n".join(["", header, body]), "utf-8")
        if target.is_file():
            twin = nbformat.read(target, as_version=4)
            if len(twin.cells) == len(formatted.cells):
                for old, new in zip(twin.cells, formatted.cells, strict=True):
                    old.source = new.source
                write(normalise(twin), target)
        print(f"formatted {source.relative_to(ROOT)}")
    return 0


def describe(cell: nbformat.NotebookNode) -> tuple[str, str, str]:
    kept = {key: cell.metadata[key] for key in ("mystnb", "tags") if key in cell.metadata}
    return cell.cell_type, cell.source.rstrip(), json.dumps(kept, sort_keys=True)


def problems(source: Path, target: Path) -> list[str]:
    """What is wrong with a pair, in sentences."""
    name = target.name
    if not target.is_file():
        return [f"{name} is missing: make run NB={source}"]
    text, twin = jupytext.read(source), nbformat.read(target, as_version=4)
    found = []
    if [describe(cell) for cell in text.cells] != [describe(cell) for cell in twin.cells]:
        found.append(
            f"{name} and its .md differ: edit the .md, then make run NB={source.with_suffix('.md')}"
        )
    code = [cell for cell in twin.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append(f"{name} was not run from top to bottom: make run NB={source}")
    for cell in code:
        tags = cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags:
                found.append(f"{name} stores an error: {output.evalue}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"{name} stores noise on stderr: {output.text[:80]!r}")
    if target.stat().st_size > MAX_BYTES:
        found.append(f"{name} is larger than {MAX_BYTES / 1e6:.1f} MB: store smaller figures")
    return found


def check(files: list[str]) -> int:
    count = 0
    for source, target in pairs(files):
        for problem in problems(source, target):
            print(f"{source.parent.relative_to(ROOT)}: {problem}")
            count += 1
    if not files:
        for target in sorted(BOOK.rglob("*.ipynb")):
            if not target.with_suffix(".md").is_file():
                print(f"{target.relative_to(ROOT)} has no .md source")
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "fmt", "check"])
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    action = {"run": run, "fmt": fmt, "check": check}[arguments.command]
    sys.exit(1 if action(arguments.files) else 0)


if __name__ == "__main__":
    main()
