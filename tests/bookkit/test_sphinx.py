"""The Sphinx extension: bibliography, sources, names, and what it mends in a page."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx")

import pybtex.database
from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser
from docutils.utils import new_document
from sphinx import addnodes

from icml24.bookkit import references
from icml24.bookkit import sphinx as extension

BIB = r"""
@article{one, author={Bi{\`e}ye, Ann}, title={PlanDQ: Plan by {D}}, journal={J}, year={2020}}
@article{two, author={Doe, J. and Roe, R.}, title={On x}, journal={J}, year={2021}}
@article{six, author={Doe, J. and Roe, R.}, title={On y}, journal={J}, year={2021}}
@article{ten, author={van Aa, A. and Bb, B. and Cc, C.}, title={On z}, journal={J}, year={2022}}
"""


def test_labels_are_names_and_year():
    entries = pybtex.database.parse_string(BIB, "bibtex").entries.values()
    labels = list(references.AuthorYear().format_labels(entries))
    assert labels == [
        "Bièye, 2020",
        "Doe and Roe, 2021a",
        "Doe and Roe, 2021b",
        "van Aa et al., 2022",
    ]


def test_titles_keep_their_capitals():
    entries = pybtex.database.parse_string(BIB, "bibtex").entries
    references.register()
    (entry,) = references.BookStyle().format_entries([entries["one"]])
    assert "PlanDQ: Plan by D." in str(entry.text)


@pytest.mark.parametrize(
    ("name", "end"),
    [("icml24.core.data", "icml24/core/data.py"), ("icml24.core", "icml24/core/__init__.py")],
)
def test_a_source_is_found_without_import(name, end):
    assert extension.module_file(None, name).replace("\\", "/").endswith(end)


def test_a_module_that_is_not_ours_has_no_source():
    assert extension.module_file(None, "icml24.nothing") is None


def test_nodes_of_an_inner_document_move_to_the_page():
    settings = get_default_settings(Parser)
    page, inner = new_document("page", settings), new_document("inner", settings)
    paragraph = nodes.paragraph("", "text")
    inner += paragraph
    page += paragraph
    paragraph.document = inner
    extension.adopt_nodes(None, page)
    assert all(node.document is page for node in page.findall())


def resolve(target, home, names):
    objects = {name: SimpleNamespace(docname="api", node_id=name) for name in names}
    env = SimpleNamespace(domains={"py": SimpleNamespace(data={"objects": objects})})
    builder = SimpleNamespace(get_relative_uri=lambda here, there: there)
    node = addnodes.pending_xref(refdomain="py", reftarget=target, refdoc="page")
    node["py:module"] = home
    found = extension.ShortNames()(SimpleNamespace(builder=builder), env, node, nodes.literal())
    return None if found is None else found["refuri"].partition("#")[2]


def test_short_names_resolve_within_their_column():
    names = ["icml24.a.x.fit", "icml24.b.y.fit", "icml24.a.x.Model.fit"]
    assert resolve("fit", "icml24.a.x", names) == "icml24.a.x.fit"
    assert resolve("icml24.b.fit", "", names) == "icml24.b.y.fit"
    assert resolve("Model.fit", "icml24.a.z", names) == "icml24.a.x.Model.fit"
    assert resolve("outfit", "icml24.a.x", names) is None
    assert resolve("fit", "", names) is None


def test_a_mark_stays_with_its_formula():
    math = '<span class="math notranslate nohighlight">\\(x &lt; 1\\)</span>'
    body = f"<p>{math}, then {math} (as {math}).</p>"
    context = {"body": body, "script_files": []}
    extension.clean_page(None, "page", "page.html", context, None)
    assert context["body"].count('class="together"') == 2
    assert f'<span class="together">{math},</span> then {math} (as' in context["body"]
