"""What the README shows works as shown."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


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
    houses.to_csv(folder / "houses.csv", index=False)


@pytest.mark.parametrize("code", BLOCKS)
def test_python_blocks_run(code, tmp_path, monkeypatch):
    mpl.use("Agg")
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})


def test_the_two_commands_are_make_targets():
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z0-9_]+)", README.read_text())) - {"alone"}
    targets = set(re.findall(r"^([a-z0-9_]+):", makefile, re.M))
    assert {"book", "test"} <= named
    assert named <= targets
