"""Schedules: differential equations, limits, inverses, Bayesian bookkeeping."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from icml24.bayesian_flow import ContinuousBFNSchedule, DiscreteBFNSchedule

sigmas = st.floats(1e-4, 0.9)
times = st.floats(0.0, 0.999)


def derivative(function, t):
    t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(function(t), t)
    return float(slope)


@given(sigmas, times, st.floats(-1, 1))
def test_theorem_4_1_moments_solve_the_linear_sde(sigma_1, t, x):
    schedule = ContinuousBFNSchedule(sigma_1)
    drift, noise = float(schedule.drift(t)), float(schedule.diffusion2(t))
    mean = derivative(lambda u: schedule.gamma(u) * x, t)
    variance = derivative(lambda u: schedule.gamma(u) * (1 - schedule.gamma(u)), t)
    alpha, sigma = (float(c) for c in schedule.alpha_sigma(t))
    assert math.isclose(mean, drift * alpha * x, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(variance, 2 * drift * sigma**2 + noise, rel_tol=1e-8, abs_tol=1e-9)


@given(st.integers(2, 50), st.floats(0.05, 50), times)
def test_theorem_5_1_moments_solve_the_linear_sde(classes, beta_1, t):
    schedule = DiscreteBFNSchedule(classes, beta_1)
    drift, noise = float(schedule.drift(t)), float(schedule.diffusion2(t))
    slope = derivative(schedule.beta, t)
    beta = float(schedule.beta(t))
    assert math.isclose(slope, drift * beta, rel_tol=1e-9)
    assert math.isclose(classes * slope, 2 * drift * classes * beta + noise, rel_tol=1e-9)


@pytest.mark.parametrize("sigma_1", [1e-1, 1e-3])
def test_limits_at_both_ends(sigma_1):
    schedule = ContinuousBFNSchedule(sigma_1)
    assert float(schedule.gamma(1.0)) == 0.0
    assert math.isclose(float(schedule.omega(0.0)), sigma_1**2, rel_tol=1e-12)
    assert math.isclose(float(schedule.beta(0.0)), sigma_1**-2 - 1, rel_tol=1e-12)
    near = 1 - 1e-9  # gamma stays accurate where 1 - omega would cancel
    assert math.isclose(float(schedule.gamma(near)), -2e-9 * math.log(sigma_1), rel_tol=1e-6)
    assert torch.equal(schedule.alphas_cumprod(0.3), schedule.gamma(0.3))


@given(sigmas, times)
def test_log_snr_inverse(sigma_1, t):
    schedule = ContinuousBFNSchedule(sigma_1)
    back = float(schedule.t_from_log_snr(schedule.log_snr(t)))
    assert math.isclose(back, t, abs_tol=1e-9)
    alpha, sigma = (float(c) for c in schedule.alpha_sigma(t))
    assert math.isclose(float(schedule.log_snr(t)), math.log(alpha / sigma), abs_tol=1e-9)


def test_discrete_log_snr_inverse():
    schedule = DiscreteBFNSchedule(5, 9.0)
    for t in (0.0, 0.3, 0.99):
        assert math.isclose(float(schedule.t_from_log_snr(schedule.log_snr(t))), t, abs_tol=1e-12)


@pytest.mark.parametrize("schedule", [ContinuousBFNSchedule(0.03), DiscreteBFNSchedule(4, 2.0)])
@pytest.mark.parametrize("spacing", ["uniform", "logsnr"])
def test_grids_fall_from_one_minus_eta_to_zero(schedule, spacing):
    grid = schedule.timesteps(7, 0.01, spacing)
    assert grid.dtype == torch.float64 and len(grid) == 8
    assert math.isclose(float(grid[0]), 0.99) and float(grid[-1]) == 0.0
    values = grid if spacing == "uniform" else schedule.log_snr(grid)
    steps = values.diff().numpy()
    assert np.allclose(steps, steps[0], rtol=1e-9)
    assert (grid.diff() < 0).all()


@given(sigmas, st.integers(1, 30))
def test_accuracies_of_the_original_observations_add_up(sigma_1, n):
    schedule = ContinuousBFNSchedule(sigma_1)
    i = np.arange(1, n + 1)
    alpha = sigma_1 ** (-2 * i / n) * (1 - sigma_1 ** (2 / n))
    assert math.isclose(alpha.sum(), sigma_1**-2 - 1, rel_tol=1e-9)
    ours = schedule.beta(1 - torch.arange(n + 1, dtype=torch.float64) / n).diff().numpy()
    assert np.allclose(ours, alpha, rtol=1e-9)


def test_n_bayesian_updates_give_the_marginal():
    # Observe x = 0.7 eleven times with accuracies alpha_i; the mean and variance of the belief mean
    # follow from the weights alpha_i / rho_n, by hand.
    schedule, x = ContinuousBFNSchedule(0.05), 0.7
    alpha = schedule.beta(1 - torch.arange(12, dtype=torch.float64) / 11).diff()
    rho = 1.0 + float(alpha.sum())
    mean, variance = float((alpha * x).sum()) / rho, float((alpha / rho**2).sum())
    gamma = float(schedule.gamma(0.0))
    assert math.isclose(mean, gamma * x, rel_tol=1e-12)
    assert math.isclose(variance, gamma * (1 - gamma), rel_tol=1e-12)


@pytest.mark.parametrize(("s", "t"), [(0.9, 0.4), (0.5, 0.0)])
def test_second_order_term_of_the_discrete_solver_is_the_integral(s, t):
    # SDE-BFN-Solver2 adds minus the integral of L^2(tau) (tau - s) from s to t, times the slope.
    schedule = DiscreteBFNSchedule(6, 1.7)
    integral = quad(lambda tau: float(schedule.diffusion2(tau)) * (tau - s), s, t)[0]
    closed = 6 * 1.7 * (t - s) ** 2 * (s + 2 * t - 3) / 3
    assert math.isclose(-integral, closed, rel_tol=1e-9)


@pytest.mark.parametrize("sigma_1", [0.0, 1.0, -1.0, 2.0, math.nan])
def test_bad_sigma(sigma_1):
    with pytest.raises(ValueError, match="sigma_1"):
        ContinuousBFNSchedule(sigma_1)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="num_classes"):
        DiscreteBFNSchedule(1)
    for beta_1 in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="beta_1"):
            DiscreteBFNSchedule(3, beta_1)
    schedule = ContinuousBFNSchedule(0.1)
    for t in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="Times"):
            schedule.gamma(t)
    with pytest.raises(TypeError, match="floating"):
        schedule.gamma(torch.tensor(1))
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError, match="steps"):
            schedule.timesteps(steps, 0.01)
    with pytest.raises(ValueError, match="eta"):
        schedule.timesteps(5, 1.0)
    with pytest.raises(ValueError, match="spacing"):
        schedule.timesteps(5, 0.01, "cosine")
    with pytest.raises(ValueError, match="eta > 0"):
        schedule.timesteps(5, 0.0, "logsnr")
