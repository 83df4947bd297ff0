"""Exact problems: closed forms against brute force."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from icml24.bayesian_flow import (
    BFNSampler,
    ContinuousBFNSchedule,
    GaussianMixture,
    MarkovChain,
    gaussian_moments,
)

D = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_mixture_posterior_by_numerical_integration():
    mixture = GaussianMixture(
        torch.tensor([[-0.4], [0.5]], dtype=D), 0.15, weights=torch.tensor([1.0, 3.0])
    )
    schedule = ContinuousBFNSchedule(0.1)
    x = torch.linspace(-3, 3, 20_001, dtype=D)
    gamma = float(schedule.gamma(0.7))
    prior = 0.25 * torch.exp(-((x + 0.4) ** 2) / 0.045) + 0.75 * torch.exp(
        -((x - 0.5) ** 2) / 0.045
    )
    for mu in (-0.3, 0.0, 0.2):
        weight = prior * torch.exp(-((mu - gamma * x) ** 2) / (2 * gamma * (1 - gamma)))
        expected = float((weight * x).sum() / weight.sum())
        got = float(mixture.posterior_mean(torch.tensor([[mu]], dtype=D), 0.7, schedule))
        assert math.isclose(got, expected, abs_tol=1e-9)


def test_mixture_posterior_at_the_ends():
    ring = GaussianMixture.ring(5, 0.6, 0.02)
    schedule = ContinuousBFNSchedule(1e-3)
    x = ring.sample(20, seeded())
    prior = ring.posterior_mean(0 * x, 1.0, schedule)
    assert torch.allclose(prior, torch.zeros_like(x), atol=1e-12)  # the mean of the ring
    mu = float(schedule.gamma(0.0)) * x
    assert torch.allclose(ring.posterior_mean(mu, 0.0, schedule), x, atol=0.01)


def test_mixture_takes_one_time_per_example():
    ring = GaussianMixture.ring(5, 0.6, 0.1)
    schedule, t = ContinuousBFNSchedule(0.01), torch.tensor([0.2, 0.8], dtype=D)
    mu = 0.1 * torch.randn(2, 2, generator=seeded(), dtype=D)
    both = ring.posterior_mean(mu, t, schedule)
    for i in (0, 1):
        alone = ring.posterior_mean(mu[i : i + 1], float(t[i]), schedule)
        assert torch.allclose(both[i : i + 1], alone, atol=1e-14)


def test_mixture_samples():
    mixture = GaussianMixture(
        torch.tensor([[-1.0, 0.0], [1.0, 2.0]]), 0.1, torch.tensor([3.0, 1.0])
    )
    x = mixture.sample(100_000, seeded())
    assert torch.allclose(x.mean(0), torch.tensor([-0.5, 0.5], dtype=D), atol=0.01)
    assert math.isclose(float(x[:, 0].var()), 0.75 + 0.01, rel_tol=0.02)


@pytest.mark.parametrize(("classes", "length"), [(2, 1), (3, 4), (4, 3)])
def test_chain_posterior_and_probabilities_by_enumeration(classes, length):
    chain = MarkovChain.random(classes, length, 0.6, seeded(2))
    x = torch.tensor(list(itertools.product(range(classes), repeat=length)))
    probability = chain.log_prob(x).exp()
    assert math.isclose(float(probability.sum()), 1.0, rel_tol=1e-12)
    entropy = float(-(probability * chain.log_prob(x)).sum())
    assert math.isclose(chain.entropy(), entropy, rel_tol=1e-10)
    theta = torch.randn(3, length, classes, generator=seeded(), dtype=D).mul(2).softmax(-1)
    weight = theta[:, torch.arange(length), x].prod(-1) * probability
    brute = torch.einsum("bn,ndk->bdk", weight, F.one_hot(x, classes).to(D))
    brute = brute / brute.sum(-1, keepdim=True)
    assert torch.allclose(chain.posterior(theta), brute, atol=1e-13)


def test_chain_posterior_does_not_depend_on_time_and_stays_finite():
    chain = MarkovChain.random(5, 40, 0.3, seeded(2))
    model = chain.model()
    theta = torch.randn(2, 40, 5, generator=seeded(), dtype=D).mul(30).softmax(-1)
    assert torch.equal(model(theta, torch.zeros(2)), model(theta, torch.ones(2)))
    assert torch.isfinite(model(theta, torch.zeros(2))).all()


def test_chain_samples_follow_the_chain():
    chain = MarkovChain.random(3, 5, 0.8, seeded(4))
    x = chain.sample(60_000, seeded())
    assert math.isclose(float(-chain.log_prob(x).mean()), chain.entropy(), rel_tol=0.01)
    pairs = torch.bincount(3 * x[:, 0] + x[:, 1], minlength=9).double() / 60_000
    assert torch.allclose(pairs, (chain.initial[:, None] * chain.transition).ravel(), atol=0.006)


def test_exact_moments_of_one_step_by_hand():
    # One step with last_step="drop": the result is x_hat at 1 - eta, affine in the start.
    flow = GaussianMixture(torch.tensor([[0.3]]), 0.4).flow(ContinuousBFNSchedule(0.1))
    gamma = float(flow.schedule.gamma(0.99))
    gain = 0.16 / (gamma * 0.16 + 1 - gamma)
    mean, variance = gaussian_moments(BFNSampler(flow, "bfn1", 1), 0.3, 0.4)
    assert math.isclose(mean, 0.3 * (1 - gain * gamma))
    assert math.isclose(variance, gain**2 * gamma * (1 - gamma))


def test_bad_problems_are_named():
    with pytest.raises(ValueError, match="means"):
        GaussianMixture(torch.zeros(3), 0.1)
    with pytest.raises(ValueError, match="std"):
        GaussianMixture(torch.zeros(3, 1), -0.1)
    with pytest.raises(ValueError, match="weights"):
        GaussianMixture(torch.zeros(3, 1), 0.1, torch.ones(2))
    with pytest.raises(ValueError, match="length"):
        MarkovChain(torch.tensor([0.5, 0.5]), torch.eye(2), 0)
    with pytest.raises(ValueError, match="sum to one"):
        MarkovChain(torch.tensor([0.5, 0.4]), torch.eye(2), 3)
    with pytest.raises(ValueError, match="shape"):
        MarkovChain(torch.tensor([0.5, 0.5]), torch.eye(2), 3).log_prob(torch.zeros(2, 4).long())
    flow = GaussianMixture(torch.zeros(1, 1), 0.1).flow(ContinuousBFNSchedule(0.1))
    with pytest.raises(ValueError, match="clipping"):
        gaussian_moments(BFNSampler(flow, clip_sample=1.0), 0.0, 1.0)
