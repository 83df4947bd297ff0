"""The book as a whole: pairs, frames, claims, links, alt text, and every generated file."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jupytext
import numpy as np
import pytest
import yaml
from PIL import Image

from icml24.bookkit.chapters import chapters, stored_records
from icml24.bookkit.claims import MIME, Claim, declarations, read_records

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import env  # noqa: E402
import nb  # noqa: E402
import records  # noqa: E402

PAIRS = nb.pairs([])
CHAPTERS = [chapter for chapter in chapters() if (ROOT / "book" / chapter.slug).is_dir()]
INDEX_FRAME = [
    "What you will be able to do",
    "Claims tested here",
    "From equations to code",
    "Use it on your own data",
    "The full-scale path",
    "Where to read on",
]
each_pair = pytest.mark.parametrize(
    ("source", "target"), PAIRS, ids=[p[0].parent.name + "/" + p[0].stem for p in PAIRS]
)
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=[c.slug for c in CHAPTERS])


def headings(cells):
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^## (.+)$", text, re.M)


def in_order(wanted, found):
    rest = iter(found)
    return all(any(w == f for f in rest) for w in wanted)


def toc_files():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())

    def walk(node):
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("file", "root"):
                    yield value
                else:
                    yield from walk(value)
        elif isinstance(node, list):
            for entry in node:
                yield from walk(entry)

    return list(walk(toc))


@each_pair
def test_pair_is_the_same_and_fully_run(source, target):
    assert nb.problems(source, target) == []


def test_every_notebook_and_chapter_is_in_the_contents():
    listed = {Path(name).with_suffix("").as_posix() for name in toc_files()}
    pages = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT / "book").rglob("*.md")}
    assert pages == listed
    for name in toc_files():
        is_notebook = (ROOT / name).with_suffix(".ipynb").is_file()
        assert name.endswith(".ipynb") == is_notebook, f"{name}: write the suffix of notebooks"


@each_chapter
def test_minutes_to_read_add_up(chapter):
    folder = ROOT / "book" / chapter.slug
    index = re.search(r"(\d+)\s+minutes\s+to\s+read", (folder / "index.md").read_text("utf-8"))
    pages = [path.read_text("utf-8") for path in sorted(folder.glob("[0-9]*.md"))]
    minutes = [int(re.search(r"\*(\d+)\s+minutes\s+to\s+read", page)[1]) for page in pages]
    assert chapter.read == int(index[1]) == sum(minutes)


def test_chapters_are_numbered_as_in_the_table_of_contents():
    listed = [Path(name).parent.name for name in toc_files() if name.endswith("/index")]
    assert [chapter.slug for chapter in CHAPTERS] == listed
    assert [chapter.order for chapter in CHAPTERS] == list(range(1, len(CHAPTERS) + 1))


@each_chapter
def test_index_has_the_frame(chapter):
    text = (ROOT / "book" / chapter.slug / "index.md").read_text()
    assert "Minutes and needs" in text
    assert in_order(INDEX_FRAME, re.findall(r"^## (.+)$", text, re.M))


@each_chapter
def test_notebooks_have_the_frame(chapter):
    sources = [source for source, _ in PAIRS if source.parent.name == chapter.slug]
    assert 2 <= len(sources) <= 4
    cells = [jupytext.read(source).cells for source in sources]
    first = ["The question in one picture", "A case small enough to check by hand"]
    assert in_order(first, headings(cells[0]))
    for source, notebook in zip(sources, cells, strict=True):
        found = headings(notebook)
        assert found[-2:] == ["What to take home", "Exercises"], source.name
        assert "find_spec" in notebook[1].source + notebook[2].source, "the set-up cell is missing"
    every = "\n".join(cell.source for notebook in cells for cell in notebook)
    labels = re.findall(r"^:label: (\S+)", every, re.M)
    solved = re.findall(r"^```\{solution-start\} (\S+)", every, re.M)
    exercises = [name for name in labels if name in solved]
    assert 3 <= len(exercises) <= 8, "three to eight exercises, each with a gated solution"
    assert every.count("Explorer(") >= 1, "a chapter has an interactive element"
    tags = [t for notebook in cells for cell in notebook for t in cell.metadata.get("tags", [])]
    assert tags.count("cover") == 1, "exactly one cell is tagged cover"


@each_chapter
def test_every_declared_claim_is_recorded_as_declared(chapter):
    recorded = {
        claim.declaration.id: claim
        for _, claim in read_records(ROOT / "book" / chapter.slug).values()
    }
    declared = declarations(chapter.slug)
    assert set(recorded) == set(declared)
    for name, claim in recorded.items():
        assert claim.declaration == declared[name], f"{name}: run the notebook again"


@each_pair
def test_cards_show_their_records(source, target):
    for cell in json.loads(target.read_text())["cells"]:
        for output in cell.get("outputs", []):
            if MIME in output.get("data", {}):
                claim = Claim.from_record(output["data"][MIME])
                assert output["data"][MIME] == claim.record()
                assert "".join(output["data"]["text/plain"]) == str(claim)
                assert "".join(output["data"]["text/html"]) == claim.to_html()


@each_pair
def test_cells_are_short_and_figures_described(source, target):
    for cell in json.loads(target.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        text = "".join(cell["source"])
        lines = text.rstrip().splitlines()
        assert len(lines) <= 25, text
        assert all(len(line) <= 80 for line in lines if "http" not in line), text
        if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
            alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
            assert len(alt) > 20, f"describe the figure of this cell:\n{text}"
            assert "plt.show()" in text, text


def test_prose_binds_its_numbers():
    known = set(read_records(ROOT / "book"))
    for page in (ROOT / "book").rglob("*.md"):
        for key in re.findall(r"\{claim\}`([^`|]+)", page.read_text()):
            assert key in known, f"{page.name} refers to the unknown claim {key}"


def test_generated_files_are_current():
    assert (ROOT / "environment.yml").read_text() == env.environment()
    assert (ROOT / "src" / "icml24" / "scorecard.json").read_text() == records.scorecard()
    assert (ROOT / "README.md").read_text() == records.readme()
    assert set(stored_records()) == set(read_records(ROOT / "book"))


def test_picture_of_the_readme_shows_the_covers():
    stored = np.asarray(Image.open(records.COVERS).convert("RGB"), dtype=float)
    fresh = np.asarray(records.covers().convert("RGB"), dtype=float)
    assert stored.shape == fresh.shape, "run python tools/records.py"
    assert np.abs(stored - fresh).mean() < 4, "run python tools/records.py"


def test_every_column_is_under_the_import_contracts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    columns = {f"icml24.{c.slug}" for c in chapters()}
    assert columns <= set(contracts[0]["modules"])
    assert columns <= set(contracts[1]["forbidden_modules"])
    assert columns <= set(contracts[2]["forbidden_modules"])
    assert columns <= set(contracts[3]["source_modules"])


@pytest.mark.parametrize("slug", [c.slug for c in chapters()])
def test_the_tests_of_a_column_are_a_package(slug):
    """Two columns may use the same file name, which pytest allows in packages only."""
    assert (ROOT / "tests" / slug / "__init__.py").is_file()


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, icml24; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_set_up_cells_name_the_configured_repository():
    url = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
    for source, _ in PAIRS:
        assert f"git+{url}" in source.read_text()


def test_no_paths_of_a_machine():
    pattern = re.compile(r"/(?:home|root|work|Users)/\w+")
    for path in [*(ROOT / "book").rglob("*.md"), *(ROOT / "book").rglob("*.ipynb")]:
        assert not pattern.search(path.read_text()), path
