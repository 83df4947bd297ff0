"""Sphinx extension: the scorecard, claims in prose, chapter cards, and everything served locally.

- ``{claim}`slug/id` `` writes the measured value with its interval, ``|.2f`` formats it,
  ``||verdict`` writes the verdict instead;
- ``{scorecard}`` makes the table of claims (``:chapter: slug`` restricts it);
- ``{chapters}`` makes the cards of the landing page;
- MathJax and Plotly are copied out of installed packages, so no page asks another host.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext import viewcode
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.util.nodes import make_refnode

import icml24
from icml24.bookkit import references
from icml24.bookkit.chapters import Chapter, chapters, count_verdicts
from icml24.bookkit.claims import Claim, css_class, read_records

__all__ = ["setup"]

logger = logging.getLogger(__name__)
COVER = "cover"
#: A formula in running text with what is written right after it: a full stop must not wrap alone.
MATH_AND_MARK = r'(<span class="math notranslate nohighlight">[^<]*</span>[^\s<]+)'


def _link(docname: str, text: str) -> addnodes.pending_xref:
    xref = addnodes.pending_xref(
        "", refdomain="std", reftype="doc", reftarget="/" + docname, refexplicit=True, refwarn=True
    )
    xref += nodes.inline(text, text)
    return xref


def _badge(verdict: str, text: str | None = None) -> nodes.inline:
    return nodes.inline("", text or verdict, classes=["verdict", css_class(verdict)])


def _docname(path: Path, source: Path) -> str:
    return path.relative_to(source).with_suffix("").as_posix()


class ClaimRole(SphinxRole):
    """Write a claim's number or verdict in running text."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Resolve the role."""
        key, *options = self.text.split("|")
        records = read_records(Path(self.env.srcdir) / "book")
        if key not in records:
            logger.warning("no notebook records the claim %r", key, location=self.get_location())
            return [nodes.inline(self.rawtext, self.text)], []
        path, claim = records[key]
        self.env.note_dependency(str(path))
        if "verdict" in options:
            return [_badge(claim.verdict)], []
        if claim.value is None:
            return [nodes.inline(self.rawtext, "–")], []
        text = f"{claim.value:{options[0]}}" if options else claim.measured()
        return [nodes.inline(self.rawtext, text.replace("-", "−"))], []


class Scorecard(SphinxDirective):
    """A table of claims with paper value, our value and verdict."""

    option_spec: ClassVar = {"chapter": directives.unchanged}
    header = ("Claim", "Holds if", "Paper", "Measured here", "Verdict")

    def run(self) -> list[nodes.Node]:
        """Build the table."""
        source = Path(self.env.srcdir)
        chosen = self.options.get("chapter")
        rows = [
            (path, claim)
            for path, claim in read_records(source / "book").values()
            if chosen in (None, claim.declaration.slug)
        ]
        for path, _ in rows:
            self.env.note_dependency(str(path))
        if not rows:
            logger.warning("the scorecard finds no claims", location=self.get_location())
            return []
        if chosen:
            return [self._table(rows)]
        summary = nodes.paragraph("", "", *_verdicts([claim for _, claim in rows]))
        result: list[nodes.Node] = [summary]
        for chapter in chapters():
            part = [(path, c) for path, c in rows if c.declaration.slug == chapter.slug]
            if part:
                section = nodes.section(ids=[nodes.make_id(f"claims {chapter.slug}")])
                section += nodes.title("", chapter.title)
                section += self._table(part)
                result.append(section)
        return result

    def _table(self, rows: Sequence[tuple[Path, Claim]]) -> nodes.container:
        source = Path(self.env.srcdir)
        group = nodes.tgroup(cols=len(self.header))
        group += [nodes.colspec(colwidth=width) for width in (40, 12, 16, 18, 14)]
        head = nodes.row()
        for name in self.header:
            head += nodes.entry("", nodes.paragraph("", name))
        group += nodes.thead("", head)
        body = nodes.tbody()
        for path, claim in rows:
            d = claim.declaration
            text = nodes.paragraph("", "", _link(_docname(path, source), d.statement))
            note = nodes.paragraph("", d.not_testable or d.metric, classes=["metric"])
            row = nodes.row()
            row += nodes.entry("", text, note)
            for cell in (claim.accepted(), d.paper, claim.measured()):
                row += nodes.entry("", nodes.paragraph("", cell))
            row += nodes.entry("", nodes.paragraph("", "", _badge(claim.verdict)))
            body += row
        group += body
        table = nodes.table("", group, classes=["scorecard"])
        return nodes.container("", table, classes=["scorecard-box"])


