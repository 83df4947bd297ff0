"""The ocean as a grid: real temperature, salinity, sea floor and basins; wet cells as nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from icml24.core.data import DataSource
from icml24.ocean_oxygen.extracts import MISSING, block_mean

__all__ = [
    "BASINS",
    "Nodes",
    "argo_positions",
    "basin_of",
    "cell_volume",
    "check_grid",
    "monthly_temperature",
    "ocean_grid",
    "unit_vectors",
]

Array = np.ndarray[Any, Any]

EARTH_RADIUS_KM = 6371.0

#: Names of the basins, in the order of their codes.
BASINS = ("Atlantic", "Pacific", "Indian", "Southern", "Arctic", "marginal")

_DIGESTS = {
    "levitus_6": "8f72e44ef872ed11173a18d2f904377ce5c70e4babbf5e33eba312f7cf648972",
    "levitus_4": "d673a09cc3de795a71cfd3c765442f394b05c2699e75ef3335607dedb4daf7ae",
    "monthly_6": "223416c5e20a6f9d22d0c64d4f8ae8361a9e0a4fdc69be0be46d8409b88f08f5",
    "argo": "4b817d2088c99e90c8617605ea544040b2d20c89b6ab089f859d310bd4054c7b",
}


@lru_cache(maxsize=8)
def _extract(name: str) -> dict[str, Array]:
    source = DataSource(
        name,
        _DIGESTS[name],
        "CC BY 4.0, Argo" if name == "argo" else "public domain, NOAA",
        extract=f"icml24.ocean_oxygen:data/{name}.npz",
    )
    with np.load(source.load().open()) as file:
        return {key: file[key] for key in file.files}


def _floats(stored: Array, scale: float = 1.0, offset: float = 0.0) -> Array:
    values = stored.astype(np.float32)
    return np.where(stored == MISSING, np.float32(np.nan), values / scale + offset)


def basin_of(lat: Any, lon: Any) -> Array:
    """Assign places to basins by a rule of thumb in latitude and longitude.

    Parameters
    ----------
    lat, lon : array_like
        Degrees; longitudes from -180 to 360.

    Returns
    -------
    numpy.ndarray of int
        Positions in :data:`BASINS`.

    Examples
    --------
    >>> [BASINS[i] for i in basin_of([0, 0, -10, -60, 80, 36], [-25, -150, 75, 0, 0, 18])]
    ['Atlantic', 'Pacific', 'Indian', 'Southern', 'Arctic', 'marginal']
    """
    lat, lon = np.broadcast_arrays(np.asarray(lat, float), np.asarray(lon, float))
    lon = (lon + 180) % 360 - 180
    west = np.select([lat > 17, lat > 14, lat > 9], [-100.0, -90.0, -84.0], -69.0)
    atlantic = (lon > west) & (lon < 20)
    indian = (lon >= 20) & (lon < np.where(lat > -7, 100.0, 135.0)) & (lat < 31)
    inner = (lat > 30) & (lat < 47) & (lon > -5.5) & (lon < 60)
    red_sea = (lat > 12) & (lat < 31) & (lon > 32) & (lon < 43)
    conditions = [lat > 66, lat < -40, inner | red_sea, atlantic, indian]
    return np.select(conditions, [4, 3, 5, 0, 2], 1)


def _describe(ds: xr.Dataset) -> xr.Dataset:
    """Attach CF attributes to coordinates and covariates."""
    attributes: dict[str, dict[str, Any]] = {
        "lat": {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
        "lon": {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
        "depth": {"standard_name": "depth", "units": "m", "positive": "down", "axis": "Z"},
        "temperature": {"standard_name": "sea_water_temperature", "units": "degree_Celsius"},
        "salinity": {"standard_name": "sea_water_practical_salinity", "units": "1"},
        "bathymetry": {"standard_name": "sea_floor_depth_below_geoid", "units": "m"},
        "basin": {
            "long_name": "basin",
            "flag_values": np.arange(len(BASINS), dtype=np.int8),
            "flag_meanings": " ".join(BASINS),
        },
        "wet": {"long_name": "cell is sea", "units": "1"},
    }
    for name, values in attributes.items():
        if name in ds.variables:
            ds[name].attrs.update(values)
    return ds


def _coarser(field: Array) -> Array:
    """Average 2 x 2 cells of which at least two are sea (all four would lose the coasts)."""
    return block_mean(field, 2, 0.5).astype(np.float32)


def ocean_grid(step: int = 6, levels: int | None = None) -> xr.Dataset:
    """Load the real ocean without its oxygen: the covariates every reconstruction starts from.

    Parameters
    ----------
    step : {4, 6, 12}
        Degrees between cells.
    levels : int, optional
        Only this many levels from the top.

    Returns
    -------
    xarray.Dataset
        Dimensions ``depth``, ``lat``, ``lon``; variables ``temperature``, ``salinity``,
        ``bathymetry``, ``basin`` and the land-sea mask ``wet``.

    Examples
    --------
    >>> grid = ocean_grid(12, levels=3)
    >>> dict(grid.sizes), int(grid.wet.sum())
    ({'depth': 3, 'lat': 15, 'lon': 30}, 935)
    """
    if step not in (4, 6, 12):
        raise ValueError(f"step must be 4, 6 or 12 degrees, got {step}.")
    stored = _extract("levitus_4" if step == 4 else "levitus_6")
    fields = {
        "temperature": _floats(stored["temperature"], 1000),
        "salinity": _floats(stored["salinity"], 1000, 35),
        "bathymetry": _floats(stored["bathymetry"]),
    }
    if step == 12:
        fields = {name: _coarser(field) for name, field in fields.items()}
    depth = stored["depth"].astype(float)[:levels]
    lat, lon = np.arange(-90 + step / 2, 90, step), np.arange(-180 + step / 2, 180, step)
    full = ("depth", "lat", "lon")
    t, s = (fields[name][: len(depth)] for name in ("temperature", "salinity"))
    variables = {
        "temperature": (full, t),
        "salinity": (full, s),
        "bathymetry": (full[1:], fields["bathymetry"]),
        "basin": (full[1:], basin_of(lat[:, None], lon[None, :]).astype(np.int8)),
        "wet": (full, np.isfinite(t) & np.isfinite(s)),
    }
    ds = xr.Dataset(variables, {"depth": depth, "lat": lat, "lon": lon})
    ds.attrs["source"] = "Levitus climatology and ETOPO relief (NOAA), block means"
    return _describe(ds)


def monthly_temperature() -> xr.Dataset:
    """Load the real monthly temperature; its time steps, called ``year`` here too, are months.

    Returns
    -------
    xarray.Dataset
        ``temperature`` over (year, depth, lat, lon) with ``year`` = 1 to 12, and the covariates
        ``bathymetry``, ``basin`` and ``wet``.

    Examples
    --------
    >>> dict(monthly_temperature().sizes)
    {'year': 12, 'depth': 8, 'lat': 30, 'lon': 60}
    """
    stored = _extract("monthly_6")
    t = _floats(stored["temperature"], 1000)
    grid = ocean_grid(6)[["bathymetry", "basin"]]
    full = ("year", "depth", "lat", "lon")
    variables = {"temperature": (full, t), "wet": (full[1:], np.isfinite(t).all(axis=0))}
    coordinates = {
        "year": np.arange(1, 13),
        "depth": stored["depth"].astype(float),
        "lat": grid["lat"].to_numpy(),
        "lon": grid["lon"].to_numpy(),
    }
    ds = xr.Dataset(variables, coordinates)
    ds["bathymetry"] = (full[2:], grid["bathymetry"].to_numpy())
    ds["basin"] = (full[2:], grid["basin"].to_numpy())
    ds["year"].attrs["long_name"] = "month of the mean year"
    return _describe(ds)


def argo_positions() -> pd.DataFrame:
    """Load where and when Argo floats have measured oxygen (one profile per 2° cell and year).

    Returns
    -------
    pandas.DataFrame
        Columns ``lat``, ``lon`` (degrees), ``year``. Positions only: the values are not included.

    Examples
    --------
    >>> len(argo_positions())
    26539
    """
    stored = _extract("argo")
    day = pd.Timestamp("2000-01-01") + pd.to_timedelta(stored["day"].astype("int64"), unit="D")
    return pd.DataFrame(
        {
            "lat": stored["lat"] / 100,
            "lon": (stored["lon"] / 100 + 180) % 360 - 180,
            "year": day.year,
        }
    )


def check_grid(ds: xr.Dataset) -> None:
    """Say at once what is wrong with the coordinates of a gridded dataset.

    Raises
    ------
    ValueError
        If a dimension is missing, depth is negative or not increasing, latitude or longitude are
        not increasing or out of range, or the land-sea mask is missing or empty.
    """
    for name in ("depth", "lat", "lon"):
        if name not in ds.sizes or name not in ds.coords:
            raise ValueError(f"The dataset needs a coordinate {name!r}; it has {list(ds.coords)}.")
        values = np.asarray(ds[name], float)
        if not np.isfinite(values).all():
            raise ValueError(f"The coordinate {name!r} has missing values; fill or drop them.")
        if (np.diff(values) <= 0).any():
            raise ValueError(f"The coordinate {name!r} must increase; use ds.sortby({name!r}).")
    if float(ds["depth"][0]) < 0:
        raise ValueError("depth must be in metres below the surface, so zero or positive.")
    if np.abs(ds["lat"]).max() > 90:
        raise ValueError("lat must lie between -90 and 90 degrees.")
    low, high = float(ds["lon"][0]), float(ds["lon"][-1])
    if low < -180 or high > 360 or high - low >= 360 or (low < 0 and high > 180):
        raise ValueError(
            f"lon must keep to one convention, -180 to 180 or 0 to 360, got {low:g} to {high:g}."
        )
    if "wet" not in ds or ds["wet"].dims != ("depth", "lat", "lon"):
        raise ValueError("The dataset needs the land-sea mask wet (depth, lat, lon).")
    if not bool(ds["wet"].any()):
        raise ValueError("The mask wet has no sea cell.")


def cell_volume(ds: xr.Dataset) -> xr.DataArray:
    """Relative volume of the cells: cosine of the latitude times the thickness of the level.

    Examples
    --------
    >>> volume = cell_volume(ocean_grid(12))
    >>> volume.dims, bool((volume[-1] > volume[1]).all())
    (('depth', 'lat', 'lon'), True)
    """
    depth = np.asarray(ds["depth"], float)
    middles = (depth[1:] + depth[:-1]) / 2
    edges = np.concatenate([[0.0], middles, [depth[-1] + (depth[-1] - middles[-1])]])
    volume = (
        np.diff(edges)[:, None, None] * np.cos(np.radians(np.asarray(ds["lat"], float)))[:, None]
    )
    volume = np.broadcast_to(volume, tuple(ds.sizes[name] for name in ("depth", "lat", "lon")))
    coordinates = {name: np.asarray(ds[name]) for name in ("depth", "lat", "lon")}
    return xr.DataArray(volume.copy(), coordinates, ("depth", "lat", "lon"), name="volume")


def unit_vectors(lat: Array, lon: Array) -> Array:
    """Places on the unit sphere, shape (n, 3)."""
    phi, lam = np.radians(lat), np.radians(lon)
    return np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)], axis=-1)


@dataclass(frozen=True)
class Nodes:
    """The wet cells of a grid, one node each, in the order depth, latitude, longitude.

    Parameters
    ----------
    wet : numpy.ndarray of bool, shape (depth, lat, lon)
    level : numpy.ndarray of int, shape (N,)
    depth, lat, lon : numpy.ndarray, shape (N,)
    basin : numpy.ndarray of int, shape (N,)

    Examples
    --------
    >>> nodes = Nodes.of(ocean_grid(12, levels=3))
    >>> field = nodes.scatter(nodes.depth)
    >>> field.shape, bool((nodes.gather(field) == nodes.depth).all())
    ((3, 15, 30), True)
    """

    wet: Array
    level: Array
    depth: Array
    lat: Array
    lon: Array
    basin: Array

    @classmethod
    def of(cls, ds: xr.Dataset) -> Nodes:
        """Collect the wet cells of a dataset."""
        check_grid(ds)
        wet = np.asarray(ds["wet"], bool)
        level, i, j = np.nonzero(wet)
        lat, lon = np.asarray(ds["lat"], float)[i], np.asarray(ds["lon"], float)[j]
        basin = np.asarray(ds["basin"])[i, j] if "basin" in ds else basin_of(lat, lon)
        return cls(wet, level, np.asarray(ds["depth"], float)[level], lat, lon, basin)

    def __len__(self) -> int:
        return len(self.level)

    def gather(self, field: Any) -> Array:
        """Values at the nodes of a field (..., depth, lat, lon), or of a map (lat, lon)."""
        values = np.asarray(field)
        if values.shape == self.wet.shape[1:]:
            values = np.broadcast_to(values, self.wet.shape)
        return values[..., self.wet]

    def scatter(self, values: Array) -> Array:
        """Put node values (..., N) back on the grid, NaN on land."""
        field = np.full((*values.shape[:-1], *self.wet.shape), np.nan, np.float32)
        field[..., self.wet] = values
        return field
