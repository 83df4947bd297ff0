"""Losses and scores: identities with score matching, information-theoretic values, errors."""

import math

import pytest
import torch
from torch.nn import functional as F

from icml24.bayesian_flow import (
    ContinuousBFN,
    ContinuousBFNSchedule,
    DiscreteBFN,
    DiscreteBFNSchedule,
    GaussianMixture,
    MarkovChain,
)

D = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def categorical(p):
    """One symbol with known probabilities: a chain of length one."""
    return MarkovChain(torch.tensor(p, dtype=D), torch.eye(len(p), dtype=D), 1)


def test_continuous_loss_is_score_matching():
    # 1/2 G^2 |s - grad log p(mu|x)|^2 equals the loss at the same belief, to rounding.
    schedule = ContinuousBFNSchedule(0.02)
    flow = ContinuousBFN(lambda mu, s: torch.tanh(3 * mu), schedule, "sample")
    x = 2 * torch.rand(64, 3, generator=seeded(1), dtype=D) - 1
    s = torch.rand(64, generator=seeded(2), dtype=D) * 0.98 + 0.01
    loss = flow.loss(x, s=s, generator=seeded(3), reduction="none")
    mu = flow.belief(x, s, seeded(3))
    alpha, sigma = schedule.alpha_sigma(1 - s)
    conditional = -(mu - alpha[:, None] * x) / sigma[:, None] ** 2
    gap = ((flow.score(mu, 1 - s) - conditional) ** 2).mean(1)
    assert torch.allclose(loss, 0.5 * schedule.diffusion2(1 - s) * gap, rtol=1e-9, atol=0)


def test_discrete_loss_is_score_matching():
    schedule = DiscreteBFNSchedule(5, 2.0)
    flow = DiscreteBFN(lambda theta, s: 3 * theta, schedule)
    x = torch.randint(5, (64, 4), generator=seeded(1))
    s = torch.rand(64, generator=seeded(2), dtype=D) * 0.98 + 0.01
    loss = flow.loss(x, s=s, generator=seeded(3), reduction="none")
    z = flow.belief(x, s, seeded(3))
    beta = schedule.beta(1 - s)[:, None, None]
    conditional = -(z - beta * (5 * F.one_hot(x, 5) - 1)) / (5 * beta)
    gap = ((flow.score(z, 1 - s) - conditional) ** 2).sum(-1).mean(1)
    assert torch.allclose(loss, 0.5 * schedule.diffusion2(1 - s) * gap, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("sigma_1", "value"), [(1e-1, 1.4118785), (1e-3, 5.9914672)])
def test_optimal_loss_is_the_mutual_information_of_a_gaussian(sigma_1, value):
    # I-MMSE: 1/2 ln(1 + s^2 (sigma_1^-2 - 1)) for x ~ N(0, .4^2). The error of the exact posterior
    # mean is integrated over time by the midpoint rule; no Monte Carlo.
    assert math.isclose(0.5 * math.log1p(0.16 * (sigma_1**-2 - 1)), value, rel_tol=1e-7)
    schedule = ContinuousBFNSchedule(sigma_1)
    t = (torch.arange(200_000, dtype=D) + 0.5) / 200_000
    gamma, omega = schedule.gamma(t), schedule.omega(t)
    error = 0.16 * omega / (gamma * 0.16 + omega)
    integral = float((-math.log(sigma_1) * error / omega).mean())
    assert math.isclose(integral, value, rel_tol=1e-7)


def test_loss_estimates_the_mutual_information():
    mixture = GaussianMixture(torch.zeros(1, 1, dtype=D), 0.4)
    flow = mixture.flow(ContinuousBFNSchedule(0.1))
    x = mixture.sample(100_000, seeded()).clamp(-1, 1)
    value = float(flow.loss(x, generator=seeded(1)))
    assert math.isclose(value, 1.4118785, rel_tol=0.03)
    # The n-step loss is an upper bound that falls to the limit.
    steps = [float(flow.loss(x, n_steps=n, generator=seeded(1))) for n in (2, 8, 200)]
    assert steps[0] > steps[1] > steps[2] * 1.02
    assert math.isclose(steps[2], value, rel_tol=0.05)


