"""The chapter's experiments: pure functions ``(config, seed) -> record``.

Run them with :func:`icml24.core.experiments.run`, which repeats them over seeds and grids. For
tables a seed is a fold: seeds 0 to 4 are the folds of one shuffled five-fold split, seeds 5 to 9
those of the next, so that methods are compared on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.utils import Bunch

from icml24.additive_models.data import Synthetic, additive, interacting, load
from icml24.additive_models.estimator import LaplaceNAMClassifier, LaplaceNAMRegressor
from icml24.additive_models.evidence import Block, Gaussian
from icml24.additive_models.interactions import METHODS, top_pairs
from icml24.additive_models.peers import PEERS, EnsembleNAM, fast_interactions
from icml24.additive_models.stacked_mlp import StackedMLP
from icml24.additive_models.training import AdditiveModel, Schedule, draw_knots, train
from icml24.core.experiments import read_records, run, write_records

__all__ = [
    "EXPERIMENTS",
    "TABLES",
    "Config",
    "bands",
    "build",
    "make_records",
    "pair_recovery",
    "prior_sweep",
    "split",
    "stage_two",
    "stored",
    "table_nll",
]


@dataclass(frozen=True)
class Config:
    """Settings of all experiments of the chapter.

    Parameters
    ----------
    max_iter, learning_rate, batch_size, structure
        Of every neural additive model: LA-NAM, the plain NAM and the ensemble alike.
    n_rows, n_columns : int
        Of the synthetic additive data.
    n_members : int
        Of the ensemble.
    table : str
        Real table of ``table_nll`` and ``stage_two``; ``"planted"`` is the synthetic one with two
        interactions.
    max_rows : int
        Larger tables are thinned at random to so many rows.
    method : str
        ``"LA-NAM"`` (with ``structure``), ``"LA-NAM, exact block"``, or a name in ``peers.PEERS``.
    correlation : float
    correlated : pair of int
        The one pair of correlated columns of the planted data.
    pair_method : str
        Score that picks the pairs of the second stage; ``"none"`` skips it.
    n_pairs : int
        Pairs to add.
    """

    max_iter: int = 600
    learning_rate: float = 0.03
    batch_size: int = 512
    structure: str = "kron"
    n_rows: int = 1000
    n_columns: int = 10
    n_members: int = 5
    table: str = "heart"
    max_rows: int = 1500
    method: str = "LA-NAM"
    correlation: float = 0.0
    correlated: tuple[int, int] = (1, 2)
    pair_method: str = "none"
    n_pairs: int = 2

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs: minutes on two cores."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the scale of the official code's example: all rows, and long training."""
        return cls(max_iter=5000, max_rows=10**9, n_pairs=10)


def build(config: Config, task: str, seed: int, **settings: Any) -> Any:
    """Make the estimator that a configuration names.

    Parameters
    ----------
    config : Config
    task : {"regression", "classification"}
    seed : int
    **settings
        More settings for LA-NAM.

    Returns
    -------
    estimator with ``fit``, ``predict`` and ``log_likelihood``
    """
    shared: dict[str, Any] = {
        "max_iter": config.max_iter,
        "learning_rate": config.learning_rate,
        "batch_size": config.batch_size,
        "random_state": seed,
    }
    if config.method.startswith("LA-NAM"):
        kind = LaplaceNAMRegressor if task == "regression" else LaplaceNAMClassifier
        structure = "full" if config.method == "LA-NAM, exact block" else config.structure
        return kind(structure=structure, **shared, **settings)
    if config.method not in PEERS:
        raise ValueError(
            f"method must be 'LA-NAM' or one of {', '.join(PEERS)}, got {config.method!r}."
        )
    peer = PEERS[config.method](task, seed)
    return peer.set_params(**shared) if isinstance(peer, EnsembleNAM) else peer


