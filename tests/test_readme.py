"""What the README and the first page of each chapter show works as shown."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("book/*/index.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.parent.name}-{k}")
    for page in PAGES
    for k, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


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
