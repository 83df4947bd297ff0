"""What the README and the first page of each chapter show works as shown."""

import ast
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("book/*/index.md"))]
SLOW = "The full-scale path"  # blocks under this heading take hours: only their names are checked


def blocks(page):
    """Yield (id, code, runs here) for each Python block of a page."""
    sections = re.split(r"^## ", page.read_text(), flags=re.M)
    found = [
        (code, not section.startswith(SLOW))
        for section in sections
        for code in re.findall(r"```python\n(.*?)```", section, re.S)
    ]
    for k, (code, runs) in enumerate(found):
        yield f"{page.parent.name}-{k}", code, runs


ALL = [block for page in PAGES for block in blocks(page)]
BLOCKS = [pytest.param(code, id=name) for name, code, runs in ALL if runs]
SLOW_BLOCKS = [pytest.param(code, id=name) for name, code, runs in ALL if not runs]


def write_inputs(folder):
    rng = np.random.default_rng(0)
    n = 120
    houses = pd.DataFrame(
        {
            "area": rng.uniform(40, 200, n).round(),
            "rooms": rng.integers(1, 7, n),
            "district": rng.choice(["north", "south", "harbour"], n),
        }
    )
    extra = houses["district"].map({"north": 0, "south": 50, "harbour": 150})
    houses["price"] = 2 * houses["area"] + extra + rng.normal(0, 10, n)
    for name in ("houses.csv", "my_table.csv"):
        houses.to_csv(folder / name, index=False)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_blocks_run(code, tmp_path, monkeypatch):
    mpl.use("Agg")
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "page.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("code", SLOW_BLOCKS)
def test_full_scale_blocks_name_what_exists(code):
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    namespace = {}
    exec(compile(ast.Module(imports, []), "page.md", "exec"), namespace)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert loaded <= namespace.keys()


def test_named_imports_exist():
    lines = re.findall(r"`(from icml24\S* import [^`]+)`", README.read_text())
    assert lines
    for line in lines:
        exec(line, {})


def test_the_two_commands_are_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z0-9_]+)", README.read_text())) - {"alone"}
    targets = set(re.findall(r"^([a-z0-9_]+):", makefile, re.M))
    assert {"book", "test"} <= named
    assert named <= targets
