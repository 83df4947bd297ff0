"""A continuous flow is a diffusion: both directions, and parity with diffusers."""

import builtins
import math

import numpy as np
import pytest
import torch

from icml24.bayesian_flow import (
    BFNSampler,
    ContinuousBFNSchedule,
    DiscreteBFN,
    DiscreteBFNSchedule,
    GaussianMixture,
    as_diffusers_scheduler,
    from_nnaisense,
    from_vp,
    to_vp,
)

D = torch.float64
SCHEDULE = ContinuousBFNSchedule(1e-3**0.5)
RING = GaussianMixture.ring(5, 0.7, 0.1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ddpm_alphas():
    """The linear schedule of DDPM."""
    return np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))


def vp_noise_model(alphas_cumprod):
    """Exact noise prediction for the ring in a diffusion library's convention."""
    abar = torch.as_tensor(alphas_cumprod)

    def model(x, k):
        # abar at a fractional step, interpolated in the log-SNR
        log = abar.log() - (-abar).log1p()
        low = k.floor().long().clamp(max=len(abar) - 2)
        a = torch.sigmoid(log[low] + (k - low) * (log[low + 1] - log[low]))[:, None]
        variance = a * RING.std**2 + 1 - a
        shift = x[:, None] - a[..., None].sqrt() * RING.means
        share = (-0.5 * shift.square().sum(-1) / variance).softmax(-1)
        gain = a.sqrt() * RING.std**2 / variance
        x0 = share @ RING.means + gain * (share[..., None] * shift).sum(1)
        return (x - a.sqrt() * x0) / (1 - a).sqrt()

    return model


def test_scaled_beliefs_are_vp_samples():
    x = torch.full((200_000, 1), 0.5, dtype=D)
    mu = RING.flow(SCHEDULE).belief(x, 0.4, seeded())
    gamma = float(SCHEDULE.gamma(0.6))
    x_vp = mu / math.sqrt(gamma)
    assert math.isclose(float(x_vp.mean()), math.sqrt(gamma) * 0.5, abs_tol=0.005)
    assert math.isclose(float(x_vp.var()), 1 - gamma, rel_tol=0.02)


def test_a_diffusion_model_becomes_a_flow():
    flow, eta = from_vp(vp_noise_model(ddpm_alphas()), ddpm_alphas())
    assert math.isclose(flow.schedule.sigma_1**2, 1e-4, rel_tol=1e-9)
    assert math.isclose(float(flow.schedule.gamma(1 - eta)), ddpm_alphas()[-1], rel_tol=1e-6)
    mu = 0.3 * torch.randn(8, 2, generator=seeded(), dtype=D)
    for t in (0.05, 0.5, 0.9):
        exact = RING.posterior_mean(mu, t, flow.schedule)
        assert torch.allclose(flow.predict(mu, t), exact, atol=1e-9)
    x = BFNSampler(flow, "bfn2", 20, eta=eta, timestep_spacing="logsnr").sample(
        (4000, 2), seeded(), dtype=D
    )
    assert abs(float(x.norm(dim=1).mean()) - 0.7) < 0.02


def test_a_flow_becomes_a_diffusion_model_and_comes_back():
    flow = RING.flow(SCHEDULE)
    model = to_vp(flow, 1000, eta=0.01)
    abar = model.alphas_cumprod
    assert abar.shape == (1000,) and (abar.diff() < 0).all()
    assert math.isclose(float(abar[0]), 1 - 1e-3, rel_tol=1e-9)
    back, eta = from_vp(model, abar)
    assert math.isclose(eta, 0.01, rel_tol=1e-6)
    mu = 0.3 * torch.randn(8, 2, generator=seeded(), dtype=D)
    for t in (0.0, 0.3, 0.7, 0.98):  # between training steps the time is interpolated
        assert torch.allclose(back.predict(mu, t), flow.predict(mu, t), atol=2e-3)
    on_grid = float(model.time(torch.tensor(400.0, dtype=D)))
    assert torch.allclose(back.predict(mu, on_grid), flow.predict(mu, on_grid), atol=1e-8)


