"""The evidence against closed forms, autograd and inequalities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from icml24.additive_models.curvature import STRUCTURES, FullCurvature
from icml24.additive_models.evidence import (
    Bernoulli,
    Block,
    DataFit,
    EvidenceClimber,
    Gaussian,
    block_evidence,
    evidence_gradient,
    mackay_step,
)
from icml24.additive_models.stacked_mlp import StackedMLP

from .dense import dense_precision


def norms_of(stack):
    return torch.stack([t.detach().flatten(1).square().sum(1) for t in stack.tensors], dim=1)


def dense_evidence(structure, case, likelihood, log_prior, log_sigma):
    """Evidence through dense matrices only, differentiable in prior and noise."""
    f = case.stack(case.x).sum(1).detach()
    target = case.y if likelihood.learns_noise else (case.y > 0.5).double()
    ones = torch.ones_like(f)
    gamma = likelihood.curvature(f)
    if likelihood.learns_noise:
        scale = torch.exp(-2 * log_sigma)
        rows = len(f)
        value = -rows * (0.5 * math.log(2 * math.pi) + log_sigma)
        value = value - 0.5 * scale * (target - f).square().sum()
    else:
        scale = torch.ones((), dtype=torch.float64)
        value = torch.tensor(likelihood.data_fit(f, target, ones).fixed, dtype=torch.float64)
    sizes = torch.tensor(case.stack.group_sizes)
    zero_prior = torch.zeros_like(log_prior)
    hessian = dense_precision(structure, case.stack, case.x, gamma, zero_prior, 1.0)
    for k in range(case.stack.n_networks):
        diagonal = log_prior[k].exp().repeat_interleave(sizes)
        precision = scale * hessian[k] + torch.diag(diagonal)
        factor = torch.linalg.cholesky(precision)
        theta = case.stack.flat()[k]
        value = value + 0.5 * (diagonal.log().sum() - (diagonal * theta.square()).sum())
        value = value - factor.diagonal().log().sum()
    return value, DataFit(
        float(len(f)),
        float((target - f).square().sum()) if likelihood.learns_noise else 0.0,
        None if likelihood.learns_noise else likelihood.data_fit(f, target, ones).fixed,
    )


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("kind", [Gaussian, Bernoulli])
def test_gradient_equals_autograd_through_cholesky(wave_case, structure, kind):
    case = wave_case(3)
    generator = torch.Generator().manual_seed(1)
    log_prior = torch.randn((3, 4), generator=generator, dtype=torch.float64).requires_grad_()
    log_sigma = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    likelihood = kind(-0.3)
    value, fit = dense_evidence(structure, case, likelihood, log_prior, log_sigma)
    by_prior, by_sigma = torch.autograd.grad(value, [log_prior, log_sigma], allow_unused=True)

    f = case.stack(case.x).sum(1).detach()
    curvature = STRUCTURES[structure](case.stack, case.x, likelihood.curvature(f))
    prior, sizes = log_prior.detach().exp(), torch.tensor(case.stack.group_sizes)
    determinant = curvature.log_determinant(prior, likelihood.scale)
    share = block_evidence(prior, norms_of(case.stack), sizes, determinant)
    ours = fit.log_likelihood(-0.3) + float(share.sum())
    assert ours == pytest.approx(float(value.detach()), rel=1e-10)

    traces = curvature.traces(prior, likelihood.scale)
    gradient, determined = evidence_gradient(prior, norms_of(case.stack), sizes, traces)
    torch.testing.assert_close(gradient, by_prior, rtol=1e-6, atol=1e-8)
    if likelihood.learns_noise:
        slope = -fit.rows + fit.sse * likelihood.scale + float(determined.sum())
        assert slope == pytest.approx(float(by_sigma), rel=1e-6)


def linear_case(X, y, sigma, prior):
    """Bayesian linear regression as networks without a hidden layer, at the joint mode."""
    n, d = X.shape
    precision = X.T @ X / sigma**2 + prior * np.eye(d)
    mode = np.linalg.solve(precision, X.T @ y / sigma**2)
    stack = StackedMLP(d, 1, hidden=(), bias=False)
    with torch.no_grad():
        stack.weights[0].copy_(torch.from_numpy(mode)[:, None, None])
    x = torch.from_numpy(X).unsqueeze(2)
    ones = torch.ones(n, dtype=torch.float64)
    curvature = FullCurvature(stack, x, ones)
    priors = torch.full((d, 1), prior, dtype=torch.float64)
    fit = Gaussian(math.log(sigma)).data_fit(stack(x).sum(1).detach(), torch.from_numpy(y), ones)
    determinant = curvature.log_determinant(priors, sigma**-2)
    share = block_evidence(priors, norms_of(stack), torch.tensor([1]), determinant)
    block = fit.log_likelihood(math.log(sigma)) + float(share.sum())
    exact = multivariate_normal(np.zeros(n), sigma**2 * np.eye(n) + X @ X.T / prior).logpdf(y)
    return block, exact


def test_one_linear_feature_gives_the_exact_evidence():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 1)), 0.3 * rng.normal(size=12)
    block, exact = linear_case(X, y, sigma=0.3, prior=2.0)
    assert block == pytest.approx(exact, rel=1e-10)


def test_orthogonal_features_give_the_exact_evidence():
    rng = np.random.default_rng(0)
    X = 3 * np.linalg.qr(rng.normal(size=(20, 4)))[0]
    block, exact = linear_case(X, rng.normal(size=20), sigma=0.5, prior=1.0)
    assert block == pytest.approx(exact, rel=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    correlation=st.floats(-0.99, 0.99),
    sigma=st.floats(0.05, 3.0),
    prior=st.floats(0.01, 100.0),
)
def test_block_evidence_is_a_lower_bound(seed, correlation, sigma, prior):
    """Fischer: log |P| <= sum of log |P_d|, so the block evidence never exceeds the exact one."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(15, 3))
    X[:, 1] = correlation * X[:, 0] + math.sqrt(1 - correlation**2) * X[:, 1]
    block, exact = linear_case(X, rng.normal(size=15), sigma, prior)
    assert block <= exact + 1e-8 * abs(exact)


