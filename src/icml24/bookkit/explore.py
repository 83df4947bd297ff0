"""A slider over states computed beforehand, and a menu of such sliders: interactive, no server.

The states are drawn with Plotly, moved by an ordinary range input (so that keyboards and screen
readers can use it), and listed as text, which is what nbval compares.
"""

from __future__ import annotations

import html
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from icml24.bookkit.style import COLORS

__all__ = ["Band", "Bars", "Explorer", "Line", "Menu", "Points"]

CYCLE = tuple(COLORS[name] for name in ("blue", "red", "green", "orange", "purple", "sky"))
PLOTLY_CDN = "https://cdn.jsdelivr.net/npm/plotly.js-dist-min@3/plotly.min.js"


def _values(x: ArrayLike) -> list[Any]:
    array = np.asarray(x)
    if array.dtype.kind in "fiub":
        return [float(f"{v:.4g}") for v in array.ravel().tolist()]
    return [str(v) for v in array.ravel().tolist()]


@dataclass(frozen=True)
class Line:
    """A curve ``y`` over ``x``; ``dash`` is one of Plotly's names ("solid", "dash", "dot")."""

    x: ArrayLike
    y: ArrayLike
    name: str
    color: str | None = None
    dash: str = "solid"

    def traces(self, color: str) -> list[dict[str, Any]]:
        """Return Plotly traces."""
        line = {"color": self.color or color, "width": 3, "dash": self.dash}
        trace = {"type": "scatter", "mode": "lines", "line": line, "name": self.name}
        return [{**trace, "x": _values(self.x), "y": _values(self.y)}]


@dataclass(frozen=True)
class Band:
    """The area between ``low`` and ``high`` over ``x``."""

    x: ArrayLike
    low: ArrayLike
    high: ArrayLike
    name: str
    color: str | None = None

    def traces(self, color: str) -> list[dict[str, Any]]:
        """Return Plotly traces."""
        x, low, high = _values(self.x), _values(self.low), _values(self.high)
        rgb = [int((self.color or color)[i : i + 2], 16) for i in (1, 3, 5)]
        fill = "rgba({},{},{},0.25)".format(*rgb)
        trace = {"type": "scatter", "mode": "lines", "line": {"width": 0, "color": fill}}
        trace |= {"fill": "toself", "fillcolor": fill, "hoverinfo": "skip", "name": self.name}
        return [{**trace, "x": x + x[::-1], "y": high + low[::-1]}]


@dataclass(frozen=True)
class Points:
    """Markers at ``(x, y)``."""

    x: ArrayLike
    y: ArrayLike
    name: str
    color: str | None = None
    symbol: str = "circle"

    def traces(self, color: str) -> list[dict[str, Any]]:
        """Return Plotly traces."""
        marker = {"color": self.color or color, "size": 6, "opacity": 0.7, "symbol": self.symbol}
        trace = {"type": "scatter", "mode": "markers", "marker": marker, "name": self.name}
        return [{**trace, "x": _values(self.x), "y": _values(self.y)}]


@dataclass(frozen=True)
class Bars:
    """One bar of height ``y`` for each category ``x``."""

    x: Sequence[str]
    y: ArrayLike
    name: str
    color: str | None = None

    def traces(self, color: str) -> list[dict[str, Any]]:
        """Return Plotly traces."""
        marker = {"color": self.color or color}
        return [
            {
                "type": "bar",
                "name": self.name,
                "marker": marker,
                "x": _values(self.x),
                "y": _values(self.y),
            }
        ]


Shape = Line | Band | Points | Bars

