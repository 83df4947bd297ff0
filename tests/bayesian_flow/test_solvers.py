"""Solvers: identities between them, exact flow maps, convergence orders, special cases."""

import math

import numpy as np
import pytest
import torch

from icml24.bayesian_flow import (
    BFNSampler,
    ContinuousBFN,
    ContinuousBFNSchedule,
    GaussianMixture,
    MarkovChain,
    adaptive_flow,
    gaussian_moments,
)
from icml24.bayesian_flow.solvers import (
    bayesian_update,
    bayesian_update_discrete,
    bfn_solver,
    bfn_solver_discrete,
    euler_maruyama,
    sde_bfn_solver,
    sde_bfn_solver_discrete,
)

D = torch.float64
SCHEDULE = ContinuousBFNSchedule(1e-3)
GAUSSIAN = GaussianMixture(torch.tensor([[0.3]]), 0.4)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def integrate(sampler, state, noise=None):
    """Run the rules from a given state to t = 0 and return the state."""
    previous = None
    for i in range(sampler.num_steps):
        prediction = sampler.predict(state, float(sampler.timesteps[i]))
        given = None if noise is None else noise[i]
        state = sampler.step(prediction, i, state, previous=previous, noise=given).prev_state
        previous = prediction
    return state


# --- the rules themselves -------------------------------------------------------------------------


@pytest.mark.parametrize("sigma_1", [0.3, 1e-3])
@pytest.mark.parametrize(("s", "t"), [(1.0, 0.9), (0.8, 0.1), (0.3, 0.0)])
def test_original_sampler_is_the_first_order_sde_solver(sigma_1, s, t):
    # Proposition 4.2, sharpened: the same map, not only the same order.
    schedule = ContinuousBFNSchedule(sigma_1)
    mu, x_hat, noise = torch.randn(3, 50, generator=seeded(), dtype=D)
    if s == 1.0:
        mu = torch.zeros(50, dtype=D)
        s = 1.0 - 1e-12  # the solver divides by gamma(s)
    original = bayesian_update(schedule, mu, x_hat, s, t, noise=noise)
    solver = sde_bfn_solver(schedule, mu, x_hat, s, t, noise=noise)
    assert torch.allclose(original, solver, rtol=1e-9, atol=1e-12 if s < 0.9 else 1e-9)
    # Both coefficients reduce to sigma_1^(2(s-t)).
    decay = sigma_1 ** (2 * (s - t))
    gain = float(schedule.gamma(t)) - decay * float(schedule.gamma(s))
    unit = bayesian_update(schedule, torch.ones(1, dtype=D), 0 * mu[:1], s, t, noise=0 * mu[:1])
    assert math.isclose(float(unit), decay, rel_tol=1e-9)
    unit = bayesian_update(schedule, 0 * mu[:1], torch.ones(1, dtype=D), s, t, noise=0 * mu[:1])
    assert math.isclose(float(unit), gain, rel_tol=1e-9)


def test_original_discrete_sampler_without_draw_is_sde_solver_1():
    flow = MarkovChain.random(4, 3, 0.7, seeded(5)).flow(2.0)
    z, noise = torch.randn(2, 20, 3, 4, generator=seeded(), dtype=D)
    e_hat = flow.predict(z, 0.7)
    a = bayesian_update_discrete(flow.schedule, z, e_hat, 0.7, 0.4, noise=noise)
    b = sde_bfn_solver_discrete(flow.schedule, z, e_hat, 0.7, 0.4, noise=noise)
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_rules_by_hand():
    # sigma_1 = 1/2, s = 1/2, t = 0: gamma_s = 1/2, gamma_t = 3/4, sigma_s = 1/2,
    # sigma_t = sqrt(3)/4, e^lambda = 1 and sqrt(3), e^-h = 1/sqrt(3).
    schedule = ContinuousBFNSchedule(0.5)
    one, zero = torch.ones(1, dtype=D), torch.zeros(1, dtype=D)
    root = math.sqrt(3)
    value = float(bfn_solver(schedule, one, one, 0.5, 0.0))
    assert math.isclose(value, root / 2 + 0.75 * (1 - 1 / root))
    h = math.log(root)
    value = float(bfn_solver(schedule, one, one, 0.5, 0.0, slope=one))
    assert math.isclose(value, root / 2 + 0.75 * (1 - 1 / root) * (1 + h / 2))
    value = float(sde_bfn_solver(schedule, one, one, 0.5, 0.0, noise=zero))
    assert math.isclose(value, 1 / 2 + 0.75 * (2 / 3))
    value = float(sde_bfn_solver(schedule, zero, zero, 0.5, 0.0, noise=one))
    assert math.isclose(value, root / 4 * math.sqrt(2 / 3))
    value = float(sde_bfn_solver(schedule, zero, zero, 0.5, 0.0, slope=one, noise=zero))
    assert math.isclose(value, 0.75 * (2 / 3) * h / 2)


