"""The experiments are pure, and the claims are well formed."""

import math
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pandas as pd
import pytest

from icml24.additive_models.experiments import (
    EXPERIMENTS,
    TABLES,
    Config,
    bands,
    build,
    pair_recovery,
    prior_sweep,
    split,
    stage_two,
    stored,
    table_nll,
)
from icml24.core.experiments import run

TINY = replace(Config.laptop(), max_iter=60, n_rows=150, n_columns=4, n_members=2)


def test_bands_record():
    record = bands(TINY, 0)
    assert record["coverage"].shape == record["ensemble_effect"].shape == (4,)
    assert record["worst_coverage"] == record["coverage"].min()
    gain = record["coverage"] - record["ensemble_coverage"]
    assert record["coverage_gain"] == pytest.approx(gain.mean())
    again = bands(TINY, 0)
    np.testing.assert_array_equal(record["coverage"], again["coverage"])


def test_table_nll_over_folds_and_methods():
    grid = {"table": ["heart", "yacht"], "method": ["LA-NAM", "linear", "NAM"]}
    frame = run(table_nll, TINY, 1, grid=grid, progress=False)
    assert len(frame) == 6
    assert np.isfinite(frame.nll).all()
    heart = frame[frame.table == "heart"]
    assert (heart.nll < np.log(2)).all()
    first = heart.iloc[0]
    likelihood = np.where(first.y == 1, first.p, 1 - first.p)
    assert first.nll == pytest.approx(-np.log(likelihood).mean())
    measured = frame[(frame.table == "yacht") & (frame.method == "LA-NAM")]
    assert measured.coverage.notna().all()


def test_prior_sweep_goes_from_wild_to_flat():
    wild, flat = prior_sweep([-4.0, 6.0], n_rows=20)
    assert wild.log_likelihood > flat.log_likelihood
    assert wild.std[0] > 1.0 > 0.5 > flat.std[0]
    assert np.abs(flat.mean).max() < np.abs(wild.mean).max()


def test_folds_partition_the_rows_and_repeat_by_seed():
    y = np.arange(53) % 2
    tests = [split(53, y, seed)[1] for seed in range(5)]
    assert sorted(np.concatenate(tests)) == list(range(53))
    train, test = split(53, None, 7)
    assert not set(train) & set(test)
    np.testing.assert_array_equal(test, split(53, None, 7)[1])
    assert set(test) != set(split(53, None, 2)[1])


def test_pair_recovery_and_stage_two():
    record = pair_recovery(replace(TINY, max_iter=200), 0)
    assert record["evidence"] == 1.0
    assert set(record) == {"evidence", "mutual_info", "marglik_slack", "random", "FAST"}
    result = stage_two(replace(TINY, table="planted", pair_method="evidence"), 0)
    assert len(result["pairs"]) == 2
    assert stage_two(replace(TINY, table="planted"), 0)["pairs"] == []


def test_unknown_method():
    with pytest.raises(ValueError, match="method must be 'LA-NAM' or one of linear"):
        build(replace(TINY, method="XGBoost"), "regression", 0)


def test_paper_scale_is_larger():
    assert Config.paper().max_iter > Config.laptop().max_iter
    assert Config.paper().max_rows > 45_730  # protein, whole


def test_experiments_are_listed_by_name():
    assert list(EXPERIMENTS) == ["bands", "table_nll", "pair_recovery", "stage_two"]
    assert all(function.__name__ == name for name, function in EXPERIMENTS.items())


def test_claims_are_well_formed():
    text = (resources.files("icml24.additive_models") / "claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    ids = [claim["id"] for claim in claims]
    assert len(ids) == len(set(ids)) > 10
    for claim in claims:
        assert {"abstract", "statement", "metric", "paper"} <= claim.keys()
        assert ("accept" in claim) != ("not_testable" in claim)
        if "accept" in claim:
            low, high = claim["accept"]
            assert low < high


PIECES = {
    "ebm_concrete": {"table": "concrete", "method": "EBM", "seed": 3},
    "regression": {"table": "autompg", "method": "LA-NAM, exact block", "seed": 2},
    "correlation": {"correlation": 0.6, "seed": 1},
    "second_stage": {"pair_method": "random", "seed": 1},
}


def test_stored_tables_are_whole():
    assert PIECES.keys() == TABLES.keys()
    for name, (_, _, grid, seeds) in TABLES.items():
        frame = stored(name)
        assert len(frame) == seeds * math.prod(map(len, grid.values()))
        assert not frame[[*grid, "seed"]].duplicated().any()
        for key, values in grid.items():
            assert set(frame[key]) == set(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_stored_records_are_what_the_experiment_gives(name):
    experiment, config, _, _ = TABLES[name]
    piece = PIECES[name]
    frame = stored(name)
    (row,) = frame[(frame[list(piece)] == pd.Series(piece)).all(axis=1)].to_dict("records")
    settings = {key: value for key, value in piece.items() if key != "seed"}
    again = experiment(replace(config, **settings), piece["seed"])
    for key in again.keys() & row.keys() - {"pairs", "coverage"}:
        assert again[key] == pytest.approx(row[key], rel=2e-3, abs=2e-3), key
