"""Errors, volumes, trends and intervals against hand calculations; maps."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import icml24.ocean_oxygen as oo


def test_mape_leaves_out_low_values():
    assert oo.mape([4, 10, 20], [0, 9, 22]) == pytest.approx(10)
    assert oo.mape([4, 10, 20], [0, 9, 22], threshold=0) == pytest.approx(100 * 1.2 / 3)
    assert oo.mape([5.0], [4.0]) == pytest.approx(20)  # the threshold itself counts
    with pytest.raises(ValueError, match="No true value"):
        oo.mape([1.0], [1.0])


def test_errors_need_matching_finite_values():
    for function in (oo.mape, oo.rmse, oo.r2):
        with pytest.raises(ValueError, match="must match"):
            function([1.0, 2.0], [1.0])
        with pytest.raises(ValueError, match="finite"):
            function([10.0, np.nan], [1.0, 2.0])


def test_r2_of_the_mean_is_zero():
    y = np.array([1.0, 2.0, 6.0])
    assert oo.r2(y, np.full(3, y.mean())) == pytest.approx(0)


def test_volumes_and_means_by_hand():
    field = np.array([[[50.0, 200.0], [np.nan, 90.0]], [[150.0, np.nan], [99.0, 101.0]]])
    volume = np.array([[[1.0, 2.0], [9.0, 3.0]], [[4.0, 9.0], [5.0, 6.0]]])
    assert oo.low_volume(field, volume, 100) == pytest.approx((1 + 3 + 5) / 21)
    mean = (50 + 400 + 270 + 600 + 495 + 606) / 21
    assert oo.weighted_mean(field, volume) == pytest.approx(mean)
    np.testing.assert_allclose(oo.weighted_mean(np.stack([field, field]), volume), [mean] * 2)


@given(st.floats(-5, 5), st.floats(-100, 100))
def test_trend_of_a_line(slope, start):
    years = np.arange(1920, 2024, 5)
    assert oo.trend(start + slope * years, years) == pytest.approx(50 * slope, abs=1e-6)


def test_trend_needs_years():
    with pytest.raises(ValueError, match="fewer than two years"):
        oo.trend([1.0, 2.0], [1900, 1910])


def test_regional_table():
    table = oo.regional_table([100, 200, 300], [110, 200, 330], [0, 0, 4])
    assert table.index.tolist() == ["Atlantic", "Arctic"]
    assert table.loc["Arctic", "RMSE"] == 30
    assert table.loc["Atlantic", "MAPE"] == 5
    assert table["n"].tolist() == [2, 1]


def test_conformal_rank_by_hand():
    errors = np.arange(1, 40.0)  # 39 of them: the ceil(40 * 0.9) = 36th smallest
    conformal = oo.ZoneConformal(0.1).fit(errors, np.zeros(39, int), 2)
    assert conformal.half_width_.tolist() == [36, 36]
    few = oo.ZoneConformal(0.1).fit(errors[:5], np.zeros(5, int), 1)
    assert np.isinf(few.half_width_[0])  # five errors cannot give 90 %
    none = oo.ZoneConformal(0.1).fit([], np.zeros(0, int), 2)
    assert np.isinf(none.half_width_).all()


@pytest.mark.parametrize(("n", "width"), [(29, 1.0), (30, 7.0)])
def test_a_zone_with_few_errors_takes_the_pooled_width(n, width):
    """Thirty errors of 7 speak for their zone; with one fewer, the thousand others do."""
    errors, zone = np.r_[np.full(1000, 1.0), np.full(n, 7.0)], np.r_[np.zeros(1000), np.ones(n)]
    assert oo.ZoneConformal(0.1).fit(errors, zone, 2).half_width_.tolist() == [1.0, width]


def test_conformal_covers_each_zone():
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(200):
        zone = rng.integers(2, size=400)
        error = rng.normal(size=400) * np.array([1.0, 10.0])[zone]
        width = oo.ZoneConformal(0.1).fit(error[:200], zone[:200], 2).half_width_
        inside = np.abs(error[200:]) <= width[zone[200:]]
        hits += [inside[zone[200:] == i].mean() for i in (0, 1)]
    np.testing.assert_allclose(hits / 200, 0.9, atol=0.02)
    assert width[1] > 5 * width[0]


def test_conformal_bad_input():
    with pytest.raises(ValueError, match="alpha"):
        oo.ZoneConformal(1.0)
    with pytest.raises(ValueError, match="same length"):
        oo.ZoneConformal().fit([1.0], [0, 1], 2)


def test_maps_show_the_field_and_grey_land():
    grid = oo.ocean_grid(12)
    figure, (left, right) = plt.subplots(1, 2)
    mesh = oo.plot_map(grid.temperature[0], left, label="°C", vmin=0)
    assert np.isfinite(mesh.get_array().compressed()).all()
    assert mesh.get_array().mask.sum() == int((~grid.wet[0]).sum())
    section = oo.plot_section(grid.temperature.sel(lon=-150, method="nearest"), right)
    assert right.yaxis_inverted()
    assert section.get_array().shape == (8, 15)
    with pytest.raises(ValueError, match="lat and lon"):
        oo.plot_map(grid.temperature)
    with pytest.raises(ValueError, match="depth and lat"):
        oo.plot_section(grid.temperature[0])
    plt.close(figure)