def split(n_rows: int, y: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and testing of fold ``seed % 5`` of shuffled split ``seed // 5``.

    Parameters
    ----------
    n_rows : int
    y : ndarray, optional
        Class labels, to stratify by.
    seed : int

    Returns
    -------
    train, test : ndarray of int
    """
    kind = KFold if y is None else StratifiedKFold
    folds = kind(5, shuffle=True, random_state=seed // 5)
    return list(folds.split(np.zeros(n_rows), y))[seed % 5]


def _fold(config: Config, seed: int) -> tuple[str, Any, Any, Any, Any]:
    if config.table == "planted":
        train, test = _planted(config, seed), _planted(config, seed + 1000)
        return "regression", train.X, train.y, test.X, test.y
    table = load(config.table)
    X, y = table.X, table.y.to_numpy()
    if len(X) > config.max_rows:
        kept = np.random.default_rng(0).choice(len(X), config.max_rows, replace=False)
        X, y = X.iloc[kept], y[kept]
    rows, test_rows = split(len(X), y if table.task == "classification" else None, seed)
    return table.task, X.iloc[rows], y[rows], X.iloc[test_rows], y[test_rows]


def _planted(config: Config, seed: int) -> Synthetic:
    return interacting(correlation=config.correlation, correlated=config.correlated, seed=seed)


def bands(config: Config, seed: int) -> dict[str, Any]:
    """Coverage and selection on synthetic data whose curves are known.

    Returns
    -------
    dict
        ``coverage`` and ``ensemble_coverage``: share of rows whose true centred curve lies in the
        95 % band, for each column; ``effect`` and ``ensemble_effect``: standard deviation of each
        fitted curve; and as numbers ``worst_coverage``, ``mean_coverage``, ``coverage_gain``,
        ``effect_ratio`` (weakest relevant over largest irrelevant), ``rmse`` of all curves, ``sd``
        that the bands claim, and the noise ``sigma``.
    """
    case = additive(config.n_rows, config.n_columns, seed)
    model = build(config, "regression", seed).fit(case.X, case.y)
    ensemble = EnsembleNAM(
        "regression",
        config.n_members,
        max_iter=config.max_iter,
        learning_rate=config.learning_rate,
        batch_size=config.batch_size,
        estimate_noise=False,
        random_state=seed,
    ).fit(case.X, case.y)
    record: dict[str, Any] = {"sigma": model.sigma_}
    for name, fitted in (("", model), ("ensemble_", ensemble)):
        mean, std = fitted.feature_functions(case.X)
        coverage = (np.abs(mean - case.terms) <= 1.96 * std).mean(axis=0)
        effect = mean.std(axis=0)
        record |= {
            f"{name}coverage": coverage,
            f"{name}worst_coverage": float(coverage.min()),
            f"{name}mean_coverage": float(coverage.mean()),
            f"{name}effect": effect,
            f"{name}effect_ratio": float(effect[:3].min() / effect[3:].max()),
            f"{name}rmse": float(np.sqrt(((mean - case.terms) ** 2).mean())),
            f"{name}sd": float(np.sqrt((std**2).mean())),
        }
    gain = record["coverage"] - record["ensemble_coverage"]
    record["coverage_gain"] = float(gain.mean())
    return record


def table_nll(config: Config, seed: int) -> dict[str, Any]:
    """Negative log likelihood of one method on one fold of one table.

    Returns
    -------
    dict
        ``nll`` in nats per row in the units of the target; ``score``: R squared or area under the
        ROC curve; ``coverage`` of the 95 % predictive interval (LA-NAM in regression, else NaN);
        ``p``, the probability of the second class at each test row (empty in regression), and
        ``y``, what was observed.
    """
    task, X, y, X_test, y_test = _fold(config, seed)
    model = build(config, task, seed).fit(X, y)
    coverage, p = float("nan"), np.empty(0)
    if task == "classification":
        p = model.predict_proba(X_test)[:, 1]
        score = roc_auc_score(y_test, p)
    else:
        residual = y_test - model.predict(X_test)
        score = 1 - np.mean(residual**2) / np.var(y_test)
        if config.method.startswith("LA-NAM"):
            mean, std = model.predict(X_test, return_std=True)
            coverage = float(np.mean(np.abs(y_test - mean) <= 1.96 * std))
    return {
        "nll": -model.log_likelihood(X_test, y_test),
        "score": float(score),
        "coverage": coverage,
        "p": p,
        "y": y_test,
    }


def pair_recovery(config: Config, seed: int) -> dict[str, Any]:
    """Share of the two planted interactions among the two best pairs of each score.

    Returns
    -------
    dict
        Precision at 2 for each method and for FAST, the score of EBM.
    """
    case = _planted(config, seed)
    model = build(config, "regression", seed).fit(case.X, case.y)
    scores = {name: model.interaction_scores(case.X, case.y, name) for name in METHODS}
    scores["FAST"] = fast_interactions(case.X, case.y, "regression", model.predict(case.X))
    return {
        name: len(set(top_pairs(score, 2)) & set(case.pairs)) / 2 for name, score in scores.items()
    }


def stage_two(config: Config, seed: int) -> dict[str, Any]:
    """Test NLL after a second stage with pairs chosen by ``config.pair_method``.

    Returns
    -------
    dict
        ``nll``, and the chosen ``pairs``.
    """
    task, X, y, X_test, y_test = _fold(config, seed)
    pairs = {}
    if config.pair_method != "none":
        pairs = {"n_interactions": config.n_pairs, "interaction_method": config.pair_method}
    model = build(config, task, seed, **pairs).fit(X, y)
    return {"nll": -model.log_likelihood(X_test, y_test), "pairs": model.pairs_}


def prior_sweep(
    log_priors: Sequence[float], n_rows: int = 40, sigma: float = 0.3, seed: int = 0
) -> list[Bunch]:
    """Fit one curve with several prior precisions, all else held fixed.

    Parameters
    ----------
    log_priors : sequence of float
        Logarithm of the prior precision, shared by all parameters of the network.
    n_rows : int, default 40
    sigma : float, default 0.3
        True noise, taken as known.
    seed : int, default 0

    Returns
    -------
    list of Bunch
        For each prior: data ``x``, ``y``; ``grid``, ``mean``, ``std`` and ``truth`` on it;
        ``log_evidence`` and ``log_likelihood`` of the data.
    """
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-2, 2, n_rows))
    y = np.sin(2 * x) + sigma * rng.normal(size=n_rows)
    grid = np.linspace(-3, 3, 61)
    tensors = [torch.from_numpy(a).reshape(-1, 1, 1) for a in (x, grid)]
    target, ones = torch.from_numpy(y), torch.ones(n_rows, dtype=torch.float64)
    schedule = Schedule(max_iter=600, burn_in=10**9, hyper_steps=0)
    results = []
    for log_prior in log_priors:
        generator = torch.Generator().manual_seed(seed)
        stack = StackedMLP(1, 1, generator=generator)
        stack.place_knots(draw_knots(tensors[0], ones, 64, generator), 2.0, generator)
        prior = torch.full((1, 1), float(log_prior), dtype=torch.float64)
        likelihood = Gaussian(math.log(sigma))
        model = AdditiveModel([Block(stack, [(0,)], prior)], likelihood, 0.0, "full")
        path = train(model, tensors[:1], target, ones, schedule, torch.float64, generator)
        fit = likelihood.data_fit(model.means(tensors[:1]).sum(1), target, ones)
        results.append(
            Bunch(
                x=x,
                y=y,
                grid=grid,
                truth=np.sin(2 * grid),
                mean=model.means(tensors[1:])[:, 0].numpy(),
                std=model.variances(tensors[1:])[:, 0].sqrt().numpy(),
                log_evidence=path[-1][1],
                log_likelihood=fit.log_likelihood(math.log(sigma)),
            )
        )
    return results


# -- what takes minutes and is stored -------------------------------------------------------------

Experiment = Callable[[Config, int], dict[str, Any]]
_LAPTOP = Config.laptop()

#: Stored tables: experiment, configuration, grid and number of seeds.
TABLES: dict[str, tuple[Experiment, Config, dict[str, list[Any]], int]] = {
    # EBM needs most of a minute for the five folds of this table, as much as all others together.
    "ebm_concrete": (table_nll, _LAPTOP, {"table": ["concrete"], "method": ["EBM"]}, 5),
    "regression": (
        table_nll,
        _LAPTOP,
        {
            "table": ["autompg", "concrete", "wine"],
            "method": ["LA-NAM", "LA-NAM, exact block", "NAM"],
        },
        5,
    ),
    "correlation": (
        pair_recovery,
        replace(_LAPTOP, correlated=(0, 3)),
        {"correlation": [0.0, 0.3, 0.6, 0.9]},
        4,
    ),
    "second_stage": (
        stage_two,
        replace(_LAPTOP, table="concrete", structure="full", n_pairs=6),
        {"pair_method": ["none", "random", "mutual_info", "evidence"]},
        3,
    ),
}


def stored(name: str) -> pd.DataFrame:
    """Read a stored table; the notebooks compute a part of it again and compare.

    ``python -m icml24.additive_models.experiments`` makes all of them anew, in some minutes.

    Parameters
    ----------
    name : str
        One of :data:`TABLES`.

    Returns
    -------
    pandas.DataFrame
        One row for each setting and seed.

    Examples
    --------
    >>> stored("ebm_concrete")["seed"].tolist()
    [0, 1, 2, 3, 4]
    """
    return read_records("icml24.additive_models", f"{name}.json")


def make_records(folder: Path, **options: Any) -> None:
    """Run the stored experiments and write their tables, without the single test rows.

    Parameters
    ----------
    folder : path
    **options
        Passed to :func:`icml24.core.experiments.run`, for example ``jobs``.
    """
    for name, (experiment, config, grid, seeds) in TABLES.items():
        found = run(experiment, config, seeds, grid=grid, **options)
        kept = found.drop(columns=["p", "y"], errors="ignore").dropna(axis=1, how="all")
        write_records(folder / f"{name}.json", kept)


EXPERIMENTS: dict[str, Experiment] = {
    "bands": bands,
    "table_nll": table_nll,
    "pair_recovery": pair_recovery,
    "stage_two": stage_two,
}

if __name__ == "__main__":
    from icml24.additive_models import experiments

    experiments.make_records(Path(__file__).with_name("data"), jobs=2)
