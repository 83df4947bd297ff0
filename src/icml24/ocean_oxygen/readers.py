"""Files of the World Ocean Database, GLODAP and the World Ocean Atlas.

None of them ships with the package. Each reader returns what
:func:`~icml24.ocean_oxygen.profiles.grid_profiles` and
:class:`~icml24.ocean_oxygen.reconstructor.Reconstructor` take, in µmol/kg.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from icml24.ocean_oxygen.chemistry import to_umol_per_kg, unit_name

__all__ = ["read_glodap", "read_woa", "read_wod"]

Array = np.ndarray[Any, Any]
PathLike = str | os.PathLike[str]


def _existing(path: PathLike) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    return path


def _engine(path: Path) -> str:
    """NetCDF 4 files are HDF5; classic ones are read by scipy."""
    with open(path, "rb") as file:
        return "scipy" if file.read(3) == b"CDF" else "h5netcdf"


def _ragged(ds: xr.Dataset, name: str, rows: Array) -> Array:
    """Values of a ragged variable for every depth of every cast, NaN where a cast has none."""
    if name not in ds:
        return np.full(rows.sum(), np.nan)
    sizes = np.nan_to_num(np.asarray(ds[f"{name}_row_size"], float)).astype(int)
    bad = (sizes != 0) & (sizes != rows)
    if bad.any():
        k = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"Cast {k} has {sizes[k]} values of {name} for {rows[k]} depths; each cast must have "
            "none or one for each depth."
        )
    values = np.full(rows.sum(), np.nan)
    stored = np.asarray(ds[name], float)
    values[np.repeat(sizes > 0, rows)] = stored[: sizes.sum()]
    flag = f"{name}_WODflag"
    if flag in ds:
        accepted = np.zeros(rows.sum(), bool)
        marks = np.nan_to_num(np.asarray(ds[flag], float), nan=1.0)
        accepted[np.repeat(sizes > 0, rows)] = marks[: sizes.sum()] == 0
        values = np.where(accepted, values, np.nan)
    return values


def _units(ds: xr.Dataset) -> str:
    units = ds["Oxygen"].attrs.get("units")
    if units is None:
        raise ValueError("The variable Oxygen has no units in this file.")
    return units


def _convert(table: pd.DataFrame, units: str) -> pd.DataFrame:
    """Oxygen in µmol/kg; without temperature or salinity a value per volume is dropped."""
    if unit_name(units) != "umol/kg":
        table = table.dropna(subset=["temperature", "salinity"])
    t, s = (table[name].to_numpy(float) for name in ("temperature", "salinity"))
    oxygen = to_umol_per_kg(table["oxygen"], units, t, s, table["depth"])
    return table.assign(oxygen=oxygen)


def read_wod(paths: PathLike | Iterable[PathLike]) -> pd.DataFrame:
    """Read profiles from NetCDF files of the World Ocean Database (CF contiguous ragged arrays).

    Values whose WOD flag is not 0 are left out. Units per volume are converted with the density of
    each sample.

    Parameters
    ----------
    paths : path-like or iterable of them
        Files such as ``wod_osd_1990.nc`` with the variables ``z``, ``Oxygen``, ``Temperature``,
        ``Salinity``, their ``<name>_row_size`` and ``<name>_WODflag``.

    Returns
    -------
    pandas.DataFrame
        ``cast``, ``lat``, ``lon``, ``depth``, ``year``, ``oxygen``, ``temperature``, ``salinity``,
        ``phosphate``, ``nitrate``; one row for each oxygen value.
    """
    names = {"Oxygen": "oxygen", "Temperature": "temperature", "Salinity": "salinity"}
    names |= {"Phosphate": "phosphate", "Nitrate": "nitrate"}
    tables, first = [], 0
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        path = _existing(path)
        with xr.open_dataset(path, engine=_engine(path)) as ds:
            for name in ("lat", "lon", "time", "z", "z_row_size", "Oxygen", "Oxygen_row_size"):
                if name not in ds.variables:
                    raise ValueError(f"{path.name} has no variable {name}; is it a WOD file?")
            rows = np.nan_to_num(np.asarray(ds["z_row_size"], float)).astype(int)
            cast = np.repeat(np.arange(len(rows)), rows)
            time = pd.to_datetime(np.asarray(ds["time"]))
            table = pd.DataFrame(
                {
                    "cast": first + cast,
                    "lat": np.asarray(ds["lat"], float)[cast],
                    "lon": np.asarray(ds["lon"], float)[cast],
                    "depth": np.asarray(ds["z"], float)[: len(cast)],
                    "year": time.year.to_numpy()[cast],
                    **{new: _ragged(ds, old, rows) for old, new in names.items()},
                }
            )
            tables.append(_convert(table.dropna(subset=["oxygen"]), _units(ds)))
            first += len(rows)
    return pd.concat(tables, ignore_index=True)


def read_glodap(path: PathLike) -> pd.DataFrame:
    """Read the merged table of GLODAPv2 (CSV; oxygen is in µmol/kg already).

    Oxygen whose flag is not 2 (good), and the fill value -9999, are left out.

    Parameters
    ----------
    path : path-like
        ``GLODAPv2.2023_Merged_Master_File.csv`` or a part of it.

    Returns
    -------
    pandas.DataFrame
        ``lat``, ``lon``, ``depth``, ``year``, ``oxygen``, ``temperature``, ``salinity``,
        ``phosphate``, ``nitrate``.
    """
    path = _existing(path)
    wanted = {
        "latitude": "lat",
        "longitude": "lon",
        "depth": "depth",
        "year": "year",
        "oxygen": "oxygen",
        "temperature": "temperature",
        "salinity": "salinity",
        "phosphate": "phosphate",
        "nitrate": "nitrate",
    }
    table = pd.read_csv(path, na_values=[-9999, -9999.0])
    table.columns = [str(name).strip().removeprefix("G2") for name in table.columns]
    missing = [
        name for name in ("latitude", "longitude", "depth", "year", "oxygen") if name not in table
    ]
    if missing:
        raise ValueError(f"{path.name} has no columns {', '.join(missing)}; is it a GLODAP table?")
    if "oxygenf" in table:
        table = table[table["oxygenf"] == 2]
    table = table.dropna(subset=["oxygen", "depth"])
    kept = {old: new for old, new in wanted.items() if old in table}
    return table[list(kept)].rename(columns=kept).reset_index(drop=True)


def read_woa(path: PathLike, variable: str = "o_an") -> xr.DataArray:
    """Read a gridded field of the World Ocean Atlas.

    Parameters
    ----------
    path : path-like
        For example ``woa23_all_o00_01.nc``.
    variable : str, default "o_an"
        The objectively analysed mean of oxygen; ``t_an``, ``s_an``, ``p_an``, ``n_an`` for others.

    Returns
    -------
    xarray.DataArray
        Dimensions depth, lat, lon; oxygen in µmol/kg.
    """
    path = _existing(path)
    with xr.open_dataset(path, engine=_engine(path), decode_times=False) as ds:
        if variable not in ds:
            raise ValueError(
                f"{path.name} has no variable {variable}; it has {list(ds.data_vars)}."
            )
        field = ds[variable].load()
    if "time" in field.dims:
        if field.sizes["time"] != 1:
            raise ValueError(f"{path.name} holds {field.sizes['time']} times; one is wanted.")
        field = field.isel(time=0, drop=True)
    field = field.transpose("depth", "lat", "lon")
    if variable.startswith("o_"):
        units = field.attrs.get("units", "")
        if unit_name(units) != "umol/kg":
            raise ValueError(
                f"{variable} is in {units}: convert it with to_umol_per_kg and the atlas's "
                "temperature and salinity."
            )
        field.attrs["units"] = "umol kg-1"
    return field
