"""Write a reconstruction as NetCDF or Zarr, whole or not at all, and read it back."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import xarray as xr

__all__ = ["open_field", "save_field"]


def _kind(path: Path) -> str:
    if path.suffix not in (".nc", ".zarr"):
        raise ValueError(f"The name must end in .nc (NetCDF) or .zarr, got {path.name!r}.")
    return path.suffix


def save_field(ds: xr.Dataset, path: str | os.PathLike[str]) -> None:
    """Write a dataset.

    The file is written beside its place and moved there when it is complete, so a killed run leaves
    the old one. Numbers are packed without loss (deflate).

    Parameters
    ----------
    ds : xarray.Dataset
        From ``predict``, or any other.
    path : path-like
        Ends in ``.nc`` (NetCDF 4) or ``.zarr``.

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> path = Path(tempfile.mkdtemp()) / "grid.nc"
    >>> save_field(ocean_grid(12), path)
    >>> open_field(path).equals(ocean_grid(12))
    True
    """
    path = Path(path)
    kind = _kind(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}; make it first.")
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    try:
        part = scratch / path.name
        if kind == ".nc":
            packed = {name: {"zlib": True} for name in ds.data_vars}
            ds.to_netcdf(part, engine="h5netcdf", encoding=packed)
        else:
            ds.to_zarr(part, mode="w", consolidated=False)
            if path.is_dir():
                os.replace(path, scratch / "old")
        os.replace(part, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def open_field(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a dataset into memory.

    Parameters
    ----------
    path : path-like
        Written by :func:`save_field`, or any NetCDF 4 file or Zarr store.
    """
    path = Path(path)
    kind = _kind(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if kind == ".nc":
        with xr.open_dataset(path, engine="h5netcdf") as ds:
            return ds.load()
    with xr.open_zarr(path, consolidated=False) as ds:
        return ds.load()
