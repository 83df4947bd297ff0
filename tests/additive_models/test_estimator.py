"""The estimators: identities, limits, tables with categories, and what they say to bad input."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermegauss

from icml24.additive_models import LaplaceNAMClassifier, LaplaceNAMRegressor
from icml24.additive_models.data import additive, interacting, load

FAST = {"hidden_layer_sizes": (16,), "max_iter": 120, "burn_in": 40, "hyper_every": 20}


def regressor(**settings):
    return LaplaceNAMRegressor(**{**FAST, "random_state": 0, **settings})


def classifier(**settings):
    return LaplaceNAMClassifier(**{**FAST, "random_state": 0, **settings})


@pytest.fixture(scope="module")
def cars():
    table = load("autompg")
    return table.X, table.y


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
@pytest.mark.parametrize("pairs", [None, [(0, 4), (2, 6)]])
def test_terms_are_centred_and_add_up_to_the_prediction(cars, structure, pairs):
    X, y = cars
    model = regressor(structure=structure, interactions=pairs).fit(X, y)
    mean, std = model.feature_functions(X)
    assert mean.shape == std.shape == (len(X), len(model.term_names_))
    np.testing.assert_allclose(mean.mean(axis=0), 0.0, atol=1e-10)
    np.testing.assert_allclose(mean.sum(axis=1) + model.intercept_, model.predict(X), rtol=1e-10)
    np.testing.assert_allclose(mean.std(axis=0), model.effect_size_, rtol=1e-10)
    _, total = model.predict(X, return_std=True)
    np.testing.assert_allclose(total**2, (std**2).sum(axis=1) + model.sigma_**2, rtol=1e-10)


def test_classifier_terms_add_up_to_the_logit():
    table = load("heart")
    model = classifier().fit(table.X, table.y)
    mean, std = model.feature_functions(table.X)
    logit = mean.sum(axis=1) + model.intercept_
    moderated = logit / np.sqrt(1 + np.pi / 8 * (std**2).sum(axis=1))
    np.testing.assert_allclose(moderated, model.decision_function(table.X), rtol=1e-10)
    p = model.predict_proba(table.X)
    np.testing.assert_allclose(p[:, 1], 1 / (1 + np.exp(-moderated)))
    chosen = p[np.arange(len(p)), table.y]
    assert model.log_likelihood(table.X, table.y) == pytest.approx(np.log(chosen).mean())


@settings(max_examples=200, deadline=None)
@given(m=st.floats(-6, 6), v=st.sampled_from([0.1, 1.0, 4.0, 16.0]))
def test_probit_is_close_to_quadrature(m, v):
    nodes, weights = hermegauss(80)
    exact = (weights / (1 + np.exp(-(m + math.sqrt(v) * nodes)))).sum() / weights.sum()
    assert 1 / (1 + math.exp(-m / math.sqrt(1 + math.pi * v / 8))) == pytest.approx(
        exact, abs=0.015
    )


def test_log_likelihood_is_a_gaussian_density(cars):
    from scipy.stats import norm

    X, y = cars
    model = regressor().fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert model.log_likelihood(X, y) == pytest.approx(norm(mean, std).logpdf(y).mean())


def test_units_of_the_target_carry_through(cars):
    """Fitting 10 y + 3 stretches curves, bands and noise by 10 and shifts the intercept."""
    X, y = cars
    a, b = regressor().fit(X, y), regressor().fit(X, 10 * y + 3)
    for left, right in zip(a.feature_functions(X), b.feature_functions(X), strict=True):
        np.testing.assert_allclose(10 * left, right, rtol=1e-4, atol=1e-4)
    assert b.sigma_ == pytest.approx(10 * a.sigma_, rel=1e-5)
    assert b.intercept_ == pytest.approx(10 * a.intercept_ + 3, rel=1e-5)
    units = len(y) * math.log(10)
    assert b.log_marginal_likelihood_ == pytest.approx(a.log_marginal_likelihood_ - units, rel=1e-4)


def test_units_of_the_columns_do_not_matter(cars):
    X, y = cars
    scaled = X.assign(weight=X.weight / 1000 - 7)
    np.testing.assert_allclose(
        regressor().fit(X, y).predict(X), regressor().fit(scaled, y).predict(scaled), rtol=1e-4
    )


def test_truth_is_recovered_inside_the_bands():
    case = additive(n_rows=600, n_columns=5, seed=3)
    model = LaplaceNAMRegressor(max_iter=500, random_state=0).fit(case.X, case.y)
    mean, std = model.feature_functions(case.X)
    assert (np.abs(mean - case.terms) < 1.96 * std).mean(axis=0).min() > 0.85
    assert np.sqrt(((mean - case.terms) ** 2).mean(axis=0)).max() < 0.2
    assert model.effect_size_[:3].min() > 4 * model.effect_size_[3:].max()
    assert model.sigma_ == pytest.approx(1.0, rel=0.2)


def test_evidence_switches_off_and_bands_widen_outside_the_data():
    case = additive(n_rows=400, n_columns=3, seed=0)
    model = regressor(max_iter=300).fit(case.X, case.y)
    grid = np.array([-3.0, -1.0, 0.5, 2.0, 4.0])
    std = model.partial_dependence(0, grid).std
    assert std[0] > std[1] > std[2] < std[3] < std[4]


@pytest.mark.parametrize("make", [regressor, classifier])
def test_weights_are_repetitions(make):
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(40, 3)), rng.integers(0, 4, size=40)
    y = (X[:, 0] + rng.normal(size=40) > 0).astype(int)
    a = make().fit(X, y, sample_weight=weight)
    b = make().fit(X.repeat(weight, axis=0), y.repeat(weight))
    for left, right in zip(a.feature_functions(X), b.feature_functions(X), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-7)
    assert a.log_marginal_likelihood_ == pytest.approx(b.log_marginal_likelihood_)


def test_same_seed_same_fit_and_global_state_untouched(cars):
    import torch

    X, y = cars
    numpy_state, torch_state = np.random.mtrand._rand.get_state(), torch.get_rng_state()
    before = X.copy()
    a, b = regressor().fit(X, y), regressor().fit(X, y)
    np.testing.assert_array_equal(a.predict(X), b.predict(X))
    assert (regressor(random_state=1).fit(X, y).predict(X) != a.predict(X)).any()
    np.testing.assert_array_equal(np.random.mtrand._rand.get_state()[1], numpy_state[1])
    assert torch.equal(torch.get_rng_state(), torch_state)
    pd.testing.assert_frame_equal(X, before)


@pytest.mark.parametrize("prior", ["layer", "feature"])
@pytest.mark.parametrize("init", ["knots", "torch"])
@pytest.mark.parametrize("hidden", [(16,), (12, 8)])
def test_options_fit_and_report(cars, prior, init, hidden):
    X, y = cars
    model = regressor(prior=prior, init=init, hidden_layer_sizes=hidden).fit(X, y)
    assert model.score(X, y) > 0.6
    assert model.prior_precision_.shape == (7, 2 * len(hidden) + 2)
    per_feature = model.prior_precision_[:6]  # the seventh term is a table with one tensor
    assert np.isnan(model.prior_precision_[6, 1:]).all()
    tied = np.ptp(per_feature, axis=1).max() < 1e-12
    assert tied is np.bool_(prior == "feature")
    steps, evidence = model.evidence_path_.T
    assert steps.tolist() == list(range(40, 121, 20))
    assert model.log_marginal_likelihood_ == evidence.max()
    assert model.n_iter_ == 120


def test_auto_structure_follows_the_size_of_the_networks(cars):
    X, y = cars
    few = {"max_iter": 2, "burn_in": 1}
    assert regressor(hidden_layer_sizes=(64,), **few).fit(X, y).structure_ == "full"
    assert regressor(hidden_layer_sizes=(64, 64), **few).fit(X, y).structure_ == "kron"
    assert regressor(hidden_layer_sizes=(90,), **few).fit(X, y).structure_ == "full"
    paired = regressor(hidden_layer_sizes=(90,), n_interactions=1, **few).fit(X, y)
    assert paired.structure_ == "kron"
    assert regressor(structure="diag", **few).fit(X, y).structure_ == "diag"


# ------------------------------------------------------------------------------- categories


def category_frame(n_rows=200):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": rng.normal(size=n_rows),
            "colour": rng.choice(["red", "green", "blue"], size=n_rows),
            "grade": pd.Categorical(
                rng.choice(["low", "high"], size=n_rows), categories=["low", "mid", "high"]
            ),
        }
    )
    effect = frame.colour.map({"red": 1.0, "green": -1.0, "blue": 0.0})
    y = frame["size"] + effect + 0.1 * rng.normal(size=n_rows)
    return frame, y


def test_category_levels_get_their_means():
    frame, y = category_frame()
    model = regressor(max_iter=400).fit(frame, y)
    colour = model.partial_dependence("colour")
    effects = dict(zip(colour.grid_values[0], colour.mean, strict=True))
    assert effects["red"] - effects["green"] == pytest.approx(2.0, abs=0.1)
    assert list(model.partial_dependence("grade").grid_values[0]) == ["low", "high"]
    assert model.term_names_ == ["size", "colour", "grade"]


def test_categories_by_mask_name_and_dtype_agree():
    frame, y = category_frame()
    by_dtype = regressor().fit(frame, y).predict(frame)
    codes = frame.assign(
        colour=frame.colour.map({"blue": 3, "green": 5, "red": 9}),
        grade=frame.grade.astype(str).map({"low": 0, "high": 1}).astype(int),
    )
    for spec, table in [
        (["colour", "grade"], codes),
        ([1, 2], codes),
        ([False, True, True], codes),
        ([1, 2], codes.to_numpy()),
        ([1, 2], frame.to_numpy(dtype=object)),
    ]:
        model = regressor(categorical_features=spec).fit(table, y)
        np.testing.assert_allclose(model.predict(table), by_dtype, rtol=1e-6, atol=1e-6)


def test_unseen_level_gets_the_average_effect_with_prior_variance():
    frame, y = category_frame()
    model = regressor(max_iter=300).fit(frame, y)
    odd = frame.head(3).assign(colour="purple")
    with pytest.warns(UserWarning, match="Column 'colour' has 3 rows with a level"):
        mean, std = model.feature_functions(odd)
    np.testing.assert_allclose(mean[:, 1], 0.0, atol=1e-12)
    _, seen = model.feature_functions(frame)
    precision = model.prior_precision_[1, 0]
    np.testing.assert_allclose(std[:, 1], y.std(ddof=0) / math.sqrt(precision), rtol=1e-6)
    assert std[0, 1] > 3 * seen[:, 1].max()


def test_pairs_with_categories():
    rng = np.random.default_rng(0)
    frame, _ = category_frame(400)
    y = np.where(frame.colour == "red", 2.0, -1.0) * frame["size"] + 0.1 * rng.normal(size=400)
    plain = regressor(max_iter=300).fit(frame, y)
    paired = regressor(max_iter=300, interactions=[("size", "colour")]).fit(frame, y)
    assert paired.pairs_ == [(0, 1)]
    assert paired.term_names_[-1] == "size x colour"
    assert paired.score(frame, y) > plain.score(frame, y) + 0.2
    surface = paired.partial_dependence(("size", "colour"), grid_resolution=7)
    assert surface.mean.shape == surface.std.shape == (7, 3)
    swapped = paired.partial_dependence(("colour", "size"), grid_resolution=7)
    np.testing.assert_allclose(swapped.mean, surface.mean.T)


# --------------------------------------------------------------------------------- pairs


def test_second_stage_finds_and_uses_the_planted_pairs():
    case = interacting(seed=0)
    test = interacting(seed=100)
    plain = regressor(max_iter=300).fit(case.X, case.y)
    paired = regressor(max_iter=300, n_interactions=2).fit(case.X, case.y)
    assert sorted(paired.pairs_) == case.pairs
    assert paired.n_iter_ == 600
    assert paired.log_likelihood(test.X, test.y) > plain.log_likelihood(test.X, test.y) + 0.5
    assert paired.log_marginal_likelihood_ > plain.log_marginal_likelihood_ + 100


# ------------------------------------------------------------------- edges and bad input


def test_constant_column_has_no_effect():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=80), np.full(80, 3.0)])
    model = regressor().fit(X, X[:, 0])
    assert model.effect_size_[1] == pytest.approx(0.0, abs=1e-12)


def test_more_columns_than_rows():
    X = np.random.default_rng(0).normal(size=(10, 30))
    assert np.isfinite(regressor().fit(X, X[:, 0]).predict(X, return_std=True)).all()


def test_one_row_and_constant_target():
    model = regressor().fit([[1.0, 2.0]], [5.0])
    assert model.predict([[1.0, 2.0]])[0] == pytest.approx(5.0, abs=0.2)
    flat = regressor().fit(np.arange(10.0)[:, None], np.full(10, 7.0))
    assert flat.predict([[3.0]])[0] == pytest.approx(7.0, abs=0.05)


def test_huge_offsets_are_harmless():
    rng = np.random.default_rng(0)
    X = 1e9 + rng.normal(size=(100, 1))
    y = 1e9 + (X[:, 0] - 1e9)
    assert regressor().fit(X, y).score(X, y) > 0.9


FRAME, TARGET = category_frame()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"structure": "block"}, "The 'structure' parameter"),
        ({"prior": "global"}, "The 'prior' parameter"),
        ({"activation": "swish"}, "The 'activation' parameter"),
        ({"max_iter": 0}, "The 'max_iter' parameter"),
        ({"learning_rate": -1.0}, "The 'learning_rate' parameter"),
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes must be positive"),
        ({"n_interactions": 4}, "asks for more pairs than the 3 that 3 columns have"),
        ({"n_interactions": 1, "interactions": [(0, 1)]}, "either n_interactions or interactions"),
        ({"interactions": [(1, 1)]}, "pairs of different columns"),
        ({"interactions": [(0, 1), (1, 0)]}, "each named once"),
        ({"interactions": [(0, 3)]}, "Column 3 is out of range"),
        ({"interactions": [(0, 1, 2)]}, "must be a pair"),
        ({"interactions": [("size", "weight")]}, "There is no column 'weight'"),
        ({"interactions": [(0, 1.5)]}, "by name or number"),
        ({"categorical_features": ["price"]}, "There is no column 'price'"),
        ({"categorical_features": [True]}, "must have 3 entries"),
        ({"categorical_features": None}, "could not convert string"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        regressor(**settings).fit(FRAME, TARGET)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_missing_and_infinite_values(bad):
    X, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
    broken = X.copy()
    broken[3, 1] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        regressor().fit(broken, y)
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        regressor().fit(X, y).predict(broken)
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        regressor().fit(X, np.where(y == 3, bad, y))
    with pytest.raises(ValueError, match="finite"):
        regressor().fit(X, y).log_likelihood(X, np.where(y == 3, bad, y))


def test_missing_category():
    with pytest.raises(ValueError, match="NaN"):
        regressor().fit(FRAME.assign(colour=FRAME.colour.where(FRAME.index > 0)), TARGET)


def test_bad_targets_and_weights():
    X = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ValueError, match="at least 2 classes"):
        classifier().fit(X, np.zeros(20))
    with pytest.raises(ValueError, match="Only binary classification is supported"):
        classifier().fit(X, np.arange(20) % 3)
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        regressor().fit(X, X[:, 0], sample_weight=-np.ones(20))
    model = classifier().fit(X, X[:, 0] > 0)
    with pytest.raises(ValueError, match="labels out of"):
        model.log_likelihood(X, np.full(20, "yes"))
    with pytest.raises(ValueError, match="There is no term"):
        model.partial_dependence((0, 1))


def test_columns_in_another_order_are_refused():
    model = regressor().fit(FRAME, TARGET)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(FRAME[["colour", "size", "grade"]])