def test_discrete_rules_by_hand():
    # K = 2, beta_1 = 1, s = 1/2, t = 0: beta_s = 1/4, beta_t = 1.
    schedule = MarkovChain(torch.tensor([0.5, 0.5]), torch.eye(2), 1).flow(1.0).schedule
    z = torch.tensor([[1.0, -1.0]], dtype=D)
    e = torch.tensor([[0.75, 0.25]], dtype=D)
    slope = torch.tensor([[1.0, -1.0]], dtype=D)
    zero, one = torch.zeros(1, 2, dtype=D), torch.ones(1, 2, dtype=D)
    out = sde_bfn_solver_discrete(schedule, z, e, 0.5, 0.0, noise=zero)
    assert torch.allclose(out, torch.tensor([[1.375, -1.375]], dtype=D))
    out = sde_bfn_solver_discrete(schedule, zero, one / 2, 0.5, 0.0, noise=one)
    assert torch.allclose(out, one * math.sqrt(1.5))
    out = sde_bfn_solver_discrete(schedule, zero, one / 2, 0.5, 0.0, slope=slope, noise=zero)
    assert torch.allclose(out, 2 * 0.25 * (-2.5) / 3 * slope)
    out = bfn_solver_discrete(schedule, z, e, 0.5, 0.0)
    assert torch.allclose(out, torch.tensor([[2.25, -2.25]], dtype=D))
    out = bfn_solver_discrete(schedule, zero, one / 2, 0.5, 0.0, slope=slope)
    assert torch.allclose(out, -2 * 0.25 / 2 * slope)


def test_euler_maruyama_agrees_with_the_solver_for_a_tiny_step():
    mu, x_hat, noise = torch.randn(3, 20, generator=seeded(), dtype=D)
    schedule = ContinuousBFNSchedule(0.1)
    change = [
        rule(schedule, mu, x_hat, 0.5, 0.5 - 1e-5, noise=noise) - mu
        for rule in (euler_maruyama, sde_bfn_solver)
    ]
    assert torch.allclose(*change, rtol=1e-2, atol=1e-7)


# --- against exact solutions ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfn", "sde-bfn-solver1", "sde-bfn-solver2", "bfn-solver2"])
def test_exact_moments_agree_with_simulation(name):
    sampler = BFNSampler(GAUSSIAN.flow(SCHEDULE), name, 6)
    mean, variance = gaussian_moments(sampler, 0.3, 0.4)
    x = sampler.sample((100_000, 1), seeded(), dtype=D)
    assert math.isclose(float(x.mean()), mean, abs_tol=0.006)
    assert math.isclose(float(x.var()), variance, rel_tol=0.02)


@pytest.mark.parametrize(("name", "order"), [("bfn-solver1", 1.0), ("bfn-solver2", 2.0)])
def test_orders_on_the_exact_flow_map_of_a_gaussian(name, order):
    # mu_t = gamma_t m + sqrt(V_t / V_s) (mu_s - gamma_s m)
    flow, errors = GAUSSIAN.flow(SCHEDULE), []
    mu = 0.1 * torch.linspace(-2, 2, 9, dtype=D)[:, None]

    def moments(t):
        gamma = float(SCHEDULE.gamma(t))
        return gamma * 0.3, gamma**2 * 0.16 + gamma * (1 - gamma)

    (m0, v0), (m1, v1) = moments(0.99), moments(0.0)
    exact = m1 + math.sqrt(v1 / v0) * (mu - m0)
    for n in (80, 160):
        sampler = BFNSampler(flow, name, n, timestep_spacing="logsnr")
        errors.append(float((integrate(sampler, mu) - exact).abs().max()))
    assert abs(math.log2(errors[0] / errors[1]) - order) < 0.06


