"""A reviewer's re-analysis of the tables printed in the paper (arXiv 2402.11359v4).

Every number in ``TABLE_1`` and ``TABLE_2`` is copied from the paper; everything else is computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from icml24.core.statistics import proportion_interval

__all__ = ["TABLE_1", "TABLE_2", "paper_cells", "sign_test", "smallest_denominator"]

_TYPES = ("PreAlg", "Algebra", "IntAlg", "Geometry", "Count&Prob", "Precalc", "NumTheory")
#: Table 1, MATH, per cent: for each agent test before and after, train before and after.
TABLE_1: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "GPT-4+": (
        (78.8, 66.3, 30.0, 40.0, 72.5, 32.5, 56.3),
        (82.6, 65.0, 38.8, 42.5, 76.3, 35.0, 67.5),
        (60, 55, 30, 30, 65, 5, 70),
        (65, 65, 40, 40, 65, 10, 80),
    ),
    "ReAct": (
        (87.5, 83.8, 50.0, 53.8, 73.8, 53.8, 68.8),
        (87.5, 82.5, 51.3, 58.8, 78.8, 62.5, 72.5),
        (55, 55, 25, 5, 45, 5, 75),
        (55, 60, 35, 15, 50, 10, 75),
    ),
}
#: Table 2, GAIA and TabMWP, per cent: (train before, train after, test before, test after).
TABLE_2: Mapping[tuple[str, str], tuple[float, float, float, float]] = {
    ("GAIA", "GPT-4+"): (10, 30, 16, 23),
    ("GAIA", "ReAct"): (20, 40, 12, 18),
    ("TabMWP", "GPT-4+"): (30.0, 66.7, 51, 56),
    ("TabMWP", "ReAct"): (63.3, 73.3, 59, 70),
}


def smallest_denominator(percentages: list[float], largest: int = 200, digits: int = 1) -> int:
    """Return the smallest n for which every percentage is a rounded multiple of 1/n.

    Parameters
    ----------
    percentages : list of float
        As printed, rounded to ``digits`` decimals.
    largest : int, default 200
    digits : int, default 1

    Returns
    -------
    int
        0 if there is none up to ``largest``.

    Examples
    --------
    >>> smallest_denominator([60, 55, 30, 65, 5, 70])
    20
    """
    values = np.asarray(percentages, float)
    for n in range(1, largest + 1):
        counts = np.round(values * n / 100)
        if np.all(np.abs(100 * counts / n - values) <= 0.5001 * 10.0**-digits):
            return n
    return 0


def paper_cells() -> pd.DataFrame:
    """Return the fourteen MATH and four GAIA and TabMWP cells with exact statistics.

    Returns
    -------
    pandas.DataFrame
        One row a cell: ``data``, ``agent``, test share ``before`` and ``after`` with exact 95%
        intervals, the counts, and ``fisher_p`` of the unpaired comparison. Test sizes are 80 (MATH)
        and 100, as the printed percentages imply.
    """
    cells = [
        (kind, agent, before, after, 80)
        for agent, (first, last, _, _) in TABLE_1.items()
        for kind, before, after in zip(_TYPES, first, last, strict=True)
    ] + [(data, agent, t[2], t[3], 100) for (data, agent), t in TABLE_2.items()]
    rows = []
    for data, agent, before, after, n in cells:
        k0, k1 = round(before * n / 100), round(after * n / 100)
        low, high = proportion_interval(k0, n), proportion_interval(k1, n)
        rows.append(
            {
                "data": data,
                "agent": agent,
                "n": n,
                "solved_before": k0,
                "solved_after": k1,
                "before": k0 / n,
                "after": k1 / n,
                "before_low": low.low,
                "before_high": low.high,
                "after_low": high.low,
                "after_high": high.high,
                "fisher_p": stats.fisher_exact([[k0, n - k0], [k1, n - k1]]).pvalue,
            }
        )
    return pd.DataFrame(rows)


def sign_test(differences: list[float] | np.ndarray) -> tuple[int, int, float]:
    """Two-sided sign test; equal cells do not count.

    Returns
    -------
    (int, int, float)
        Cells up, cells that differ, p-value.

    Examples
    --------
    >>> sign_test([1, 2, -1, 0])
    (2, 3, 1.0)
    """
    values = np.asarray(differences, float)
    up, n = int((values > 0).sum()), int((values != 0).sum())
    if n == 0:
        raise ValueError("The sign test needs at least one difference.")
    return up, n, float(stats.binomtest(up, n).pvalue)
