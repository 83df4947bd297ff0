import warnings

import numpy as np
import pandas as pd
import pytest

import icml24.online_equity as eq


def test_points_are_sorted_merged_and_dropped():
    demand = eq.DemandModel([[3, 1, 3, 9], [2]], [[0.25, 0.5, 0.25, 0.0], [1.0]])
    np.testing.assert_allclose(demand.values, [[1, 3], [2, 2]])
    np.testing.assert_allclose(demand.weights, [[0.5, 0.5], [1, 0]])
    np.testing.assert_allclose(demand.mean, [2, 2])


def test_scenarios_enumerate_the_product_law():
    demand = eq.DemandModel([[1, 2], [5], [3, 4]], [[0.3, 0.7], [1], [0.1, 0.9]])
    scenarios, probability = demand.scenarios()
    assert len(np.unique(scenarios, axis=0)) == len(scenarios) == 4
    assert probability.sum() == pytest.approx(1)
    np.testing.assert_allclose(probability @ scenarios, demand.mean)
    assert probability[(scenarios == [2, 5, 3]).all(axis=1)] == pytest.approx(0.07)


def test_draws_follow_the_law():
    demand = eq.DemandModel([[1, 2, 5]], [[0.2, 0.5, 0.3]])
    sample = demand.sample(40_000, random_state=1)[:, 0]
    for value, p in zip([1, 2, 5], [0.2, 0.5, 0.3], strict=True):
        assert abs((sample == value).mean() - p) < 4 * np.sqrt(p * (1 - p) / 40_000)
    np.testing.assert_array_equal(demand.sample(5, 3), demand.sample(5, 3))


@pytest.mark.parametrize("bins", [None, 1, 3, 100])
def test_from_samples_keeps_the_mean_for_any_number_of_bins(bins, rng):
    sample = np.floor(rng.exponential(5, 57))
    demand = eq.DemandModel.from_samples([sample, [1.0, 2.0]], bins=bins)
    np.testing.assert_allclose(demand.mean, [sample.mean(), 1.5])
    assert demand.sizes[0] <= (bins or 57)


def test_long_table_round_trip_keeps_order_of_arrival():
    demand = eq.DemandModel([[1, 3], [2]], [[0.25, 0.75], [1.0]], names=["z", "a"])
    again = eq.DemandModel.from_frame(demand.to_frame(), probability="probability")
    assert again.names == ["z", "a"]
    np.testing.assert_allclose(again.values, demand.values)
    np.testing.assert_allclose(again.weights, demand.weights)


def test_dependent_columns_warn_and_independent_ones_do_not(rng):
    common = rng.exponential(1, (60, 1))
    with pytest.warns(UserWarning, match="dependent"):
        eq.DemandModel.from_samples(common + 0.3 * rng.exponential(1, (60, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = eq.DemandModel.from_samples(pd.DataFrame(rng.exponential(1, (60, 4))))
    assert model.n == 4


@pytest.mark.parametrize(
    ("supports", "probabilities", "message"),
    [
        ([[1, 2]], [[0.5, 0.4]], "sum to 0.9"),
        ([[1, -2]], None, "not negative"),
        ([[1, np.inf]], None, "finite"),
        ([[1, np.nan]], None, "finite"),
        ([[1], []], None, "agent 1"),
        ([], None, "empty"),
        ([[1, 2]], [[1.5, -0.5]], "not negative"),
        ([[1, 2]], [[1.0]], "same lengths"),
        ([[1, "many"]], None, "numbers"),
    ],
)
def test_bad_laws_are_refused(supports, probabilities, message):
    with pytest.raises(ValueError, match=message):
        eq.DemandModel(supports, probabilities)


def test_bad_tables_are_refused():
    table = pd.DataFrame({"agent": ["a"], "demand": [1.0]})
    with pytest.raises(ValueError, match="no column 'doses'"):
        eq.DemandModel.from_frame(table, demand="doses")
    with pytest.raises(ValueError, match="empty"):
        eq.DemandModel.from_frame(table.iloc[:0])
    with pytest.raises(ValueError, match="NaN"):
        eq.DemandModel.from_samples(np.array([[1.0, np.nan]]))
    with pytest.raises(ValueError, match="bins"):
        eq.DemandModel.from_samples([[1.0]], bins=0)
    with pytest.raises(ValueError, match="one per agent"):
        eq.DemandModel([[1], [2]], names=["only one"])


def test_too_many_scenarios_are_refused():
    with pytest.raises(ValueError, match="too many"):
        eq.DemandModel([[1, 2]] * 30).scenarios()


def test_locate_finds_or_refuses():
    demand = eq.DemandModel([[1, 4, 10]])
    np.testing.assert_array_equal(demand.locate(0, np.array([10, 1, 4 * (1 + 1e-12)])), [2, 0, 1])
    np.testing.assert_array_equal(
        demand.locate(0, np.array([0, 2, 3, 99]), nearest=True), [0, 0, 1, 2]
    )
    with pytest.raises(ValueError, match="from_samples"):
        demand.locate(0, np.array([2.0]))
