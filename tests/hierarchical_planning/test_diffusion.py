"""Schedules, the analytic denoiser, entries held fixed, guidance."""

import numpy as np
import pytest
import torch

from icml24.hierarchical_planning import GaussianDiffusion, alpha_bars, hold


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian_denoiser(bars, mean, variance):
    """The exact guess of x0 for data N(mean, variance)."""

    def denoise(x, m, context=None):
        bar = bars[m][:, None, None]
        gain = variance * bar.sqrt() / (bar * variance + 1 - bar)
        return mean + gain * (x - bar.sqrt() * mean)

    return denoise


@pytest.mark.parametrize("n", [1, 5, 32, 256])
@pytest.mark.parametrize("schedule", ["cosine", "vp"])
def test_signal_starts_at_one_and_falls(n, schedule):
    bars = alpha_bars(n, schedule)
    assert bars[0] == 1 and len(bars) == n + 1
    assert (bars.diff() < 0).all() and (bars > 0).all()
    if schedule == "cosine" and n >= 5:
        assert bars[-1] < 1e-3


def test_vp_rates_of_the_paper():
    bars = alpha_bars(5, "vp")
    beta = 1 - bars[1:] / bars[:-1]
    t = torch.arange(1, 6, dtype=torch.float64)
    by_hand = 1 - torch.exp(-0.1 / 5 - 0.5 * 9.9 * (2 * t - 1) / 25)
    assert torch.allclose(beta, by_hand)
    assert abs(beta[0] - 0.19587) < 1e-5 and abs(beta[-1] - 0.83503) < 1e-5


@pytest.mark.parametrize("m", [1, 2, 7, 16])
def test_posterior_of_a_known_point_is_exact(m):
    """If x0 is c for sure, x^{m-1} given x^m averages to the marginal sqrt(abar) c."""
    diffusion = GaussianDiffusion(lambda x, m, c: x, 16)
    c, bar = 0.8, diffusion.alpha_bar
    guess = torch.full((1, 1, 1), c)
    centre = bar[m].sqrt() * guess  # the mean of x^m
    mean, variance = diffusion.posterior(centre, guess, m)
    beta = 1 - bar[m] / bar[m - 1]
    assert abs(float(mean) - float(bar[m - 1].sqrt() * c)) < 1e-6
    # the variance of x^{m-1} is that of the posterior and of its mean together
    c2 = (1 - bar[m - 1]) * (1 - beta).sqrt() / (1 - bar[m])
    assert abs(float(variance + c2**2 * (1 - bar[m])) - float(1 - bar[m - 1])) < 1e-6


def test_analytic_denoiser_gives_back_the_gaussian():
    mean, variance, n = 0.7, 0.3, 20_000
    model = gaussian_denoiser(alpha_bars(256).float(), mean, variance)
    x = GaussianDiffusion(model, 256).sample((n, 1, 1), seeded())
    assert abs(float(x.mean()) - mean) < 3 * (variance / n) ** 0.5
    assert abs(float(x.var()) / variance - 1) < 0.05


def test_predicting_noise_and_the_clean_sequence_are_the_same_thing():
    bars = alpha_bars(12).float()
    exact = gaussian_denoiser(bars, 0.4, 0.5)

    def noise(x, m, context=None):
        bar = bars[m][:, None, None]
        return (x - bar.sqrt() * exact(x, m)) / (1 - bar).sqrt()

    a = GaussianDiffusion(exact, 12).sample((50, 2, 1), seeded())
    b = GaussianDiffusion(noise, 12, prediction="eps").sample((50, 2, 1), seeded())
    assert torch.allclose(a, b, atol=1e-3)


def test_fixed_entries_are_equal_bit_for_bit_in_every_step():
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask[0], mask[-1, 1] = True, True
    values = torch.randn(6, 4, 2, generator=seeded())
    chain = []
    diffusion = GaussianDiffusion(lambda x, m, c: 0.3 * x, 9)
    x = diffusion.sample((6, 4, 2), seeded(1), (mask, values), chain=chain)
    assert len(chain) == 10
    for state in [*chain, x]:
        assert torch.equal(state[:, mask], values[:, mask])
    assert not torch.equal(x[:, -1, 0], values[:, -1, 0])


def test_loss_has_no_gradient_through_fixed_entries():
    weight = torch.full((3, 1), 0.5, requires_grad=True)
    diffusion = GaussianDiffusion(lambda x, m, c: weight * x, 5)
    mask = torch.tensor([[True], [False], [True]])
    x = torch.randn(8, 3, 1, generator=seeded())
    diffusion.loss(x, seeded(), (mask, x)).backward()
    assert weight.grad[0] == 0 and weight.grad[2] == 0 and weight.grad[1] != 0


def test_loss_of_a_perfect_model_is_zero():
    x = torch.full((4, 3, 2), 0.5)
    diffusion = GaussianDiffusion(lambda x, m, c: torch.full_like(x, 0.5), 5)
    assert diffusion.loss(x, seeded()) == 0


def test_guidance_moves_samples_towards_the_centre():
    model = gaussian_denoiser(alpha_bars(64).float(), 0.0, 0.5)
    diffusion = GaussianDiffusion(model, 64)

    def sample(scale, **more):
        guide = lambda x, m: -((x - 2.0) ** 2).sum((1, 2)) / 2  # noqa: E731
        return diffusion.sample((500, 1, 1), seeded(), guide=guide, guide_scale=scale, **more)

    plain = diffusion.sample((500, 1, 1), seeded())
    assert torch.equal(sample(0.0), plain)
    means = [float(sample(scale).mean()) for scale in (0.0, 0.3, 1.0)]
    assert means[0] < means[1] - 0.1 and means[1] < means[2] - 0.1 and means[2] < 2
    assert sample(0.3, n_guide_steps=2).mean() > means[1] + 0.05
    assert torch.equal(sample(1.0, stop_guide=64), plain)


def test_guided_samples_need_no_gradient_mode():
    diffusion = GaussianDiffusion(lambda x, m, c: 0 * x, 4)
    with torch.no_grad():
        diffusion.sample((2, 1, 1), seeded(), guide=lambda x, m: x.sum((1, 2)))


def test_clipping_bounds_the_guess():
    diffusion = GaussianDiffusion(lambda x, m, c: torch.full_like(x, 9.0), 4, clip=1.5)
    assert (diffusion.sample((2, 1, 1), seeded()) == 1.5).all()


def test_same_seed_same_sample_and_no_global_state():
    before = torch.get_rng_state()
    diffusion = GaussianDiffusion(lambda x, m, c: 0.5 * x, 4)
    a, b = (diffusion.sample((2, 3, 1), seeded(4)) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)


def test_errors_say_what_would_be_right():
    with pytest.raises(ValueError, match="at least 1"):
        alpha_bars(0)
    with pytest.raises(ValueError, match="'cosine' or 'vp'"):
        alpha_bars(3, "linear")
    with pytest.raises(ValueError, match="'x0' or 'eps'"):
        GaussianDiffusion(lambda x, m, c: x, 3, prediction="v")


def test_hold_without_condition_is_the_identity():
    x = torch.zeros(1, 2, 1)
    assert hold(x, None) is x
    assert np.isclose(float(hold(x, (torch.tensor([[True], [False]]), x + 2)).sum()), 2)
