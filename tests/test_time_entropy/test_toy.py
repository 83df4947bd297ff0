import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from icml24.test_time_entropy import toy


def reference(function, b, k, s, shift=0.0, mu=1.0):
    def density(x):
        return 0.5 * (norm.pdf(x, -mu + shift, s) + norm.pdf(x, mu + shift, s))

    points = sorted({-b, -mu + shift, mu + shift})
    return quad(lambda x: function(k * (x + b)) * density(x), -15, 15, points=points, limit=400)[0]


@pytest.mark.parametrize(("k", "s"), [(2, 0.3), (4, 0.9), (16, 0.9), (16, 0.2)])
def test_energy_agrees_with_adaptive_quadrature(k, s):
    for b, shift in ((0.0, 0.0), (0.7, 0.2), (-1.5, 0.4)):
        wanted = reference(toy.binary_entropy, b, k, s, shift)
        assert np.isclose(toy.energy(b, k, s, shift), wanted, atol=1e-9)


@pytest.mark.parametrize(
    ("k", "wanted"),
    [(2, 0.536), (3, 0.780), (4, 0.870), (5, 0.914), (6, 0.939), (8, 0.965), (16, 0.991)],
)
def test_critical_spread(k, wanted):
    assert abs(toy.critical_spread(k) - wanted) < 6e-4


def test_critical_spread_tends_to_bimodality_and_scales():
    """A mixture of two normals at +-mu has two peaks iff s < mu."""
    assert abs(toy.critical_spread(1000.0) - 1) < 1e-5
    assert np.isclose(toy.critical_spread(2.0, mu=2.0), 2 * toy.critical_spread(4.0))
    with pytest.raises(ValueError, match="too flat"):
        toy.critical_spread(1.5)


@settings(max_examples=25, deadline=None)
@given(st.floats(1, 10), st.floats(0.1, 1.2))
def test_curvature_is_the_second_difference_of_the_energy(k, s):
    h = 1e-3
    e = toy.energy([-h, 0.0, h], k, s)
    assert np.isclose((e[0] - 2 * e[1] + e[2]) / h**2, toy.gap_curvature(k, s), atol=2e-4 * k**2)


def test_energy_vanishes_at_collapse_and_has_a_barrier():
    assert toy.energy([-30.0, 30.0], 4, 0.4).max() < 1e-12
    b = np.linspace(0, 2, 201)
    e = toy.energy(b, 4, 0.4)
    assert np.isclose(e[0], 0.148, atol=1e-3)
    assert np.isclose(e.max(), 0.261, atol=1e-3) and np.isclose(b[e.argmax()], 0.98, atol=0.02)


def test_flow_descends_and_finds_the_gap_or_collapses():
    path = toy.flow(4, 0.45, shift=0.5, steps=2000)
    assert (np.diff(toy.energy(path, 4, 0.45, 0.5)) <= 1e-12).all()
    assert np.isclose(path[-1], -0.5, atol=1e-4)
    assert toy.accuracy(path[[0, -1]], 0.45, 0.5).round(3).tolist() == [0.933, 0.987]
    lost = toy.flow(2, 0.5, shift=0.6, steps=4000)
    assert toy.accuracy(lost[[0, -1]], 0.5, 0.6).round(3).tolist() == [0.894, 0.5]


@settings(max_examples=25, deadline=None)
@given(st.floats(-2, 2), st.floats(0.2, 1.5), st.floats(-1, 1))
def test_accuracy_by_simulation(b, s, shift):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 40_000)
    x = 2 * y - 1 + shift + s * rng.normal(size=y.size)
    assert abs(toy.accuracy(b, s, shift) - np.mean((x + b > 0) == y)) < 0.012


def test_binary_entropy_is_safe_and_even():
    z = np.array([-800.0, -3.0, 0.0, 3.0, 800.0])
    h = toy.binary_entropy(z)
    assert np.allclose(h, h[::-1]) and h[0] == 0 and np.isclose(h[2], np.log(2))
    p = expit(3.0)
    assert np.isclose(h[3], -p * np.log(p) - (1 - p) * np.log(1 - p))


def test_bad_parameters_are_named():
    with pytest.raises(ValueError, match="positive"):
        toy.energy(0.0, k=-1, s=0.5)
