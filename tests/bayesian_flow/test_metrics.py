"""Metrics: hand-computed cases, closed forms, invariants."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icml24.bayesian_flow import (
    energy_distance,
    frechet_distance,
    nfe_at_quality,
    ngram_tv,
    speedup,
    speedup_interval,
    spelling_accuracy,
    total_variation,
)


def test_frechet_of_known_gaussians():
    # Diagonal covariances: |shift|^2 + sum (s_a - s_b)^2.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3))
    x = (x - x.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    a, b = x * [1.0, 2.0, 3.0], x * [2.0, 2.0, 1.0] + [0.0, 3.0, 0.0]
    assert math.isclose(frechet_distance(a, b), 9 + 1 + 0 + 4, rel_tol=1e-9)


@given(st.integers(0, 1000))
def test_frechet_is_a_symmetric_distance(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(30, 4)), rng.normal(1, 2, size=(20, 4))
    assert abs(frechet_distance(a, a)) < 1e-9
    assert math.isclose(frechet_distance(a, b), frechet_distance(b, a), rel_tol=1e-7)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert math.isclose(frechet_distance(a @ turn, b @ turn), frechet_distance(a, b), rel_tol=1e-7)


def test_frechet_of_degenerate_features():
    a = np.zeros((10, 3))
    assert frechet_distance(a, a + 2) == pytest.approx(12.0)


def test_energy_distance():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2000, 2)), rng.normal(size=(2000, 2))
    assert abs(energy_distance(a, b)) < 0.01
    assert energy_distance(a, b + 1) > 0.3
    # Two points against two points by hand: 2 * mean(|a-b|) - |a-a'| - |b-b'|.
    assert math.isclose(energy_distance([[0.0], [1.0]], [[2.0], [4.0]]), 2 * 2.5 - 1 - 2)


def test_spelling_leaves_cut_words_out():
    vocabulary = {"union", "state"}
    assert spelling_accuracy(["xion state of the uni"], vocabulary) == pytest.approx(1 / 3)
    assert spelling_accuracy(["a state b", "c union d"], frozenset(vocabulary)) == 1.0
    with pytest.raises(ValueError, match="no whole word"):
        spelling_accuracy(["oneword", ""], vocabulary)


def test_ngram_tv():
    a = torch.tensor([[0, 1, 0, 1]])  # pairs 01 10 01
    b = torch.tensor([[0, 0, 1, 0]])  # pairs 00 01 10
    assert ngram_tv(a, a, 2, 2) == 0.0
    assert ngram_tv(a, b, 2, 2) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="order"):
        ngram_tv(a, b, 5, 2)


def test_calls_at_a_quality():
    assert nfe_at_quality([5, 10], [1.0, 0.5], 2.0) == 5.0
    assert nfe_at_quality([5, 10], [1.0, 0.5], 0.1) == math.inf
    assert nfe_at_quality([4, 16], [1.0, 0.25], 0.5) == pytest.approx(8.0)
    assert nfe_at_quality([4, 8, 16], [1.0, 2.0, 0.25], 0.5) == pytest.approx(
        8 * 2**0.5
    )  # the bump at 8 is levelled to 1
    assert speedup([4, 16], [1.0, 0.25], nfe=2, error=0.5) == pytest.approx(4.0)


@given(st.floats(0.5, 3), st.floats(1.1, 20))
def test_speedup_recovers_the_factor_of_a_shifted_power_law(power, factor):
    nfe = np.array([5.0, 10, 20, 50, 100, 200, 400])
    assert math.isclose(
        speedup(nfe, nfe**-power, nfe=10, error=(10 * factor) ** -power), factor, rel_tol=1e-6
    )


def test_speedup_interval():
    nfe, rng = [5, 10, 20, 40], np.random.default_rng(0)
    curves = np.array([40.0, 20, 10, 5]) * np.exp(0.05 * rng.normal(size=(6, 4)))
    found = speedup_interval(nfe, curves, 5, 10 * np.exp(0.05 * rng.normal(size=6)))
    assert found.low < 4.0 < found.high and found.high < 2 * found.low and found.n == 6
    capped = speedup_interval(nfe, curves, 5, np.full(6, 0.1))
    assert capped.value == capped.low == capped.high == 8.0
    assert speedup_interval(nfe, curves, 5, np.full(6, 0.1), cap=99.0).value == 99.0
    with pytest.raises(ValueError, match="runs"):
        speedup_interval(nfe, curves[0], 5, [0.1])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="matrix"):
        frechet_distance([1.0, 2.0], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="same features"):
        frechet_distance(np.zeros((3, 2)), np.zeros((3, 1)))
    with pytest.raises(ValueError, match="NaN"):
        energy_distance([[np.nan], [0.0]], [[0.0], [1.0]])
    with pytest.raises(ValueError, match="shape"):
        total_variation([1.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="rise"):
        nfe_at_quality([10, 5], [1.0, 0.5], 0.7)
    with pytest.raises(ValueError, match="positive"):
        nfe_at_quality([5, 10], [1.0, 0.0], 0.7)
