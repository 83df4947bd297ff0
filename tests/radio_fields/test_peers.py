"""Interpolators: exact cases and the right prior."""

import numpy as np
import pytest
import torch
from scipy.special import j0
from sklearn.exceptions import NotFittedError

import icml24.radio_fields as rf

F = 928e6
K = 2 * np.pi / rf.wavelength(F)


def random_waves(n, dim=2, seed=0, m=200):
    """A field of waves of one frequency from all directions, whose covariance is the kernel."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(m, dim))
    w /= np.linalg.norm(w, axis=1, keepdims=True)
    a = rng.normal(size=(m, 2)) @ [1, 1j] / np.sqrt(2 * m)
    x = rng.uniform(0, 1, (n, dim))
    return x, np.exp(1j * K * x @ w.T) @ a


def test_neighbours_by_hand():
    model = rf.NearestNeighbours(ks=(2,)).fit([[0.0, 0], [3, 0], [9, 9]], [1 + 0j, 4, 100])
    assert model.predict([[1.0, 0]])[0] == pytest.approx((1 / 1 + 4 / 2) / (1 + 1 / 2))
    assert model.k_ == 2
    smooth_x = np.random.default_rng(0).uniform(0, 1, (80, 2))
    assert rf.NearestNeighbours().fit(smooth_x, np.ones(80) * 1j).predict([[0.5, 0.5]]) == 1j


def test_helmholtz_kernel_is_the_covariance_of_random_waves():
    r = np.array([0.0, 0.05, 0.13, 0.4])
    rng = np.random.default_rng(0)
    w = rng.normal(size=(400_000, 3))
    w /= np.linalg.norm(w, axis=1, keepdims=True)
    space = np.exp(1j * K * w[:, :1] * r).mean(axis=0)
    np.testing.assert_allclose(rf.helmholtz_kernel(r, F, 3), space.real, atol=5e-3)
    np.testing.assert_allclose(rf.helmholtz_kernel(r, F, 2), j0(K * r))


@pytest.mark.parametrize("dim", [2, 3])
def test_helmholtz_gp_beats_the_others_on_its_own_prior(dim):
    x, h = random_waves(460 if dim == 3 else 160, dim)
    n = len(x) - 60
    scores = {}
    for model in (rf.HelmholtzGP(F), rf.RBFGP(), rf.NearestNeighbours()):
        scores[type(model).__name__] = model.fit(x[:n], h[:n]).score(x[n:], h[n:])
    assert scores["HelmholtzGP"] > 10
    assert scores["HelmholtzGP"] > max(scores["RBFGP"], scores["NearestNeighbours"]) + 1


def test_leave_one_out_is_exact():
    x, h = random_waves(25)
    model = rf.HelmholtzGP(F, noises=(0.1,)).fit(x, h)
    left = []
    for i in range(25):
        rest = np.arange(25) != i
        part = rf.HelmholtzGP(F, noises=(0.1,)).fit(x[rest], h[rest])
        left.append(part.predict(x[i : i + 1])[0] - h[i])
    kernel = rf.helmholtz_kernel(np.linalg.norm(x[:, None] - x, axis=-1), F, 2) + 0.1 * np.eye(25)
    inverse = np.linalg.inv(kernel)
    np.testing.assert_allclose(model.weights_, inverse @ h, rtol=1e-8)
    np.testing.assert_allclose(-(inverse @ h) / np.diag(inverse), left, rtol=1e-6)


def test_network_learns_a_smooth_field_and_is_reproducible():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (120, 2))
    h = np.exp(1j * (2 * x[:, 0] + x[:, 1])) * 1e-4
    model = rf.CoordinateMLP(pos_freqs=2, steps=300).fit(x[:100], h[:100])
    assert model.score(x[100:], h[100:]) > 15
    again = rf.CoordinateMLP(pos_freqs=2, steps=300).fit(x[:100], h[:100])
    np.testing.assert_array_equal(model.predict(x), again.predict(x))


@pytest.mark.parametrize(
    "model", [rf.NearestNeighbours(), rf.RBFGP(), rf.HelmholtzGP(F), rf.CoordinateMLP(steps=40)]
)
def test_contract(model):
    x, h = random_waves(20)
    state = torch.random.get_rng_state()
    with pytest.raises(NotFittedError):
        model.predict(x)
    assert model.fit(x, h) is model
    assert torch.equal(state, torch.random.get_rng_state())
    out = model.predict(x[:3])
    assert out.shape == (3,) and np.iscomplexobj(out)
    assert torch.is_tensor(model.predict(torch.as_tensor(x[:3])))
    for bad, message in ((h.real, "complex"), (0 * h, "zero everywhere"), (h[:5], "shape")):
        with pytest.raises(ValueError, match=message):
            model.fit(x, bad)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(x, np.where(np.arange(20) == 3, np.nan, h))
    with pytest.raises(ValueError, match="two receivers"):
        model.fit(x[:1], h[:1])
    model.fit(x, h)
    with pytest.raises(ValueError, match="2 coordinates"):
        model.predict(np.ones((2, 3)))
