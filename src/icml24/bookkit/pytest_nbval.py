"""A pytest plugin that makes nbval strict where it is lenient, and tolerant where it is brittle.

Strict: a notebook that was never run fails; after an error the rest of a notebook is skipped; a
notebook that takes too long fails. Tolerant: numbers agree within ``rtol`` (1e-3, or the cell's tag
``rtol=...``), a claim may move inside its own interval, and figures are not compared bit by bit.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

from icml24.bookkit.claims import MIME

RTOL = 1e-3
NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]*\w)")
NOT_COMPARED = ("image/svg+xml", "text/html", "application/vnd.plotly.v1+json")
SANITIZE = (
    (r"\b\d+(\.\d+)?\s?(ns|µs|ms|s|min)\b", "TIME"),
    (r"0x[0-9a-f]{6,}", "ADDRESS"),
    (r"(/[\w.+-]+)+/(site-packages|src)/", "PATH/"),
)


def same_text(ref: str, new: str, rtol: float = RTOL, atol: float = 1e-12) -> bool:
    """Whether two texts are equal up to numbers, and the numbers equal within tolerance.

    Examples
    --------
    >>> same_text("loss 1.0000", "loss 1.0004"), same_text("loss 1.00", "loss 1.04")
    (True, False)
    """
    if NUMBER.sub("#", ref) != NUMBER.sub("#", new):
        return False
    pairs = zip(NUMBER.findall(ref), NUMBER.findall(new), strict=True)
    floats = ((float(a.replace("−", "-")), float(b.replace("−", "-"))) for a, b in pairs)
    return all(abs(a - b) <= atol + rtol * max(abs(a), abs(b)) for a, b in floats)


def same_claim(ref: Mapping[str, Any], new: Mapping[str, Any], rtol: float = RTOL) -> bool:
    """Whether a claim keeps its words and verdict, and its value stays near its stored interval."""
    keys = ("id", "abstract", "statement", "metric", "paper", "accept", "reason", "verdict")
    if any(ref[key] != new[key] for key in keys):
        return False
    if ref["value"] is None or new["value"] is None:
        return ref["value"] is new["value"]
    slack = ref["high"] - ref["low"] + rtol * abs(ref["value"]) + 1e-12
    return ref["low"] - slack <= new["value"] <= ref["high"] + slack


def _soften_data(ref: Mapping[str, Any], new: dict[str, Any], rtol: float) -> None:
    if MIME in ref and MIME in new:
        if same_claim(ref[MIME], new[MIME], rtol):
            new.update(ref)
        return
    for key, value in ref.items():
        if key.endswith("text/plain") and key in new and same_text(value, new[key], rtol):
            new[key] = value


def soften(new: Sequence[Any], ref: Sequence[Any], rtol: float = RTOL) -> list[Any]:
    """Replace each fresh output that agrees within tolerance by the stored one.

    Parameters
    ----------
    new, ref : sequence of notebook outputs
        Fresh and stored outputs of one cell.
    rtol : float
        Relative tolerance for numbers.

    Returns
    -------
    list
        A copy of ``new`` that compares equal to ``ref`` exactly where the two agree.
    """
    result = [copy.deepcopy(output) for output in new]
    if len(new) != len(ref):
        return result
    for fresh, stored in zip(result, ref, strict=True):
        if fresh.output_type != stored.output_type:
            continue
        if fresh.output_type == "stream":
            if fresh.name == stored.name and same_text(stored.text, fresh.text, rtol):
                fresh.text = stored.text
        elif "data" in fresh and "data" in stored:
            _soften_data(stored.data, fresh.data, rtol)
    return result


def _rtol(cell: Any) -> float:
    tags = cell.metadata.get("tags", [])
    return next((float(tag[5:]) for tag in tags if tag.startswith("rtol=")), RTOL)


def _patch_nbval() -> None:
    from nbval import plugin
    from nbval.kernel import RunningKernel

    cell_class, file_class = plugin.IPyNbCell, plugin.IPyNbFile
    if getattr(cell_class, "icml24_patched", False):
        return
    cell_class.icml24_patched = True
    exact_compare, plain_init, file_init = (
        cell_class.compare_outputs,
        cell_class.__init__,
        file_class.__init__,
    )

    def compare_outputs(self: Any, test: Any, ref: Any, skip_compare: Any = None) -> bool:
        return exact_compare(self, soften(test, ref, _rtol(self.cell)), ref, skip_compare)

    def init_cell(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.output_timeout = 60

    def init_file(self: Any, *args: Any, **kwargs: Any) -> None:
        file_init(self, *args, **kwargs)
        self.skip_compare = (*self.skip_compare, *NOT_COMPARED)
        self.sanitize_patterns.update(SANITIZE)

    def execute_cell_input(self: Any, cell_input: str, allow_stdin: Any = None) -> str:
        return self.kc.execute(
            cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
        )

    cell_class.compare_outputs, cell_class.__init__ = compare_outputs, init_cell
    file_class.__init__ = init_file
    RunningKernel.execute_cell_input = execute_cell_input


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini value that bounds the run time of one notebook."""
    parser.addini("notebook_budget", "seconds one notebook may take (0: no bound)", default="900")


def pytest_configure(config: pytest.Config) -> None:
    """Patch nbval when it is in use."""
    if getattr(config.option, "nbval", False) or getattr(config.option, "nbval_lax", False):
        _patch_nbval()


def _is_cell(item: pytest.Item) -> bool:
    return type(item).__name__ == "IPyNbCell"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail cells that were never run; skip what follows an error."""
    if not _is_cell(item):
        return
    cell: Any = item.cell  # type: ignore[attr-defined]
    if cell.source.strip() and cell.execution_count is None:
        pytest.fail("This cell was never run: execute the notebook with make run NB=...", False)
    if getattr(item.parent, "icml24_failed", False):
        pytest.skip("an earlier cell of this notebook failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Add up the seconds of a notebook, remember errors, and hold it to its budget."""
    if not _is_cell(item):
        return (yield)
    parent: Any = item.parent
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        parent.icml24_failed = "outputs differ" not in str(error)
        raise
    finally:
        parent.icml24_seconds = (
            getattr(parent, "icml24_seconds", 0.0) + time.perf_counter() - started
        )
        item.user_properties.append(("notebook_seconds", parent.icml24_seconds))
    budget = float(item.config.getini("notebook_budget"))
    if budget and parent.icml24_seconds > budget:
        parent.icml24_failed = True
        pytest.fail(
            f"This notebook has taken {parent.icml24_seconds:.0f} s, over its budget of "
            f"{budget:.0f} s: make the experiment smaller or split the notebook.",
            pytrace=False,
        )
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds that each notebook took."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "notebook_seconds":
                    path = report.nodeid.split("::")[0]
                    seconds[path] = max(value, seconds.get(path, 0.0))
    if seconds:
        terminalreporter.section("seconds per notebook")
        for path, value in sorted(seconds.items()):
            terminalreporter.write_line(f"{value:7.1f}  {path}")
