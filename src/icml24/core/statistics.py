"""Means with intervals: the few statistics that every claim in the book rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy  # its parts load at first use, which keeps the command line and the book quick
from numpy.typing import ArrayLike

__all__ = ["Estimate", "mean_interval", "paired_difference", "proportion_interval"]


@dataclass(frozen=True)
class Estimate:
    """A measured number with its interval.

    Parameters
    ----------
    value : float
        Point estimate, in the unit of the data.
    low, high : float
        Ends of the confidence interval, in the same unit.
    n : int
        Number of independent observations (seeds, folds or trials) behind it.
    level : float
        Confidence level of the interval.

    Examples
    --------
    >>> print(Estimate(0.5, 0.4, 0.6, n=5))
    0.5 [0.4, 0.6]
    >>> f"{Estimate(0.5, 0.4, 0.6, n=5):.2f}"
    '0.50 [0.40, 0.60]'
    """

    value: float
    low: float
    high: float
    n: int = 1
    level: float = 0.95

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"The value {self.value:g} must lie inside its interval "
                f"[{self.low:g}, {self.high:g}]."
            )

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self, "")


def _observations(x: ArrayLike, name: str) -> np.ndarray:
    x = np.asarray(x, dtype=float)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must be a non-empty 1-D array, got shape {x.shape}.")
    if not np.isfinite(x).all():
        raise ValueError(
            f"{name} contains NaN or infinite values; drop or repair those runs first."
        )
    return x


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}.")


def mean_interval(
    x: ArrayLike,
    level: float = 0.95,
    method: Literal["t", "bootstrap"] = "t",
    random_state: int | np.random.Generator = 0,
) -> Estimate:
    """Mean of independent observations with a confidence interval.

    Parameters
    ----------
    x : array_like, shape (n,)
        One number for each seed or fold. A single observation has no interval: low = high = value.
    level : float, default 0.95
        Confidence level.
    method : {"t", "bootstrap"}
        Student's t interval, or the bias-corrected bootstrap (BCa, 9,999 resamples), which is the
        better choice for skewed data with twenty observations or more.
    random_state : int or numpy.random.Generator
        Used by the bootstrap only.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If ``x`` is empty, not one-dimensional or not finite, or ``level`` or ``method`` is unknown.

    Examples
    --------
    >>> print(f"{mean_interval([1.0, 2.0, 3.0]):.2f}")
    2.00 [-0.48, 4.48]
    """
    x = _observations(x, "x")
    _check_level(level)
    mean = float(x.mean())
    if x.size == 1 or scipy.stats.sem(x) == 0:
        return Estimate(mean, mean, mean, x.size, level)
    if method == "t":
        low, high = scipy.stats.t.interval(level, x.size - 1, loc=mean, scale=scipy.stats.sem(x))
    elif method == "bootstrap":
        interval = scipy.stats.bootstrap(
            (x,), np.mean, confidence_level=level, rng=np.random.default_rng(random_state)
        ).confidence_interval
        low, high = min(interval.low, mean), max(interval.high, mean)
    else:
        raise ValueError(f"method must be 't' or 'bootstrap', got {method!r}.")
    return Estimate(mean, float(low), float(high), x.size, level)


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    level: float = 0.95,
    method: Literal["t", "bootstrap"] = "t",
    random_state: int | np.random.Generator = 0,
) -> Estimate:
    """Mean of ``a - b`` over paired runs (same seed or fold), with its interval.

    Parameters
    ----------
    a, b : array_like, shape (n,)
        Results of two methods, entry by entry on the same seed or fold.
    level, method, random_state
        As in :func:`mean_interval`.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If the arrays differ in length, are empty or not finite.

    Examples
    --------
    >>> paired_difference([3.0, 4.0], [1.0, 2.0]).value
    2.0
    """
    a, b = _observations(a, "a"), _observations(b, "b")
    if a.size != b.size:
        raise ValueError(f"a and b must be paired run by run, got {a.size} and {b.size} runs.")
    return mean_interval(a - b, level, method, random_state)


def proportion_interval(successes: int, trials: int, level: float = 0.95) -> Estimate:
    """Share of successes with the exact (Clopper-Pearson) binomial interval.

    Parameters
    ----------
    successes, trials : int
        Counts, with ``0 <= successes <= trials`` and ``trials >= 1``.
    level : float, default 0.95
        Confidence level.

    Returns
    -------
    Estimate
        A share between 0 and 1.

    Raises
    ------
    ValueError
        If the counts are impossible.

    Examples
    --------
    >>> print(f"{proportion_interval(6, 6):.3f}")
    1.000 [0.541, 1.000]
    """
    _check_level(level)
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            f"successes must lie between 0 and trials >= 1, got {successes} of {trials}."
        )
    interval = scipy.stats.binomtest(int(successes), int(trials)).proportion_ci(
        level, method="exact"
    )
    share = successes / trials
    return Estimate(share, float(interval.low), float(interval.high), int(trials), level)
