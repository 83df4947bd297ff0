"""Two scikit-learn estimators: a penalty for every feature, a weight for every sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from icml24.bilevel.problems import DataHyperCleaning, L2Selection
from icml24.bilevel.solver import minimize_bilevel

__all__ = ["BilevelLogisticRegression", "HyperCleaner"]

Array = np.ndarray


def _split(
    X: Array, y: Array, X_val: ArrayLike | None, y_val: ArrayLike | None, share: float, seed: int
) -> tuple[Array, Array, Array, Array]:
    if (X_val is None) != (y_val is None):
        raise ValueError("Give both X_val and y_val, or neither.")
    if X_val is None:
        parts = train_test_split(X, y, test_size=share, stratify=y, random_state=seed)
        return parts[0], parts[2], parts[1], parts[3]
    X_val, y_val = np.asarray(X_val, dtype=float), np.asarray(y_val)
    if X_val.ndim != 2 or X_val.shape[1] != X.shape[1]:
        raise ValueError(f"X_val must have {X.shape[1]} columns like X, got shape {X_val.shape}.")
    return X, y, X_val, y_val


class _Scaled(ClassifierMixin, BaseEstimator):
    """Shared: standardise, add a constant, scale so that the loss is 1-smooth."""

    def _prepare(self, X: Array, curvature: float, standardize: bool = True) -> Array:
        self._mean = X.mean(0)
        spread = X.std(0)
        if not standardize:
            spread = np.full(len(spread), np.sqrt((spread**2).mean()))
        self._spread = np.where(spread > 0, spread, 1.0)
        table = self._table(X, 1.0)
        largest = np.linalg.eigvalsh(table.T @ table / len(table))[-1]
        self._unit = float(1 / np.sqrt(curvature * largest))
        return table * self._unit

    def _table(self, X: Array, unit: float) -> Array:
        return unit * np.column_stack([(X - self._mean) / self._spread, np.ones(len(X))])


class BilevelLogisticRegression(_Scaled):
    """Logistic regression with a penalty for each feature, tuned by gradients on validation data.

    What a cross-validated grid does for one penalty, a bilevel method does for thousands.

    Parameters
    ----------
    method : str, default "spaba"
        See :func:`~icml24.bilevel.minimize_bilevel`.
    lr_inner, lr_outer : float
        Step sizes; features are standardised and scaled so that the loss is 1-smooth, which makes
        the defaults transferable. Penalties end at ``1 / lr_inner`` in these units, since larger
        ones would make the inner step unstable.
    batch_size : int or "sqrt"
        Mini-batch.
    max_passes : float, default 50
        Budget in passes over training and validation data.
    floor : float, default 1e-4
        Smallest penalty (in units of the standardised features).
    validation_fraction : float, default 0.3
        Share of the rows held out when ``fit`` gets no validation data.
    random_state : int
        Seed of split and batches.

    Attributes
    ----------
    penalties_ : ndarray, shape (n_features,)
        Strength of each feature's penalty, for standardised features.
    coef_, intercept_ : ndarray, shapes (1, n_features) and (1,)
        The model, in the units of the data.
    classes_ : ndarray, shape (2,)
        Labels.
    result_ : OptimizeResult
        Everything about the optimisation.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((400, 5))
    >>> y = X[:, 0] + 0.5 * rng.standard_normal(400) > 0
    >>> model = BilevelLogisticRegression().fit(X, y)
    >>> int(model.penalties_.argmin())  # only the first feature matters
    0
    """

    def __init__(
        self,
        method: Any = "spaba",
        lr_inner: float = 0.5,
        lr_outer: float = 10.0,
        batch_size: int | str = "sqrt",
        max_passes: float = 50,
        floor: float = 1e-4,
        validation_fraction: float = 0.3,
        random_state: int = 0,
    ) -> None:
        self.method = method
        self.lr_inner = lr_inner
        self.lr_outer = lr_outer
        self.batch_size = batch_size
        self.max_passes = max_passes
        self.floor = floor
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> BilevelLogisticRegression:
        """Fit model and penalties.

        Parameters
        ----------
        X, X_val : array_like, shapes (n, d) and (m, d)
            Training features, and validation features (split off when missing).
        y, y_val : array_like
            Labels of two classes.

        Returns
        -------
        self
        """
        table, codes = validate_data(self, X, y, dtype=float)
        kind = type_of_target(codes, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        train, labels, val, labels_val = _split(
            table, codes, X_val, y_val, self.validation_fraction, self.random_state
        )
        table = self._prepare(train, 0.25)
        ceiling = 1 / self.lr_inner if self.lr_inner > 0 else np.inf  # the driver names a bad one
        problem = L2Selection(
            table, labels, self._table(val, self._unit), labels_val,
            floor=self.floor * self._unit**2, x0=-3.0, ceiling=ceiling,
        )  # fmt: skip
        self.result_ = minimize_bilevel(
            problem, self.method, lr_inner=self.lr_inner, lr_outer=self.lr_outer,
            batch_size=self.batch_size, random_state=self.random_state, progress=False,
            max_oracle_calls=self.max_passes * (problem.n_inner + problem.n_outer),
        )  # fmt: skip
        self.classes_ = problem.classes
        weights = problem.solution(self.result_.x[0])[0] * self._unit  # exact for these penalties
        self.penalties_ = (problem.strength(self.result_.x[0, :-1]) + problem.floor) / self._unit**2
        self.coef_ = (weights[:-1] / self._spread)[None]
        self.intercept_ = weights[-1:] - self.coef_ @ self._mean
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Log-odds of the second class, shape (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=float)
        return X @ self.coef_[0] + self.intercept_[0]

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of the two classes, shape (n, 2)."""
        second = expit(self.decision_function(X))
        return np.column_stack([1 - second, second])

    def predict(self, X: ArrayLike) -> Array:
        """Labels, shape (n,)."""
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class HyperCleaner(_Scaled):
    """Softmax regression on partly wrong labels, each sample weighted by what trusted data say.

    Parameters
    ----------
    method : str, default "spaba"
        See :func:`~icml24.bilevel.minimize_bilevel`.
    l2 : float
        Ridge penalty of the inner problem (scaled features).
    standardize : bool, default False
        Give every feature the same variance; by default all are only centred and scaled together,
        which suits images and embeddings.
    lr_inner, lr_outer : float
        Step sizes; ``lr_outer`` is multiplied by the number of samples, because a single weight
        touches the average loss only by 1/n.
    batch_size : int or "sqrt"
        Mini-batch.
    max_passes : float
        Budget in passes over both data sets.
    random_state : int
        Seed of the batches.

    Attributes
    ----------
    sample_weight_ : ndarray, shape (n,)
        Learnt weight in (0, 1) of each training sample; small for labels that look wrong.
    coef_, intercept_ : ndarray, shapes (K, d) and (K,)
        The model, in the units of the data.
    classes_ : ndarray, shape (K,)
        Labels.
    result_ : OptimizeResult
        Everything about the optimisation.

    Examples
    --------
    >>> from icml24.bilevel.data import load_digits
    >>> data = load_digits(seed=0)
    >>> model = HyperCleaner().fit(data.X[:, :-1], data.y, data.X_val[:, :-1], data.y_val)
    >>> good, bad = (model.sample_weight_[data.corrupted == k].mean() for k in (False, True))
    >>> bool(good > bad)
    True
    """

    def __init__(
        self,
        method: Any = "spaba",
        l2: float = 1e-3,
        standardize: bool = False,
        lr_inner: float = 0.5,
        lr_outer: float = 0.3,
        batch_size: int | str = "sqrt",
        max_passes: float = 100,
        random_state: int = 0,
    ) -> None:
        self.method = method
        self.l2 = l2
        self.standardize = standardize
        self.lr_inner = lr_inner
        self.lr_outer = lr_outer
        self.batch_size = batch_size
        self.max_passes = max_passes
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, X_val: ArrayLike, y_val: ArrayLike) -> HyperCleaner:
        """Fit model and weights.

        Parameters
        ----------
        X, y : array_like, shapes (n, d) and (n,)
            Training data, labels possibly wrong.
        X_val, y_val : array_like, shapes (m, d) and (m,)
            Trusted data.

        Returns
        -------
        self
        """
        table, codes = validate_data(self, X, y, dtype=float)
        check_classification_targets(codes)
        train, labels, val, labels_val = _split(table, codes, X_val, y_val, 0.0, 0)
        table = self._prepare(train, 0.5, self.standardize)
        problem = DataHyperCleaning(
            table, labels, self._table(val, self._unit), labels_val, l2=self.l2
        )
        self.result_ = minimize_bilevel(
            problem, self.method, lr_inner=self.lr_inner, lr_outer=self.lr_outer * len(train),
            batch_size=self.batch_size, random_state=self.random_state, progress=False,
            max_oracle_calls=self.max_passes * (problem.n_inner + problem.n_outer),
        )  # fmt: skip
        self.classes_ = problem.classes
        self.sample_weight_ = expit(self.result_.x[0])
        W = self.result_.y[0].reshape(problem.shape) * self._unit
        self.coef_ = (W[:-1] / self._spread[:, None]).T
        self.intercept_ = W[-1] - self.coef_ @ self._mean
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Logits, shape (n, K)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=float)
        return X @ self.coef_.T + self.intercept_

    def predict_proba(self, X: ArrayLike) -> Array:
        """Class probabilities, shape (n, K)."""
        return softmax(self.decision_function(X), axis=1)

    def predict(self, X: ArrayLike) -> Array:
        """Labels, shape (n,)."""
        best = self.decision_function(X).argmax(1)
        return self.classes_[best]
