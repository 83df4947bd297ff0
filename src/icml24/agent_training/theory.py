"""The paper's generalization bound, its flaw, and the bound that holds.

Lemma (appendix A): for one *fixed* function set, with probability at least ``1 - delta``, training
accuracy on ``n`` tasks and true accuracy differ by at most ``sqrt(ln(2 / delta) / (2 n))``
(Hoeffding). The paper applies it to the set that training *chose on the same tasks*. For the best
of ``V`` sets a union bound is needed: ``sqrt((ln V + ln(2 / delta)) / (2 n))``.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

__all__ = [
    "first_violation",
    "lemma_width",
    "simulate_violations",
    "union_width",
    "violation_probability",
]


def _check(n: int, delta: float, v: int = 1) -> None:
    if n < 1 or v < 1:
        raise ValueError(f"n and v must be at least 1, got n={n}, v={v}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")


def lemma_width(n: int, delta: float = 0.05) -> float:
    """Half-width of Hoeffding's interval for one fixed function set on ``n`` tasks.

    Examples
    --------
    >>> round(lemma_width(20), 3)
    0.304
    """
    _check(n, delta)
    return math.sqrt(math.log(2 / delta) / (2 * n))


def union_width(n: int, v: int, delta: float = 0.05) -> float:
    """Half-width that holds for ``v`` function sets at once, so also for the chosen one."""
    _check(n, delta, v)
    return math.sqrt((math.log(v) + math.log(2 / delta)) / (2 * n))


def violation_probability(v: int, n: int = 20, width: float | None = None, p: float = 0.5) -> float:
    """Exact probability that the best of ``v`` sets of true accuracy ``p`` looks too good.

    That is, that the largest of ``v`` independent training accuracies on ``n`` tasks exceeds ``p``
    by more than ``width`` (by default :func:`lemma_width`).

    Examples
    --------
    >>> [round(violation_probability(v), 4) for v in (1, 110, 1000)]
    [0.0013, 0.1322, 0.7245]
    """
    width = lemma_width(n) if width is None else width
    _check(n, 0.5, v)
    least = math.floor(n * (p + width) + 1e-9) + 1  # smallest count beyond the width
    tail = float(stats.binom.sf(least - 1, n, p))
    return float(-np.expm1(v * np.log1p(-tail)))


def first_violation(n: int = 20, delta: float = 0.05, p: float = 0.5) -> int:
    """Smallest number of sets at which the lemma, applied to the best, fails more than ``delta``.

    Examples
    --------
    >>> first_violation()
    40
    """
    tail = violation_probability(1, n, lemma_width(n, delta), p)
    if tail == 0:
        raise ValueError(f"With n={n} the width exceeds every possible deviation.")
    v = max(1, math.floor(math.log1p(-delta) / math.log1p(-tail)))
    while violation_probability(v, n, lemma_width(n, delta), p) <= delta:
        v += 1
    return v


def simulate_violations(
    v: int, n: int = 20, delta: float = 0.05, p: float = 0.5, runs: int = 20_000, seed: int = 0
) -> tuple[float, float]:
    """Simulate how often the lemma and the union bound fail for the best of ``v`` sets.

    Returns
    -------
    (float, float)
        Violation rate of the lemma's width and of the union bound's.
    """
    _check(n, delta, v)
    rng = np.random.default_rng(seed)
    # the maximum of v binomials through its distribution function: no v x runs array
    best = stats.binom.ppf(rng.random(runs) ** (1 / v), n, p) / n
    excess = best - p
    return (
        float((excess > lemma_width(n, delta) + 1e-12).mean()),
        float((excess > union_width(n, v, delta) + 1e-12).mean()),
    )
