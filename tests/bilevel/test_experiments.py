"""The experiments on toy sizes: contracts, and the order of methods that theory demands."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from icml24.bilevel import experiments
from icml24.bilevel.data import load_digits
from icml24.bilevel.experiments import (
    EXPERIMENTS,
    Config,
    cleaning,
    expectation,
    finite_sum,
    make_records,
    noise_floor,
    penalties,
    simple_baselines,
    slope,
    stored,
)
from icml24.core.experiments import run

TINY = replace(
    Config.laptop(), sizes=(64, 256), target=1e-2, precisions=(1e-1, 3e-2), d=6, streams=1,
    max_steps=800, budget=6e4, penalty_methods=("spaba", "full"), cleaning_budget=1e4,
)  # fmt: skip


def test_slope_recovers_a_power():
    x = np.array([1.0, 10.0, 100.0])
    assert slope(x, 3 * x**1.5) == pytest.approx(1.5)


def test_finite_sum_counts_and_ratios():
    config = replace(TINY, target=1e-3)  # coarser ones are over before y and z have settled
    record = finite_sum(config, 0)
    assert record["slope:full"] == pytest.approx(1.0, abs=0.02)
    assert record["calls:spaba:256"] < record["calls:full:256"] / 2
    assert record["ratio:full"] == pytest.approx(1.0, abs=0.1)
    assert record["ratio:single level"] == pytest.approx(1.0, abs=0.15)
    assert record == finite_sum(config, 0)


def test_expectation_prices_grow_with_precision():
    record = expectation(TINY, 0)
    for name in ("soba", "spaba", "srmba"):
        assert record[f"calls:{name}:0.03"] > record[f"calls:{name}:0.1"]
    assert record["slope gap"] == pytest.approx(record["slope:soba"] - record["slope:spaba"])


def test_noise_floor_and_clip():
    record = noise_floor(TINY, 0)
    assert record["floor:soba"] > 1e-4 > 1e-20 > record["floor:spaba"]
    assert record["clip:1:free"] < 1e-12 and record["clip:30:free"] < 1e-12
    assert record["clip:1:box"] > 1e-3 and record["clip:30:box"] > 1e-3


def test_penalties_on_real_data():
    record = penalties(TINY, 0)
    assert 0 < record["gap:spaba"] < record["gap:full"] < record["start"]
    assert record["curve:spaba"].shape[0] == 2


def test_cleaning_on_real_images():
    record = cleaning(TINY, 0)
    assert record["auc:digits:spaba"] > 0.8
    assert record["acc:digits:oracle"] > record["acc:digits:noisy"]


def test_stored_penalties_are_those_of_the_code():
    frame, config = stored("penalties"), Config.laptop()
    assert frame["seed"].tolist() == list(range(5))
    assert {f"gap:{name}" for name in config.penalty_methods} <= set(frame)
    assert frame["curve:spaba"][0].shape[0] == 2
    now = penalties(replace(config, penalty_methods=("saba",), curves=()), 1)
    assert now["gap:saba"] == pytest.approx(frame["gap:saba"][1], rel=0.02)
    assert now["steps:saba"] == tuple(frame["steps:saba"][1])


def test_stored_check_on_the_second_table():
    frame, config = stored("penalties_income"), Config.income()
    assert frame["seed"].tolist() == list(range(5))
    assert {name[4:] for name in frame if name.startswith("gap:")} == set(config.penalty_methods)
    now = penalties(replace(config, penalty_methods=("saba",)), 1)
    assert now["gap:saba"] == pytest.approx(frame["gap:saba"][1], rel=0.02)


def test_stored_cleaning_is_that_of_the_code():
    frame = stored("cleaning")
    assert frame["seed"].tolist() == list(range(5))
    assert frame["auc:fashion:spaba"].min() > 0.8
    for name, accuracy in simple_baselines(load_digits(1)).items():
        assert accuracy == pytest.approx(frame[f"acc:digits:{name}"][1], abs=0.01)


def _toy(config, seed):
    return {"curve:toy": np.arange(seed + 2.0)}


def test_records_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setitem(experiments.STORED, "cleaning", (_toy, TINY))
    make_records(tmp_path, ["cleaning"], jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["cleaning.json"]
    monkeypatch.setattr(experiments, "read_records", lambda _, name: pd.read_json(tmp_path / name))
    np.testing.assert_array_equal(stored("cleaning")["curve:toy"][4], np.arange(6.0))


def test_the_experiments_run_through_core():
    frame = run(noise_floor, TINY, seeds=[0])
    assert frame.loc[0, "floor:soba"] > 0
    assert set(EXPERIMENTS) == {"finite_sum", "expectation", "noise_floor", "penalties", "cleaning"}
    assert Config.paper().sizes[-1] > Config.laptop().sizes[-1]