@pytest.mark.parametrize(
    ("name", "order"),
    [("bfn", 1.0), ("sde-bfn-solver1", 1.0), ("sde-bfn-solver2", 2.0), ("euler-maruyama", 1.0)],
)
def test_weak_orders_of_the_stochastic_solvers(name, order):
    # The variance at t = 0 against the limit of many steps, without Monte Carlo.
    errors = []
    for n in (160, 320, 2560):
        spacing = "uniform" if name in ("bfn", "euler-maruyama") else "logsnr"
        schedule = ContinuousBFNSchedule(0.05)
        sampler = BFNSampler(
            GAUSSIAN.flow(schedule), name, n, last_step="integrate", timestep_spacing=spacing
        )
        errors.append(gaussian_moments(sampler, 0.3, 0.4)[1])
    if name != "euler-maruyama":
        gamma = float(schedule.gamma(0.0))
        limit = gamma**2 * 0.16 + gamma * (1 - gamma)
        start = 0.0 if name == "bfn" else abs(errors[2] - limit)
        assert start < 3e-3
    first, second = abs(errors[0] - errors[2]), abs(errors[1] - errors[2])
    assert abs(math.log2(first / second) - order) < 0.15


@pytest.mark.parametrize(
    ("name", "order"), [("bfn-solver1", 1.0), ("bfn-solver2", 2.0), ("bfn-solver2-single", 2.0)]
)
def test_orders_on_a_mixture_and_a_chain(name, order):
    ring = GaussianMixture.ring(3, 0.7, 0.2).flow(ContinuousBFNSchedule(0.05))
    chain = MarkovChain.random(4, 3, 0.7, seeded(5)).flow(4.0)
    starts = {
        ring: 0.2 * torch.randn(16, 2, generator=seeded(1), dtype=D),
        chain: 0.1 * torch.randn(16, 3, 4, generator=seeded(1), dtype=D),
    }
    for flow, start in starts.items():
        spacing, eta = ("logsnr", 0.05) if flow is ring else ("uniform", 0.01)
        exact, _ = adaptive_flow(flow, start, 1 - eta, rtol=1e-9, atol=1e-10, method="DOP853")
        errors = []
        for n in (40, 80):
            sampler = BFNSampler(flow, name, n, eta=eta, timestep_spacing=spacing)
            errors.append(float((integrate(sampler, start) - exact).abs().max()))
        assert abs(math.log2(errors[0] / errors[1]) - order) < 0.25, flow


