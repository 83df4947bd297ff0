r"""Which pairs of features interact? Four scores.

``mutual_info`` and ``marglik_slack`` are the paper's. Both treat the fitted curves
:math:`F_n = (f_1(x_{n1}), \dots, f_D(x_{nD}))` as inputs of a linear model with weights 1 and look
at the precision :math:`H = \sum_n \gamma_n F_n F_n^\top + I` of those weights. The target enters
only through the curves: neither score sees the residual, which is where an interaction would show.
They measure *concurvity*, how strongly the data tie two curves to each other.

``evidence`` is ours. It asks of each pair how much the log evidence of the residual would grow if a
small Bayesian linear model of the pair were added, in closed form. ``random`` is the control.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from sklearn.utils import check_random_state

__all__ = [
    "METHODS",
    "evidence_gain",
    "marglik_slack",
    "mutual_information",
    "pair_scores",
    "rank_interactions",
    "weight_precision",
]

METHODS = ("evidence", "mutual_info", "marglik_slack", "random")


def weight_precision(curves: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    r"""Laplace precision of one weight for each curve.

    This is :math:`H = \sum_n \gamma_n F_n F_n^\top + I`. The curves are centred first: no data can
    tell their offsets apart, and left in they would make every pair look dependent.

    Parameters
    ----------
    curves : ndarray, shape (N, D)
    gamma : ndarray, shape (N,)
        Curvature of the negative log likelihood at each row.

    Returns
    -------
    ndarray, shape (D, D)
    """
    centred = curves - np.average(curves, axis=0, weights=gamma)
    return (centred * gamma[:, None]).T @ centred + np.eye(curves.shape[1])


def mutual_information(precision: np.ndarray) -> np.ndarray:
    r"""Mutual information of each pair of weights, :math:`-\tfrac12 \log(1 - \rho_{ij}^2)`.

    :math:`\rho` is the posterior correlation, from the inverse of the precision.

    Parameters
    ----------
    precision : ndarray, shape (D, D)

    Returns
    -------
    ndarray, shape (D, D)
        In nats, symmetric, with a zero diagonal.

    Examples
    --------
    >>> mutual_information(np.array([[2.0, 1.0], [1.0, 2.0]]))[0, 1].round(4)  # log(4 / 3) / 2
    np.float64(0.1438)
    """
    return _information(np.linalg.inv(precision))


def marglik_slack(precision: np.ndarray) -> np.ndarray:
    r"""Loss of the block-diagonal evidence on each pair.

    :math:`-\tfrac12 \log(1 - H_{ij}^2 / (H_{ii} H_{jj}))`: half the difference between
    :math:`\log H_{ii} + \log H_{jj}` and the log determinant of the 2 x 2 block.

    Parameters
    ----------
    precision : ndarray, shape (D, D)

    Returns
    -------
    ndarray, shape (D, D)
        In nats, symmetric, with a zero diagonal.
    """
    return _information(precision)


def _information(matrix: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(np.diag(matrix))
    correlation = matrix / np.outer(deviation, deviation)
    np.fill_diagonal(correlation, 0.0)
    return -0.5 * np.log1p(-np.minimum(correlation**2, 1 - 1e-15))


def evidence_gain(
    columns: np.ndarray, gradient: np.ndarray, gamma: np.ndarray, n_waves: int = 4
) -> np.ndarray:
    r"""Log evidence gained by a small Bayesian model of each pair on the residual.

    The model of a pair is linear in the products of ``n_waves`` cosines of the two columns' ranks,
    with prior precision :math:`\alpha`. With the Gram matrix
    :math:`G = \Phi^\top \Gamma \Phi = V \operatorname{diag}(e) V^\top` and
    :math:`c = V^\top \Phi^\top (\Gamma r)` the gain is

    .. math:: \max_\alpha \tfrac12 \sum_k \Bigl[ \log\frac{\alpha}{\alpha + e_k}
              + \frac{c_k^2}{\alpha + e_k} \Bigr].

    All pairs are handled at once: the Gram matrices of all pairs are blocks of one matrix product.

    Parameters
    ----------
    columns : ndarray, shape (N, D)
        Only the order of each column's values matters.
    gradient : ndarray, shape (N,)
        :math:`\Gamma r`: residual over noise variance in regression, ``y - p`` for two classes.
    gamma : ndarray, shape (N,)
        ``1 / sigma^2`` in regression, ``p (1 - p)`` for two classes.
    n_waves : int, default 4

    Returns
    -------
    ndarray, shape (D, D)
        In nats, symmetric, with a zero diagonal; never negative, since the prior may switch a pair
        off.
    """
    n_rows, n_columns = columns.shape
    ranks = (rankdata(columns, axis=0) - 0.5) / n_rows
    waves = np.sqrt(2) * np.cos(np.pi * ranks[:, :, None] * np.arange(1, n_waves + 1))
    flat = waves.reshape(n_rows, -1)
    projected = (flat * gradient[:, None]).T @ flat
    projected = projected.reshape(n_columns, n_waves, n_columns, n_waves)
    squares = (waves[:, :, :, None] * waves[:, :, None, :]).reshape(n_rows, -1)
    gram = (squares * gamma[:, None]).T @ squares
    gram = gram.reshape(n_columns, n_waves, n_waves, n_columns, n_waves, n_waves)
    first, second = np.triu_indices(n_columns, k=1)
    size = n_waves**2
    # (pair; wave of i, wave of j; wave of i, wave of j)
    gram = gram.transpose(0, 3, 1, 4, 2, 5)[first, second].reshape(-1, size, size)
    projected = projected.transpose(0, 2, 1, 3)[first, second].reshape(-1, size, 1)
    eigenvalues, vectors = np.linalg.eigh(gram)
    eigenvalues = np.maximum(eigenvalues, 0.0)[None]
    squared = (vectors.transpose(0, 2, 1) @ projected)[None, :, :, 0] ** 2
    alpha = np.logspace(-2, 8, 41)[:, None, None]
    shrunk = alpha + eigenvalues
    gain = 0.5 * (np.log(alpha / shrunk) + squared / shrunk).sum(axis=2).max(axis=0)
    scores = np.zeros((n_columns, n_columns))
    scores[first, second] = scores[second, first] = np.maximum(gain, 0.0)
    return scores


def pair_scores(
    method: str,
    columns: np.ndarray,
    curves: np.ndarray,
    gradient: np.ndarray,
    gamma: np.ndarray,
    random_state: Any = None,
) -> np.ndarray:
    """Score all pairs by one of :data:`METHODS`; shape (D, D), symmetric, zero diagonal."""
    if method == "evidence":
        return evidence_gain(columns, gradient, gamma)
    if method == "mutual_info":
        return mutual_information(weight_precision(curves, gamma))
    if method == "marglik_slack":
        return marglik_slack(weight_precision(curves, gamma))
    if method == "random":
        upper = np.triu(check_random_state(random_state).uniform(size=(curves.shape[1],) * 2), k=1)
        return upper + upper.T
    raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")


def top_pairs(scores: np.ndarray, n_pairs: int) -> list[tuple[int, int]]:
    """Pick the ``n_pairs`` best pairs ``i < j`` of a score matrix, best first."""
    first, second = np.triu_indices(len(scores), k=1)
    order = np.argsort(-scores[first, second], kind="stable")[:n_pairs]
    return [(int(first[k]), int(second[k])) for k in order]


def rank_interactions(
    estimator: Any, X: Any, y: Any, method: str = "evidence", n_pairs: int | None = None
) -> pd.DataFrame:
    """Rank the pairs of features of a fitted additive model.

    Parameters
    ----------
    estimator : LaplaceNAMRegressor or LaplaceNAMClassifier
        Fitted.
    X : array_like or DataFrame, shape (N, D)
        Usually the training rows.
    y : array_like, shape (N,)
    method : {"evidence", "mutual_info", "marglik_slack", "random"}, default "evidence"
        ``evidence`` looks for structure in the residual; the two scores of the paper measure how
        tightly two curves are tied to each other (concurvity).
    n_pairs : int, optional
        Keep the best ones only.

    Returns
    -------
    DataFrame
        Columns ``first``, ``second`` (names), ``i``, ``j`` (positions) and ``score``, best first.

    Examples
    --------
    >>> from icml24.additive_models import LaplaceNAMRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (300, 3))
    >>> y = X[:, 0] + 3 * X[:, 1] * X[:, 2] + 0.1 * rng.normal(size=300)
    >>> model = LaplaceNAMRegressor(max_iter=200, random_state=0).fit(X, y)
    >>> rank_interactions(model, X, y, n_pairs=1)[["first", "second"]].values.tolist()
    [['x1', 'x2']]
    """
    scores = estimator.interaction_scores(X, y, method=method)
    names = estimator.term_names_[: len(scores)]
    pairs = top_pairs(scores, len(scores) ** 2 if n_pairs is None else n_pairs)
    rows = [(names[i], names[j], i, j, float(scores[i, j])) for i, j in pairs]
    return pd.DataFrame(rows, columns=["first", "second", "i", "j", "score"])
