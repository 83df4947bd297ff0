"""The pair scores: hand-computed cases, invariances, and what each of them sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from icml24.additive_models import LaplaceNAMRegressor, rank_interactions
from icml24.additive_models.data import interacting
from icml24.additive_models.interactions import (
    METHODS,
    evidence_gain,
    marglik_slack,
    mutual_information,
    pair_scores,
    top_pairs,
    weight_precision,
)


def test_mutual_information_of_the_hand_case():
    """H = [[2, 1], [1, 2]] has posterior correlation -1/2, so MI = log(4/3)/2 (not negative)."""
    precision = np.array([[2.0, 1.0], [1.0, 2.0]])
    assert mutual_information(precision)[0, 1] == pytest.approx(0.5 * np.log(4 / 3))
    assert marglik_slack(precision)[0, 1] == pytest.approx(0.5 * np.log(4 / 3))
    three = np.array([[2.0, 1.0, 0.5], [1.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
    covariance = np.linalg.inv(three)
    rho = covariance[0, 2] / np.sqrt(covariance[0, 0] * covariance[2, 2])
    assert mutual_information(three)[0, 2] == pytest.approx(-0.5 * np.log(1 - rho**2))
    assert marglik_slack(three)[0, 2] == pytest.approx(-0.5 * np.log(1 - 0.25 / 2))


def test_slack_is_the_gap_of_fischers_inequality():
    matrix = np.array([[3.0, 1.2], [1.2, 2.0]])
    gap = 0.5 * (np.log(3.0) + np.log(2.0) - np.linalg.slogdet(matrix)[1])
    assert marglik_slack(matrix)[0, 1] == pytest.approx(gap)


def test_weight_precision_centres_the_curves():
    rng = np.random.default_rng(0)
    curves, gamma = rng.normal(size=(40, 3)), rng.uniform(0.5, 2.0, size=40)
    shifted = curves + np.array([100.0, -5.0, 0.0])
    np.testing.assert_allclose(weight_precision(shifted, gamma), weight_precision(curves, gamma))
    centred = curves - (gamma @ curves) / gamma.sum()
    expected = sum(g * np.outer(f, f) for g, f in zip(gamma, centred, strict=True)) + np.eye(3)
    np.testing.assert_allclose(weight_precision(curves, gamma), expected)


def test_evidence_gain_equals_gaussian_densities():
    """The gain is log N(r; 0, s I + Phi Phi'/alpha) - log N(r; 0, s I) at the best alpha."""
    rng = np.random.default_rng(0)
    columns, noise = rng.normal(size=(25, 3)), 0.7
    residual = noise * rng.normal(size=25) + columns[:, 0] * columns[:, 1]
    gamma = np.full(25, noise**-2)
    found = evidence_gain(columns, gamma * residual, gamma)
    ranks = (columns.argsort(0).argsort(0) + 0.5) / 25
    waves = np.sqrt(2) * np.cos(np.pi * ranks[:, :, None] * np.arange(1, 5))
    null = multivariate_normal(np.zeros(25), noise**2 * np.eye(25)).logpdf(residual)
    for i, j in [(0, 1), (0, 2), (1, 2)]:
        phi = np.einsum("na,nb->nab", waves[:, i], waves[:, j]).reshape(25, 16)
        gains = [
            multivariate_normal(np.zeros(25), noise**2 * np.eye(25) + phi @ phi.T / alpha).logpdf(
                residual
            )
            - null
            for alpha in np.logspace(-2, 8, 41)
        ]
        assert found[i, j] == pytest.approx(max(max(gains), 0.0), rel=1e-8, abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), method=st.sampled_from([m for m in METHODS if m != "random"]))
def test_scores_follow_a_permutation_of_the_columns(seed, method):
    rng = np.random.default_rng(seed)
    columns, curves = rng.normal(size=(2, 30, 5))
    gradient, gamma = rng.normal(size=30), rng.uniform(0.1, 1.0, size=30)
    order = rng.permutation(5)
    scores = pair_scores(method, columns, curves, gradient, gamma)
    permuted = pair_scores(method, columns[:, order], curves[:, order], gradient, gamma)
    np.testing.assert_allclose(permuted, scores[np.ix_(order, order)], atol=1e-9)
    np.testing.assert_allclose(scores, scores.T)
    assert (np.diag(scores) == 0).all()
    assert (scores >= 0).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_evidence_gain_sees_only_the_order_of_a_column(seed):
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(30, 3))
    gradient, gamma = rng.normal(size=30), np.ones(30)
    warped = np.stack([np.exp(columns[:, 0]), columns[:, 1] ** 3, -1 / (1e3 + columns[:, 2])], 1)
    a, b = evidence_gain(columns, gradient, gamma), evidence_gain(warped, gradient, gamma)
    np.testing.assert_allclose(a, b, atol=1e-9)


def test_random_scores_are_reproducible():
    empty = np.zeros((3, 4))
    a = pair_scores("random", empty, empty, empty[:, 0], empty[:, 0], 5)
    np.testing.assert_array_equal(a, pair_scores("random", empty, empty, empty[:, 0], 1.0, 5))
    np.testing.assert_array_equal(a, a.T)
    assert len(np.unique(a[np.triu_indices(4, 1)])) == 6


def test_top_pairs():
    scores = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]])
    assert top_pairs(scores, 2) == [(0, 2), (1, 2)]


@pytest.fixture(scope="module")
def planted():
    case = interacting(n_rows=600, correlation=0.9, seed=1)
    return case, LaplaceNAMRegressor(max_iter=400, random_state=0).fit(case.X, case.y)


def test_evidence_finds_the_planted_pairs(planted):
    case, model = planted
    table = rank_interactions(model, case.X, case.y, n_pairs=2)
    assert {tuple(pair) for pair in table[["i", "j"]].to_numpy().tolist()} == set(case.pairs)
    assert table["score"].is_monotonic_decreasing


@pytest.mark.parametrize("method", ["mutual_info", "marglik_slack"])
def test_the_papers_scores_find_the_correlated_pair_instead(planted, method):
    case, model = planted
    first = rank_interactions(model, case.X, case.y, method, n_pairs=1).iloc[0]
    assert (first.i, first.j) == (1, 2)


def test_the_papers_scores_do_not_see_the_residual(planted):
    case, model = planted
    other = case.y + 5 * case.X[:, 6] * case.X[:, 7]
    for method, same in [("mutual_info", True), ("marglik_slack", True), ("evidence", False)]:
        a = model.interaction_scores(case.X, case.y, method)
        b = model.interaction_scores(case.X, other, method)
        assert np.allclose(a, b) is same


def test_unknown_method(planted):
    case, model = planted
    with pytest.raises(ValueError, match="method must be one of evidence"):
        model.interaction_scores(case.X, case.y, "fast")
