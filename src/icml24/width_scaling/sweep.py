"""From losses over rates and widths to the best rate and how it moves with width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from icml24.core.statistics import Estimate, mean_interval

__all__ = ["BestRate", "best_rate", "best_rates", "transfer_exponent"]


@dataclass(frozen=True)
class BestRate:
    """Minimum of a loss-versus-rate curve.

    Parameters
    ----------
    log2_rate : float
        Binary logarithm of the best rate.
    loss : float
        Loss there.
    on_edge : bool
        The smallest loss lies at the end of the grid: widen the grid before believing it.
    """

    log2_rate: float
    loss: float
    on_edge: bool


def best_rate(log2_rates: ArrayLike, losses: ArrayLike) -> BestRate:
    """Fit a parabola through the three points around the smallest loss.

    Parameters
    ----------
    log2_rates : array_like, shape (k,)
        Increasing; need not be evenly spaced.
    losses : array_like, shape (k,)
        NaN or infinite where training diverged.

    Returns
    -------
    BestRate
        Without a parabola (minimum on the edge, or beside a diverged run), the grid point itself.

    Raises
    ------
    ValueError
        If the arrays do not fit, the rates do not increase, or every run diverged.

    Examples
    --------
    >>> best_rate([-3, -2, -1], [2.0, 1.0, 2.0])
    BestRate(log2_rate=-2.0, loss=1.0, on_edge=False)
    >>> best_rate([-3, -2, -1], [2.0, 1.0, float("nan")]).on_edge
    True
    """
    x, y = np.asarray(log2_rates, dtype=float), np.asarray(losses, dtype=float)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise ValueError(
            f"Rates and losses must be vectors of one length, got {x.shape}, {y.shape}."
        )
    if (np.diff(x) <= 0).any():
        raise ValueError("log2_rates must increase.")
    finite = np.isfinite(y)
    if not finite.any():
        raise ValueError("Every run diverged; try smaller rates.")
    i = int(np.where(finite, y, np.inf).argmin())
    if i in (0, x.size - 1) or not finite[i - 1 : i + 2].all():
        return BestRate(float(x[i]), float(y[i]), True)
    # Newton form of the parabola; a flat one (three equal losses) has its minimum in the middle.
    left, right = np.diff(y[i - 1 : i + 2]) / np.diff(x[i - 1 : i + 2])
    curvature = (right - left) / (x[i + 1] - x[i - 1])
    if curvature <= 0:
        return BestRate(float(x[i]), float(y[i]), False)
    best = (x[i - 1] + x[i]) / 2 - left / (2 * curvature)
    loss = y[i - 1] + left * (best - x[i - 1]) + curvature * (best - x[i - 1]) * (best - x[i])
    return BestRate(float(best), float(loss), False)


def best_rates(frame: pd.DataFrame, by: list[str] | None = None) -> pd.DataFrame:
    """Best rate of every curve.

    Parameters
    ----------
    frame : pandas.DataFrame
        A row per trained model with columns ``log2_rate`` and ``loss``.
    by : list of str, optional
        Columns that tell the curves apart; default: all others.

    Returns
    -------
    pandas.DataFrame
        A row per curve: the columns of ``by``, ``log2_rate``, ``loss``, ``on_edge``.
    """
    by = by or [column for column in frame.columns if column not in ("log2_rate", "loss")]
    rows = []
    for key, curve in frame.groupby(by, sort=False):
        curve = curve.sort_values("log2_rate")
        best = best_rate(curve["log2_rate"], curve["loss"])
        rows.append((*key, best.log2_rate, best.loss, best.on_edge))
    return pd.DataFrame(rows, columns=[*by, "log2_rate", "loss", "on_edge"])


def transfer_exponent(best: pd.DataFrame, level: float = 0.95) -> Estimate:
    """Slope of the best rate's logarithm over the width's: 0 means that the rate transfers.

    Parameters
    ----------
    best : pandas.DataFrame
        Columns ``width``, ``seed``, ``log2_rate``: the best rate of each width and seed.
    level : float, default 0.95
        Confidence level of the interval over seeds.

    Returns
    -------
    Estimate
        Least-squares slope of each seed, and their mean with Student's interval.

    Raises
    ------
    ValueError
        If there are fewer than two widths.

    Examples
    --------
    >>> data = {"width": [64, 128] * 2, "seed": [0, 0, 1, 1], "log2_rate": [-3, -4, -2.5, -3.5]}
    >>> transfer_exponent(pd.DataFrame(data)).value
    -1.0
    """
    if best["width"].nunique() < 2:
        raise ValueError("A transfer exponent needs at least two widths.")
    slopes = []
    for _, part in best.groupby("seed"):
        x = np.log2(part["width"].to_numpy(float))
        dx = x - x.mean()
        slopes.append(dx @ part["log2_rate"].to_numpy(float) / (dx @ dx))
    return mean_interval(slopes, level)
