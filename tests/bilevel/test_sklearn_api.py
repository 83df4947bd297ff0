import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from icml24.bilevel import BilevelLogisticRegression, HyperCleaner
from icml24.bilevel.data import load_digits


@parametrize_with_checks([BilevelLogisticRegression(max_passes=5)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def sparse_truth(n=900, d=12, seed=0):
    rng = np.random.default_rng(seed)
    X = 3 * rng.standard_normal((n, d)) + 1
    y = np.where(X[:, 0] - X[:, 1] + rng.logistic(size=n) > 0, "yes", "no")
    return X, y


def test_useless_features_get_the_large_penalties_and_the_model_improves():
    X, y = sparse_truth()
    model = BilevelLogisticRegression().fit(X[:200], y[:200], X[200:400], y[200:400])
    assert set(np.argsort(model.penalties_)[:2]) == {0, 1}
    assert list(model.classes_) == ["no", "yes"]
    plain = LogisticRegression(C=np.inf, max_iter=1000).fit(X[:200], y[:200])
    loss = [
        -np.log(m.predict_proba(X[400:])[np.arange(500), (y[400:] == "yes").astype(int)]).mean()
        for m in (model, plain)
    ]
    assert loss[0] < loss[1]


def test_long_runs_end_at_the_largest_penalty_that_the_step_can_follow():
    X, y = sparse_truth(600)
    model = BilevelLogisticRegression(max_passes=1000).fit(X, y)
    assert model.score(X, y) > 0.8
    highest = (1 / model.lr_inner) / model._unit**2 + model.floor
    assert model.penalties_.max() == pytest.approx(highest, rel=1e-9)
    with pytest.raises(ValueError, match="lr_inner must be positive"):
        BilevelLogisticRegression(lr_inner=0.0).fit(X, y)


def test_model_is_the_inner_solution_for_the_learnt_penalties():
    X, y = sparse_truth()
    model = BilevelLogisticRegression(max_passes=20).fit(X[:200], y[:200], X[200:], y[200:])
    scaled = (X[:200] - X[:200].mean(0)) / X[:200].std(0)
    w = model.coef_[0] * X[:200].std(0)
    s = np.where(y[:200] == "yes", 1.0, -1.0)
    wrong = 1 / (1 + np.exp(s * model.decision_function(X[:200])))
    gradient = -(s * wrong) @ scaled / 200 + model.penalties_ * w
    assert abs(gradient).max() < 1e-10


def test_pipeline_clone_and_own_split():
    X, y = sparse_truth()
    pipeline = make_pipeline(StandardScaler(), BilevelLogisticRegression(max_passes=20))
    first, second = clone(pipeline).fit(X, y), clone(pipeline).fit(X, y)
    np.testing.assert_array_equal(first[-1].coef_, second[-1].coef_)
    assert first.score(X, y) > 0.8


def test_cleaner_finds_wrong_labels_on_real_digits():
    data = load_digits(seed=0)
    X, X_val, X_test = (part[:, :-1] for part in (data.X, data.X_val, data.X_test))
    names = np.array([f"digit {k}" for k in range(10)])
    model = HyperCleaner(max_passes=60).fit(X, names[data.y], X_val, names[data.y_val])
    assert roc_auc_score(data.corrupted, -model.sample_weight_) > 0.9
    noisy = LogisticRegression(C=0.1, max_iter=500).fit(X, names[data.y])
    assert model.score(X_test, names[data.y_test]) > noisy.score(X_test, names[data.y_test])
    np.testing.assert_allclose(model.predict_proba(X_test).sum(1), 1)


def test_bad_validation_data_are_named():
    X, y = sparse_truth(60, 3)
    with pytest.raises(ValueError, match="both X_val and y_val"):
        BilevelLogisticRegression().fit(X, y, X)
    with pytest.raises(ValueError, match="3 columns"):
        BilevelLogisticRegression().fit(X, y, X[:, :2], y)
    with pytest.raises(ValueError, match="Only binary"):
        BilevelLogisticRegression().fit(X, np.arange(60) % 3, X, np.arange(60) % 3)
