"""Write environment.yml from pyproject.toml and constraints.txt; ``--check`` only compares."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    entries = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name_of(name): version.strip() for name, version in entries}


def environment() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = pins()
    extras = project["optional-dependencies"]
    chosen = re.findall(r"[\w-]+", extras["all"][0].partition("[")[2])
    groups = {"core": project["dependencies"], **{name: extras[name] for name in chosen}}
    lines = [
        "# Written by tools/env.py from pyproject.toml and constraints.txt: edit those.",
        "name: icml24",
        "channels: [conda-forge]",
        "dependencies:",
        "  - python=3.11",
        "  - pip",
        "  - pip:",
        "    - -c constraints.txt",
    ]
    for group, requirements in groups.items():
        named = sorted(name_of(r) for r in requirements)
        named = [name for name in named if name != "icml24"]
        if named:
            lines.append(f"    # {group}")
            missing = [name for name in named if name not in pinned]
            if missing:
                sys.exit(f"constraints.txt has no pin for {', '.join(missing)}.")
            lines += [f"    - {name}=={pinned[name]}" for name in named]
    return "\n".join([*lines, "    - -e .", ""])


def main() -> None:
    target = ROOT / "environment.yml"
    text = environment()
    if "--check" in sys.argv:
        if not target.is_file() or target.read_text("utf-8") != text:
            sys.exit("environment.yml is out of date: run python tools/env.py")
    else:
        target.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
