"""How good samples are, and how much faster one sampler is than another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from torch import Tensor

from icml24.core.statistics import Estimate

__all__ = [
    "energy_distance",
    "frechet_distance",
    "nfe_at_quality",
    "ngram_tv",
    "speedup",
    "speedup_interval",
    "spelling_accuracy",
    "total_variation",
]


def _rows(x: ArrayLike | Tensor, name: str) -> np.ndarray:
    array = np.asarray(x, dtype=float)
    if array.ndim != 2 or len(array) < 2:
        raise ValueError(f"{name} must be a matrix with at least two rows, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite values.")
    return array


def frechet_distance(a: ArrayLike | Tensor, b: ArrayLike | Tensor) -> float:
    """Squared Frechet distance between Gaussians fitted to two sets of features.

    Parameters
    ----------
    a, b : array_like, shapes (n, D) and (m, D)

    Returns
    -------
    float
        ``|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))``. It falls with the sample size:
        compare only equal sizes.

    Examples
    --------
    >>> round(frechet_distance([[0.0], [2.0]], [[1.0], [3.0]]), 6)
    1.0
    """
    a, b = _rows(a, "a"), _rows(b, "b")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b need the same features, got {a.shape[1]} and {b.shape[1]}.")
    cov_a, cov_b = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    values, vectors = np.linalg.eigh(cov_a)
    root_a = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    middle = np.linalg.eigvalsh(root_a @ cov_b @ root_a)
    shift = ((a.mean(0) - b.mean(0)) ** 2).sum()
    cross = np.sqrt(np.clip(middle, 0, None)).sum()
    return float(shift + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)


def energy_distance(a: ArrayLike | Tensor, b: ArrayLike | Tensor) -> float:
    """Energy distance ``2 E|a-b| - E|a-a'| - E|b-b'|``, unbiased; may be slightly below zero.

    Parameters
    ----------
    a, b : array_like, shapes (n, D) and (m, D)

    Returns
    -------
    float

    Examples
    --------
    >>> energy_distance([[0.0], [0.0]], [[1.0], [1.0]])
    2.0
    """
    a, b = _rows(a, "a"), _rows(b, "b")
    within = [cdist(x, x).sum() / (len(x) * (len(x) - 1)) for x in (a, b)]
    return float(2 * cdist(a, b).mean() - sum(within))


def total_variation(p: ArrayLike | Tensor, q: ArrayLike | Tensor) -> float:
    """Half the sum of the absolute differences of two distributions.

    Examples
    --------
    >>> total_variation([1.0, 0.0], [0.5, 0.5])
    0.5
    """
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    if p.shape != q.shape:
        raise ValueError(f"p and q must have the same shape, got {p.shape} and {q.shape}.")
    return float(0.5 * np.abs(p - q).sum())


def spelling_accuracy(texts: Iterable[str], vocabulary: Iterable[str]) -> float:
    """Share of the whole words inside the texts that are in a vocabulary.

    The first and last word of each text may be cut and are left out.

    Parameters
    ----------
    texts : iterable of str
    vocabulary : iterable of str

    Returns
    -------
    float

    Examples
    --------
    >>> spelling_accuracy(["xx the cat sqt yy"], {"the", "cat", "sat"})
    0.6666666666666666
    """
    known = vocabulary if isinstance(vocabulary, (set, frozenset)) else set(vocabulary)
    inner = [word for text in texts for word in text[text.find(" ") : text.rfind(" ") + 1].split()]
    if not inner:
        raise ValueError("The texts contain no whole word between two spaces.")
    return sum(word in known for word in inner) / len(inner)


def ngram_counts(x: Tensor, order: int, num_classes: int) -> np.ndarray:
    """Relative frequency of each n-gram along the last axis, shape (num_classes**order,)."""
    if order < 1 or x.shape[-1] < order:
        raise ValueError(f"order must lie between 1 and {x.shape[-1]}, got {order}.")
    grams = x.long().unfold(-1, order, 1).reshape(-1, order)
    index = (grams * num_classes ** torch.arange(order - 1, -1, -1)).sum(1)
    counts = torch.bincount(index, minlength=num_classes**order).double()
    return (counts / counts.sum()).numpy()


def ngram_tv(a: Tensor, b: Tensor, order: int = 3, num_classes: int = 27) -> float:
    """Total variation between the n-grams of two sets of texts.

    Parameters
    ----------
    a, b : Tensor of integers, shapes (..., length)
    order, num_classes : int

    Returns
    -------
    float
        Between 0 and 1; two finite samples of one law are above 0.

    Examples
    --------
    >>> ngram_tv(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[1, 1, 1, 1]]), 1, num_classes=2)
    0.5
    """
    return total_variation(ngram_counts(a, order, num_classes), ngram_counts(b, order, num_classes))


def nfe_at_quality(nfe: Sequence[float], error: ArrayLike, level: float) -> float:
    """Smallest number of calls at which an error curve reaches a level.

    The curve is made monotone (running minimum) and interpolated in the logarithms of both.

    Parameters
    ----------
    nfe : sequence of float
        Rising.
    error : array_like
        Positive, one for each entry; smaller is better.
    level : float

    Returns
    -------
    float
        The first entry if the curve starts below the level, infinity if it never gets there.

    Examples
    --------
    >>> round(nfe_at_quality([10, 1000], [1.0, 0.01], 0.1), 6)
    100.0
    """
    x, y = np.asarray(nfe, dtype=float), np.asarray(error, dtype=float)
    if x.shape != y.shape or x.ndim != 1 or not (np.diff(x) > 0).all():
        raise ValueError("nfe must rise, with one error for each entry.")
    if not (y > 0).all() or not level > 0:
        raise ValueError("Errors and level must be positive.")
    y = np.minimum.accumulate(y)
    if y[0] <= level:
        return float(x[0])
    if y[-1] > level:
        return float("inf")
    j = int(np.argmax(y <= level))
    share = np.log(y[j - 1] / level) / np.log(y[j - 1] / y[j])
    return float(np.exp(np.log(x[j - 1]) + share * np.log(x[j] / x[j - 1])))


def speedup(
    reference_nfe: Sequence[float], reference_error: ArrayLike, nfe: float, error: float
) -> float:
    """How many times fewer calls a solver needs than a reference for the same error.

    Parameters
    ----------
    reference_nfe, reference_error : sequences
        Curve of the reference sampler.
    nfe, error : float
        One point of the solver.

    Returns
    -------
    float
        Calls that the reference needs for ``error``, over ``nfe``; infinity where the reference
        never gets there.

    Examples
    --------
    >>> round(speedup([10, 1000], [1.0, 0.01], nfe=10, error=0.1), 6)
    10.0
    """
    return nfe_at_quality(reference_nfe, reference_error, error) / nfe


def speedup_interval(
    reference_nfe: Sequence[float],
    reference_error: ArrayLike,
    nfe: float,
    error: ArrayLike,
    cap: float | None = None,
    resamples: int = 2000,
    random_state: int | np.random.Generator = 0,
) -> Estimate:
    """Estimate a speed-up from several runs, with a bootstrap interval over the runs.

    Parameters
    ----------
    reference_nfe : sequence of float, length m
    reference_error : array_like, shape (runs, m)
    nfe : float
    error : array_like, shape (runs,)
        Of the solver, in the same runs (seeds).
    cap : float, optional
        Stands for a level that the reference never reaches; by default its last entry over
        ``nfe``, a lower bound of the truth.
    resamples : int, default 2000
    random_state : int or numpy.random.Generator

    Returns
    -------
    Estimate
        :func:`speedup` of the mean curves, and its central 95 % over resampled runs.

    Examples
    --------
    >>> curve = [[1.0, 0.01], [1.0, 0.01]]
    >>> print(speedup_interval([10, 1000], curve, nfe=10, error=[0.1, 0.1]))
    10 [10, 10]
    """
    curves, points = np.asarray(reference_error, dtype=float), np.asarray(error, dtype=float)
    if curves.ndim != 2 or points.shape != curves.shape[:1]:
        raise ValueError(
            f"reference_error must be (runs, {len(reference_nfe)}) and error (runs,), "
            f"got {curves.shape} and {points.shape}."
        )
    limit = reference_nfe[-1] / nfe if cap is None else cap
    rng = np.random.default_rng(random_state)

    def factor(rows: np.ndarray) -> float:
        mean = float(points[rows].mean())
        return min(speedup(reference_nfe, curves[rows].mean(0), nfe, mean), limit)

    value = factor(np.arange(len(points)))
    draws = rng.integers(len(points), size=(resamples, len(points)))
    low, high = np.quantile([factor(rows) for rows in draws], [0.025, 0.975])
    return Estimate(value, min(float(low), value), max(float(high), value), len(points))
