"""The author's tools: a bad pair, a failed run or a missing pin ends with one clear sentence."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from icml24.cli import app, summarise
from icml24.core.experiments import run

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import env  # noqa: E402
import nb  # noqa: E402
import speed  # noqa: E402

HEADER = """---
jupytext: {text_representation: {extension: .md, format_name: myst}}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setattr(nb, "ROOT", tmp_path)
    monkeypatch.setattr(nb, "BOOK", tmp_path)
    source = tmp_path / "01_a.md"
    source.write_text(HEADER + "\n# Title\n\n```{code-cell} ipython3\nprint(1 + 1)\n```\n")
    assert nb.run([str(source)]) == 0
    return source, source.with_suffix(".ipynb")


def test_a_fresh_pair_is_fine_and_running_again_changes_no_byte(pair):
    assert nb.problems(*pair) == []
    before = pair[1].read_bytes()
    nb.run([str(pair[0])])
    assert pair[1].read_bytes() == before


def test_formatting_changes_both_twins_and_keeps_header_and_outputs(pair):
    pair[0].write_text(pair[0].read_text().replace("print(1 + 1)", "print( 1+1 )"))
    assert nb.run([str(pair[0])]) == 0
    nb.fmt([str(pair[0])])
    assert pair[0].read_text().startswith(HEADER)
    assert "print(1 + 1)" in pair[0].read_text()
    assert nb.problems(*pair) == []
    assert nbformat.read(pair[1], as_version=4).cells[1].outputs[0].text == "2\n"


def test_an_edited_twin_is_found(pair):
    twin = nbformat.read(pair[1], as_version=4)
    twin.cells[1].source = "print(3)"
    nbformat.write(twin, pair[1])
    assert "differ" in nb.problems(*pair)[0]


def test_an_unrun_notebook_is_found(pair):
    twin = nbformat.read(pair[1], as_version=4)
    twin.cells[1].execution_count = None
    nbformat.write(twin, pair[1])
    assert "not run" in nb.problems(*pair)[0]


def test_an_orphaned_twin_is_found(pair, capsys):
    pair[0].unlink()
    assert nb.check([]) == 1
    assert "has no .md source" in capsys.readouterr().out


