"""Write what README.md shows, and the package's scorecard.json, from the stored notebooks.

``--check`` only compares. The notebooks are the one source: of the claims in the table, and of the
figures in the picture ``book/_static/covers.png``.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from icml24.bookkit.chapters import chapters, count_verdicts
from icml24.bookkit.claims import read_records

ROOT = Path(__file__).resolve().parent.parent
COVERS = ROOT / "book" / "_static" / "covers.png"
WIDTH, HEIGHT, TITLE, GAP = 400, 280, 30, 16
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def scorecard() -> str:
    records = [claim.record() for _, claim in read_records(ROOT / "book").values()]
    return json.dumps(records, indent=1, ensure_ascii=False) + "\n"


def table() -> str:
    claims = [claim for _, claim in read_records(ROOT / "book").values()]
    total = ", ".join(f"{n} {verdict}" for verdict, n in count_verdicts(claims).items())
    lines = [f"**{len(claims)} claims: {total}.**", ""]
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


def cover(slug: str) -> Image.Image | None:
    """Return the figure of the cell tagged ``cover``."""
    for path in sorted((ROOT / "book" / slug).glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if "cover" in cell["metadata"].get("tags", []):
                for output in cell["outputs"]:
                    if "image/png" in output.get("data", {}):
                        content = base64.b64decode(output["data"]["image/png"])
                        return Image.open(io.BytesIO(content)).convert("RGBA")
    return None


def covers() -> Image.Image:
    """Put the covers of all chapters on one sheet, three in a row, each under its title."""
    import matplotlib

    font_file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    font = ImageFont.truetype(str(font_file), 15)
    found = [(c.title, cover(c.slug)) for c in chapters()]
    shown = [(title, picture) for title, picture in found if picture is not None]
    rows = -(-len(shown) // 3)
    size = (3 * WIDTH + 4 * GAP, rows * (HEIGHT + TITLE + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for k, (title, picture) in enumerate(shown):
        x = GAP + (k % 3) * (WIDTH + GAP)
        y = GAP + (k // 3) * (HEIGHT + TITLE + GAP)
        draw.text((x, y), title, fill="#222222", font=font)
        picture.thumbnail((WIDTH, HEIGHT))
        sheet.paste(picture, (x, y + TITLE), picture)
    return sheet.quantize(128)


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
    if "--check" not in sys.argv:
        covers().save(COVERS, optimize=True)


if __name__ == "__main__":
    main()
