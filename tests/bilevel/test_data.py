import numpy as np
import pytest

from icml24.bilevel.data import (
    ADULT,
    RAND_HEALTH,
    load_digits,
    load_fashion,
    load_income,
    load_mnist,
    load_rand_health,
)
from icml24.core.data import DataUnavailableError


def test_rand_health_table():
    assert RAND_HEALTH.load().level == "extract"
    data = load_rand_health(0)
    assert data.X.shape == (10_048, 43) and data.X_val.shape == (8_000, 43)
    assert len(data.X) + len(data.X_val) + len(data.X_test) == 20_190
    assert len(data.names) == 43 and "hlthg:hlthf" not in data.names  # constant
    largest = np.linalg.eigvalsh(data.X.T @ data.X / len(data.X))[-1]
    assert largest == pytest.approx(4.0)  # logistic curvature at most 1
    assert 0.68 < data.y.mean() < 0.7
    scale = data.X[:, -1].max()
    assert abs(data.X).max() <= 3 * scale * (1 + 1e-12)
    other = load_rand_health(1)
    assert (other.y != data.y).any()
    with pytest.raises(ValueError, match="n and m"):
        load_rand_health(n=20_000, m=1_000)


def test_income_table():
    assert ADULT.load().level == "extract"
    data = load_income(0)
    assert data.X.shape == (16_064, 49) and data.X_test.shape == (8_497, 49)
    assert 0.23 < np.r_[data.y, data.y_val, data.y_test].mean() < 0.25
    names = dict(zip(data.names, data.X.T, strict=True))
    assert not {"income", "weight", "sex: Female"} & set(names)
    assert np.corrcoef(names["education_years"], data.y)[0, 1] > 0.3  # labels fit their rows
    assert np.linalg.eigvalsh(data.X.T @ data.X / len(data.X))[-1] == pytest.approx(4.0)
    with pytest.raises(ValueError, match="n and m"):
        load_income(n=40_000)


@pytest.mark.parametrize(("load", "n", "k"), [(load_digits, 1200, 497), (load_fashion, 2000, 2000)])
def test_label_noise_is_what_it_says(load, n, k):
    data = load(seed=1)
    assert len(data.X) == len(data.images) == n and len(data.X_test) == k
    assert data.corrupted.mean() == pytest.approx(0.6 * 0.9, abs=0.04)
    np.testing.assert_array_equal(data.corrupted, data.y != data.y_true)
    clean = load(seed=1, flip=0.0)
    assert not clean.corrupted.any()
    np.testing.assert_array_equal(clean.y_true, data.y_true)
    np.testing.assert_array_equal(load(seed=1).y, data.y)
    with pytest.raises(ValueError, match="not enough"):
        load(n=20_000)
    with pytest.raises(ValueError, match="flip"):
        load(flip=1.1)


def test_mnist_from_the_wheel_if_it_is_at_hand():
    try:
        data = load_mnist(seed=0)
    except DataUnavailableError as reason:
        pytest.skip(str(reason))
    assert data.X.shape == (3000, 51) and data.images.shape[1:] == (28, 28)
    assert np.bincount(data.y_true).min() > 250
