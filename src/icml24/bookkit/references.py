"""How the bibliography looks: labelled as the text cites, titles as they were published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pybtex.plugin import register_plugin
from pybtex.richtext import Text
from pybtex.style.formatting.unsrt import Style as UnsrtStyle
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.template import field, sentence

__all__ = ["AuthorYear", "BookStyle", "register"]


class AuthorYear(BaseLabelStyle):
    """Label an entry with names and year, and with a letter where both agree."""

    def format_labels(self, sorted_entries: Iterable[Any]) -> Iterator[str]:
        """Yield one label for each entry."""
        labels = [self._label(entry) for entry in sorted_entries]
        total, seen = Counter(labels), Counter[str]()
        for label in labels:
            seen[label] += 1
            yield label + (chr(96 + seen[label]) if total[label] > 1 else "")

    @staticmethod
    def _label(entry: Any) -> str:
        people = entry.persons.get("author") or entry.persons.get("editor") or []
        names = [
            str(Text.from_latex(" ".join(person.prelast_names + person.last_names)))
            for person in people
        ] or [entry.key]
        if len(names) > 2:
            names = [names[0] + " et al."]
        return " and ".join(names) + ", " + entry.fields.get("year", "no year")


class BookStyle(UnsrtStyle):
    """The style ``book``: by author, and no capital of a title is taken away."""

    default_sorting_style = "author_year_title"
    default_label_style = "author_year"

    def format_title(self, e: Any, which_field: str, as_sentence: bool = True) -> Any:
        """Leave the title as it is."""
        title = field(which_field)
        return sentence(capfirst=False)[title] if as_sentence else title


def register() -> None:
    """Make the style known to pybtex as ``book``."""
    register_plugin("pybtex.style.labels", "author_year", AuthorYear)
    register_plugin("pybtex.style.formatting", "book", BookStyle)