def test_a_failing_notebook_leaves_the_stored_one_alone(pair, capsys):
    before = pair[1].read_bytes()
    pair[0].write_text(pair[0].read_text().replace("1 + 1", "1 / 0"))
    assert nb.run([str(pair[0])]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert pair[1].read_bytes() == before


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(SystemExit, match="There is no notebook source"):
        nb.pairs([str(tmp_path / "absent.md")])


def test_a_missing_pin_is_named(monkeypatch):
    monkeypatch.setattr(env, "pins", dict)
    with pytest.raises(SystemExit, match="no pin for"):
        env.environment()


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_list_and_scorecard_name_every_chapter():
    result = invoke("list")
    assert result.exit_code == 0
    assert "additive_models" in result.output
    assert invoke("scorecard").exit_code == 0
    assert invoke("scorecard", "--json").output.startswith("[")


def test_show_prints_claims_and_names_unknown_ones():
    result = invoke("show", "additive_models")
    assert result.exit_code == 0
    assert "holds if" in result.output
    result = invoke("show", "nothing")
    assert result.exit_code == 2
    assert "there is no claim 'nothing'" in result.output


def test_run_names_unknown_columns_and_experiments():
    result = invoke("run", "nothing")
    assert result.exit_code == 2
    assert "no column 'nothing'; there are: additive_models" in result.output
    result = invoke("run", "additive_models", "--experiment", "nothing")
    assert result.exit_code == 2
    assert "has no experiment 'nothing'" in result.output


def test_a_new_column_works_from_the_first_minute(tmp_path, monkeypatch):
    (tmp_path / "src" / "icml24").mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text("")
    result = invoke("new", "toy_column", "--root", str(tmp_path))
    assert result.exit_code == 0, result.output
    package = tmp_path / "src" / "icml24" / "toy_column"
    code = (package / "experiments.py").read_text()
    assert "icml24.toy_column.method" in code
    assert "SLUG" not in code
    monkeypatch.syspath_prepend(str(package))
    from method import scale

    assert scale([1.0], 2.0) == [2.0]
    again = invoke("new", "toy_column", "--root", str(tmp_path))
    assert again.exit_code == 2
    assert "exists already" in again.output
    assert "no column name" in invoke("new", "Bad-Name", "--root", str(tmp_path)).output
    assert "no checkout" in invoke("new", "fine", "--root", str(package)).output


def test_run_prints_means_and_writes_whole_files(tmp_path, monkeypatch):
    from dataclasses import dataclass
    from types import SimpleNamespace

    from icml24 import cli

    @dataclass(frozen=True)
    class Config:
        n: int = 1

        @classmethod
        def laptop(cls):
            return cls()

    def square(config, seed):
        return {"square": float(seed**2)}

    module = SimpleNamespace(Config=Config, EXPERIMENTS={"square": square})
    monkeypatch.setattr(cli, "_column", lambda slug: module)
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "runs.csv"
    result = invoke("run", "toy", "--seeds", "3", "--fresh", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "1.67" in result.output
    assert out.read_text().count("\n") == 4
    result = invoke("run", "toy", "--out", str(tmp_path / "absent" / "x.csv"))
    assert result.exit_code == 2
    assert "does not exist" in result.output
    summary = summarise(run(square, Config(), seeds=3), [])
    assert summary["n"].tolist() == [3]


def test_an_old_python_is_refused_before_anything_is_built(tmp_path):
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", "-C", str(ROOT), f"PYTHON={old}", f"VENV={venv}", f"{venv}/.ok"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "too old" in done.stdout + done.stderr
    assert not venv.exists()


def bench(name, seconds, **extra):
    return {name: {"seconds": seconds, "extra": extra}}


def test_rows_of_the_speed_page_name_benchmarks_that_exist():
    files = (ROOT / "tests" / "benchmarks").glob("test_*.py")
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(f.read_text() for f in files), re.M))
    wanted = speed.wanted()
    names = [row[k] for row in wanted["row"] for k in ("ours", "other", "of") if k in row]
    names += [line["test"] for line in wanted["growth"]]
    assert {n.partition("[")[0] for n in names if not n.startswith("extra:")} <= defined


def test_speed_page_shows_what_is_stored_and_every_row_is():
    stored = json.loads(speed.STORED.read_text("utf-8"))
    assert speed.PAGE.read_text("utf-8") == speed.page(stored)
    assert [speed.key(row) for row in stored["rows"]] == [
        speed.key(row) for row in speed.wanted()["row"]
    ]
    assert len(stored["growth"]) == len(speed.wanted()["growth"])
    assert "not explained" not in speed.page(stored)


def test_speed_page_divides_the_peers_time_by_ours():
    found = bench("test_ours[bfn-solver2]", 0.5) | bench("test_diffusers[dpmsolver++]", 2.0)
    found |= bench("test_search[counting search]", 1.0)
    found |= bench("test_search[1 % of the pairs, one by one]", 0.25)  # a hundredth of the work
    slow, fast = "test_optimizer_step[1e6 in 1 tensor-ours]", "1e6 in 1 tensor-adamw]"
    found |= bench(slow, 2e-3) | bench(f"test_optimizer_step[{fast}", 1e-3)
    stored = speed.take(found, {})
    ratios = {row["chapter"]: row["ratio"] for row in stored["rows"]}
    assert ratios == {"bayesian_flow": 4.0, "radio_fields": 25.0, "width_scaling": 0.5}
    text = speed.page(stored)
    text = text.replace("\u00a0", " ")
    assert "| 500 ms |" in text and "| 25 | 1 s | 25 s |" in text
    assert "Where the peer is faster" in text and "arctangent" in text
    other = bench("test_ours[bfn-solver2]", 1.0) | bench("test_diffusers[dpmsolver++]", 2.0)
    kept = {row["chapter"]: row["ratio"] for row in speed.take(other, stored)["rows"]}
    assert kept == ratios | {"bayesian_flow": 2.0}
