import json
import math

import pytest

from icml24.bookkit import claims as module
from icml24.bookkit.claims import MIME, Claim, Claims, Declaration, declarations, read_records
from icml24.core.statistics import Estimate

D = Declaration("col", "a", "abstract", "statement", "metric", "0.9", (0.8, math.inf))
U = Declaration("col", "u", "abstract", "statement", "metric", "0.9", not_testable="no data")


def notebook(*records):
    outputs = [{"output_type": "execute_result", "data": {MIME: r}} for r in records]
    return json.dumps({"cells": [{"cell_type": "code", "outputs": outputs}]})


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (0.9, 0.85, 0.95, "reproduced"),
        (0.8, 0.8, 0.8, "reproduced"),
        (0.9, 0.7, 1.1, "partly"),
        (0.7, 0.6, 0.95, "not reproduced"),
    ],
)
def test_verdicts(value, low, high, verdict):
    assert Claim(D, value, low, high, 5).verdict == verdict


def test_untestable_claims_have_their_own_verdict():
    assert Claim(U, None, None, None, 0).verdict == "not testable here"
    assert "no data" in str(Claim(U, None, None, None, 0))


def test_a_record_is_json_and_comes_back_whole():
    for claim in (Claim(D, 0.9, 0.85, 0.95, 5), Claim(U, None, None, None, 0)):
        assert Claim.from_record(json.loads(json.dumps(claim.record()))) == claim


def test_narrow_regions_are_written_with_their_width():
    d = Declaration("col", "a", "x", "y", "m", "1", (1 - 1e-9, 1 + 1e-9))
    assert Claim(d, 1.0, 1.0, 1.0, 1).accepted() == "1 ± 1e−09"
    assert Claim(D, 0.9, 0.85, 0.95, 5).accepted() == "≥ 0.8"


def test_cards_escape_html():
    d = Declaration("col", "a", "x", "p < 0.05 & q", "m", "<b>", (0.0, 1.0))
    text = Claim(d, 0.5, 0.4, 0.6, 5).to_html()
    assert "p &lt; 0.05 &amp; q" in text
    assert "<b>" not in text


def test_declaration_needs_one_of_accept_and_reason():
    with pytest.raises(ValueError, match="either accept"):
        Declaration("c", "a", "x", "y", "m", "p")
    with pytest.raises(ValueError, match="low < high"):
        Declaration("c", "a", "x", "y", "m", "p", (1.0, 0.0))


@pytest.fixture
def column(tmp_path, monkeypatch):
    (tmp_path / "col").mkdir()
    monkeypatch.setattr(module.resources, "files", lambda _: tmp_path)

    def write(text):
        (tmp_path / "col" / "claims.toml").write_text(text)

    return write


TOML = """
[[claim]]
id = "a"
abstract = "x"
statement = "y"
metric = "m"
paper = "p"
accept = [0.5, inf]
[[claim]]
id = "u"
abstract = "x"
statement = "y"
metric = "m"
paper = "p"
not_testable = "why"
"""


def test_recording(column):
    column(TOML)
    claims = Claims("col")
    assert claims.record("a", Estimate(0.9, 0.8, 1.0, n=5)).verdict == "reproduced"
    assert claims.record("a", 0.4).verdict == "not reproduced"
    assert claims.record("u").verdict == "not testable here"
    with pytest.raises(KeyError, match="no claim 'b'"):
        claims.record("b", 1.0)
    with pytest.raises(ValueError, match="needs a measurement"):
        claims.record("a")
    with pytest.raises(ValueError, match="not testable"):
        claims.record("u", 1.0)
    with pytest.raises(ValueError, match="finite"):
        claims.record("a", math.inf)


def test_duplicate_and_incomplete_declarations_are_named(column):
    column(TOML + TOML)
    with pytest.raises(ValueError, match="occurs twice"):
        declarations("col")
    column("[[claim]]\nid = 'a'\n")
    with pytest.raises(ValueError, match="lacks abstract"):
        declarations("col")
    with pytest.raises(ValueError, match="declares no claims"):
        declarations("absent")


def test_reading_records_and_refusing_duplicates(tmp_path):
    record = Claim(D, 0.9, 0.85, 0.95, 5).record()
    (tmp_path / "a.ipynb").write_text(notebook(record))
    assert read_records(tmp_path)["col/a"][1].value == 0.9
    (tmp_path / "b.ipynb").write_text(notebook(record))
    with pytest.raises(ValueError, match="recorded twice"):
        read_records(tmp_path)
