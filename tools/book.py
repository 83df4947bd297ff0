"""Check the notebook pairs and render the book into _build/html."""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

# A grammar of web addresses that jsonschema builds at import, in seconds, and nothing here asks.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

import nb
from jupyter_book.cli.main import main as jupyter_book

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    if nb.check([]):
        sys.exit(1)
    options = ["--warningiserror", "--nitpick", "--keep-going", "--quiet"]
    try:
        jupyter_book(["build", str(ROOT), *options])
    except SystemExit as end:
        if end.code:
            sys.exit("The book did not build: mend the warnings above.")
    html = ROOT / "_build" / "html"
    (html / ".nojekyll").touch()
    print(f"The book is ready: open {html.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