def test_noise_predictions_pass_through_unchanged():
    from icml24.bayesian_flow import ContinuousBFN

    flow = ContinuousBFN(lambda mu, s: torch.sin(mu), SCHEDULE, "epsilon")
    model = to_vp(flow)
    x_vp = torch.randn(4, 3, generator=seeded(), dtype=D)
    gamma = model.alphas_cumprod[200]
    assert torch.allclose(model(x_vp, 200), torch.sin(gamma.sqrt() * x_vp), atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*copy keyword.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("ours", "algorithm", "order"),
    [
        ("bfn-solver1", "dpmsolver++", 1),
        ("bfn-solver2", "dpmsolver++", 2),
        ("sde-bfn-solver2", "sde-dpmsolver++", 2),
        ("sde-bfn-solver1", "sde-dpmsolver++", 1),
    ],
)
def test_parity_with_dpm_solver_of_diffusers(ours, algorithm, order):
    pytest.importorskip("diffusers")
    model = to_vp(RING.flow(SCHEDULE), 1000, eta=0.01)
    scheduler = as_diffusers_scheduler(
        model,
        algorithm_type=algorithm,
        solver_order=order,
        lower_order_final=False,
        final_sigmas_type="sigma_min",
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(12)
    grid = [float(model.time(k)) for k in scheduler.timesteps]
    sampler = BFNSampler(RING.flow(SCHEDULE), ours)
    sampler.set_timesteps(timesteps=grid)
    mu, previous = RING.flow(SCHEDULE).prior((64, 2), grid[0], seeded(), dtype=D), None
    x_vp = mu / SCHEDULE.gamma(grid[0]).sqrt()
    for i in range(11):
        prediction = sampler.predict(mu, grid[i])
        noise = torch.randn(64, 2, generator=seeded(i), dtype=D)
        mu = sampler.step(prediction, i, mu, previous=previous, noise=noise).prev_state
        previous, k = prediction, scheduler.timesteps[i]
        output = model(x_vp, k)
        x_vp = scheduler.step(output, k, x_vp, variance_noise=noise).prev_sample.to(D)
        gap = mu / SCHEDULE.gamma(grid[i + 1]).sqrt() - x_vp
        assert float(gap.abs().max()) < 5e-5, i


def test_diffusers_samples_a_flow():
    pytest.importorskip("diffusers")
    model = to_vp(RING.flow(SCHEDULE), 1000)
    scheduler = as_diffusers_scheduler(model, "DDIMScheduler", clip_sample=False)
    scheduler.set_timesteps(50)
    x = torch.randn(2000, 2, generator=seeded(), dtype=D)
    for k in scheduler.timesteps:
        x = scheduler.step(model(x, k), int(k), x).prev_sample
    assert abs(float(x.norm(dim=1).mean()) - 0.7) < 0.03


def test_without_diffusers_the_message_says_what_to_do(monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name == "diffusers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ImportError, match="pip install diffusers"):
        as_diffusers_scheduler(to_vp(RING.flow(SCHEDULE)))


def test_networks_of_the_original_code():
    # The original calls network(data, t) with t shaped like the data.
    shapes = []

    def network(data, t):
        shapes.append((tuple(data.shape), tuple(t.shape)))
        return data * t

    model = from_nnaisense(network)
    model(torch.ones(2, 3, 4), torch.rand(2))
    assert shapes == [((2, 3, 4), (2, 3, 4))]


def test_bad_input_is_named():
    for alphas in ([0.5], [0.1, 0.5], [1.0, 0.5], [0.5, 0.0]):
        with pytest.raises(ValueError, match="alphas_cumprod"):
            from_vp(lambda x, k: x, alphas)
    with pytest.raises(TypeError, match="Only a ContinuousBFN"):
        to_vp(DiscreteBFN(lambda theta, s: theta, DiscreteBFNSchedule(3)))
    with pytest.raises(ValueError, match="eta"):
        to_vp(RING.flow(SCHEDULE), eta=0.0)
    pytest.importorskip("diffusers")
    with pytest.raises(ValueError, match="no scheduler"):
        as_diffusers_scheduler(to_vp(RING.flow(SCHEDULE)), "NoSuchScheduler")
