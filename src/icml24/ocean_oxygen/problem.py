"""What all methods see: nodes, standardised training values, features, and nothing of the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from scipy.sparse import csr_matrix

from icml24.ocean_oxygen.chemistry import solubility, unit_name
from icml24.ocean_oxygen.grid import Nodes, unit_vectors
from icml24.ocean_oxygen.splits import ROLES

__all__ = ["NUTRIENTS", "Problem", "window_of"]

Array = np.ndarray[Any, Any]

COVARIATES = ("temperature", "salinity")
NUTRIENTS = ("phosphate", "nitrate")
RANGE = (-5.0, 700.0)


def window_of(values: Array, t: int, half: int) -> Array:
    """Values of the years around ``t``, NaN where there are none; the centre is always NaN.

    Parameters
    ----------
    values : numpy.ndarray, shape (T, N)
    t : int
    half : int
        Years on each side.

    Returns
    -------
    numpy.ndarray, shape (N, 2 half + 1)

    Examples
    --------
    >>> window_of(np.array([[1.0], [2.0], [3.0]]), 0, 1).tolist()
    [[nan, nan, 2.0]]
    """
    window = np.full((2 * half + 1, values.shape[1]), np.nan, values.dtype)
    first, last = max(t - half, 0), min(t + half + 1, len(values))
    window[first - t + half : last - t + half] = values[first:last]
    window[half] = np.nan
    return window.T


def _unit_scale(values: Array) -> Array:
    sd = np.nanstd(values)
    return np.nan_to_num((values - np.nanmean(values)) / (sd if sd > 0 else 1.0)).astype(np.float32)


class Problem:
    """A dataset and a split, prepared for learning.

    Parameters
    ----------
    ds : xarray.Dataset
        With dimensions year, depth, lat, lon.
    split : xarray.DataArray
        Roles, from :mod:`icml24.ocean_oxygen.splits`.
    variable : str
        What to reconstruct.
    target : {"aou", "raw"}
        Learn the apparent oxygen utilisation, or the variable as it is.
    fourier : bool
        Add sines and cosines of the position (our addition).

    Attributes
    ----------
    nodes : Nodes
    years : numpy.ndarray, shape (T,)
    observed : numpy.ndarray, shape (T, N)
        The measurements, NaN elsewhere.
    role : numpy.ndarray, shape (T, N)
    known : numpy.ndarray, shape (T, N)
        Standardised training values, NaN elsewhere.
    nutrients : tuple of str
        Those that the dataset has.
    """

    def __init__(
        self,
        ds: xr.Dataset,
        split: xr.DataArray,
        variable: str = "oxygen",
        target: str = "aou",
        fourier: bool = True,
    ) -> None:
        _check(ds, split, variable, target)
        full = ("year", "depth", "lat", "lon")
        self.variable, self.target, self.fourier = variable, target, fourier
        self.attrs = dict(ds[variable].attrs)
        self.nodes, self.years = Nodes.of(ds), np.asarray(ds["year"])
        self.grid = ds[["wet", *(n for n in ("bathymetry", "basin") if n in ds)]]
        self.observed = self.nodes.gather(ds[variable].transpose(*full)).astype(np.float64)
        self.role = np.where(
            np.isfinite(self.observed), self.nodes.gather(split.transpose(*full)), -1
        )
        if not (self.role == 0).any():
            raise ValueError("The split leaves no measurement on a sea cell for training.")
        self._covariates = {
            name: _over_years(ds[name], self.nodes, len(self.years))
            for name in COVARIATES
            if name in ds and name != variable
        }
        self.nutrients = tuple(name for name in NUTRIENTS if name in ds and name != variable)
        self._solubility = self._saturation(ds)
        self._standardise()
        self._prepare_features(ds)

    def _saturation(self, ds: xr.Dataset) -> Array:
        if self.target == "raw":
            return np.zeros((1, 1))
        t, s = (self._covariates[name] for name in COVARIATES)
        for name, field in zip(COVARIATES, (t, s), strict=True):
            if not np.isfinite(field).all():
                raise ValueError(
                    f"{name} has gaps on sea cells; fill them, or set wet to False there."
                )
        return solubility(t, s, self.nodes.depth)

    # -- the target -------------------------------------------------------------------------------

    def _standardise(self) -> None:
        """Mean and spread of each level, from training values only."""
        raw = self.observed if self.target == "raw" else self._solubility - self.observed
        train = np.where(self.role == 0, raw, np.nan)
        everything = train[np.isfinite(train)]
        n_levels = self.nodes.wet.shape[0]
        mean, sd = np.full(n_levels, everything.mean()), np.full(n_levels, everything.std() or 1.0)
        for level in range(n_levels):
            part = train[:, self.nodes.level == level]
            part = part[np.isfinite(part)]
            if len(part) >= 10 and part.std() > 0:
                mean[level], sd[level] = part.mean(), part.std()
        self.mean, self.sd = mean[self.nodes.level], sd[self.nodes.level]
        self.standard = ((raw - self.mean) / self.sd).astype(np.float32)
        self.known = np.where(self.role == 0, self.standard, np.float32(np.nan))

    def invert(self, standard: Array, t: Any, v: Any) -> Array:
        """Turn standardised values at years ``t`` and nodes ``v`` back into the variable."""
        value = standard * self.sd[v] + self.mean[v]
        if self.target == "raw":
            return value
        rows = np.zeros_like(t) if len(self._solubility) == 1 else t
        return self._solubility[rows, v] - value

    def pairs(self, role: str) -> tuple[Array, Array]:
        """Years and nodes of the measurements with a role (positions, not numbers)."""
        t, v = np.nonzero(self.role == ROLES.index(role))
        return t, v

    # -- features ---------------------------------------------------------------------------------

    def _prepare_features(self, ds: xr.Dataset) -> None:
        nodes = self.nodes
        lam, depth = np.radians(nodes.lon), np.log1p(nodes.depth / 100)
        columns = {
            "lat": nodes.lat / 90,
            "abs lat": np.abs(nodes.lat) / 90,
            "sin lon": np.sin(lam),
            "cos lon": np.cos(lam),
            "depth": _unit_scale(depth),
        }
        self._changing = {}
        for name, field in self._covariates.items():
            if len(field) == 1:
                columns[name] = _unit_scale(field[0])
            else:
                self._changing[name] = _unit_scale(field)
        self.meta_names = (*columns, *self._changing)
        meta = [*columns.values(), *(f.mean(axis=0) for f in self._changing.values())]
        self.meta = np.stack([_unit_scale(m) for m in meta], axis=1)
        if "bathymetry" in ds:
            columns["bathymetry"] = _unit_scale(nodes.gather(ds["bathymetry"]))
        if self.fourier:
            place = unit_vectors(nodes.lat, nodes.lon)
            waves = np.concatenate([place * np.pi * 2.0**i for i in range(3)], axis=1)
            for i, wave in enumerate(waves.T):
                columns |= {f"sin {i}": np.sin(wave), f"cos {i}": np.cos(wave)}
        self._static = np.stack(list(columns.values()), axis=1).astype(np.float32)
        self._nutrient = {}
        for name in self.nutrients:
            field = _over_years(ds[name], nodes, len(self.years))
            scale = np.where(self.role == 0, field, np.nan)  # scaled by training stations only
            ok = np.isfinite(scale).sum() > 1 and np.nanstd(scale) > 0
            mean, sd = (np.nanmean(scale), np.nanstd(scale)) if ok else (0.0, 1.0)
            self._nutrient[name] = ((field - mean) / sd).astype(np.float32)
        flags = [f"{name} known" for name in self.nutrients]
        self.feature_names = [*columns, "year", *self._changing, *self.nutrients, *flags]

    def features(self, t: int) -> Array:
        """Features of all nodes in a year, shape (N, F); missing nutrients are 0."""
        span = max(len(self.years) - 1, 1)
        year = np.full((len(self.nodes), 1), 2 * t / span - 1, np.float32)
        moving = [field[t][:, None] for field in self._changing.values()]
        values = [field[t % len(field)][:, None] for field in self._nutrient.values()]
        known = [np.isfinite(v).astype(np.float32) for v in values]
        filled = [np.nan_to_num(v) for v in values]
        return np.concatenate([self._static, year, *moving, *filled, *known], axis=1)

    def records(self, t: int, neighbours: csr_matrix) -> Array:
        """Our addition: what a node and its neighbours recorded in all other years, shape (N, 4).

        Mean training value and (logarithmic) number of values, of the node and of its neighbours.
        """
        here = np.isfinite(self.known[t])
        total = np.nansum(self.known, axis=0) - np.nan_to_num(self.known[t])
        count = np.isfinite(self.known).sum(axis=0) - here
        total_near, count_near = neighbours @ total, neighbours @ count
        columns = [
            total / np.maximum(count, 1),
            np.log1p(count),
            total_near / np.maximum(count_near, 1),
            np.log1p(count_near),
        ]
        return np.stack(columns, axis=1).astype(np.float32)


def _over_years(field: xr.DataArray, nodes: Nodes, n_years: int) -> Array:
    """Node values of a covariate, shape (T, N), or (1, N) if it does not change."""
    order = [name for name in ("year", "depth", "lat", "lon") if name in field.dims]
    values = nodes.gather(field.transpose(*order)).astype(np.float64)
    return values if "year" in order else values[None]


def _check(ds: xr.Dataset, split: xr.DataArray, variable: str, target: str) -> None:
    if variable not in ds:
        raise ValueError(f"The dataset has no variable {variable!r}; it has {list(ds.data_vars)}.")
    if set(ds[variable].dims) != {"year", "depth", "lat", "lon"}:
        raise ValueError(
            f"{variable} must have the dimensions year, depth, lat, lon, got {ds[variable].dims}."
        )
    if (np.diff(np.asarray(ds["year"])) <= 0).any():
        raise ValueError("The coordinate 'year' must increase; use ds.sortby('year').")
    if dict(split.sizes) != dict(ds[variable].sizes):
        raise ValueError(f"The split must have the sizes of {variable}; make it from this dataset.")
    if target not in ("aou", "raw"):
        raise ValueError(f"target must be 'aou' or 'raw', got {target!r}.")
    values = np.asarray(ds[variable])
    if np.isinf(values).any():
        raise ValueError(f"{variable} holds infinite values; set them to NaN.")
    if target == "raw":
        return
    missing = [name for name in COVARIATES if name not in ds]
    if missing:
        raise ValueError(
            f"target='aou' needs temperature and salinity; {', '.join(missing)} is missing. "
            "target='raw' works without."
        )
    units = ds[variable].attrs.get("units")
    if units is None:
        raise ValueError(f"{variable} has no units; set ds[{variable!r}].attrs['units'].")
    if unit_name(units) != "umol/kg":
        raise ValueError(f"{variable} is in {units}; convert it with to_umol_per_kg first.")
    low, high = np.nanmin(values, initial=0.0), np.nanmax(values, initial=0.0)
    if low < RANGE[0] or high > RANGE[1]:
        raise ValueError(
            f"{variable} runs from {low:.4g} to {high:.4g}; oxygen lies between {RANGE[0]:g} and "
            f"{RANGE[1]:g} µmol/kg. Drop those values, or check the unit."
        )
