"""The alternatives are honest: densities integrate, fits are what they say."""

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.linear_model import LinearRegression

from icml24.additive_models.data import additive, interacting, load
from icml24.additive_models.interactions import top_pairs
from icml24.additive_models.peers import PEERS, DensityModel, EnsembleNAM, fast_interactions

OPTIONAL = {"EBM": "interpret", "EBM + pairs": "interpret", "LightGBM": "lightgbm"}
NEURAL = {"max_iter": 60, "hidden": (16,)}


def peer(name, task):
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    model = PEERS[name](task, 0)
    if name == "EBM + pairs":
        model.model.set_params(interactions=2, bags=2)
    return model.set_params(**NEURAL) if isinstance(model, EnsembleNAM) else model


@pytest.mark.parametrize("name", PEERS)
def test_regression_peers_beat_the_constant_density(name):
    table = load("autompg")  # it has a categorical column
    X, y = table.X[:300], table.y[:300].to_numpy()
    model = peer(name, "regression").fit(X[::2], y[::2])
    constant = norm(y[::2].mean(), y[::2].std()).logpdf(y[1::2]).mean()
    assert model.log_likelihood(X[1::2], y[1::2]) > constant + 0.2
    assert model.predict(X[:5]).shape == (5,)


@pytest.mark.parametrize("name", PEERS)
def test_classification_peers_beat_the_base_rate(name):
    table = load("heart")
    X, y = table.X, table.y.to_numpy()
    model = peer(name, "classification").fit(X[::2], y[::2])
    assert model.log_likelihood(X[1::2], y[1::2]) > -np.log(2) + 0.05
    p = model.predict_proba(X[:5])
    np.testing.assert_allclose(p.sum(axis=1), 1.0)
    # the likelihood is that of the probabilities it reports
    one = model.log_likelihood(X[:1], y[:1])
    assert one == pytest.approx(np.log(p[0, y[0]]), rel=1e-5)


def test_holdout_noise_is_the_error_on_held_out_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 2))
    y = X[:, 0] + 0.5 * rng.normal(size=2000)
    model = DensityModel(LinearRegression(), "holdout").fit(X, y)
    assert model.sigma_ == pytest.approx(0.5, rel=0.1)
    expected = norm(model.predict(X), model.sigma_).logpdf(y).mean()
    assert model.log_likelihood(X, y) == pytest.approx(expected)


def test_leave_one_out_noise_of_the_spline_gam():
    case = additive(n_rows=500, n_columns=3)
    model = PEERS["spline GAM"]("regression", 0).fit(case.X, case.y)
    assert model.sigma_ == pytest.approx(1.0, rel=0.15)


def test_members_of_an_ensemble_are_independent_networks():
    """Two members trained together are what each would be with the other left out of the sum."""
    case = additive(n_rows=200, n_columns=3)
    pair = EnsembleNAM("regression", 2, estimate_noise=False, **NEURAL).fit(case.X, case.y)
    members = pair._members(pair._encoder.transform(_frame(case.X)))
    assert np.abs(members[:, 0] - members[:, 1]).max() > 1e-3
    residual = (case.y - pair._center) / pair._scale - members.T
    assert (residual.std(axis=1) < 0.9).all()  # each member fits the whole target by itself
    mean, std = pair.feature_functions(case.X)
    np.testing.assert_allclose(mean.sum(1), pair.predict(case.X) - pair.predict(case.X).mean())
    assert (std > 0).all()


def _frame(X):
    import pandas as pd

    return pd.DataFrame(X)


def test_early_stopping_returns_to_the_best_step():
    table = load("heart")
    X, y = table.X, table.y.to_numpy()
    settings = {"max_iter": 300, "learning_rate": 0.05}
    late = EnsembleNAM("classification", **settings).fit(X[::2], y[::2])
    early = EnsembleNAM("classification", early_stopping=True, **settings).fit(X[::2], y[::2])
    gain = early.log_likelihood(X[1::2], y[1::2]) - late.log_likelihood(X[1::2], y[1::2])
    assert gain > 0.1


def test_fast_finds_planted_pairs():
    pytest.importorskip("interpret")
    case = interacting(seed=0)
    scores = fast_interactions(case.X, case.y, "regression", case.terms.sum(axis=1))
    assert set(top_pairs(scores, 2)) == set(case.pairs)
    np.testing.assert_array_equal(scores, scores.T)
