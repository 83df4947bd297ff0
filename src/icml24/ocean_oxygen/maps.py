"""Maps and sections with matplotlib only: colour for the sea, grey for land."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

__all__ = ["plot_map", "plot_section"]


def _mesh(ax: Any, x: Any, y: Any, field: Any, label: str, options: dict[str, Any]) -> Any:
    import matplotlib.pyplot as plt

    ax = plt.gca() if ax is None else ax
    ax.set_facecolor("#bbbbbb")
    mesh = ax.pcolormesh(x, y, np.ma.masked_invalid(field), rasterized=True, **options)
    if label:
        ax.figure.colorbar(mesh, ax=ax, label=label, shrink=0.85)
    ax.grid(False)
    return mesh


def plot_map(field: xr.DataArray, ax: Any = None, label: str = "", **options: Any) -> Any:
    """Draw a field over longitude and latitude.

    Parameters
    ----------
    field : xarray.DataArray
        Dimensions lat and lon; NaN on land.
    ax : matplotlib.axes.Axes, optional
        The current axes by default.
    label : str
        Of the colour bar; without it there is none.
    **options
        Passed to ``pcolormesh``, for example ``vmin`` and ``cmap``.

    Returns
    -------
    matplotlib.collections.QuadMesh

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> mesh = plot_map(ocean_grid(12).temperature[0], label="°C")
    """
    if set(field.dims) != {"lat", "lon"}:
        raise ValueError(f"A map has the dimensions lat and lon, got {field.dims}.")
    field = field.transpose("lat", "lon")
    mesh = _mesh(ax, field["lon"], field["lat"], field, label, options)
    mesh.axes.set(xlabel="longitude (°)", ylabel="latitude (°)")
    mesh.axes.set(xticks=range(-120, 181, 60), yticks=range(-60, 61, 30))
    return mesh


def plot_section(field: xr.DataArray, ax: Any = None, label: str = "", **options: Any) -> Any:
    """Draw a field over latitude and depth, one band for each level of the grid.

    Parameters
    ----------
    field : xarray.DataArray
        Dimensions depth and lat; NaN on land.
    ax, label, **options
        As in :func:`plot_map`.

    Returns
    -------
    matplotlib.collections.QuadMesh

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> mesh = plot_section(ocean_grid(12).temperature.sel(lon=-162), label="°C")
    """
    if set(field.dims) != {"depth", "lat"}:
        raise ValueError(f"A section has the dimensions depth and lat, got {field.dims}.")
    field = field.transpose("depth", "lat")
    depth = np.asarray(field["depth"], float)
    mesh = _mesh(ax, field["lat"], np.arange(len(depth)), field, label, options)
    mesh.axes.set_yticks(np.arange(len(depth)), [f"{z:.0f}" for z in depth])
    mesh.axes.set_ylim(len(depth) - 0.5, -0.5)
    mesh.axes.set(xlabel="latitude (°)", ylabel="depth (m)")
    return mesh
