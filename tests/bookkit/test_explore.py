import json
import re

import numpy as np
import pytest

from icml24.bookkit import Band, Bars, Explorer, Line, Menu, Points

X = np.linspace(0, 1, 4)


def explorer(**kwargs):
    states = {"1": [Line(X, X, "line"), Points(X, X, "data")], "2": [Band(X, X, X + 1, "band")]}
    return Explorer("power", states, "x (m)", "y (s)", title="A & B", **kwargs)


def spec(html):
    return json.loads(re.search(r"json\">(.*?)</script>", html, re.S).group(1))


def test_text_lists_every_state():
    text = str(explorer(notes={"1": "flat", "2": "steep"}))
    assert "power = 1: flat" in text
    assert "power = 2: steep" in text


def test_html_is_deterministic_and_carries_all_states():
    a, b = explorer().to_html(), explorer().to_html()
    assert a == b
    assert [state["label"] for state in spec(a)["states"]] == ["1", "2"]
    assert 'type="range"' in a
    assert 'aria-label="A &amp; B"' in a


def test_axes_are_fixed_over_all_states():
    low, high = spec(explorer().to_html())["layout"]["yaxis"]["range"]
    assert low <= 0
    assert high >= 2


def test_bars_start_at_zero():
    e = Explorer(
        "s", {"1": [Bars(["a"], [2.0], "n")], "2": [Bars(["a"], [3.0], "n")]}, "", "", title="t"
    )
    assert spec(e.to_html())["layout"]["yaxis"]["range"][0] == 0


def test_data_cannot_close_the_script():
    e = Explorer("s", {"</script>": [Line(X, X, "n")], "2": [Line(X, X, "n")]}, "", "", title="t")
    assert e.to_html().count("</script>") == 2


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="at least two states"):
        Explorer("s", {"1": []}, "", "", title="t")
    with pytest.raises(ValueError, match="one entry for each state"):
        explorer(notes={"1": "x"})
    with pytest.raises(ValueError, match="start"):
        explorer(start=2)


def test_a_repeated_name_is_listed_once():
    hills = [Line([0, 1], [k, k], "hill") for k in range(3)]
    states = {"a": [*hills, Line([0, 1], [0, 1], "path")], "b": hills}
    page = spec(Explorer("x", states, "x", "y", title="Hills").to_html())
    for state, names in zip(page["states"], (["hill", "path"], ["hill"]), strict=True):
        shown = [t["name"] for t in state["traces"] if t.get("showlegend", True)]
        assert shown == names


def test_menu_lists_and_shows_one_of_its_explorers():
    menu = Menu("cable & core", {"thin": explorer(notes={"1": "a", "2": "b"}), "thick": explorer()})
    text, page = str(menu), menu.to_html()
    assert text.splitlines()[:3] == [
        "cable & core: thin",
        "  Explorer: A & B",
        "    power = 1: a",
    ]
    assert text.count("cable & core: ") == 2
    assert page.count('class="explorer"') == 2
    assert page.count("<div hidden class") == 1
    assert page.index('<div class="explorer"') < page.index("<div hidden class")
    assert "cable &amp; core" in page
    assert [o for o in re.findall(r"<option value=\"(\d)\">(\w+)", page)] == [
        ("0", "thin"),
        ("1", "thick"),
    ]
    assert page == menu.to_html()


def test_menu_needs_a_choice():
    with pytest.raises(ValueError, match="at least two explorers"):
        Menu("cable", {"thin": explorer()})
