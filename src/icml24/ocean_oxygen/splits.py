"""Which measurements train, stop the training, calibrate the intervals, and test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from icml24.ocean_oxygen.profiles import check_table, grid_profiles

__all__ = ["ROLES", "area_of", "block_split", "source_split", "spatial_split", "temporal_split"]

Array = np.ndarray[Any, Any]

#: Names of the roles, in the order of their codes; -1 stands for "not measured".
ROLES = ("train", "validate", "calibrate", "test")

SHARES = (0.60, 0.075, 0.075, 0.25)


def area_of(lat: Any, lon: Any, size: float) -> Array:
    """Give each place the number of its area of ``size`` by ``size`` degrees.

    Examples
    --------
    >>> area_of([-80, 80], [-170, 170], 45).tolist()
    [0, 31]
    """
    row = np.floor((np.asarray(lat, float) + 90) / size).astype(int)
    column = np.floor(((np.asarray(lon, float) + 180) % 360) / size).astype(int)
    return np.minimum(row, int(np.ceil(180 / size)) - 1) * int(np.ceil(360 / size)) + column


def _deal(groups: Array, seed: int, shares: tuple[float, ...]) -> Array:
    """Deal whole groups to the roles until each has its share of the entries."""
    if len(shares) != len(ROLES) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(f"shares must be {len(ROLES)} parts that sum to one, got {shares}.")
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.random.default_rng([14, seed]).permutation(len(names))
    done = np.cumsum(counts[order]) - counts[order] / 2
    edges = np.cumsum(shares)[:-1] * max(counts.sum(), 1)
    role = np.empty(len(names), np.int8)
    role[order] = np.searchsorted(edges, done, side="right")
    return role[inverse]


def _roles(codes: Array, field: xr.DataArray) -> xr.DataArray:
    return xr.DataArray(codes, field.coords, field.dims, name="role").assign_attrs(
        flag_values=[-1, 0, 1, 2, 3], flag_meanings="unmeasured " + " ".join(ROLES)
    )


def _assign(
    ds: xr.Dataset, variable: str, group: Any, seed: int, shares: tuple[float, ...]
) -> xr.DataArray:
    """Deal the measured cells of a dataset, whole groups at a time."""
    if variable not in ds:
        raise ValueError(f"The dataset has no variable {variable!r}; it has {list(ds.data_vars)}.")
    field = ds[variable].transpose("year", "depth", "lat", "lon")
    seen = np.isfinite(field.to_numpy())
    codes = np.full(seen.shape, -1, np.int8)
    codes[seen] = _deal(np.broadcast_to(group, seen.shape)[seen], seed, shares)
    return _roles(codes, field)


def block_split(
    ds: xr.Dataset,
    seed: int = 0,
    shares: tuple[float, ...] = SHARES,
    *,
    size: float = 30.0,
    variable: str = "oxygen",
) -> xr.DataArray:
    """Deal whole blocks, one area in one year, as the authors do.

    The same water a year before or after may train, which flatters every method that looks at it;
    :func:`temporal_split` and :func:`spatial_split` are stricter.

    Parameters
    ----------
    ds : xarray.Dataset
    seed : int
    shares : tuple of four floats
        Of the measurements, for training, early stopping, calibration and test.
    size : float, default 30
        Side of an area in degrees.
    variable : str

    Returns
    -------
    xarray.DataArray of int
        Positions in :data:`ROLES`, -1 where nothing is measured.

    Examples
    --------
    >>> from icml24.ocean_oxygen.world import make_ocean
    >>> role = block_split(make_ocean(0, step=12, years=(1990, 1999), levels=2))
    >>> sorted(np.unique(role).tolist())
    [-1, 0, 1, 2, 3]
    """
    lat, lon = np.meshgrid(ds["lat"], ds["lon"], indexing="ij")
    area = area_of(lat, lon, size)
    years = np.arange(ds.sizes["year"])[:, None, None, None]
    return _assign(ds, variable, years * (area.max() + 1) + area, seed, shares)


def temporal_split(
    ds: xr.Dataset, seed: int = 0, shares: tuple[float, ...] = SHARES, *, variable: str = "oxygen"
) -> xr.DataArray:
    """Deal whole years; see :func:`block_split`."""
    years = np.arange(ds.sizes["year"])[:, None, None, None]
    return _assign(ds, variable, years, seed, shares)


def spatial_split(
    ds: xr.Dataset,
    seed: int = 0,
    shares: tuple[float, ...] = SHARES,
    *,
    size: float = 30.0,
    variable: str = "oxygen",
) -> xr.DataArray:
    """Deal whole areas for the whole century; see :func:`block_split`."""
    lat, lon = np.meshgrid(ds["lat"], ds["lon"], indexing="ij")
    return _assign(ds, variable, area_of(lat, lon, size), seed, shares)


def source_split(
    table: pd.DataFrame,
    grid: xr.Dataset,
    years: tuple[int, int],
    seed: int = 0,
    shares: tuple[float, ...] = SHARES,
    *,
    variable: str = "oxygen",
    group: str = "source",
    **options: Any,
) -> tuple[xr.Dataset, xr.DataArray]:
    """Deal whole cruises, or other sources of measurements, and sort the table into a grid.

    A cruise crosses areas and years, so the other splits tear it apart: a bottle is then tested
    against its neighbours on the same wire. Where sources of different roles meet in one cell and
    year, only those of the last role count (test before calibration, validation, training), so no
    value is trained on that shares its cell and year with a held-out one.

    Parameters
    ----------
    table : pandas.DataFrame
        As for :func:`~icml24.ocean_oxygen.profiles.grid_profiles`, with a column that names the
        source of each row.
    grid, years
        As for :func:`~icml24.ocean_oxygen.profiles.grid_profiles`.
    seed : int
    shares : tuple of four floats
        Of the rows, for training, early stopping, calibration and test.
    variable : str
    group : str, default "source"
        The column with the sources.
    **options
        Passed to :func:`~icml24.ocean_oxygen.profiles.grid_profiles`.

    Returns
    -------
    ds : xarray.Dataset
        The gridded table; its attribute ``dropped`` counts the unused rows of each role.
    split : xarray.DataArray of int
        Positions in :data:`ROLES`, -1 where nothing is measured.

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> rows = {"lat": [1.0, 1.0], "lon": [-150.0, -150.0], "depth": [0.0, 90.0], "year": 1987}
    >>> rows |= {"oxygen": [220.0, 150.0], "source": ["cruise A", "cruise B"]}
    >>> shares = (0.5, 0.0, 0.0, 0.5)
    >>> ds, split = source_split(
    ...     pd.DataFrame(rows), ocean_grid(12, levels=3), (1985, 1990), 0, shares
    ... )
    >>> sorted(split.to_numpy()[np.isfinite(ds.oxygen.to_numpy())].tolist())
    [0, 3]
    """
    check_table(table, (group,))
    if table[group].isna().any():
        raise ValueError(
            f"{int(table[group].isna().sum())} rows have no {group}; name or drop them."
        )
    role = _deal(table[group].astype(str).to_numpy(), seed, shares)
    parts = {
        int(code): grid_profiles(table[role == code], grid, years, variable=variable, **options)
        for code in np.unique(role)
    }
    ds = next(iter(parts.values()))
    field = ds[variable]
    values, codes = np.full(field.shape, np.nan, field.dtype), np.full(field.shape, -1, np.int8)
    for code, part in parts.items():  # in the order of the roles, so a later one wins
        seen = np.isfinite(part[variable].to_numpy())
        values[seen], codes[seen] = part[variable].to_numpy()[seen], code
    notes = "; ".join(f"{ROLES[code]}: {part.attrs['dropped']}" for code, part in parts.items())
    ds = ds.assign({variable: field.copy(data=values)}).assign_attrs(dropped=notes)
    return ds, _roles(codes, field)