def _verdicts(claims: Sequence[Claim]) -> list[nodes.Node]:
    """Make a badge with the number of claims for each verdict that occurs."""
    badges: list[nodes.Node] = []
    for verdict, count in count_verdicts(claims).items():
        if count:
            badges += [_badge(verdict, f"{count} {verdict}"), nodes.Text(" ")]
    return badges


class Chapters(SphinxDirective):
    """All verdicts, then one card per chapter: figure, title, question, verdicts, minutes."""

    def run(self) -> list[nodes.Node]:
        """Build the cards, part by part."""
        source = Path(self.env.srcdir)
        records = read_records(source / "book")
        for path, _ in records.values():
            self.env.note_dependency(str(path))
        claims = [claim for _, claim in records.values()]
        papers = len({claim.declaration.slug for claim in claims})
        total = nodes.paragraph("", f"{len(claims)} claims of {papers} papers: ")
        total += _verdicts(claims)
        result: list[nodes.Node] = [total]
        for part in dict.fromkeys(chapter.part for chapter in chapters()):
            grid = nodes.container(classes=["chapter-grid"])
            for chapter in chapters():
                if chapter.part == part and (source / "book" / chapter.slug).is_dir():
                    grid += self._card(chapter, source, records)
            if len(grid):
                result += [nodes.rubric("", part), grid]
        return result

    def _card(
        self, chapter: Chapter, source: Path, records: dict[str, tuple[Path, Claim]]
    ) -> nodes.container:
        card = nodes.container(classes=["chapter-card"])
        cover = _cover(source, chapter.slug)
        if cover is not None:
            self.env.note_dependency(str(cover[0]))
            uri = "/" + cover[1].relative_to(source).as_posix()
            image = nodes.image(uri=uri, alt=cover[2])
            image["candidates"] = {"*": uri}
            card += image
        link = _link(f"book/{chapter.slug}/index", chapter.title)
        card += nodes.paragraph("", "", link, classes=["chapter-title"])
        card += nodes.paragraph("", chapter.question)
        claims = [c for _, c in records.values() if c.declaration.slug == chapter.slug]
        line = nodes.paragraph(classes=["chapter-meta"])
        line += _verdicts(claims)
        card += line
        minutes = f"{chapter.read} min to read, {chapter.run} min to run"
        card += nodes.paragraph("", minutes, classes=["chapter-meta"])
        return card


def _cover(source: Path, slug: str) -> tuple[Path, Path, str] | None:
    """Write the figure of the cell tagged ``cover`` below ``_build``: notebook, image, alt text."""
    for path in sorted((source / "book" / slug).glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if COVER not in cell["metadata"].get("tags", []):
                continue
            alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
            for output in cell.get("outputs", []):
                data = output.get("data", {}).get("image/png")
                if data:
                    target = source / "_build" / "covers" / f"{slug}.png"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = base64.b64decode(data)
                    if not target.is_file() or target.read_bytes() != content:
                        target.write_bytes(content)
                    return path, target, alt
    return None


def _package_file(package: str, *parts: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"The package {package} is missing: pip install 'icml24[book]'.")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def copy_vendored(app: Sphinx, exception: Exception | None) -> None:
    """Copy MathJax and Plotly beside the pages, so that nothing is fetched when reading."""
    if exception is not None or app.builder.format != "html":
        return
    vendor = Path(app.outdir) / "_static" / "vendor"
    mathjax = _package_file("mathjax", "static", "mathjax", "es5", "tex-chtml-full.js")
    plotly = _package_file("plotly", "package_data", "plotly.min.js")
    fonts = mathjax.parent / "output" / "chtml" / "fonts"
    for origin in (mathjax, plotly):
        target = vendor / origin.name
        if not target.is_file() or target.stat().st_size != origin.stat().st_size:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, target)
    if not (vendor / "output").is_dir():
        shutil.copytree(fonts, vendor / "output" / "chtml" / "fonts", dirs_exist_ok=True)