def test_sde_2_has_strong_order_one_but_a_smaller_error():
    # Paths driven by the same Brownian motion, D = 1, against a fine path.
    flow = MarkovChain(torch.tensor([0.4, 0.6]), torch.eye(2), 1).flow(2.0)
    fine, eta = 512, 0.01
    grid = torch.linspace(1 - eta, 0, fine + 1, dtype=D)
    beta = flow.schedule.beta(grid)
    piece = torch.randn(fine, 1000, 1, 2, generator=seeded(), dtype=D)
    piece = piece * (2 * beta.diff())[:, None, None, None].sqrt()  # increments of the martingale
    start = 0.1 * torch.randn(1000, 1, 2, generator=seeded(1), dtype=D)

    def end(name, n):
        sampler = BFNSampler(flow, name, n, eta=eta)
        part = piece.reshape(n, fine // n, *piece.shape[1:]).sum(1)
        scale = (2 * flow.schedule.beta(sampler.timesteps).diff()).sqrt()
        return integrate(sampler, start, part / scale[:, None, None, None])

    exact = end("sde-bfn-solver2", fine)
    error = {
        (name, n): float((end(name, n) - exact).abs().mean())
        for name in ("sde-bfn-solver1", "sde-bfn-solver2")
        for n in (16, 64)
    }
    for name in ("sde-bfn-solver1", "sde-bfn-solver2"):
        assert 0.8 < math.log(error[name, 16] / error[name, 64], 4) < 1.3
    ratio = error["sde-bfn-solver2", 64] / error["sde-bfn-solver1", 64]
    assert 0.3 < ratio < 0.6


def test_one_symbol_is_exact_for_the_original_sampler_with_its_draw():
    # Spec oracle 14: p = (.6, .3, .1), beta_1 = 3. The law of z_0 is the true one for any n.
    chain = MarkovChain(torch.tensor([0.6, 0.3, 0.1]), torch.eye(3), 1)
    flow = chain.flow(3.0)
    z = flow.belief(chain.sample(60_000, seeded()), 1.0, seeded(1)).double()
    truth = float(flow.predict(z, 0.0).amax(-1).mean())
    assert math.isclose(truth, 0.9744, abs_tol=0.002)

    def certainty(draw):
        sampler = BFNSampler(flow, "bfn", 2, categorical_draw=draw)
        _, states = sampler.sample((60_000, 1), seeded(2), return_trajectory=True, dtype=D)
        e_hat = flow.predict(states[-1], 0.0)
        return float(e_hat.amax(-1).mean()), e_hat.mean((0, 1)).tolist()

    exact, _ = certainty(True)
    assert math.isclose(exact, truth, abs_tol=0.003)
    biased, mean = certainty(False)
    assert math.isclose(biased, 0.9232, abs_tol=0.003)
    assert np.allclose(mean, [0.667, 0.258, 0.074], atol=0.005)


# --- special cases --------------------------------------------------------------------------------

SINGLE = [
    "bfn",
    "bfn-solver1",
    "bfn-solver2",
    "bfn-solver2-single",
    "sde-bfn-solver1",
    "sde-bfn-solver2",
]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("last_step", ["drop", "denoise"])
def test_one_data_point_is_returned_exactly(name, last_step):
    point = GaussianMixture(torch.tensor([[0.3, -0.7]]), 0.0)
    sampler = BFNSampler(point.flow(SCHEDULE), name, 4, last_step=last_step)
    x = sampler.sample((5, 2), seeded(), dtype=D)
    assert torch.allclose(x, point.means.expand(5, 2), atol=1e-12)


@pytest.mark.parametrize("name", SINGLE)
def test_one_symbol_language_is_returned_exactly(name):
    chain = MarkovChain(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([[0.0, 1, 0]] * 3), 4)
    x = BFNSampler(chain.flow(3.0), name, 3).sample((5, 4), seeded(), dtype=D)
    assert (x == 1).all()


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_a_constant_prediction_makes_both_orders_agree(kind):
    if kind == "continuous":
        flow, shape = ContinuousBFN(lambda mu, s: 0 * mu + 0.3, SCHEDULE, "sample"), (4, 2)
    else:
        chain = MarkovChain(torch.full((3,), 1 / 3), torch.full((3, 3), 1 / 3), 1)
        flow, shape = chain.flow(2.0), (4, 1)
        flow.model = lambda theta, s: torch.softmax(torch.arange(3.0) + 0 * theta, -1)
    for names in (("bfn-solver1", "bfn-solver2"), ("sde-bfn-solver1", "sde-bfn-solver2")):
        ends = [
            BFNSampler(flow, name, 9, last_step="integrate").sample(
                shape, seeded(), return_trajectory=True, dtype=D
            )[1][-1]
            for name in names
        ]
        assert torch.allclose(*ends, atol=1e-12)


def test_the_first_step_of_order_two_is_of_order_one():
    flow = GaussianMixture.ring(3).flow(SCHEDULE)
    trajectories = [
        BFNSampler(flow, name, 5).sample((4, 2), seeded(), return_trajectory=True, dtype=D)[1]
        for name in ("bfn-solver1", "bfn-solver2")
    ]
    assert torch.equal(trajectories[0][1], trajectories[1][1])
    assert not torch.allclose(trajectories[0][2], trajectories[1][2])


@pytest.mark.parametrize("name", ["bfn-solver2", "sde-bfn-solver2"])
def test_a_mirror_image_gives_mirror_samples(name):
    plus = GaussianMixture(torch.tensor([[0.3], [-0.5]]), 0.1)
    minus = GaussianMixture(-plus.means, 0.1)
    runs = []
    for mixture, sign in ((plus, 1), (minus, -1)):
        sampler = BFNSampler(mixture.flow(SCHEDULE), name, 6)
        start = 0.2 * sign * torch.randn(8, 1, generator=seeded(), dtype=D)
        noise = sign * torch.randn(6, 8, 1, generator=seeded(1), dtype=D)
        runs.append(sign * integrate(sampler, start, noise))
    assert torch.allclose(*runs, atol=1e-12)


def test_the_adaptive_solver_follows_the_exact_flow():
    start = torch.tensor([[0.1], [-0.2]], dtype=D)
    end, nfe = adaptive_flow(GAUSSIAN.flow(SCHEDULE), start, 0.9, 0.2, rtol=1e-9, atol=1e-10)

    def moments(t):
        gamma = float(SCHEDULE.gamma(t))
        return gamma * 0.3, gamma**2 * 0.16 + gamma * (1 - gamma)

    (m0, v0), (m1, v1) = moments(0.9), moments(0.2)
    assert torch.allclose(end, m1 + math.sqrt(v1 / v0) * (start - m0), atol=1e-7)
    assert nfe > 20
    with pytest.raises(ValueError, match="stop < start"):
        adaptive_flow(GAUSSIAN.flow(SCHEDULE), start, 0.2, 0.9)
