"""The training loop in its limits, where the answer is known."""

import math

import numpy as np
import pytest
import torch

from icml24.additive_models.evidence import Bernoulli, Block, EvidenceClimber, Gaussian
from icml24.additive_models.stacked_mlp import StackedMLP
from icml24.additive_models.training import AdditiveModel, Schedule, draw_knots, train

FLOAT = torch.float64


def linear_data(n_rows=60, n_columns=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_rows, n_columns))
    X -= X.mean(axis=0)
    y = X @ np.arange(1.0, n_columns + 1) + 0.5 * rng.normal(size=n_rows)
    return X, y - y.mean()


def fit(X, y, log_prior, hidden=(), likelihood=None, steps=1500, **schedule):
    generator = torch.Generator().manual_seed(0)
    stack = StackedMLP(X.shape[1], 1, hidden, bias=bool(hidden), generator=generator)
    groups = len(stack.group_sizes)
    block = Block(
        stack,
        [(j,) for j in range(X.shape[1])],
        torch.full((X.shape[1], groups), log_prior, dtype=FLOAT),
    )
    model = AdditiveModel([block], likelihood or Gaussian(), 0.0, "full")
    x = torch.from_numpy(X).unsqueeze(2)
    weight = torch.ones(len(X), dtype=FLOAT)
    settings = Schedule(**{"max_iter": steps, "learning_rate": 0.05, "hyper_steps": 0, **schedule})
    path = train(model, [x], torch.from_numpy(y), weight, settings, FLOAT, generator)
    return model, [x], path


def test_vanishing_prior_gives_least_squares():
    X, y = linear_data()
    model, _, _ = fit(X, y, log_prior=-12.0)
    expected = np.linalg.lstsq(X, y, rcond=None)[0]
    np.testing.assert_allclose(model.blocks[0].center.flat()[:, 0].numpy(), expected, atol=1e-3)


def test_finite_prior_gives_ridge():
    X, y = linear_data()
    model, _, _ = fit(X, y, log_prior=2.5, likelihood=Gaussian(math.log(0.7)))
    ridge = 0.7**2 * math.exp(2.5)
    expected = np.linalg.solve(X.T @ X + ridge * np.eye(3), X.T @ y)
    np.testing.assert_allclose(model.blocks[0].center.flat()[:, 0].numpy(), expected, atol=1e-3)


def test_infinite_prior_switches_everything_off():
    X, y = linear_data()
    model, inputs, _ = fit(X, y, log_prior=16.0, hidden=(8,))
    assert model.means(inputs).abs().max() < 1e-2
    assert model.variances(inputs).max() < 1e-4


def test_linear_networks_recover_the_posterior_of_bayesian_regression():
    X, y = linear_data(n_columns=1)
    model, inputs, _ = fit(X, y, log_prior=0.0, likelihood=Gaussian(math.log(0.5)))
    precision = (X**2).sum() / 0.25 + 1.0
    expected = torch.from_numpy(X**2 / precision)
    torch.testing.assert_close(model.variances(inputs), expected)


def test_linear_networks_recover_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    X, y = linear_data(n_rows=200)
    labels = (y + np.random.default_rng(1).logistic(size=200) > 0).astype(float)
    model, _, _ = fit(X, labels, log_prior=0.0, likelihood=Bernoulli())
    expected = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-8).fit(X, labels).coef_[0]
    np.testing.assert_allclose(model.blocks[0].center.flat()[:, 0].numpy(), expected, atol=1e-3)


def test_mini_batches_reach_the_same_place():
    X, y = linear_data(n_rows=300)
    model, _, _ = fit(X, y, log_prior=0.0, batch_size=64)
    full, _, _ = fit(X, y, log_prior=0.0)
    torch.testing.assert_close(
        model.blocks[0].center.flat(), full.blocks[0].center.flat(), atol=0.02, rtol=0
    )


def test_evidence_learns_the_noise_and_ends_at_its_best():
    X, y = linear_data(n_rows=400)
    model, _, path = fit(
        X, y, log_prior=0.0, hidden=(8,), hyper_steps=10, burn_in=50, hyper_every=25
    )
    assert math.exp(model.likelihood.log_sigma) == pytest.approx(0.5, rel=0.1)
    assert [step for step, _ in path] == list(range(50, 1501, 25))
    values = [value for _, value in path]
    assert max(values) > values[0] + 10


def test_restored_copy_is_the_one_with_the_best_evidence():
    """A step size that wrecks the fit makes an early copy the best one."""
    X, y = linear_data()
    settings = {"learning_rate": 3.0, "burn_in": 1, "hyper_every": 10, "steps": 60}
    model, inputs, path = fit(X, y, log_prior=0.0, hidden=(8,), **settings)
    values = [value for _, value in path]
    assert max(values) > values[-1] + 10
    f = model.means(inputs).sum(1)
    data_fit = model.likelihood.data_fit(f, torch.from_numpy(y), torch.ones(len(y)).double())
    value = EvidenceClimber(model.blocks, model.likelihood, 0.1).value(data_fit)
    assert value == pytest.approx(max(values), rel=1e-10)


def test_knots_depend_on_the_weighted_sample_only():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 5, size=(20, 3, 2)).astype(float))
    weight = torch.from_numpy(rng.integers(1, 4, size=20).astype(float))

    def draw(x, weight):
        return draw_knots(x, weight, 50, torch.Generator().manual_seed(3))

    shuffle = torch.from_numpy(rng.permutation(20))
    repeated = x.repeat_interleave(weight.long(), dim=0)
    expected = draw(x, weight)
    torch.testing.assert_close(draw(x[shuffle], weight[shuffle]), expected)
    torch.testing.assert_close(draw(repeated, torch.ones(len(repeated)).double()), expected)
    rows = {tuple(row) for row in x[:, 1].tolist()}
    assert {tuple(row) for row in expected[1].tolist()} <= rows


def test_knots_are_drawn_in_proportion_to_the_weights():
    x = torch.tensor([0.0, 1.0]).double().reshape(2, 1, 1)
    weight = torch.tensor([1.0, 9.0]).double()
    share = draw_knots(x, weight, 4000, torch.Generator().manual_seed(0)).mean()
    assert float(share) == pytest.approx(0.9, abs=0.02)