def clean_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Mend repeated scripts, misused ARIA roles, lists without terms, marks torn from maths."""
    files, seen = [], set()
    for script in context.get("script_files", []):
        body = (getattr(script, "attributes", None) or {}).get("body")
        if body and body in seen:
            continue
        seen.add(body)
        files.append(script)
    context["script_files"] = files
    if context.get("body"):
        body = re.sub(
            r' role="doc-(?:biblioentry|backlink|endnotes?|biblioref|noteref)"', "", context["body"]
        )
        body = body.replace(
            '<div role="list" class="citation-list">', '<div class="citation-list">'
        )
        body = re.sub(r'<th(?: class="head")?>(?:<p></p>)?</th>', "<td></td>", body)
        body = re.sub(r'<dl class="field-list simple">\s*</dl>', "", body)
        body = re.sub(MATH_AND_MARK, r'<span class="together">\1</span>', body)
        context["body"] = re.sub(r"<dl>(\s*<dd>.*?)</dl>", _signature_rows, body, flags=re.S)


def _signature_rows(match: re.Match[str]) -> str:
    """Write a signature of several lines without a definition list, which it is not."""
    rows = match[1].replace("<dd>", '<span class="sig-row">').replace("</dd>", "</span>")
    return f"<span>{rows}</span>"


class ShortNames:
    """Resolve a bare or re-exported name, ``:func:`name```, within the column that uses it."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}  # last part of a name -> full names

    def __call__(
        self, app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
    ) -> nodes.Node | None:
        """Handle the event ``missing-reference``, which comes after all pages were read."""
        if node.get("refdomain") != "py":
            return None
        objects = env.domains["py"].data["objects"]
        if not self._places:
            for name in objects:
                self._places.setdefault(name.rsplit(".", 1)[-1], []).append(name)
        wanted = node["reftarget"].lstrip(".")
        home = wanted if wanted.startswith("icml24.") else str(node.get("py:module") or "")
        column = ".".join(home.split(".")[:2]) + "."
        short = wanted.removeprefix(column)
        found = self._places.get(short.rsplit(".", 1)[-1], [])
        found = [name for name in found if name.startswith(column) and name.endswith("." + short)]
        if not home or not found:
            return None
        name = min(found, key=len)
        target = objects[name]
        return make_refnode(app.builder, node["refdoc"], target.docname, target.node_id, text, name)


def adopt_nodes(app: Sphinx, doctree: nodes.document) -> None:
    """Let every node belong to the page.

    MyST parses embedded reStructuredText in a document of its own, whose settings hold the whole
    environment; stored with the page it made the API pages several times as large.
    """
    for node in doctree.findall():
        node.document = doctree


def module_file(app: Sphinx, name: str) -> str | None:
    """Find a module's file without importing it."""
    path = Path(icml24.__file__).parent.parent.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return str(file)
    return None


def skip_generated(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any
) -> bool | None:
    """Leave out the request methods that scikit-learn generates for every estimator."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.setup_extension("sphinx.ext.autodoc")
    viewcode.get_module_filename = module_file  # the original imports each module in each build
    references.register()
    app.add_role("claim", ClaimRole())
    app.add_directive("scorecard", Scorecard)
    app.add_directive("chapters", Chapters)
    app.connect("build-finished", copy_vendored)
    app.connect("missing-reference", ShortNames())
    app.connect("doctree-read", adopt_nodes)
    app.connect("autodoc-skip-member", skip_generated)
    app.connect("html-page-context", clean_page, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
