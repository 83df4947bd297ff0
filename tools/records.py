"""Write the results table of README.md and the package's scorecard.json from the stored notebooks.

``--check`` only compares. The records in the notebooks are the one source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from icml24.bookkit.chapters import chapters, count_verdicts
from icml24.bookkit.claims import read_records

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def scorecard() -> str:
    records = [claim.record() for _, claim in read_records(ROOT / "book").values()]
    return json.dumps(records, indent=1, ensure_ascii=False) + "\n"


def table() -> str:
    claims = [claim for _, claim in read_records(ROOT / "book").values()]
    total = ", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(claims).items())
    lines = [f"**{len(claims)} claims tested: {total}.**", ""]
    lines += ["| chapter | claim | paper | measured here | verdict |", "|---|---|---|---|---|"]
    for chapter in chapters():
        name = f"[{chapter.title}](book/{chapter.slug}/index.md)"
        for claim in claims:
            if claim.declaration.slug == chapter.slug:
                d = claim.declaration
                cells = [name, d.statement, d.paper, claim.measured(), claim.verdict]
                lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
                name = ""
    return "\n".join(lines)


def readme() -> str:
    text = (ROOT / "README.md").read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> None:
    targets = {
        ROOT / "README.md": readme(),
        ROOT / "src" / "icml24" / "scorecard.json": scorecard(),
    }
    for path, text in targets.items():
        if "--check" in sys.argv:
            if not path.is_file() or path.read_text("utf-8") != text:
                sys.exit(f"{path.name} is out of date: run python tools/records.py")
        else:
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
