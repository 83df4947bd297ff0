"""The nbval plugin, tried on notebooks whose stored outputs were tampered with."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient

from icml24.bookkit.pytest_nbval import same_claim, same_text

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    "import sys\nvalue = 1.2345",
    "print('loss', round(value, 4), 'after 3 steps')",
    "from icml24.bookkit.claims import Claim, Declaration\n"
    "d = Declaration('c', 'i', 'a', 's', 'm', 'p', (0.5, 2.0))\n"
    "Claim(d, value, value - 0.1, value + 0.1, 5)",
    "value",
]


@pytest.fixture(scope="module")
def executed():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3").execute(stderr=subprocess.DEVNULL)
    return notebook


def nbval(notebook, folder, *options):
    path = folder / "n.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "--nbval"]
    result = subprocess.run(
        [*command, "--nbval-current-env", *options, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def edited(notebook, cell, change):
    copy = nbformat.from_dict(notebook)
    copy = nbformat.reads(nbformat.writes(copy), as_version=4)
    change(copy.cells[cell])
    return copy


def set_text(text):
    def change(cell):
        cell.outputs[0].text = text

    return change


def test_untouched_passes_and_reports_seconds(executed, tmp_path):
    code, out = nbval(executed, tmp_path)
    assert code == 0, out
    assert "seconds per notebook" in out


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("loss 1.2349 after 3 steps\n", True),  # 0.03 % off
        ("loss 1.2839 after 3 steps\n", False),  # 4 % off
        ("loss 1.2345 after 4 steps\n", False),
        ("cost 1.2345 after 3 steps\n", False),
    ],
)
def test_stored_numbers_must_agree(executed, tmp_path, text, passes):
    code, out = nbval(edited(executed, 1, set_text(text)), tmp_path)
    assert (code == 0) == passes, out


def test_a_tag_widens_the_tolerance(executed, tmp_path):
    def change(cell):
        cell.outputs[0].text = "loss 1.2839 after 3 steps\n"
        cell.metadata.tags = ["rtol=0.05"]

    code, out = nbval(edited(executed, 1, change), tmp_path)
    assert code == 0, out


def test_an_unrun_notebook_fails(executed, tmp_path):
    def change(cell):
        cell.execution_count, cell.outputs = None, []

    code, out = nbval(edited(executed, 1, change), tmp_path)
    assert code == 1
    assert "never run" in out


@pytest.mark.parametrize(("key", "value"), [("value", 9.9), ("verdict", "partly"), ("paper", "q")])
def test_a_moved_claim_fails(executed, tmp_path, key, value):
    def change(cell):
        mime = "application/vnd.icml24.claim+json"
        cell.outputs[0].data[mime][key] = value
        if key == "value":
            cell.outputs[0].data[mime].update(low=9.8, high=10.0)

    code, _ = nbval(edited(executed, 2, change), tmp_path)
    assert code == 1


def test_an_error_fails_once_and_skips_the_rest(executed, tmp_path):
    def change(cell):
        cell.source = "raise ValueError('broken')"

    code, out = nbval(edited(executed, 1, change), tmp_path)
    assert code == 1
    assert "1 failed, 1 passed, 2 skipped" in out


def test_new_noise_on_stderr_fails(executed, tmp_path):
    def change(cell):
        cell.source += "\nprint('oops', file=sys.stderr)"

    code, _ = nbval(edited(executed, 1, change), tmp_path)
    assert code == 1


def test_a_slow_notebook_fails(executed, tmp_path):
    code, out = nbval(executed, tmp_path, "-o", "notebook_budget=0.000001")
    assert code == 1
    assert "over its budget" in out


numbers = st.floats(-1e6, 1e6).map(lambda x: f"{x:.6g}")


@given(st.lists(numbers, min_size=1, max_size=4))
def test_text_equals_itself(parts):
    assert same_text(" and ".join(parts), " and ".join(parts))


@given(st.floats(1e-3, 1e6), st.floats(0.02, 1.0))
def test_text_with_a_number_moved_differs(x, shift):
    assert not same_text(f"loss {x:.8g}", f"loss {x * (1 + shift):.8g}")


def test_numbers_inside_words_are_words():
    assert not same_text("model v1000", "model v1001")
    assert not same_text("layer1000.weight", "layer1001.weight")


def test_claims_without_values_compare():
    keys = ("id", "abstract", "statement", "metric", "paper", "accept", "reason", "verdict")
    record = dict.fromkeys(keys, "x") | {"value": None, "low": None, "high": None}
    assert same_claim(record, dict(record))
    assert not same_claim(record, record | {"value": 1.0, "low": 1.0, "high": 1.0})
