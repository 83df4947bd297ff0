"""Peers: weighted neighbours, kriging, and any regression of a table of features."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from sklearn.base import clone

from icml24.ocean_oxygen.base import FieldEstimator
from icml24.ocean_oxygen.grid import EARTH_RADIUS_KM, unit_vectors
from icml24.ocean_oxygen.problem import window_of

__all__ = ["IDW", "Kriging", "Tabular", "boosted_trees"]

Array = np.ndarray[Any, Any]


class _Neighbours(FieldEstimator):
    """Methods that average the nearest training values in space, depth and time.

    Lengths are chosen by the error on the validation measurements, among all combinations.
    """

    candidates: Mapping[str, tuple[float, ...]]
    n_neighbours: int

    def _fit(self) -> None:
        t, v = self.problem_.pairs("train")
        self._t, self._v = t, v
        self._values = self.problem_.known[t, v].astype(float)
        check_t, check_v = self.problem_.pairs("validate")
        names, best = list(self.candidates), np.inf
        for values in itertools.product(*self.candidates.values()):
            settings = dict(zip(names, values, strict=True))
            self._set(settings)
            if not len(check_t):
                break
            error = self._standard(check_t, check_v) - self.problem_.standard[check_t, check_v]
            if (score := float((error**2).mean())) < best:
                best, chosen = score, settings
        self.lengths_ = chosen if len(check_t) else settings
        self._set(self.lengths_)

    def _set(self, settings: dict[str, float]) -> None:
        self._settings = settings
        self._tree = cKDTree(self._scaled(self._t, self._v))

    def _scaled(self, t: Array, v: Array) -> Array:
        """Position with distances in units of the lengths."""
        nodes, s = self.problem_.nodes, self._settings
        place = unit_vectors(nodes.lat[v], nodes.lon[v]) * EARTH_RADIUS_KM / s["km"]
        depth = np.log1p(nodes.depth[v] / 100) / s["depth"]
        return np.column_stack([place, depth, self.problem_.years[t] / s["years"]])

    def _nearest(self, t: Array, v: Array) -> tuple[Array, Array, Array]:
        place = self._scaled(t, v)
        k = min(self.n_neighbours, len(self._values))
        distance, index = self._tree.query(place, k=k)
        return place, distance.reshape(len(t), k), index.reshape(len(t), k)


class IDW(_Neighbours):
    """Inverse-distance weighting of standardised training values.

    Parameters
    ----------
    variable, target, alpha
        As in :class:`~icml24.ocean_oxygen.reconstructor.Reconstructor`.
    n_neighbours : int, default 12
    power : float, default 2.0
        Of the distance.

    Examples
    --------
    >>> from icml24.ocean_oxygen.world import make_ocean
    >>> ds = make_ocean(0, step=12, years=(1990, 1995), levels=2)
    >>> sorted(IDW().fit(ds).lengths_)
    ['depth', 'km', 'years']
    """

    def __init__(
        self,
        variable: str = "oxygen",
        target: str = "aou",
        *,
        n_neighbours: int = 12,
        power: float = 2.0,
        alpha: float = 0.1,
    ) -> None:
        self.variable, self.target, self.alpha = variable, target, alpha
        self.n_neighbours, self.power = n_neighbours, power

    candidates = MappingProxyType(
        {
            "km": (1000.0,),
            "depth": (0.15, 0.3, 0.6, 1.2),
            "years": (5.0, 10.0, 20.0, 40.0),
        }
    )

    def _standard(self, t: Array, v: Array) -> Array:
        _, distance, index = self._nearest(t, v)
        ratio = (distance[:, :1] + 1e-9) / (distance + 1e-9)  # at most one: safe at any power
        weight = ratio**self.power
        return (weight * self._values[index]).sum(axis=1) / weight.sum(axis=1)


class Kriging(_Neighbours):
    """Simple kriging of standardised values with an exponential covariance and a nugget.

    Parameters
    ----------
    variable, target, alpha
        As in :class:`~icml24.ocean_oxygen.reconstructor.Reconstructor`.
    n_neighbours : int, default 24
        Values that take part in each prediction.

    Examples
    --------
    >>> from icml24.ocean_oxygen.world import make_ocean
    >>> ds = make_ocean(0, step=12, years=(1990, 1995), levels=2)
    >>> sorted(Kriging().fit(ds).lengths_)
    ['depth', 'km', 'nugget', 'years']
    """

    def __init__(
        self,
        variable: str = "oxygen",
        target: str = "aou",
        *,
        n_neighbours: int = 24,
        alpha: float = 0.1,
    ) -> None:
        self.variable, self.target, self.alpha = variable, target, alpha
        self.n_neighbours = n_neighbours

    candidates = MappingProxyType(
        {
            "km": (1000.0, 2000.0),
            "depth": (0.3, 0.6, 1.2),
            "years": (10.0, 20.0, 40.0),
            "nugget": (0.02, 0.1),
        }
    )

    def _standard(self, t: Array, v: Array) -> Array:
        return np.concatenate(
            [self._solve(t[i : i + 20_000], v[i : i + 20_000]) for i in range(0, len(t), 20_000)]
        )

    def _solve(self, t: Array, v: Array) -> Array:
        place, distance, index = self._nearest(t, v)
        near = self._scaled(self._t, self._v)[index] if len(t) else np.zeros((0, 0, place.shape[1]))
        gap = np.sqrt(((near[:, :, None] - near[:, None]) ** 2).sum(axis=-1))
        nugget = self._settings["nugget"]
        covariance = np.exp(-gap) * (1 - nugget)
        diagonal = np.arange(covariance.shape[1])
        covariance[:, diagonal, diagonal] = 1.0 + 1e-9
        to_target = np.exp(-distance) * (1 - nugget)
        weight = np.linalg.solve(covariance, to_target[..., None])[..., 0]
        return (weight * self._values[index]).sum(axis=1)


def boosted_trees() -> list[Any]:
    """Return LightGBM at three sizes, among which :class:`Tabular` chooses."""
    try:
        from lightgbm import LGBMRegressor
    except ImportError as error:
        raise ImportError("Boosted trees need lightgbm: pip install 'icml24[peers]'.") from error
    common: dict[str, Any] = {
        "learning_rate": 0.05,
        "subsample": 0.8,
        "subsample_freq": 1,
        "verbose": -1,
    }
    common |= {"colsample_bytree": 0.8, "random_state": 0, "n_jobs": 1, "deterministic": True}
    sizes = ((400, 15), (400, 31), (1000, 31))
    return [LGBMRegressor(n_estimators=n, num_leaves=leaves, **common) for n, leaves in sizes]


class Tabular(FieldEstimator):
    """Any scikit-learn regressor on the network's features and window, row by row.

    Parameters
    ----------
    variable, target, alpha
        As in :class:`~icml24.ocean_oxygen.reconstructor.Reconstructor`.
    estimators : sequence, optional
        Candidates, of which the one with the smallest validation error is kept; LightGBM by
        default. They must accept NaN in the window, or ``window`` be 0.
    window : int, default 5
    fourier : bool, default True

    Examples
    --------
    >>> from sklearn.linear_model import Ridge
    >>> from icml24.ocean_oxygen.world import make_ocean
    >>> ds = make_ocean(0, step=12, years=(1990, 1995), levels=2)
    >>> Tabular(estimators=[Ridge()], window=0).fit(ds).predict([1992]).oxygen.shape
    (1, 2, 15, 30)
    """

    def __init__(
        self,
        variable: str = "oxygen",
        target: str = "aou",
        *,
        estimators: Sequence[Any] | None = None,
        window: int = 5,
        fourier: bool = True,
        alpha: float = 0.1,
    ) -> None:
        self.variable, self.target, self.alpha = variable, target, alpha
        self.estimators, self.window, self.fourier = estimators, window, fourier

    def _table(self, t: Array, v: Array) -> Array:
        problem, parts, order = self.problem_, [], []
        for year in np.unique(t):
            rows = np.flatnonzero(t == year)
            x = problem.features(int(year))[v[rows]]
            around = window_of(problem.known, int(year), self.window)[v[rows]]
            around = np.delete(around, self.window, axis=1)
            parts.append(np.concatenate([x, around], axis=1))
            order.append(rows)
        table = np.empty((len(t), parts[0].shape[1]), np.float32)
        table[np.concatenate(order)] = np.concatenate(parts)
        return table

    def _fit(self) -> None:
        t, v = self.problem_.pairs("train")
        check = self.problem_.pairs("validate")
        x, y = self._table(t, v), self.problem_.known[t, v]
        best = np.inf
        candidates = boosted_trees() if self.estimators is None else self.estimators
        for candidate in candidates:
            fitted = clone(candidate).fit(x, y)
            score = 0.0
            if len(check[0]):
                guess = fitted.predict(self._table(*check))
                score = float(((guess - self.problem_.standard[check]) ** 2).mean())
            if score < best:
                best, self.estimator_ = score, fitted

    def _standard(self, t: Array, v: Array) -> Array:
        return np.asarray(self.estimator_.predict(self._table(t, v)), float)