def test_n_step_loss_of_one_step_by_hand():
    # n = 1: the belief is the prior mean 0, alpha_1 = sigma_1^-2 - 1, so 1/2 alpha (x - 0)^2.
    flow = ContinuousBFN(lambda mu, s: torch.zeros_like(mu), ContinuousBFNSchedule(0.5), "sample")
    x = torch.tensor([[0.5, 1.0]], dtype=D)
    assert math.isclose(float(flow.loss(x, n_steps=1)), 0.5 * 3.0 * (0.25 + 1.0) / 2)


def test_entropy_is_loss_plus_reconstruction_for_one_symbol():
    p = [0.6, 0.3, 0.1]
    chain = categorical(p)
    entropy = chain.entropy()
    assert math.isclose(entropy, -sum(q * math.log(q) for q in p))
    flow = chain.flow(beta_1=3.0)
    x = chain.sample(60_000, seeded())
    bound = flow.bound(x, times=4, generator=seeded(1))
    assert math.isclose(float(bound.mean()), entropy, rel_tol=0.015)
    discrete = float(flow.loss(x, n_steps=64, generator=seeded(2)))
    assert math.isclose(discrete, float(flow.loss(x, generator=seeded(2))), rel_tol=0.05)


def test_bound_of_a_sequence_is_above_its_entropy():
    chain = MarkovChain.random(4, 3, 0.5, seeded(3))
    bound = chain.flow(4.0).bound(chain.sample(20_000, seeded()), times=4, generator=seeded(1))
    assert float(bound.mean()) * 3 > chain.entropy() * 0.995


def test_forward_moments_of_both_flows():
    flow = ContinuousBFN(lambda mu, s: mu, ContinuousBFNSchedule(0.1))
    mu = flow.belief(torch.full((200_000, 1), 0.5, dtype=D), 0.4, seeded())
    gamma = float(flow.schedule.gamma(0.6))
    assert math.isclose(float(mu.mean()), 0.5 * gamma, rel_tol=0.01)
    assert math.isclose(float(mu.var()), gamma * (1 - gamma), rel_tol=0.02)
    discrete = DiscreteBFN(lambda theta, s: theta, DiscreteBFNSchedule(3, 2.0))
    z = discrete.belief(torch.full((200_000, 1), 1), 0.5, seeded()).double()[:, 0]
    beta = 2.0 * 0.25
    assert torch.allclose(z.mean(0), beta * torch.tensor([-1.0, 2.0, -1.0], dtype=D), atol=0.02)
    assert torch.allclose(z.T.cov(), 3 * beta * torch.eye(3, dtype=D), atol=0.03)


def test_noise_and_data_predictions_are_two_forms_of_one():
    schedule = ContinuousBFNSchedule(0.05)
    mu = torch.randn(16, 3, generator=seeded(), dtype=D)
    data_model = lambda m, s: torch.tanh(m)  # noqa: E731
    data = ContinuousBFN(data_model, schedule, "sample")
    t = torch.rand(16, generator=seeded(1), dtype=D) * 0.9

    def noise_model(m, s):
        alpha, sigma = schedule.alpha_sigma(1 - s)
        return (m - alpha[:, None] * torch.tanh(m)) / sigma[:, None]

    noise = ContinuousBFN(noise_model, schedule, "epsilon")
    assert torch.allclose(data.predict(mu, t), noise.predict(mu, t), atol=1e-10)
    assert torch.allclose(data.predict_noise(mu, t), noise.predict_noise(mu, t), atol=1e-10)
    assert torch.allclose(data.predict(mu, 0.3), noise.predict(mu, 0.3), atol=1e-10)


def test_below_t_min_the_estimate_is_zero_without_a_call():
    def never(mu, s):
        raise AssertionError("called")

    flow = ContinuousBFN(never, ContinuousBFNSchedule(0.1))
    assert not flow.predict(torch.ones(2, 2), 1.0).any()
    eager = ContinuousBFN(lambda mu, s: torch.ones_like(mu), ContinuousBFNSchedule(0.1))
    out = eager.predict(torch.ones(2, 2), torch.tensor([1.0, 0.5]))
    assert not out[0].any() and out[1].all()


