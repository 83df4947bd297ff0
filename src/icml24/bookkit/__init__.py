"""What the book needs to be written, tested and rendered: claims, explorers, figures, plugins."""

from icml24.bookkit.claims import Claim, Claims, read_records
from icml24.bookkit.explore import Band, Bars, Explorer, Line, Menu, Points
from icml24.bookkit.style import COLORS, use_style

__all__ = [
    "COLORS",
    "Band",
    "Bars",
    "Claim",
    "Claims",
    "Explorer",
    "Line",
    "Menu",
    "Points",
    "read_records",
    "use_style",
]