SCRIPT = """
(() => {
  const box = document.currentScript.closest(".explorer"), spec = JSON.parse(
    box.querySelector("script[type='application/json']").textContent);
  const plot = box.querySelector(".explorer-plot"), input = box.querySelector("input"),
    note = box.querySelector("output"), root = document.documentElement;
  const draw = () => {
    const i = +input.value, state = spec.states[i], color = getComputedStyle(box).color;
    input.setAttribute("aria-valuetext", state.label);
    note.textContent = state.label + (state.note ? " · " + state.note : "");
    if (!plot.clientWidth) return;  // not shown by its menu
    const axis = {automargin: true, gridcolor: "rgba(128,128,128,.3)",
      zerolinecolor: "rgba(128,128,128,.5)"};
    Plotly.react(plot, state.traces, {
      ...spec.layout,
      xaxis: {...axis, ...spec.layout.xaxis}, yaxis: {...axis, ...spec.layout.yaxis},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color, size: 14}
    }, {displayModeBar: false, responsive: true});
  };
  const start = () => {
    input.addEventListener("input", draw);
    new ResizeObserver(() => draw()).observe(plot);
    new MutationObserver(draw).observe(root, {attributes: true, attributeFilter: ["data-theme"]});
    draw();
  };
  if (window.Plotly) return start();
  const base = root.dataset.content_root, id = "plotly-for-explorers";
  let loader = document.getElementById(id);
  if (!loader) {
    loader = Object.assign(document.createElement("script"), {
      id, src: base === undefined ? "PLOTLY_CDN" : base + "_static/vendor/plotly.min.js"});
    document.head.append(loader);
  }
  loader.addEventListener("load", start);
})();
""".replace("PLOTLY_CDN", PLOTLY_CDN)

MENU_SCRIPT = """
(() => {
  const box = document.currentScript.closest(".explorer-menu"),
    select = box.querySelector("select"), parts = [...box.querySelectorAll(":scope > .explorer")],
    slider = part => part.querySelector("input");
  select.addEventListener("change", () => {
    const before = slider(parts.find(part => !part.hidden)), now = parts[+select.value];
    parts.forEach(part => { part.hidden = part !== now; });
    if (before.max === slider(now).max) slider(now).value = before.value;
    slider(now).dispatchEvent(new Event("input"));
  });
})();
"""


