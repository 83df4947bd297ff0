"""What every method of the column can do: fit a dataset, predict a dataset, answer for a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from sklearn.base import BaseEstimator

from icml24.ocean_oxygen.conformal import ZoneConformal
from icml24.ocean_oxygen.grid import BASINS
from icml24.ocean_oxygen.problem import Problem
from icml24.ocean_oxygen.profiles import check_table, locate
from icml24.ocean_oxygen.splits import block_split

__all__ = ["FieldEstimator"]

Array = np.ndarray[Any, Any]


class FieldEstimator(BaseEstimator):
    """Base of all methods; a subclass says how to fit and how to predict standardised values."""

    variable: str
    target: str
    alpha: float
    problem_: Problem
    conformal_: ZoneConformal
    fourier = False

    def _fit(self) -> None:
        raise NotImplementedError

    def _standard(self, t: Array, v: Array) -> Array:
        raise NotImplementedError

    def _standard_year(self, t: int) -> Array:
        v = np.arange(len(self.problem_.nodes))
        return self._standard(np.full(len(v), t), v)

    def fit(self, ds: xr.Dataset, split: xr.DataArray | None = None) -> Any:
        """Learn from the training measurements of a dataset.

        Parameters
        ----------
        ds : xarray.Dataset
            The variable, its covariates and the mask ``wet``; see
            :func:`~icml24.ocean_oxygen.profiles.grid_profiles`.
        split : xarray.DataArray, optional
            Roles of the measurements. By default blocks are dealt: 80 % train, 10 % stop the
            training, 10 % calibrate the intervals.

        Returns
        -------
        FieldEstimator
            Itself.
        """
        if split is None:
            split = block_split(ds, 0, (0.8, 0.1, 0.1, 0.0), variable=self.variable)
        self.problem_ = Problem(ds, split, self.variable, self.target, self.fourier)
        self._fit()
        t, v = self.problem_.pairs("calibrate")
        error = self.problem_.observed[t, v] - self.predict_nodes(t, v)
        basin = self.problem_.nodes.basin
        self.conformal_ = ZoneConformal(self.alpha).fit(error, basin[v], len(BASINS))
        return self

    def predict_nodes(self, t: Array, v: Array) -> Array:
        """Predict at years ``t`` and nodes ``v`` (positions), in the unit of the variable."""
        t, v = np.asarray(t, int), np.asarray(v, int)
        if not len(t):
            return np.zeros(0)
        return self.problem_.invert(self._standard(t, v), t, v)

    def half_width(self, v: Array) -> Array:
        """Half of the width of the interval at nodes ``v``."""
        return self.conformal_.half_width_[self.problem_.nodes.basin[v]]

    def held_out(self, role: str = "test") -> pd.DataFrame:
        """Compare with the measurements of a role.

        Returns
        -------
        pandas.DataFrame
            ``year``, ``node``, ``basin``, ``truth``, ``mean``, ``lower``, ``upper``.
        """
        t, v = self.problem_.pairs(role)
        mean, half = self.predict_nodes(t, v), self.half_width(v)
        return pd.DataFrame(
            {
                "year": self.problem_.years[t],
                "node": v,
                "basin": self.problem_.nodes.basin[v],
                "truth": self.problem_.observed[t, v],
                "mean": mean,
                "lower": mean - half,
                "upper": mean + half,
            }
        )

    def predict(self, years: Any = None) -> xr.Dataset:
        """Reconstruct the whole field.

        Parameters
        ----------
        years : sequence of int, optional
            All years of the dataset by default.

        Returns
        -------
        xarray.Dataset
            The variable with ``<variable>_lower`` and ``<variable>_upper``, following the CF
            conventions.
        """
        known = self.problem_.years
        wanted = known if years is None else np.atleast_1d(np.asarray(years))
        rows = [self._position(year) for year in wanted]
        v = np.arange(len(self.problem_.nodes))
        mean = np.stack(
            [self.problem_.invert(self._standard_year(t), np.full(len(v), t), v) for t in rows]
        )
        half = self.half_width(v)
        fields = {"": mean, "_lower": mean - half, "_upper": mean + half}
        return self._dataset(wanted, fields)

    def _position(self, year: Any) -> int:
        found = np.flatnonzero(self.problem_.years == year)
        if not len(found):
            first, last = self.problem_.years[[0, -1]]
            raise ValueError(f"The year {year} is not among those of the data, {first} to {last}.")
        return int(found[0])

    def _dataset(self, years: Array, fields: dict[str, Array]) -> xr.Dataset:
        problem, name = self.problem_, self.variable
        ds = problem.grid.assign_coords(year=years)
        ds["year"].attrs["long_name"] = "calendar year"
        full, level = ("year", "depth", "lat", "lon"), f"{1 - self.alpha:.0%}"
        titles = {"": "mean", "_lower": "lower end", "_upper": "upper end"}
        for suffix, values in fields.items():
            attrs = {k: v for k, v in problem.attrs.items() if k in ("units", "standard_name")}
            part = "reconstruction" if not suffix else f"{titles[suffix]} of the {level} interval"
            attrs["long_name"] = f"{name}, {part}"
            if suffix:
                attrs.pop("standard_name", None)
            ds[name + suffix] = (full, problem.nodes.scatter(values), attrs)
        ds[name].attrs["ancillary_variables"] = f"{name}_lower {name}_upper"
        return ds.assign_attrs(
            Conventions="CF-1.11",
            title=f"Reconstruction of {name}",
            source=f"icml24.ocean_oxygen, {type(self).__name__}",
            interval=f"split-conformal by basin, nominal {level}",
        )

    def predict_table(self, table: pd.DataFrame) -> pd.DataFrame:
        """Answer for single places: the nearest sea cell of the grid.

        Parameters
        ----------
        table : pandas.DataFrame
            Columns ``lat``, ``lon``, ``depth``, ``year``.

        Returns
        -------
        pandas.DataFrame
            The table with the columns ``mean``, ``lower``, ``upper``.
        """
        check_table(table, ("lat", "lon", "depth", "year"))
        t = np.array([self._position(year) for year in table["year"]])
        v = locate(self.problem_.nodes, table["lat"], table["lon"], table["depth"])
        mean, half = self.predict_nodes(t, v), self.half_width(v)
        return table.assign(mean=mean, lower=mean - half, upper=mean + half)
