import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from icml24.core.statistics import Estimate, mean_interval, paired_difference, proportion_interval

finite = st.floats(-1e6, 1e6)


def test_t_interval_by_hand():
    # n = 4, mean 2.5, s = sqrt(5/3), t(0.975, 3) = 3.18245
    e = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182446305284263 * np.sqrt(5 / 3) / 2
    assert (e.value, e.n) == (2.5, 4)
    assert np.allclose([e.low, e.high], [2.5 - half, 2.5 + half])


def test_t_interval_covers_at_its_level():
    rng = np.random.default_rng(0)
    hits = sum(e.low <= 1.0 <= e.high for e in map(mean_interval, rng.normal(1.0, 2.0, (2000, 5))))
    assert proportion_interval(hits, 2000, 0.999).low <= 0.95
    assert proportion_interval(hits, 2000, 0.999).high >= 0.95


def test_bootstrap_is_reproducible_and_near_t_for_normal_data():
    x = np.random.default_rng(1).normal(size=60)
    a, b = (mean_interval(x, method="bootstrap", random_state=3) for _ in range(2))
    t = mean_interval(x)
    assert a == b
    assert np.allclose([a.low, a.high], [t.low, t.high], atol=0.05)


def test_a_single_or_constant_sample_has_no_width():
    assert mean_interval([3.0]) == Estimate(3.0, 3.0, 3.0, 1)
    assert mean_interval([3.0, 3.0]) == Estimate(3.0, 3.0, 3.0, 2)


@given(st.lists(finite, min_size=2, max_size=8), finite, st.floats(0.1, 10))
def test_mean_interval_moves_with_shift_and_scale(x, shift, factor):
    x = np.array(x)
    a, b = mean_interval(x), mean_interval(factor * x + shift)
    tolerance = 1e-6 * (1 + np.abs(x).max() * factor + abs(shift))
    assert np.allclose(
        [b.low, b.high], [factor * a.low + shift, factor * a.high + shift], atol=tolerance
    )


def test_paired_difference_removes_what_pairs_share():
    rng = np.random.default_rng(2)
    common = 100 * rng.normal(size=6)
    a, b = common + 1 + 0.01 * rng.normal(size=6), common
    e = paired_difference(a, b)
    assert e.low > 0.9
    assert e.high < 1.1


@given(st.integers(1, 50), st.data())
def test_clopper_pearson_by_beta_quantiles(trials, data):
    k = data.draw(st.integers(0, trials))
    e = proportion_interval(k, trials)
    low = 0.0 if k == 0 else stats.beta.ppf(0.025, k, trials - k + 1)
    high = 1.0 if k == trials else stats.beta.ppf(0.975, k + 1, trials - k)
    assert np.allclose([e.low, e.high], [low, high], atol=1e-8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), "non-empty"),
        (lambda: mean_interval([[1.0]]), "1-D"),
        (lambda: mean_interval([1.0, np.nan]), "NaN"),
        (lambda: mean_interval([1.0, 2.0], level=1.0), "level"),
        (lambda: mean_interval([1.0, 2.0], method="magic"), "'t' or 'bootstrap'"),
        (lambda: paired_difference([1.0], [1.0, 2.0]), "paired run by run"),
        (lambda: proportion_interval(3, 2), "between 0 and trials"),
        (lambda: Estimate(2.0, 0.0, 1.0), "inside its interval"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