def test_strong_correlation_opens_the_gap():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 1)) + 0.1 * rng.normal(size=(50, 3))
    block, exact = linear_case(X, X.sum(1) + rng.normal(size=50), sigma=1.0, prior=1.0)
    assert exact - block > 1.0


def climbing_block(case, tied=False):
    log_prior = torch.zeros((3, 1 if tied else 4), dtype=torch.float64)
    block = Block(case.stack, [(0,), (1,), (2,)], log_prior)
    block.recenter()
    ones = torch.ones(len(case.x), dtype=torch.float64)
    block.expand(case.x, ones, ones, "full")
    f = case.stack(case.x).sum(1).detach()
    return block, Gaussian().data_fit(f, case.y, ones)


@pytest.mark.parametrize("tied", [False, True])
def test_climbing_reaches_a_stationary_point(wave_case, tied):
    block, fit = climbing_block(wave_case(3), tied)
    likelihood = Gaussian()
    climber = EvidenceClimber([block], likelihood, 0.05)
    start = climber.value(fit)
    end = climber.climb(fit, 600)
    assert end > start
    sizes = torch.tensor(block.stack.group_sizes)
    traces = block.curvature.traces(block.prior, likelihood.scale)
    gradient, determined = evidence_gradient(block.prior, block.squared_norms(), sizes, traces)
    gradient = gradient.sum(1) if tied else gradient
    assert gradient.abs().max() < 1e-3
    assert -fit.rows + fit.sse * likelihood.scale + float(determined.sum()) == pytest.approx(
        0, abs=1e-3
    )


def test_mackay_reaches_the_same_prior_as_adam(wave_case):
    block, fit = climbing_block(wave_case(3))
    likelihood = Gaussian()
    EvidenceClimber([block], likelihood, 0.05).climb(fit, 600)
    prior = torch.ones((3, 4), dtype=torch.float64)
    sizes, norms = torch.tensor(block.stack.group_sizes), block.squared_norms()
    for _ in range(3000):  # slow: few parameters of a group are determined by the data
        prior = mackay_step(prior, norms, sizes, block.curvature.traces(prior, likelihood.scale))
    torch.testing.assert_close(prior, block.prior, rtol=1e-3, atol=0.0)
