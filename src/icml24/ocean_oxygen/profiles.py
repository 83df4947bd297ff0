"""From a table of measurements to a gridded dataset, and back to a place on the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr
from scipy.spatial import cKDTree

from icml24.ocean_oxygen.chemistry import to_umol_per_kg, unit_name
from icml24.ocean_oxygen.grid import EARTH_RADIUS_KM, Nodes, check_grid, unit_vectors

__all__ = ["check_table", "grid_profiles", "locate"]

Array = np.ndarray[Any, Any]


def check_table(table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise a ValueError that names what a table of measurements lacks."""
    missing = [name for name in columns if name not in table]
    if missing:
        raise ValueError(
            f"The table lacks the columns {', '.join(missing)}; it has {list(table.columns)}."
        )
    if not len(table):
        raise ValueError("The table is empty.")


def locate(nodes: Nodes, lat: Any, lon: Any, depth: Any, limit_km: float = 700.0) -> Array:
    """Nearest sea cell: first the nearest level, then the nearest wet cell in it.

    Parameters
    ----------
    nodes : Nodes
    lat, lon, depth : array_like, shape (n,)
    limit_km : float, default 700
        Places farther from any sea cell of their level are refused.

    Returns
    -------
    numpy.ndarray of int, shape (n,)

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> nodes = Nodes.of(ocean_grid(12, levels=3))
    >>> v = locate(nodes, [0.0], [-150.0], [120.0])
    >>> nodes.depth[v].tolist()
    [100.0]
    """
    lat, lon, depth = (np.asarray(x, float) for x in (lat, lon, depth))
    levels = np.unique(nodes.level)
    metres = np.array([nodes.depth[nodes.level == i][0] for i in levels])
    nearest = levels[np.abs(depth[:, None] - metres).argmin(axis=1)]
    found = np.empty(len(lat), int)
    for level in np.unique(nearest):
        here, among = nearest == level, np.flatnonzero(nodes.level == level)
        tree = cKDTree(unit_vectors(nodes.lat[among], nodes.lon[among]))
        chord, position = tree.query(unit_vectors(lat[here], lon[here]))
        far = 2 * EARTH_RADIUS_KM * np.arcsin(np.clip(chord / 2, 0, 1)) > limit_km
        if far.any():
            k = np.flatnonzero(here)[np.flatnonzero(far)[0]]
            raise ValueError(
                f"The place {lat[k]:g}, {lon[k]:g} at {depth[k]:g} m is more than {limit_km:g} km "
                "from any sea cell of its level."
            )
        found[here] = among[position]
    return found


def _faults(table: pd.DataFrame, variable: str, years: Array) -> dict[str, Array]:
    """Rows that cannot be used, by reason."""
    value, depth = (table[name].to_numpy(float) for name in (variable, "depth"))
    lat, lon = (table[name].to_numpy(float) for name in ("lat", "lon"))
    year = table["year"].to_numpy(float)
    return {
        "without a value": ~np.isfinite(value),
        "with a missing depth": ~np.isfinite(depth),
        "with a negative depth": depth < 0,
        "without a position on the globe": ~((np.abs(lat) <= 90) & (lon >= -180) & (lon <= 360)),
        f"dated outside {years[0]} to {years[-1]}": ~((year >= years[0]) & (year < years[-1] + 1)),
    }


def _same_unit(table: pd.DataFrame, variable: str, units: str) -> Array:
    """Oxygen in µmol/kg; a column ``units`` may give each row its own unit."""
    named = table["units"] if "units" in table else pd.Series(units, index=table.index)
    result = np.full(len(table), np.nan)
    for unit in named.unique():
        rows = (named == unit).to_numpy()
        part = table[rows]
        volume = unit_name(unit) != "umol/kg"
        if volume and not {"temperature", "salinity"} <= set(table.columns):
            raise ValueError(
                f"{unit} is per volume: the table needs the columns temperature and salinity."
            )
        t, s = (part[n] if volume else None for n in ("temperature", "salinity"))
        result[rows] = to_umol_per_kg(part[variable], unit, t, s, part["depth"])
    sound = result[result >= 0]
    if len(sound) >= 5 and np.quantile(sound, 0.9) < 15:
        raise ValueError(
            "Nine tenths of the oxygen values lie below 15 µmol/kg (the largest is "
            f"{sound.max():.3g}); they look like ml/l or mg/l. Say so with units=."
        )
    if len(sound) >= 5 and np.quantile(sound, 0.1) > 1000:
        raise ValueError("Oxygen above 1000 µmol/kg is impossible; is the unit right?")
    return result


