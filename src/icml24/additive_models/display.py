"""Draw the curves of an additive model with their error bars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import norm
from sklearn.utils import Bunch
from sklearn.utils.validation import check_is_fitted

__all__ = ["LaplaceNAMDisplay"]


class LaplaceNAMDisplay:
    """Curves with credible bands; surfaces for pairs.

    Make it with :meth:`from_estimator`, like scikit-learn's ``PartialDependenceDisplay``.

    Parameters
    ----------
    results : list of Bunch
        What ``partial_dependence`` returned for each term.
    names : list of tuple of str
        Names of the columns of each term.
    level : float, default 0.95
        Credibility of the bands.
    samples : list of (ndarray or None), optional
        Values of each term's column, for the marks along the axis.

    Attributes
    ----------
    figure_ : matplotlib Figure
    axes_ : ndarray of matplotlib Axes, shape (n_terms,)
    lines_ : list
        The curve (Line2D), the points of a category (ErrorbarContainer), or the surface (QuadMesh).
    bands_ : list
        The band of each curve (or None).
    """

    def __init__(
        self,
        results: list[Bunch],
        *,
        names: list[tuple[str, ...]],
        level: float = 0.95,
        samples: list[np.ndarray | None] | None = None,
    ) -> None:
        self.results = results
        self.names = names
        self.level = level
        self.samples = samples

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        features: Any = None,
        *,
        level: float = 0.95,
        grid_resolution: int = 100,
        n_cols: int = 3,
        ax: Any = None,
        line_kw: dict | None = None,
        band_kw: dict | None = None,
    ) -> LaplaceNAMDisplay:
        """Draw terms of a fitted model.

        Parameters
        ----------
        estimator : LaplaceNAMRegressor or LaplaceNAMClassifier
        X : array_like or DataFrame, shape (N, D)
            Its range sets the grid and its deciles the marks along the axis.
        features : list of {int, str, pair of them}, optional
            Terms to draw; all of them, by decreasing effect size, when left out.
        level : float, default 0.95
        grid_resolution : int, default 100
            Points along a curve (a fifth of it along each side of a surface).
        n_cols : int, default 3
        ax : matplotlib Axes or array of them, optional
            One Axes per term, or a single one to be divided into a grid.
        line_kw, band_kw : dict, optional
            Passed on to ``Axes.plot`` and ``Axes.fill_between``.

        Returns
        -------
        LaplaceNAMDisplay

        Examples
        --------
        >>> import numpy as np
        >>> from icml24.additive_models import LaplaceNAMDisplay, LaplaceNAMRegressor
        >>> X = np.random.default_rng(0).uniform(size=(100, 2))
        >>> model = LaplaceNAMRegressor(max_iter=50, random_state=0).fit(X, X[:, 0])
        >>> display = LaplaceNAMDisplay.from_estimator(model, X, [0, 1])
        >>> len(display.axes_)
        2
        """
        check_is_fitted(estimator)
        columns = getattr(estimator, "feature_names_in_", None)
        if columns is None:
            columns = [f"x{j}" for j in range(estimator.n_features_in_)]
        columns = [str(name) for name in columns]
        if features is None:
            order = np.argsort(-estimator.effect_size_, kind="stable")
            features = [estimator._terms[k] for k in order]
        terms = [_positions(feature, columns) for feature in features]
        values = X.to_numpy(dtype=object) if hasattr(X, "to_numpy") else np.asarray(X)
        results, samples = [], []
        for term in terms:
            if len(term) == 1:
                column, grid = values[:, term[0]], None
                is_number = estimator._encoder.levels[term[0]] is None
                if is_number:
                    column = column.astype(float)
                    grid = np.linspace(column.min(), column.max(), grid_resolution)
                results.append(estimator.partial_dependence(term[0], grid))
                samples.append(column if is_number else None)
            else:
                side = max(2, grid_resolution // 5)
                results.append(estimator.partial_dependence(term, grid_resolution=side))
                samples.append(None)
        names = [tuple(columns[j] for j in term) for term in terms]
        display = cls(results, names=names, level=level, samples=samples)
        return display.plot(ax=ax, n_cols=n_cols, line_kw=line_kw, band_kw=band_kw)

    def plot(
        self,
        *,
        ax: Any = None,
        n_cols: int = 3,
        line_kw: dict | None = None,
        band_kw: dict | None = None,
    ) -> LaplaceNAMDisplay:
        """Draw; parameters as in :meth:`from_estimator`.

        Returns
        -------
        LaplaceNAMDisplay
            Itself.
        """
        from matplotlib import pyplot as plt

        if not 0 < self.level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {self.level}.")
        n_terms = len(self.results)
        n_cols = min(n_cols, n_terms)
        n_rows = math.ceil(n_terms / n_cols)
        if ax is None:
            figure = plt.figure(figsize=(3.2 * n_cols, 2.5 * n_rows), layout="constrained")
            axes = figure.subplots(n_rows, n_cols, squeeze=False).ravel()
        elif np.size(ax) == 1 and n_terms > 1:
            single = np.ravel(ax)[0]
            single.set_axis_off()
            grid = single.get_subplotspec().subgridspec(n_rows, n_cols)
            axes = np.array([single.figure.add_subplot(cell) for cell in grid])
        else:
            axes = np.ravel(ax)
            if len(axes) != n_terms:
                raise ValueError(f"ax must hold {n_terms} axes, one per term, got {len(axes)}.")
        for unused in axes[n_terms:]:
            unused.set_visible(False)
        self.axes_ = axes[:n_terms]
        self.figure_ = self.axes_[0].figure
        self.lines_: list[Any] = []
        self.bands_: list[Any] = []
        samples = self.samples or [None] * n_terms
        z = float(norm.ppf(0.5 + self.level / 2))
        terms = zip(self.axes_, self.results, self.names, samples, strict=True)
        for index, (axis, result, names, sample) in enumerate(terms):
            draw = _draw_surface if len(names) == 2 else _draw_curve
            line, band = draw(axis, result, z, sample, line_kw or {}, band_kw or {})
            self.lines_.append(line)
            self.bands_.append(band)
            axis.set_xlabel(names[0])
            if len(names) == 2:
                axis.set_ylabel(names[1])
            elif index % n_cols == 0:
                axis.set_ylabel("effect")
        return self


def _positions(feature: Any, columns: list[str]) -> tuple[int, ...]:
    parts = [feature] if isinstance(feature, str | int | np.integer) else list(feature)
    unknown = [part for part in parts if isinstance(part, str) and part not in columns]
    if unknown:
        raise ValueError(f"There is no column {unknown[0]!r}; the table has {', '.join(columns)}.")
    return tuple(columns.index(part) if isinstance(part, str) else int(part) for part in parts)


def _draw_curve(
    axis: Any, result: Bunch, z: float, sample: Any, line_kw: dict, band_kw: dict
) -> tuple[Any, Any]:
    grid, mean, half = result.grid_values[0], result.mean, z * result.std
    axis.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    if sample is None:  # a category: one point with an error bar for each level
        places = np.arange(len(grid))
        line = axis.errorbar(places, mean, yerr=half, fmt="o", capsize=3, **line_kw)
        axis.set_xticks(places, [str(level) for level in grid], rotation=30, ha="right")
        return line, None
    (line,) = axis.plot(grid, mean, **line_kw)
    style = {"alpha": 0.25, "linewidth": 0, "color": line.get_color(), **band_kw}
    band = axis.fill_between(grid, mean - half, mean + half, **style)
    deciles = np.quantile(sample, np.linspace(0.1, 0.9, 9))
    axis.vlines(deciles, 0, 0.04, transform=axis.get_xaxis_transform(), color="k", linewidth=0.8)
    return line, band


def _draw_surface(
    axis: Any, result: Bunch, z: float, sample: Any, line_kw: dict, band_kw: dict
) -> tuple[Any, Any]:
    first, second = result.grid_values
    places = []
    for grid, ticks in ((first, axis.set_xticks), (second, axis.set_yticks)):
        if np.issubdtype(np.asarray(grid).dtype, np.number):
            places.append(np.asarray(grid, dtype=float))
        else:
            places.append(np.arange(len(grid)))
            ticks(places[-1], [str(level) for level in grid])
    limit = float(np.abs(result.mean).max()) or 1.0
    mesh = axis.pcolormesh(
        *places, result.mean.T, cmap="RdBu_r", vmin=-limit, vmax=limit, shading="nearest"
    )
    axis.figure.colorbar(mesh, ax=axis)
    ratio = (np.abs(result.mean) / (z * result.std)).T
    if min(ratio.shape) > 1 and ratio.min() < 1 < ratio.max():  # the band excludes 0 inside
        axis.contour(*places, ratio, levels=[1.0], colors="k", linewidths=1.0)
    return mesh, None