def _named_once(traces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the traces; a name that comes again stays out of the legend."""
    named: set[str] = set()
    result = []
    for trace in traces:
        again = trace["name"] in named
        named.add(trace["name"])
        result.append({**trace, "showlegend": False} if again else trace)
    return result


class Explorer:
    """A figure with a slider over precomputed states.

    Parameters
    ----------
    control : str
        What the slider changes, with unit, for example ``"prior precision λ"``.
    states : mapping from str to sequence of Line, Band, Points or Bars
        Label of each slider position, and what is drawn there.
    xlabel, ylabel : str
        Axis labels with units.
    notes : mapping from str to str, optional
        A short reading for each state, shown beside the slider; also what the tests compare.
    title : str
        What the figure shows, in one sentence; read out by screen readers.
    start : int, default 0
        Slider position at the beginning.
    xrange, yrange : (float, float), optional
        Axis ranges; by default they hold all states.

    Examples
    --------
    >>> x = np.linspace(0, 1, 5)
    >>> states = {str(p): [Line(x, x**p, "power")] for p in (1, 2)}
    >>> notes = {"1": "straight", "2": "bent"}
    >>> print(Explorer("power p", states, "x", "y", notes=notes, title="Powers of x"))
    Explorer: Powers of x
      power p = 1: straight
      power p = 2: bent
    """

    def __init__(
        self,
        control: str,
        states: Mapping[str, Sequence[Shape]],
        xlabel: str,
        ylabel: str,
        *,
        title: str,
        notes: Mapping[str, str] | None = None,
        start: int = 0,
        xrange: tuple[float, float] | None = None,
        yrange: tuple[float, float] | None = None,
    ) -> None:
        if len(states) < 2:
            raise ValueError("An Explorer needs at least two states to slide between.")
        if not 0 <= start < len(states):
            raise ValueError(f"start must be a position from 0 to {len(states) - 1}, got {start}.")
        if notes is not None and set(notes) != set(states):
            raise ValueError("notes must have exactly one entry for each state.")
        self.control, self.title, self.start = control, title, start
        self.notes = dict(notes or dict.fromkeys(states, ""))
        self._states: list[dict[str, Any]] = [
            {
                "label": label,
                "note": self.notes[label],
                "traces": _named_once(
                    trace
                    for color, shape in zip(CYCLE * 4, shapes, strict=False)
                    for trace in shape.traces(color)
                ),
            }
            for label, shapes in states.items()
        ]
        self._layout = {
            "margin": {"l": 60, "r": 10, "t": 10, "b": 50},
            "height": 380,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
            "xaxis": {"title": {"text": xlabel, "standoff": 12}, **self._range("x", xrange)},
            "yaxis": {"title": {"text": ylabel, "standoff": 12}, **self._range("y", yrange)},
        }

    def _range(self, axis: str, given: tuple[float, float] | None) -> dict[str, Any]:
        if given is not None:
            return {"range": [float(given[0]), float(given[1])]}
        traces = [trace for state in self._states for trace in state["traces"]]
        values = [v for trace in traces for v in trace[axis] if isinstance(v, float)]
        values = [v for v in values if np.isfinite(v)]
        if not values:
            return {}
        low, high = min(values), max(values)
        if axis == "y" and any(trace["type"] == "bar" for trace in traces):
            low, high = min(low, 0.0), max(high, 0.0)
        pad = 0.05 * ((high - low) or 1.0)
        low = low if axis == "y" and low == 0 else low - pad
        return {"range": [float(f"{low:.4g}"), float(f"{high + pad:.4g}")]}

    def __str__(self) -> str:
        lines = [f"  {self.control} = {label}: {note}" for label, note in self.notes.items()]
        return "\n".join([f"Explorer: {self.title}", *lines])

    def to_html(self) -> str:
        """Return the figure, the slider and their data as one HTML fragment."""
        spec = json.dumps({"layout": self._layout, "states": self._states}, separators=(",", ":"))
        spec = spec.replace("</", "<\\/")
        name = uuid.uuid5(uuid.NAMESPACE_URL, self.control + spec).hex[:12]
        e = html.escape
        return (
            f'<div class="explorer" role="group" aria-label="{e(self.title)}">'
            f'<label for="x{name}">{e(self.control)}: '
            f'<output for="x{name}">{e(self._states[self.start]["label"])}</output></label>'
            f'<input id="x{name}" type="range" min="0" max="{len(self._states) - 1}" '
            f'value="{self.start}" step="1" style="width:100%">'
            '<div class="explorer-plot"></div>'
            f'<script type="application/json">{spec}</script><script>{SCRIPT}</script></div>'
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), "text/html": self.to_html()}


class Menu:
    """A choice between several explorers, for a second control beside the slider.

    The slider keeps its position when the next explorer has as many states.

    Parameters
    ----------
    control : str
        What the menu chooses, for example ``"problem"``.
    explorers : mapping from str to Explorer
        Entry of the menu, and what it shows. The first is shown at the beginning.

    Examples
    --------
    >>> x = np.linspace(0, 1, 5)
    >>> def powers(base):
    ...     states = {str(p): [Line(x, base * x**p, "power")] for p in (1, 2)}
    ...     return Explorer("power p", states, "x", "y", title=f"{base} times a power")
    >>> print(Menu("factor", {"one": powers(1), "two": powers(2)}))
    factor: one
      Explorer: 1 times a power
        power p = 1:
        power p = 2:
    factor: two
      Explorer: 2 times a power
        power p = 1:
        power p = 2:
    """

    def __init__(self, control: str, explorers: Mapping[str, Explorer]) -> None:
        if len(explorers) < 2:
            raise ValueError("A Menu needs at least two explorers to choose from.")
        self.control, self.explorers = control, dict(explorers)

    def __str__(self) -> str:
        lines = []
        for label, explorer in self.explorers.items():
            inner = (f"  {line}".rstrip() for line in str(explorer).splitlines())
            lines += [f"{self.control}: {label}", *inner]
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the menu and its explorers as one HTML fragment."""
        e = html.escape
        parts = [explorer.to_html() for explorer in self.explorers.values()]
        hidden = [part.replace("<div ", "<div hidden ", 1) for part in parts[1:]]
        name = uuid.uuid5(uuid.NAMESPACE_URL, self.control + "".join(parts)).hex[:12]
        options = "".join(
            f'<option value="{i}">{e(label)}</option>' for i, label in enumerate(self.explorers)
        )
        return (
            f'<div class="explorer-menu"><label for="m{name}">{e(self.control)}: </label>'
            f'<select id="m{name}" autocomplete="off">{options}</select>'
            f"{parts[0]}{''.join(hidden)}<script>{MENU_SCRIPT}</script></div>"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), "text/html": self.to_html()}
