"""What a user would pick instead, each with a predictive density so that NLLs compare.

Every peer has ``fit(X, y)``, ``predict`` (or ``predict_proba``) and ``log_likelihood(X, y)``, the
mean log predictive density of a row in nats. Frames with categorical columns are welcome: columns
that are not numbers are one-hot coded inside. Where a regressor has no density of its own, it gets
a Gaussian whose standard deviation is that of its errors on 15 % of the training rows, and is then
refitted on all of them.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, SplineTransformer, StandardScaler

from icml24.additive_models.stacked_mlp import StackedMLP
from icml24.additive_models.training import draw_knots

__all__ = ["PEERS", "DensityModel", "EnsembleNAM", "fast_interactions"]

_HOLDOUT = 0.15


def _table(X: Any) -> pd.DataFrame:
    return X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))


def _encode(numbers: Any) -> Any:
    """Column transformer: ``numbers`` for numeric columns, one-hot for the rest."""
    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_exclude="number"),
        ),
        verbose_feature_names_out=False,
    )


def _gaussian(y: np.ndarray, mean: np.ndarray, std: Any) -> float:
    density = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return float(np.mean(density))


class DensityModel(BaseEstimator):
    """A scikit-learn model with a predictive density.

    Parameters
    ----------
    model : estimator
        Classifiers need ``predict_proba``.
    noise : {"own", "cv", "holdout", "probability"}
        Where the density comes from: ``predict(return_std=True)``; the leave-one-out error that a
        :class:`RidgeCV` at the end of a pipeline has stored; errors on 15 % of the training rows;
        or the class probabilities.
    random_state : int, default 0
        Draws the hold-out rows.
    """

    def __init__(self, model: Any, noise: str, random_state: int = 0) -> None:
        self.model = model
        self.noise = noise
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> DensityModel:
        """Fit the model and its noise level."""
        X, y = _table(X), np.asarray(y)
        self.model_ = clone(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", FutureWarning)
            if self.noise == "holdout":
                X_fit, X_out, y_fit, y_out = train_test_split(
                    X, y, test_size=_HOLDOUT, random_state=self.random_state
                )
                errors = y_out - clone(self.model).fit(X_fit, y_fit).predict(X_out)
                self.sigma_ = float(np.sqrt(np.mean(errors**2)))
            self.model_.fit(X, y)
        if self.noise == "cv":
            self.sigma_ = math.sqrt(-self.model_[-1].best_score_)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predictive mean, or class."""
        return self.model_.predict(_table(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities."""
        return self.model_.predict_proba(_table(X))

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log predictive density of a row, in nats."""
        X, y = _table(X), np.asarray(y)
        if self.noise == "probability":
            p = self.model_.predict_proba(X)
            index = np.searchsorted(self.model_.classes_, y)
            chosen = p[np.arange(len(y)), index]
            return float(np.log(np.maximum(chosen, 1e-12)).mean())
        if self.noise == "own":
            mean, std = self.model_.predict(X, return_std=True)
            return _gaussian(y, mean, std)
        return _gaussian(y, self.predict(X), self.sigma_)


class EnsembleNAM(BaseEstimator):
    """Plain neural additive models without the Laplace: one network, or an ensemble.

    The same networks as in LA-NAM, with a fixed tiny weight decay (prior precision 1e-3). All
    members train as one batched stack.

    Parameters
    ----------
    task : {"regression", "classification"}
    n_members : int, default 1
    early_stopping : bool, default False
        Keep 15 % of the rows aside and return to each member's best step on them.
    max_iter, learning_rate, batch_size, hidden, init
        As in LaplaceNAMRegressor.
    estimate_noise : bool, default True
        In regression, train once more on 85 % of the rows to learn the noise from the rest, which
        ``log_likelihood`` needs.
    random_state : int, default 0
    """

    def __init__(
        self,
        task: str,
        n_members: int = 1,
        early_stopping: bool = False,
        max_iter: int = 800,
        learning_rate: float = 0.01,
        batch_size: int = 512,
        hidden: tuple[int, ...] = (64,),
        init: str = "auto",
        estimate_noise: bool = True,
        random_state: int = 0,
    ) -> None:
        self.task = task
        self.n_members = n_members
        self.early_stopping = early_stopping
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.hidden = hidden
        self.init = init
        self.estimate_noise = estimate_noise
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> EnsembleNAM:
        """Train all members."""
        self._encoder = _encode(StandardScaler()).fit(_table(X))
        x, y = self._encoder.transform(_table(X)), np.asarray(y)
        if self.task == "regression":
            self._center, self._scale = float(np.mean(y)), float(np.std(y)) or 1.0
            target = (y - self._center) / self._scale
        else:
            self.classes_, target = np.unique(y, return_inverse=True)
            self._center, self._scale = 0.0, 1.0
        generator = torch.Generator().manual_seed(self.random_state)
        order = np.random.default_rng(self.random_state).permutation(len(x))
        n_out = max(1, round(_HOLDOUT * len(x)))
        kept, out = order[n_out:], order[:n_out]
        needs_noise = self.task == "regression" and self.estimate_noise
        if needs_noise or self.early_stopping:
            errors = self._train(x[kept], target[kept], x[out], target[out], generator)
            self.sigma_ = self._scale * float(np.sqrt(np.mean(errors**2)))
        if not self.early_stopping:
            self._train(x, target, None, None, generator)
        self.center_ = self._member_terms(x).mean(axis=0)
        return self

    def _train(
        self, x: Any, y: Any, x_out: Any, y_out: Any, generator: torch.Generator
    ) -> np.ndarray:
        """Train a fresh stack; return the errors of the averaged members on held-out rows."""
        n_rows, n_columns = x.shape
        stack = StackedMLP(
            self.n_members * n_columns, 1, self.hidden, generator=generator, dtype=torch.float32
        )
        inputs = torch.from_numpy(x).float().repeat(1, self.n_members).unsqueeze(2)
        target = torch.from_numpy(y).float()[:, None]
        if self.init == "knots" or (self.init == "auto" and self.task == "regression"):
            knots = draw_knots(inputs, torch.ones(n_rows), self.hidden[0], generator)
            stack.place_knots(knots, 2.0, generator)
        self._stack, self._n_columns = stack, n_columns
        adam = torch.optim.Adam(stack.tensors, lr=self.learning_rate, fused=True)
        best = np.full(self.n_members, np.inf)
        kept = copy.deepcopy(stack.state_dict())
        n_batches = math.ceil(n_rows / self.batch_size)
        batches: list[torch.Tensor] = []
        for step in range(self.max_iter):
            if not batches:
                shuffled = torch.randperm(n_rows, generator=generator)
                batches = list(shuffled.tensor_split(n_batches))
            rows = batches.pop()
            f, a, g = stack.factors(inputs[rows])
            members = f.unflatten(1, (self.n_members, n_columns)).sum(2)
            fitted = members if self.task == "regression" else torch.sigmoid(members)
            delta = ((fitted - target[rows]) / len(rows)).T.repeat_interleave(n_columns, 0)
            gradients = stack.gradient(a, g, delta)
            for tensor, gradient in zip(stack.tensors, gradients, strict=True):
                tensor.grad = gradient.add_(tensor.detach(), alpha=1e-3 / n_rows)
            for settings in adam.param_groups:
                decay = 0.5 * (1 + math.cos(math.pi * step / self.max_iter))
                settings["lr"] = self.learning_rate * decay
            adam.step()
            if self.early_stopping and (step % 10 == 9 or step == self.max_iter - 1):
                loss = self._loss(self._members(x_out), y_out)
                state = stack.state_dict()
                for m in np.flatnonzero(loss < best):
                    mine = slice(m * n_columns, (m + 1) * n_columns)
                    for key, value in state.items():
                        kept[key][mine] = value[mine]
                best = np.minimum(best, loss)
        if self.early_stopping:
            stack.load_state_dict(kept)
        return np.zeros(1) if x_out is None else y_out - self._members(x_out).mean(axis=1)

    def _loss(self, f: np.ndarray, y: np.ndarray) -> np.ndarray:
        if self.task == "regression":
            return ((f - y[:, None]) ** 2).mean(axis=0)
        return (np.logaddexp(0, f) - y[:, None] * f).mean(axis=0)

    def _member_terms(self, x: np.ndarray) -> np.ndarray:
        """Terms of each member, shape (N, members, columns)."""
        inputs = torch.from_numpy(x).float().repeat(1, self.n_members).unsqueeze(2)
        with torch.no_grad():
            f = self._stack(inputs).double().numpy()
        return f.reshape(len(x), self.n_members, self._n_columns)

    def _members(self, x: np.ndarray) -> np.ndarray:
        return self._member_terms(x).sum(axis=2)

    def feature_functions(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over members of each centred term, shape (N, D)."""
        terms = self._member_terms(self._encoder.transform(_table(X))) - self.center_
        spread = terms.std(axis=1, ddof=1) if self.n_members > 1 else np.zeros_like(terms[:, 0])
        return self._scale * terms.mean(axis=1), self._scale * spread

    def predict(self, X: Any) -> np.ndarray:
        """Mean of the members (regression) or most probable class."""
        f = self._members(self._encoder.transform(_table(X)))
        if self.task == "regression":
            return self._center + self._scale * f.mean(axis=1)
        return self.classes_[(self.predict_proba(X)[:, 1] > 0.5).astype(int)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities averaged over members."""
        f = self._members(self._encoder.transform(_table(X)))
        positive = (1 / (1 + np.exp(-f))).mean(axis=1)
        return np.stack([1 - positive, positive], axis=1)

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log predictive density of a row, in nats.

        In regression a Gaussian with the members' mean, and the hold-out noise plus the variance
        among members.
        """
        y = np.asarray(y)
        if self.task == "classification":
            chosen = self.predict_proba(X)[np.arange(len(y)), np.searchsorted(self.classes_, y)]
            return float(np.log(np.maximum(chosen, 1e-12)).mean())
        spread = self._members(self._encoder.transform(_table(X))).var(axis=1)
        std = np.sqrt(self.sigma_**2 + self._scale**2 * spread)
        return _gaussian(y, self.predict(X), std)


def _linear(task: str, seed: int) -> Any:
    encode = _encode(StandardScaler())
    if task == "regression":
        return DensityModel(make_pipeline(encode, BayesianRidge()), "own")
    return DensityModel(make_pipeline(encode, _logistic()), "probability")


def _logistic() -> Any:
    return GridSearchCV(
        LogisticRegression(max_iter=2000),
        {"C": np.logspace(-4, 2, 13)},
        scoring="neg_log_loss",
        cv=5,
    )


def _spline_gam(task: str, seed: int) -> Any:
    splines = make_pipeline(
        StandardScaler(), SplineTransformer(n_knots=8, degree=3, extrapolation="linear")
    )
    if task == "regression":
        final = RidgeCV(alphas=np.logspace(-4, 4, 17))
        return DensityModel(make_pipeline(_encode(splines), final), "cv")
    return DensityModel(
        make_pipeline(_encode(splines), StandardScaler(), _logistic()), "probability"
    )


def _gaussian_process(task: str, seed: int) -> Any:
    encode = _encode(StandardScaler())
    kernel = ConstantKernel(1.0) * RBF(3.0, (0.1, 100))
    if task == "regression":
        process = GaussianProcessRegressor(kernel + WhiteKernel(0.1), normalize_y=True)
        return DensityModel(make_pipeline(encode, process), "own")
    return DensityModel(make_pipeline(encode, GaussianProcessClassifier(kernel)), "probability")


def _nam(early_stopping: bool, n_members: int = 1) -> Callable[[str, int], Any]:
    def build(task: str, seed: int) -> Any:
        return EnsembleNAM(task, n_members, early_stopping, random_state=seed)

    return build


class _EBM(BaseEstimator):
    """Explainable boosting machine (``interpret-core``), imported when it is fitted."""

    def __init__(self, task: str, interactions: int = 0, seed: int = 0, bags: int = 4) -> None:
        self.task, self.interactions, self.seed, self.bags = task, interactions, seed, bags

    def fit(self, X: Any, y: Any) -> _EBM:
        """Fit."""
        from interpret.glassbox import ExplainableBoostingClassifier, ExplainableBoostingRegressor

        regression = self.task == "regression"
        kind = ExplainableBoostingRegressor if regression else ExplainableBoostingClassifier
        self.model_ = kind(
            interactions=self.interactions,
            outer_bags=self.bags,
            random_state=self.seed,
            n_jobs=1,
        )
        self.model_.fit(X, y)
        if not regression:
            self.classes_ = self.model_.classes_
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict."""
        return self.model_.predict(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities."""
        return self.model_.predict_proba(X)


class _LightGBM(BaseEstimator):
    """LightGBM with early stopping on 15 % of the rows, then refitted on all of them."""

    def __init__(self, task: str, seed: int = 0) -> None:
        self.task, self.seed = task, seed

    def fit(self, X: Any, y: Any) -> _LightGBM:
        """Fit."""
        import lightgbm

        kind = lightgbm.LGBMRegressor if self.task == "regression" else lightgbm.LGBMClassifier
        settings: dict[str, Any] = {
            "learning_rate": 0.05,
            "random_state": self.seed,
            "n_jobs": 1,
            "verbose": -1,
        }
        self._encoder = _encode("passthrough").set_output(transform="pandas").fit(X)
        x = self._clean(X)
        stratify = None if self.task == "regression" else y
        x_fit, x_out, y_fit, y_out = train_test_split(
            x, y, test_size=_HOLDOUT, random_state=self.seed, stratify=stratify
        )
        scout = kind(n_estimators=2000, **settings).fit(
            x_fit,
            y_fit,
            eval_set=[(x_out, y_out)],
            callbacks=[lightgbm.early_stopping(50, verbose=False)],
        )
        self.model_ = kind(n_estimators=max(1, scout.best_iteration_), **settings).fit(x, y)
        if self.task != "regression":
            self.classes_ = self.model_.classes_
        return self

    def _clean(self, X: Any) -> pd.DataFrame:
        x = self._encoder.transform(X)
        return x.set_axis([f"c{k}" for k in range(x.shape[1])], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Predict."""
        return np.asarray(self.model_.predict(self._clean(X)))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities."""
        return np.asarray(self.model_.predict_proba(self._clean(X)))


def _boosted(kind: Callable[..., Any], **settings: Any) -> Callable[[str, int], Any]:
    def build(task: str, seed: int) -> Any:
        noise = "holdout" if task == "regression" else "probability"
        return DensityModel(kind(task, seed=seed, **settings), noise, random_state=seed)

    return build


#: name -> ``(task, seed) -> estimator``
PEERS: dict[str, Callable[[str, int], Any]] = {
    "linear": _linear,
    "spline GAM": _spline_gam,
    "NAM": _nam(early_stopping=False),
    "early-stopped NAM": _nam(early_stopping=True),
    "NAM ensemble": _nam(early_stopping=False, n_members=5),
    "EBM": _boosted(_EBM),
    "EBM + pairs": _boosted(_EBM, interactions=10),
    "LightGBM": _boosted(_LightGBM),
    "Gaussian process": _gaussian_process,
}


def fast_interactions(X: Any, y: Any, task: str, score: Any) -> np.ndarray:
    """FAST, the pair score of EBM, on the residual of a fitted additive model.

    Parameters
    ----------
    X : array_like, shape (N, D)
    y : array_like, shape (N,)
    task : {"regression", "classification"}
    score : ndarray, shape (N,)
        Prediction (or logit) of the additive model.

    Returns
    -------
    ndarray, shape (D, D)
    """
    from interpret.utils import measure_interactions

    X = np.asarray(X, dtype=float)
    objective = "rmse" if task == "regression" else "log_loss"
    ranked = measure_interactions(
        X, np.asarray(y), interactions=X.shape[1] ** 2, init_score=score, objective=objective
    )
    scores = np.zeros((X.shape[1],) * 2)
    for (i, j), strength in ranked:
        scores[i, j] = scores[j, i] = strength
    return scores
