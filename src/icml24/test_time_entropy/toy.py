r"""A problem in one dimension where everything about entropy minimisation can be computed.

Test data: :math:`x \sim \frac12 N(-\mu, s^2) + \frac12 N(\mu, s^2)`, moved by a shift. Classifier:
:math:`p = \sigma(k(x + b))`. Adaptation changes b and minimises
:math:`E(b) = \mathbb E\,h(k(x + b))` with the entropy :math:`h(z) = H(\sigma(z))`. Its global
minimum is collapse (:math:`|b| \to \infty`, all points in one class, E = 0). The useful minimum in
the gap between the clusters is a local one, and exists only if they are tight enough. The theory is
ours, not the paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit, log_expit
from scipy.stats import norm

__all__ = ["accuracy", "binary_entropy", "critical_spread", "energy", "flow", "gap_curvature"]


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gauss and Legendre on [-1, 1]."""
    return np.polynomial.legendre.leggauss(400)


def _check(k: float, s: float, mu: float) -> None:
    if not (k > 0 and s > 0 and mu > 0):
        raise ValueError(f"k, s and mu must be positive, got k={k}, s={s}, mu={mu}.")


def binary_entropy(z: ArrayLike) -> np.ndarray:
    r"""Entropy of :math:`\sigma(z)` in nats; its derivative is :math:`-z p (1 - p)`.

    Examples
    --------
    >>> float(binary_entropy(0.0) - np.log(2))
    0.0
    """
    z = np.asarray(z, dtype=float)
    return -(expit(z) * log_expit(z) + expit(-z) * log_expit(-z))


def _slope(z: np.ndarray) -> np.ndarray:
    return -z * expit(z) * expit(-z)


def _curvature(z: np.ndarray) -> np.ndarray:
    p, q = expit(z), expit(-z)
    return -p * q - z * p * q * (q - p)


def _mean(
    function: Callable[[np.ndarray], np.ndarray],
    b: ArrayLike,
    k: float,
    s: float,
    shift: float,
    mu: float,
) -> np.ndarray:
    """Average ``function(k (x + b))`` over the mixture by Gauss-Legendre quadrature.

    The nodes cover nine standard deviations of each cluster, or, where clusters are broad beside
    the 1/k over which the function (all but zero beyond 45) varies, the logits from -45 to 45.
    """
    centre = np.asarray(b, dtype=float)[..., None] + shift
    nodes, weights = _quadrature()
    if k * s < 5:
        x = 9 * s * nodes
        values = function(k * (centre - mu + x)) + function(k * (centre + mu + x))
        return 0.5 * values @ (9 * weights * norm.pdf(9 * nodes))
    z = 45 * nodes
    density = norm.pdf(z / k, centre - mu, s) + norm.pdf(z / k, centre + mu, s)
    return 0.5 * density @ (45 / k * weights * function(z))


def energy(b: ArrayLike, k: float, s: float, shift: float = 0.0, mu: float = 1.0) -> np.ndarray:
    """Mean entropy of the predictions when the boundary lies at ``-b``.

    Parameters
    ----------
    b : array_like
        Offset of the classifier.
    k, s : float
        Steepness of the classifier; spread of each cluster.
    shift, mu : float
        By how much the data moved; half the distance of the clusters.

    Returns
    -------
    numpy.ndarray
        Shape of ``b``, in nats.

    Examples
    --------
    >>> energy([0.0, 10.0], k=4, s=0.4).round(3).tolist()
    [0.148, 0.0]
    """
    _check(k, s, mu)
    return _mean(binary_entropy, b, k, s, shift, mu)


def gap_curvature(k: float, s: float, mu: float = 1.0) -> float:
    r"""Second derivative of the energy in the middle of the gap, :math:`k^2 \mathbb E\,h''(kx)`.

    Positive: a boundary in the gap is a minimum of the entropy, and adaptation finds it. Negative:
    it is a maximum, and adaptation pushes the boundary out until one class takes all.

    Examples
    --------
    >>> gap_curvature(4, 0.5) > 0 > gap_curvature(4, 0.95)
    True
    """
    _check(k, s, mu)
    return float(k**2 * _mean(_curvature, 0.0, k, s, 0.0, mu))


def critical_spread(k: float, mu: float = 1.0) -> float:
    r"""Spread of the clusters at which the minimum in the gap disappears.

    It tends to ``mu`` as k grows: there the mixture stops having two peaks. Below
    :math:`k \mu \approx 1.54` (where h'' changes sign even at the cluster centres) there is no
    useful minimum however tight the clusters are.

    Parameters
    ----------
    k : float
        Steepness of the classifier.
    mu : float, default 1

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the classifier is too flat for any minimum in the gap.

    Examples
    --------
    >>> round(critical_spread(4.0), 2)
    0.87
    """
    _check(k, 1.0, mu)
    low, high = (1e-3 * mu if k * mu < 3 else 0.2 * mu), 1.5 * mu
    if gap_curvature(k, low, mu) <= 0:
        raise ValueError(
            f"k = {k} is too flat for clusters at distance {mu}: entropy minimisation has no "
            "minimum in the gap; use a steeper classifier."
        )
    return float(brentq(lambda s: gap_curvature(k, s, mu), low, high, xtol=1e-10))


def accuracy(b: ArrayLike, s: float, shift: float = 0.0, mu: float = 1.0) -> np.ndarray:
    r"""Accuracy of the sign of ``x + b``: the mean of the two clusters' normal probabilities.

    Examples
    --------
    >>> round(float(accuracy(0.0, s=0.45, shift=0.5)), 3)
    0.933
    """
    b = np.asarray(b, dtype=float) + shift
    return 0.5 * (norm.cdf((mu + b) / s) + norm.cdf((mu - b) / s))


def flow(
    k: float,
    s: float,
    shift: float = 0.0,
    mu: float = 1.0,
    b: float = 0.0,
    lr: float = 0.2,
    steps: int = 400,
) -> np.ndarray:
    """Offsets along gradient descent on the energy.

    Parameters
    ----------
    k, s, shift, mu : float
        See :func:`energy`.
    b : float, default 0
        Start: the boundary of the source data.
    lr : float, default 0.2
        Step, in units of 1/k**2 times the gradient.
    steps : int, default 400

    Returns
    -------
    numpy.ndarray, shape (steps + 1,)

    Examples
    --------
    >>> path = flow(k=4, s=0.45, shift=0.5, steps=2000)
    >>> accuracy(path[[0, -1]], s=0.45, shift=0.5).round(3).tolist()
    [0.933, 0.987]
    """
    _check(k, s, mu)
    path = np.empty(steps + 1)
    path[0] = b
    for i in range(steps):
        path[i + 1] = path[i] - lr / k * _mean(_slope, path[i], k, s, shift, mu)
    return path
