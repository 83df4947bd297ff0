"""Write the page on speed, ``book/speed.md``, from stored measurements of the benchmarks.

``python tools/speed.py _build/bench.json`` takes a new measurement into
``tests/benchmarks/speed.json``, where rows of peers that are not installed now keep their last
numbers; without a file, page and figure are written from what is stored.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from icml24.bookkit.chapters import chapters

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "tests" / "benchmarks" / "rows.toml"
STORED = ROOT / "tests" / "benchmarks" / "speed.json"
PAGE = ROOT / "book" / "speed.md"
FIGURE = ROOT / "book" / "_static" / "speed.png"

HEAD = """# How fast is it?

Each row is one benchmark of `tests/benchmarks`, ours and a peer's in the same run on {cpu} ({cores}
cores, Python {python}, torch {torch}, {date}). "Times as fast" is the peer's time divided by ours;
where the peer is faster, the reason stands at the end. `make bench` measures everything again on
your machine and writes this page. Peers that are not installed are left out and keep their last
numbers.
"""

TABLE = """
## {title}

| task | peer | times as fast | ours | peer's |
|---|---|---|---|---|
"""

TAIL = """
## How cost grows

```{figure} _static/speed.png
:alt: Relative time against relative size: most lines stay near or below proportional growth.
:name: fig-speed-growth

How cost grows with size: seconds against the size of the problem, both relative to the smallest.
The dashed line is proportional growth.
```
"""


def wanted() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(ROWS.read_text("utf-8"))


def seconds(name: str, row: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """Time of a benchmark, or of an entry that the row's benchmark noted."""
    if name.startswith("extra:"):
        entry = found.get(row.get("of", row["ours"]), {}).get("extra", {})
        value = entry.get(name.removeprefix("extra:"))
        return None if value is None else value * row.get("scale", 1.0)
    return found[name]["seconds"] if name in found else None


def measured(path: Path) -> dict[str, Any]:
    """Read what pytest-benchmark wrote."""
    data = json.loads(path.read_text("utf-8"))
    return {
        bench["name"]: {"seconds": bench["stats"]["min"], "extra": bench["extra_info"]}
        for bench in data["benchmarks"]
    }


def take(found: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Combine new measurements with the stored ones of peers that are not installed now."""
    from importlib.metadata import version

    kept = {key(row): row for row in old.get("rows", [])}
    rows = []
    for row in wanted()["row"]:
        ours, other = seconds(row["ours"], row, found), seconds(row["other"], row, found)
        if ours is None or other is None:
            rows += [kept[key(row)]] if key(row) in kept else []
            continue
        other /= row.get("share", 1.0)
        entry = {name: row[name] for name in ("chapter", "task", "peer")}
        values = {"ours": ours, "other": other, "ratio": other / ours}
        rows.append(entry | {name: float(f"{value:.3g}") for name, value in values.items()})
    lines, growth = {line["label"]: line for line in old.get("growth", [])}, []
    for line in wanted()["growth"]:
        names = {size: line["test"].format(size) for size in line["sizes"]}
        if all(name in found for name in names.values()):
            took = [float(f"{found[name]['seconds']:.3g}") for name in names.values()]
            growth.append({**line, "seconds": took})
        elif line["label"] in lines:
            growth.append(lines[line["label"]])
    machine = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": date.today().isoformat(),
    }
    return {"machine": machine, "rows": rows, "growth": growth}


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["chapter"], row["task"], row["peer"]


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def spoken(value: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:.3g}\u00a0{unit}"
    return f"{value / 1e-9:.3g}\u00a0ns"


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.2g}"


def page(stored: Mapping[str, Any]) -> str:
    titles = {chapter.slug: chapter.title for chapter in chapters()}
    rows = sorted(stored["rows"], key=lambda row: list(titles).index(row["chapter"]))
    why = {key(row): row.get("why") for row in wanted()["row"]}
    text = HEAD.format(**stored["machine"])
    notes, last = [], None
    for row in rows:
        if row["chapter"] != last:
            last = row["chapter"]
            text += TABLE.format(title=titles[last])
        times_ = spoken(row["ours"]), spoken(row["other"])
        text += (
            f"| {row['task']} | {row['peer']} | {times(row['ratio'])} | {' | '.join(times_)} |\n"
        )
        if row["ratio"] < 1:
            reason = why.get(key(row)) or "not explained."
            notes.append(f"- *{row['task']}*, against {row['peer']}: {reason}")
    if notes:
        text += "\n## Where the peer is faster\n\n" + "\n".join(notes) + "\n"
    return text + TAIL


def draw(growth: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    from icml24.bookkit import COLORS, use_style

    use_style()
    colors = list(COLORS.values())
    for color, marker, line in zip(colors, "osD^vP", growth, strict=False):
        sizes = line.get("at", line["sizes"])
        x = [size / sizes[0] for size in sizes]
        y = [t / line["seconds"][0] for t in line["seconds"]]
        plt.loglog(x, y, marker + "-", color=color, label=line["label"])
    plt.loglog([1, 100], [1, 100], "--", color=COLORS["grey"])
    plt.xlabel("size, relative to the smallest")
    plt.ylabel("time, relative to the smallest")
    plt.legend()
    plt.savefig(FIGURE, dpi=150)
    plt.close()


def main() -> None:
    stored = json.loads(STORED.read_text("utf-8")) if STORED.is_file() else {}
    if len(sys.argv) == 2:
        stored = take(measured(Path(sys.argv[1])), stored)
        STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", "utf-8")
    elif not stored or len(sys.argv) > 2:
        sys.exit("Say which file pytest-benchmark wrote: python tools/speed.py _build/bench.json")
    draw(stored["growth"])
    PAGE.write_text(page(stored), "utf-8")
    print(f"The page on speed is ready: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