def grid_profiles(
    table: pd.DataFrame,
    grid: xr.Dataset,
    years: tuple[int, int],
    *,
    variable: str = "oxygen",
    units: str | None = "umol/kg",
    invalid: Literal["raise", "drop"] = "raise",
    on_land: Literal["raise", "drop", "nearest"] = "drop",
    reducer: Literal["median", "mean"] = "median",
) -> xr.Dataset:
    """Sort measurements into the cells of a grid.

    Parameters
    ----------
    table : pandas.DataFrame
        One row for each value: ``lat``, ``lon``, ``depth`` (m, positive down), ``year`` (or
        ``date``), the variable; ``temperature`` and ``salinity`` if the unit is per volume;
        ``units`` if it differs from row to row. For oxygen also ``phosphate`` and ``nitrate``.
    grid : xarray.Dataset
        Covariates and ``wet``, for example :func:`~icml24.ocean_oxygen.grid.ocean_grid`.
    years : (int, int)
        First and last year of the result.
    variable : str, default "oxygen"
    units : str or None
        Unit of the column; oxygen is converted to µmol/kg. For another variable it is only noted.
    invalid : {"raise", "drop"}
        What to do with rows that cannot be used (negative oxygen, missing depth, dates out of
        range); the result's attribute ``dropped`` counts them.
    on_land : {"drop", "raise", "nearest"}
        What to do with rows whose cell is land, or below the sea floor, on this grid.
    reducer : {"median", "mean"}
        Of several values in one cell and year.

    Returns
    -------
    xarray.Dataset
        The grid with the variable (NaN where nothing was measured) and the coordinate ``year``.

    Raises
    ------
    ValueError
        In one sentence, what is wrong and what would be right.

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> rows = {"lat": [1.0], "lon": [-150.0], "depth": [90.0], "year": [1987], "oxygen": [150.0]}
    >>> ds = grid_profiles(pd.DataFrame(rows), ocean_grid(12, levels=3), (1985, 1990))
    >>> float(ds.oxygen.sel(lat=0, lon=-150, depth=100, year=1987, method="nearest"))
    150.0
    """
    check_grid(grid)
    if years[0] >= years[1]:
        raise ValueError(f"years must be (first, last) with first < last, got {years}.")
    if "year" not in table and "date" in table:
        table = table.assign(year=pd.to_datetime(table["date"]).dt.year)
    check_table(table, ("lat", "lon", "depth", "year", variable))
    time = np.arange(years[0], years[1] + 1)
    is_oxygen = variable == "oxygen"
    table = table.reset_index(drop=True)
    if is_oxygen:
        table[variable] = _same_unit(table, variable, units or "umol/kg")
    faults = _faults(table, variable, time)
    if is_oxygen:
        value = table[variable].to_numpy(float)
        faults["with negative oxygen"] = value < 0
        faults["with more than 700 µmol/kg of oxygen"] = value > 700
    found = {reason: int(rows.sum()) for reason, rows in faults.items() if rows.any()}
    if found and invalid == "raise":
        text = ", ".join(f"{n} rows {reason}" for reason, n in found.items())
        raise ValueError(f"The table has {text}. Repair them, or pass invalid='drop'.")
    table = table[~np.any(list(faults.values()), axis=0)]
    if not len(table):
        raise ValueError(f"No usable row is left in the table: {found}.")
    cell, kept = _cells(grid, table, on_land)
    if (lost := int((~kept).sum())) and on_land == "raise":
        raise ValueError(
            f"{lost} rows lie on land or below the sea floor of this grid. Pass on_land='nearest' "
            "to move them to the nearest sea cell, or on_land='drop'."
        )
    if lost:
        found["on land"] = lost
    return _fill(grid, table[kept], cell[kept], time, variable, units, reducer, found)


def _cells(grid: xr.Dataset, table: pd.DataFrame, on_land: str) -> tuple[Array, Array]:
    """Flat index of the cell of each row, and whether that cell is sea."""
    centre = float(grid["lon"][0]) + 180 - float(np.diff(grid["lon"][:2])[0]) / 2
    lon = (table["lon"].to_numpy(float) - centre + 180) % 360 - 180 + centre
    values = {"depth": table["depth"], "lat": table["lat"], "lon": lon}
    index = [
        np.abs(np.asarray(values[name], float)[:, None] - np.asarray(grid[name], float)).argmin(1)
        for name in ("depth", "lat", "lon")
    ]
    wet = np.asarray(grid["wet"], bool)
    cell = np.ravel_multi_index(tuple(index), wet.shape)
    kept = wet.ravel()[cell]
    if on_land == "nearest" and not kept.all():
        nodes, rows = Nodes.of(grid), table[~kept]
        v = locate(nodes, rows["lat"], rows["lon"], rows["depth"])
        cell[~kept] = np.flatnonzero(wet)[v]
        kept = np.ones(len(table), bool)
    return cell, kept


def _fill(
    grid: xr.Dataset,
    table: pd.DataFrame,
    cell: Array,
    time: Array,
    variable: str,
    units: str | None,
    reducer: str,
    dropped: dict[str, int],
) -> xr.Dataset:
    full = ("year", "depth", "lat", "lon")
    shape = (len(time), *(grid.sizes[name] for name in full[1:]))
    row = table["year"].to_numpy(float).astype(int) - time[0]
    place = row * int(np.prod(shape[1:])) + cell
    ds = grid.assign_coords(year=time)
    ds["year"].attrs["long_name"] = "calendar year"
    extra = [n for n in ("phosphate", "nitrate") if n in table and n != variable]
    for name in (variable, *extra):
        grouped = table[name].groupby(place).agg(reducer).dropna()
        field = np.full(int(np.prod(shape)), np.nan, np.float32)
        field[grouped.index] = grouped.to_numpy()
        attrs = {"units": "umol kg-1"}
        if variable != "oxygen" and name == variable:
            attrs = {} if units is None else {"units": units}
        elif name == "oxygen":
            attrs["standard_name"] = "moles_of_oxygen_per_unit_mass_in_sea_water"
        ds[name] = (full, field.reshape(shape), attrs)
    notes = "; ".join(f"{n} {reason}" for reason, n in dropped.items())
    return ds.assign_attrs(dropped=notes or "none")