def test_clocks():
    seen = []

    def model(x, time):
        seen.append(float(time[0]))
        return x

    state = torch.zeros(1, 2)
    ContinuousBFN(model, ContinuousBFNSchedule(0.1), clock="s").predict(state, 0.25)
    ContinuousBFN(model, ContinuousBFNSchedule(0.1), clock="t").predict(state, 0.25)
    DiscreteBFN(model, DiscreteBFNSchedule(2), clock="t").predict(state, 0.25)
    assert seen == [0.75, 0.25, 0.25]


def test_score_matches_the_gradient_of_the_marginal():
    mixture = GaussianMixture(torch.tensor([[-0.5], [0.6]]), 0.1)
    schedule = ContinuousBFNSchedule(0.05)
    flow = mixture.flow(schedule)
    mu = torch.linspace(-0.6, 0.6, 7, dtype=D)[:, None].requires_grad_()
    gamma = float(schedule.gamma(0.4))
    deviation = math.sqrt(gamma**2 * 0.01 + gamma * (1 - gamma))
    normal = torch.distributions.Normal(gamma * mixture.means[:, 0], deviation)
    log = normal.log_prob(mu).logsumexp(1)
    (gradient,) = torch.autograd.grad(log.sum(), mu)
    assert torch.allclose(flow.score(mu.detach(), 0.4), gradient, atol=1e-10)


def test_discrete_score_matches_the_gradient_of_the_marginal():
    chain = MarkovChain.random(3, 2, 0.7, seeded(5))
    flow = chain.flow(2.0)
    z = torch.randn(4, 2, 3, generator=seeded(), dtype=D).requires_grad_()
    beta = float(flow.schedule.beta(0.3))
    x = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    mean = beta * (3 * F.one_hot(x, 3).to(D) - 1)
    log = -((z[:, None] - mean) ** 2).sum((-1, -2)) / (6 * beta) + chain.log_prob(x)
    (gradient,) = torch.autograd.grad(log.logsumexp(1).sum(), z)
    assert torch.allclose(flow.score(z.detach(), 0.3), gradient, atol=1e-10)


def test_reverse_drift_of_the_logits_has_no_z():
    # H z - L^2 score = -L^2 (e_hat - 1/K): the linear terms cancel exactly.
    flow = MarkovChain.random(4, 3, 0.7, seeded(5)).flow(2.0)
    z = torch.randn(4, 3, 4, generator=seeded(), dtype=D)
    schedule, t = flow.schedule, 0.6
    left = float(schedule.drift(t)) * z - float(schedule.diffusion2(t)) * flow.score(z, t)
    right = -float(schedule.diffusion2(t)) * (flow.predict(z, t) - 0.25)
    assert torch.allclose(left, right, atol=1e-12)


def test_two_classes_are_the_bernoulli_case():
    # Only z_1 - z_0 matters: theta_1 = sigmoid(z_1 - z_0).
    chain = categorical([0.3, 0.7])
    flow = chain.flow(2.0)
    z = torch.randn(50, 1, 2, generator=seeded(), dtype=D)
    odds = 0.7 / 0.3 * torch.exp(z[..., 1] - z[..., 0])
    assert torch.allclose(flow.predict(z, 0.5)[..., 1], odds / (1 + odds), atol=1e-12)


def test_a_shift_of_the_logits_changes_nothing():
    flow = MarkovChain.random(4, 3, 0.7, seeded(5)).flow(2.0)
    z = torch.randn(4, 3, 4, generator=seeded(), dtype=D)
    assert torch.allclose(flow.predict(z, 0.5), flow.predict(z + 7.0, 0.5), atol=1e-13)


def test_reductions_and_dtype():
    linear = torch.nn.Linear(3, 3)
    flow = ContinuousBFN(lambda mu, s: linear(mu), ContinuousBFNSchedule(0.1))
    x = torch.rand(8, 3)
    each = flow.loss(x, generator=seeded(), reduction="none")
    assert each.shape == (8,) and each.dtype == torch.float32
    assert torch.allclose(flow.loss(x, generator=seeded()), each.mean())
    assert torch.allclose(flow.loss(x, generator=seeded(), reduction="sum"), each.sum())
    assert each.requires_grad


