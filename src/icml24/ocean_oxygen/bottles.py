"""Real bottles: temperature and salinity of seawater samples from sixty years of cruises.

They come from NASA GISS's compilation of oxygen isotopes (G. A. Schmidt, G. R. Bigg and E. J.
Rohling, *Global Seawater Oxygen-18 Database*, version 1.22, 1999,
https://data.giss.nasa.gov/o18data/), whose samples mostly have their temperature and salinity
beside them. The workbook lies in the Python package ``envgeo-seawater``, which is read and not
imported. The package is MIT-licensed and hands the table on with its citation; the table itself
states no licence, so it is read where it is and not copied into this package.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

from icml24.core.data import DataSource

__all__ = ["load_bottles"]

_WORKBOOK = DataSource(
    "GISS bottles",
    "13cccbffa3948a2570fd7c6faa342a888d1e14d3bb076f48d520564a25c85840",
    "NASA GISS, cite Schmidt, Bigg and Rohling 1999; package envgeo-seawater: MIT",
    package="envgeo-seawater==1.3.5:envgeo_seawater/dataset/71_GLOBA_NASA_20260226.xlsx",
)
_COLUMNS = {
    "Latitude_degN": "lat",
    "Longitude_degE": "lon",
    "Depth_m": "depth",
    "Year": "year",
    "Month": "month",
    "Temperature_degC": "temperature",
    "Salinity": "salinity",
    "reference": "source",
}
#: What seawater can be, in degrees Celsius and in practical salinity.
_POSSIBLE = {"temperature": (-2.5, 35.0), "salinity": (0.0, 42.0)}


def load_bottles(path: str | os.PathLike[str] | None = None) -> pd.DataFrame:
    """Load real bottles, one row for each.

    Parameters
    ----------
    path : path-like, optional
        A workbook with the same columns; by default that of the package ``envgeo-seawater`` 1.3.5,
        installed or downloaded once (25 MB).

    Returns
    -------
    pandas.DataFrame
        ``lat``, ``lon`` (degrees), ``depth`` (m, positive down), ``year``, ``month`` (missing where
        unknown), ``temperature`` (degrees Celsius), ``salinity`` (practical), each missing where it
        was not measured, and ``source``, the publication that the bottle comes from. This is what
        :func:`~icml24.ocean_oxygen.profiles.grid_profiles` and
        :func:`~icml24.ocean_oxygen.splits.source_split` take. ``attrs["dropped"]`` counts, by
        reason, what was left out.

    Raises
    ------
    ImportError
        If openpyxl, which reads the workbook, is not installed.
    DataUnavailableError
        If the package is neither installed nor reachable; the message says how to install it.
    ValueError
        If the workbook lacks a column.

    Notes
    -----
    The compilation's own name for the column is potential temperature, but its authors say that
    some sources give in-situ temperature; no conversion is made. In the open ocean the two differ
    by a third of a degree at 4,000 m, and by less above.

    Examples
    --------
    >>> bottles = load_bottles()  # doctest: +SKIP
    >>> len(bottles), bottles["source"].nunique()  # doctest: +SKIP
    (22677, 98)
    """
    if find_spec("openpyxl") is None:
        raise ImportError("Reading the workbook needs openpyxl: pip install 'icml24[ocean]'.")
    return (_published() if path is None else _tidy(Path(path).read_bytes())).copy()


@lru_cache(maxsize=1)
def _published() -> pd.DataFrame:
    return _tidy(_WORKBOOK.load().content)


def _tidy(content: bytes) -> pd.DataFrame:
    """Keep the rows that say where, when, and at least one of temperature and salinity."""
    table = pd.read_excel(
        io.BytesIO(content), engine="openpyxl", usecols=lambda name: name in _COLUMNS
    )
    missing = [name for name in _COLUMNS if name not in table]
    if missing:
        raise ValueError(f"The workbook has no columns {', '.join(missing)}.")
    table = table.rename(columns=_COLUMNS)[list(_COLUMNS.values())]
    # some notes stand before the name of the source, apart by many blanks
    table["source"] = table["source"].str.replace(r"^\([^)]*\)\s{2,}", "", regex=True).str.strip()
    numbers = [name for name in table if name != "source"]
    table[numbers] = table[numbers].apply(pd.to_numeric, errors="coerce")  # "**" is missing
    dropped = {}
    for name, (low, high) in _POSSIBLE.items():
        wrong = ~table[name].between(low, high) & table[name].notna()
        table.loc[wrong, name] = np.nan
        dropped[f"impossible values of {name}"] = int(wrong.sum())
    keys = ["lat", "lon", "depth", "year", "month", "temperature", "salinity"]
    faults = {
        "rows without a depth": ~(table["depth"] >= 0),
        "rows without a year": table["year"].isna(),
        "rows without temperature and salinity": table[keys[-2:]].isna().all(axis=1),
        "repeated rows": table.duplicated(keys),
    }
    keep = np.ones(len(table), bool)
    for reason, rows in faults.items():  # a row counts once, for its first fault
        dropped[reason] = int((keep & rows.to_numpy()).sum())
        keep &= ~rows.to_numpy()
    table = table[keep].astype({"year": int}).reset_index(drop=True)
    table.attrs["dropped"] = dropped
    return table
