"""Eq. (2): closed forms, invariants, convergence order; the network's shapes."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

import icml24.radio_fields as rf

F = 928e6
LAM = rf.wavelength(F)
K = 2 * math.pi / LAM


def random_ray(n=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = 0.1 + torch.rand((3, n), generator=g, dtype=torch.float64).cumsum(1) * 0.2
    sigma = torch.rand((3, n), generator=g, dtype=torch.float64) * 4
    signal = torch.view_as_complex(torch.randn((3, n, 2), generator=g, dtype=torch.float64))
    return sigma, signal, z


def test_one_opaque_sample_is_a_transmitter():
    z = torch.linspace(0.5, 4.5, 9, dtype=torch.float64)[None]
    sigma = torch.zeros_like(z)
    sigma[0, 4] = 100  # sigma delta = 50
    h, weights = rf.render_rays(sigma, torch.ones_like(z) + 0j, z, F)
    d = z[0, 4].item()
    assert abs(h[0]) == pytest.approx(LAM / (4 * math.pi * d), rel=1e-6)
    expected = LAM / (4 * math.pi * d) * np.exp(-1j * K * d)
    assert abs(h[0].item() - expected) < 1e-6 * abs(expected)
    assert weights.sum() == pytest.approx(1)


def test_rendering_equals_the_sequential_definition():
    """Sample by sample, the phase turned step by step, as the equation is written."""
    sigma, signal, z = random_ray()
    h, weights = rf.render_rays(sigma, signal, z, F)
    for r in range(3):
        delta = np.diff(z[r].numpy())
        delta = np.append(delta, delta[-1])
        passed, phasor, total = 1.0, np.exp(-1j * K * z[r, 0].item()), 0
        for i in range(z.shape[1]):
            alpha = 1 - math.exp(-sigma[r, i].item() * delta[i])
            assert weights[r, i].item() == pytest.approx(passed * alpha, abs=1e-14)
            amplitude = LAM / (4 * math.pi * z[r, i].item())
            total += amplitude * phasor * passed * alpha * signal[r, i].item()
            passed *= 1 - alpha
            phasor *= np.exp(-1j * K * delta[i])  # the telescoped phase
        assert abs(h[r].item() - total) < 1e-12


def test_transmittance_and_linearity():
    sigma, signal, z = random_ray()
    h, weights = rf.render_rays(sigma, signal, z, F)
    gap = torch.diff(z)
    optical = sigma * torch.cat([gap, gap[:, -1:]], dim=1)
    torch.testing.assert_close(weights.sum(1), 1 - torch.exp(-optical.sum(1)))
    assert (weights >= 0).all()
    turned, _ = rf.render_rays(sigma, signal * np.exp(0.7j), z, F)
    torch.testing.assert_close(turned, h * np.exp(0.7j))
    nothing, _ = rf.render_rays(0 * sigma, signal, z, F)
    assert nothing.abs().max() == 0


def test_ablations_switch_off_what_they_say():
    sigma, signal, z = random_ray()
    _, w = rf.render_rays(sigma, signal, z, F)
    optical, _ = rf.render_rays(sigma, signal, z, F, path_loss=False, phase=False)
    torch.testing.assert_close(optical, LAM / (4 * math.pi) * (w * signal).sum(1))
    no_phase, _ = rf.render_rays(sigma, signal, z, F, phase=False)
    torch.testing.assert_close(no_phase, LAM / (4 * math.pi) * (w * signal / z).sum(1))


def test_second_order_convergence():
    """Constant density and signal: the midpoint sum tends to the integral like n^-2."""
    near, far, s = 0.3, 2.3, 1.7

    def integrand(z, part):
        value = s * np.exp(-s * (z - near)) * LAM / (4 * np.pi * z) * np.exp(-1j * K * z)
        return part(value)

    exact = sum(
        unit * quad(integrand, near, far, args=(part,), limit=200)[0]
        for unit, part in ((1, np.real), (1j, np.imag))
    )
    errors, counts = [], np.array([100, 200, 400, 800])
    for n in counts:
        z = near + (torch.arange(n, dtype=torch.float64)[None] + 0.5) * (far - near) / n
        h, _ = rf.render_rays(torch.full_like(z, s), torch.ones_like(z) + 0j, z, F)
        errors.append(abs(h.item() - exact))
    slope = -np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert slope == pytest.approx(2, abs=0.2)


def test_phase_survives_single_precision():
    z = torch.tensor([[8.0, 8.5, 9.0]])
    sigma = torch.tensor([[0.0, 100.0, 0.0]])
    ones = torch.ones(1, 3, dtype=torch.complex64)
    f = 60e9
    h, _ = rf.render_rays(sigma, ones, z, f)
    exact, _ = rf.render_rays(sigma.double(), ones.to(torch.complex128), z.double(), f)
    assert abs(h.item() - exact.item()) < 1e-3 * abs(exact.item())


def test_stratified_samples_fill_their_cells():
    g = torch.Generator().manual_seed(0)
    z = rf.stratified_samples(500, 8, 1.0, 5.0, g)
    cell = ((z - 1) / 0.5).floor()
    assert (cell == torch.arange(8)).all()
    assert (z.mean(0) - (1.25 + 0.5 * torch.arange(8))).abs().max() < 0.05
    assert z.std(0).min() > 0.1
    with pytest.raises(ValueError, match="near"):
        rf.stratified_samples(1, 4, 0.0, 1.0)
    with pytest.raises(ValueError, match="near"):
        rf.stratified_samples(1, 4, 2.0, 1.0)


def test_importance_samples_follow_the_weights():
    z = torch.linspace(1, 5, 41)[None].repeat(2, 1)
    weights = torch.exp(-((z - torch.tensor([[2.0], [4.0]])) ** 2) / (2 * 0.3**2))
    weights[1] += 0.5 * weights[0]
    g = torch.Generator().manual_seed(0)
    new = rf.importance_samples(z, weights, 4000, g)
    assert (new.diff() >= 0).all()
    assert new[0].mean() == pytest.approx(2.0, abs=0.03)
    assert new[0].std() == pytest.approx(0.3, abs=0.03)
    assert (new[1] < 3).float().mean() == pytest.approx(1 / 3, abs=0.03)
    quantiles = rf.importance_samples(z, weights, 4000)
    assert quantiles[0].mean() == pytest.approx(2.0, abs=0.02)
    empty = rf.importance_samples(z, 0 * weights, 100)  # no weight anywhere: spread evenly
    assert empty.min() < 1.2
    assert empty.max() > 4.8


def test_encoding_and_field():
    x = torch.tensor([[0.3, -1.2]])
    code = rf.fourier_features(x, 3)
    assert code.shape == (1, 2 + 2 * 2 * 3)
    for m in range(3):
        for value in x[0]:
            for wave in (torch.sin, torch.cos):
                assert (code - wave(2**m * value)).abs().min() < 1e-6
    for skip in (0, 2, 3, 9):
        field = rf.RadianceField(dim=2, width=8, depth=4, skip=skip, pos_freqs=2, dir_freqs=1)
        sigma, signal = field(torch.randn(4, 5, 2), torch.randn(4, 2))
        assert sigma.shape == signal.shape == (4, 5)
        assert (sigma >= 0).all()
        assert signal.abs().max() <= math.sqrt(2)
    soft = rf.RadianceField(dim=2, width=8, depth=2, density="softplus")
    assert (soft(torch.randn(4, 5, 2), torch.randn(4, 2))[0] > 0).all()
    with pytest.raises(ValueError, match="density"):
        rf.RadianceField(density="exp")


def test_density_sees_the_place_only_and_signal_the_direction_too():
    field = rf.RadianceField(dim=3, width=16, depth=3, skip=1)
    x = torch.randn(1, 6, 3)
    a, b = (field(x, torch.tensor([w])) for w in ([1.0, 0, 0], [0, 1.0, 0]))
    torch.testing.assert_close(a[0], b[0])
    assert (a[1] - b[1]).abs().min() > 0
