"""Errors, volumes of low oxygen, and trends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from icml24.ocean_oxygen.grid import BASINS

__all__ = ["low_volume", "mape", "r2", "regional_table", "rmse", "trend", "weighted_mean"]

Array = np.ndarray[Any, Any]


def _pair(truth: ArrayLike, prediction: ArrayLike) -> tuple[Array, Array]:
    y, p = np.asarray(truth, float), np.asarray(prediction, float)
    if y.shape != p.shape or y.size == 0:
        raise ValueError(f"truth and prediction must match, got shapes {y.shape} and {p.shape}.")
    if not (np.isfinite(y).all() and np.isfinite(p).all()):
        raise ValueError("truth and prediction must be finite; compare measured cells only.")
    return y, p


def rmse(truth: ArrayLike, prediction: ArrayLike) -> float:
    """Root of the mean squared error, in the unit of the data.

    Examples
    --------
    >>> rmse([0.0, 0.0], [3.0, 4.0])
    3.5355339059327378
    """
    y, p = _pair(truth, prediction)
    return float(np.sqrt(((y - p) ** 2).mean()))


def mape(truth: ArrayLike, prediction: ArrayLike, threshold: float = 5.0) -> float:
    """Mean absolute percentage error over true values of at least ``threshold``, in percent.

    Examples
    --------
    >>> mape([4.0, 10.0, 20.0], [0.0, 9.0, 22.0])
    10.0
    """
    y, p = _pair(truth, prediction)
    keep = y >= threshold
    if not keep.any():
        raise ValueError(f"No true value reaches the threshold {threshold:g}.")
    return float(100 * np.abs((y - p) / np.where(keep, y, 1.0))[keep].mean())


def r2(truth: ArrayLike, prediction: ArrayLike) -> float:
    """Share of the variance that is explained.

    Examples
    --------
    >>> r2([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    1.0
    """
    y, p = _pair(truth, prediction)
    return float(1 - ((y - p) ** 2).mean() / y.var())


def weighted_mean(field: Any, volume: Any) -> Array:
    """Mean over the wet cells of a field (..., depth, lat, lon), weighted by their volume."""
    values, weight = np.asarray(field, float), np.asarray(volume, float)
    wet = np.isfinite(values)
    total = np.where(wet, values * weight, 0.0).sum(axis=(-3, -2, -1))
    return total / np.where(wet, weight, 0.0).sum(axis=(-3, -2, -1))


def low_volume(field: Any, volume: Any, threshold: float = 100.0) -> Array:
    """Share of the volume below ``threshold`` µmol/kg: the oxygen-minimum zones.

    Parameters
    ----------
    field : array_like, shape (..., depth, lat, lon)
        NaN on land.
    volume : array_like, shape (depth, lat, lon)
        From :func:`~icml24.ocean_oxygen.grid.cell_volume`.
    threshold : float, default 100

    Returns
    -------
    numpy.ndarray

    Examples
    --------
    >>> low_volume(np.array([[[50.0, 200.0]]]), np.array([[[1.0, 3.0]]])).item()
    0.25
    """
    values = np.asarray(field, float)
    below = np.where(np.isfinite(values), values < threshold, np.nan)
    return weighted_mean(below, volume)


def trend(series: ArrayLike, years: ArrayLike, first: int = 1960, last: int = 2010) -> float:
    """Change from ``first`` to ``last`` along the least-squares line through the years between.

    Parameters
    ----------
    series : array_like, shape (T,)
    years : array_like of int, shape (T,)
    first, last : int

    Returns
    -------
    float
        In the unit of the series.

    Examples
    --------
    >>> round(trend([0.0, 1.0, 2.0], [2000, 2001, 2002], 2000, 2002), 6)
    2.0
    """
    t, y = np.asarray(years, float), np.asarray(series, float)
    keep = (t >= first) & (t <= last)
    if keep.sum() < 2:
        raise ValueError(f"The series has fewer than two years between {first} and {last}.")
    return float(np.polyfit(t[keep], y[keep], 1)[0] * (last - first))


def regional_table(
    truth: ArrayLike, prediction: ArrayLike, basin: ArrayLike, threshold: float = 5.0
) -> pd.DataFrame:
    """RMSE, MAPE and number of values for each basin that has any.

    Parameters
    ----------
    truth, prediction : array_like, shape (n,)
    basin : array_like of int, shape (n,)
        Positions in :data:`~icml24.ocean_oxygen.grid.BASINS`.
    threshold : float, default 5
        Of the MAPE.

    Returns
    -------
    pandas.DataFrame

    Examples
    --------
    >>> regional_table([10.0, 20.0], [11.0, 20.0], [1, 1])["RMSE"].round(2).to_dict()
    {'Pacific': 0.71}
    """
    y, p = _pair(truth, prediction)
    code = np.asarray(basin)
    rows = {
        name: {
            "RMSE": rmse(y[code == i], p[code == i]),
            "MAPE": mape(y[code == i], p[code == i], threshold),
            "n": int((code == i).sum()),
        }
        for i, name in enumerate(BASINS)
        if (code == i).any()
    }
    return pd.DataFrame.from_dict(rows, orient="index")
