"""Intervals from held-back measurements: split-conformal prediction, zone by zone."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ZoneConformal", "coverage"]

Array = np.ndarray[Any, Any]


class ZoneConformal:
    r"""Half-widths of intervals, one for each zone.

    With n absolute errors on measurements that were not trained on, the half-width is their
    :math:`\lceil (n+1)(1-\alpha) \rceil`-th smallest. If a new measurement of the zone is
    exchangeable with those, its interval covers it with probability of at least
    :math:`1 - \alpha`. Measurements of the sea are not quite exchangeable: they come in cruises.

    Parameters
    ----------
    alpha : float, default 0.1
        Share of values that may fall outside.
    min_count : int, default 30
        A zone with fewer errors gets the half-width of all zones together.

    Attributes
    ----------
    half_width_ : numpy.ndarray, shape (zones,)

    Examples
    --------
    >>> conformal = ZoneConformal(alpha=0.5, min_count=3)
    >>> conformal.fit([1.0, 2.0, 3.0], zone=[0, 0, 0], n_zones=2).half_width_.tolist()
    [2.0, 2.0]
    """

    def __init__(self, alpha: float = 0.1, min_count: int = 30) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}.")
        self.alpha, self.min_count = alpha, min_count

    def fit(self, error: Any, zone: Any, n_zones: int) -> ZoneConformal:
        """Take the quantiles of absolute errors; without any error all half-widths are infinite."""
        size, code = np.abs(np.asarray(error, float)), np.asarray(zone)
        if size.shape != code.shape:
            raise ValueError("error and zone must have the same length.")
        pooled = self._quantile(size)
        by_zone = [size[code == i] for i in range(n_zones)]
        self.half_width_ = np.array(
            [self._quantile(part) if len(part) >= self.min_count else pooled for part in by_zone]
        )
        return self

    def _quantile(self, size: Array) -> float:
        rank = int(np.ceil((len(size) + 1) * (1 - self.alpha)))
        return float(np.sort(size)[rank - 1]) if rank <= len(size) else np.inf


def coverage(truth: Any, lower: Any, upper: Any) -> float:
    """Share of values inside their intervals.

    Examples
    --------
    >>> coverage([1.0, 5.0], [0.0, 0.0], [2.0, 2.0])
    0.5
    """
    y = np.asarray(truth, float)
    return float(((y >= np.asarray(lower)) & (y <= np.asarray(upper))).mean())