def test_loss_does_not_touch_the_global_generator():
    before = torch.get_rng_state()
    flow = ContinuousBFN(lambda mu, s: mu, ContinuousBFNSchedule(0.1))
    flow.loss(torch.zeros(4, 2), generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


def test_bad_input_is_named():
    schedule = ContinuousBFNSchedule(0.1)
    flow = ContinuousBFN(lambda mu, s: mu, schedule)
    with pytest.raises(TypeError, match="schedule"):
        ContinuousBFN(lambda mu, s: mu, DiscreteBFNSchedule(3))
    with pytest.raises(TypeError, match="schedule"):
        DiscreteBFN(lambda mu, s: mu, schedule)
    with pytest.raises(TypeError, match="callable"):
        ContinuousBFN("model", schedule)
    with pytest.raises(ValueError, match="prediction_type"):
        ContinuousBFN(lambda mu, s: mu, schedule, "logits")
    with pytest.raises(ValueError, match="prediction_type"):
        DiscreteBFN(lambda mu, s: mu, DiscreteBFNSchedule(3), "epsilon")
    with pytest.raises(ValueError, match="clock"):
        ContinuousBFN(lambda mu, s: mu, schedule, clock="u")
    with pytest.raises(ValueError, match="t_min"):
        ContinuousBFN(lambda mu, s: mu, schedule, t_min=1.0)
    with pytest.raises(TypeError, match="floating"):
        flow.loss(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="NaN"):
        flow.loss(torch.full((2, 3), math.nan))
    with pytest.warns(UserWarning, match="rescale"):
        flow.loss(torch.full((2, 3), 2.0))
    with pytest.raises(ValueError, match="reduction"):
        flow.loss(torch.zeros(2, 3), reduction="max")
    with pytest.raises(ValueError, match="n_steps"):
        flow.loss(torch.zeros(2, 3), n_steps=0)
    with pytest.raises(ValueError, match="times"):
        flow.bound(torch.zeros(2, 3), times=0)
    with pytest.raises(ValueError, match="one time"):
        flow.predict(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda mu, s: mu[:1], "shaped like"),
        (lambda mu, s: None, "NoneType"),
        (lambda mu, s: mu * math.nan, "NaN"),
        (lambda mu, s: mu + math.inf, "infinite"),
    ],
)
def test_bad_models_are_named(model, message):
    flow = ContinuousBFN(model, ContinuousBFNSchedule(0.1))
    with pytest.raises(ValueError, match=message):
        flow.predict(torch.zeros(2, 3), 0.5)


def test_finite_check_can_be_switched_off():
    flow = ContinuousBFN(
        lambda mu, s: mu * math.nan, ContinuousBFNSchedule(0.1), check_finite=False
    )
    assert flow.predict(torch.zeros(2, 3), 0.5).isnan().all()


def test_bad_discrete_input_is_named():
    flow = DiscreteBFN(lambda theta, s: theta, DiscreteBFNSchedule(3), "probs")
    with pytest.raises(TypeError, match="integer"):
        flow.loss(torch.zeros(2, 3))
    for label in (-1, 3):
        with pytest.raises(ValueError, match="between 0 and 2"):
            flow.loss(torch.full((2, 3), label))
    with pytest.raises(ValueError, match="3 entries"):
        flow.predict(torch.zeros(2, 3, 4), 0.5)
    for wrong in (lambda theta, s: 2 * theta, lambda theta, s: theta - 1 + 2 / 3):
        bad = DiscreteBFN(wrong, DiscreteBFNSchedule(3), "probs")
        with pytest.raises(ValueError, match="sum to one"):
            bad.predict(torch.zeros(2, 3, 3), 0.5)


def test_models_of_diffusers_carry_their_output():
    class Output:
        def __init__(self, sample):
            self.sample = sample

    flow = ContinuousBFN(lambda mu, s: Output(mu + 1), ContinuousBFNSchedule(0.1), "sample")
    assert (flow.predict(torch.zeros(2, 3), 0.5) == 1).all()
