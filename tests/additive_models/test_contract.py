"""The scikit-learn contract, whole, and life inside scikit-learn's tools."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from icml24.additive_models import LaplaceNAMClassifier, LaplaceNAMRegressor

# narrow and short: the contract does not depend on how well the curves fit
SMALL = {"hidden_layer_sizes": (16,), "max_iter": 60, "burn_in": 20, "hyper_every": 20}


@parametrize_with_checks([LaplaceNAMRegressor(**SMALL), LaplaceNAMClassifier(**SMALL)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_pipeline_grid_search_and_pandas_output():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "c"])
    y = frame.a - frame.b + 0.1 * rng.normal(size=60)
    pipeline = make_pipeline(StandardScaler(), LaplaceNAMRegressor(**SMALL, random_state=0))
    pipeline.set_output(transform="pandas")
    grid = {"laplacenamregressor__structure": ["kron", "full"]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(frame, y)
    assert search.best_score_ > 0.8
    fitted = search.best_estimator_[-1]
    assert fitted.feature_names_in_.tolist() == fitted.term_names_ == ["a", "b", "c"]


def test_column_transformer_upstream():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "kind": rng.choice(["u", "v"], size=60)})
    y = frame.a + (frame.kind == "u")
    encode = ColumnTransformer(
        [("hot", OneHotEncoder(sparse_output=False), ["kind"])], remainder="passthrough"
    )
    model = make_pipeline(encode, LaplaceNAMRegressor(**SMALL, random_state=0)).fit(frame, y)
    assert model.score(frame, y) > 0.8


def test_more_than_two_classes_through_one_versus_rest():
    X, y = make_classification(
        n_samples=150, n_classes=3, n_informative=4, n_redundant=0, random_state=0
    )
    model = OneVsRestClassifier(LaplaceNAMClassifier(**SMALL, random_state=0)).fit(X, y)
    assert model.predict_proba(X).shape == (150, 3)
    assert model.score(X, y) > 0.6


def test_weights_travel_through_cross_validation():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0].copy()
    y[:6] += 50  # six wild rows, which the weights switch off
    weight = np.r_[np.zeros(6), np.ones(54)]
    model = LaplaceNAMRegressor(**{**SMALL, "max_iter": 300}, random_state=0)
    scores = cross_val_score(model, X, y, params={"sample_weight": weight}, cv=3)
    assert scores[1:].min() > 0.8


@pytest.mark.parametrize("kind", [LaplaceNAMRegressor, LaplaceNAMClassifier])
def test_pickle_with_pairs_and_categories(kind):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "kind": rng.choice(["u", "v"], size=60)})
    y = (frame.a > 0).astype(int)
    model = kind(**SMALL, interactions=[("a", "kind")], random_state=0).fit(frame, y)
    copy = pickle.loads(pickle.dumps(model))
    for ours, theirs in zip(
        copy.feature_functions(frame), model.feature_functions(frame), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert len(pickle.dumps(model)) < 1_000_000  # no training data inside
