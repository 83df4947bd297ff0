import json
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from icml24.core.experiments import run
from icml24.test_time_entropy import experiments
from icml24.test_time_entropy.data import shifted
from icml24.test_time_entropy.experiments import Config, calibration_sets, estimation
from icml24.test_time_entropy.networks import source_network
from icml24.test_time_entropy.weighted_flips import WeightedFlips

SMALL = replace(
    Config.laptop(),
    n_images=128,
    n_probe=100,
    severities=(5,),
    calibration=(5,),
    flip_steps=2,
    gain_steps=2,
    flip_lr=0.2,
    marks=(0, 1, 2),
)


@pytest.fixture(scope="module")
def record():
    return estimation(SMALL, 0)


def test_configs():
    assert len(experiments.test_sets(Config.laptop())) == 36
    assert len(calibration_sets(Config.laptop())) == 13
    assert len(experiments.test_sets(Config.paper())) == 90
    assert len(calibration_sets(Config.paper())) == 21
    assert Config.paper().flip_steps == 990 and Config.paper().n_probe == 1000


def test_estimation_adds_up(record):
    for target in ("source", "adapted"):
        truth = record[f"truth_{target}"]
        assert truth.shape == (18,) and ((truth >= 0) & (truth <= 1)).all()
        for name, values in record[f"estimates_{target}"].items():
            assert values.shape == truth.shape, name
            error = 100 * np.abs(values - truth).mean()
            assert np.isclose(error, record[f"error_{target}"][name])
    wf = record["error_source"]["wf"]
    assert record["wf_source"] == wf
    assert np.isclose(record["target_gap"], wf - record["wf_adapted"])
    margins = [
        record[f"error_{t}"][p] - record[f"error_{t}"]["wf"]
        for t in ("source", "adapted")
        for p in ("confidence", "doc")
    ]
    assert np.isclose(record["margin_confidence"], min(margins))
    best = min(record["error_source"][p] for p in experiments.RAW)
    assert np.isclose(record["gain_over_best_raw"], 100 * (best - wf) / best)


def test_estimation_repeats_in_any_order(record):
    again = estimation(SMALL, 0)
    assert np.array_equal(again["flips"], record["flips"])
    assert again["error_source"] == record["error_source"]


@pytest.mark.parametrize("name", ["first_gain", "two_phases", "stop_rule"])
def test_other_experiments_run(name):
    frame = run(experiments.EXPERIMENTS[name], SMALL, seeds=[3])
    assert np.isfinite(frame.select_dtypes("number").to_numpy(float)).all()


def test_gain_with_room_is_that_of_the_two_named_blurs():
    found = experiments.first_gain(SMALL, 0)
    gains = dict(zip(found["names"], found["gains"], strict=True))
    assert len(gains) == 18 and any(gains.values())
    assert np.isclose(found["gain_with_room"], (gains["glass_blur"] + gains["motion_blur"]) / 2)
    assert np.isclose(found["gain"], np.mean(list(gains.values())))


def test_two_phases_reads_its_traces():
    found = experiments.two_phases(SMALL, 0)
    ends = [
        100 * (trace["accuracy"][-1] - trace["accuracy"][0]) for trace in found["traces"].values()
    ]
    assert np.isclose(found["change_at_end"], np.mean(ends))
    regret = [
        100 * (t["accuracy"].max() - t["accuracy"][t["frechet_frozen"].argmin()])
        for t in found["traces"].values()
    ]
    assert np.isclose(found["stop_regret"], np.mean(regret))


def test_stored_long_run_is_what_the_code_gives(tmp_path):
    stored = experiments.long_estimation()
    assert stored["seed"].tolist() == [0, 1, 2, 3, 4]
    assert [len(flips) for flips in stored["flips"]] == [36] * 5
    place = experiments.test_sets(experiments.LONG).index(("fog", 5))
    data = shifted("test", "fog", 5, 1000)
    wf = WeightedFlips(n_steps=100, lr=0.02, random_state=1)
    again = wf.contributions(source_network(1), data.x, data.x[:500]).mean()
    assert abs(again - stored["flips"][1][place]) < 0.02
    path = tmp_path / "long.json"
    experiments.make_long_estimation(path, seeds=1, config=SMALL)
    assert set(json.loads(path.read_text())[0]) == set(stored)


def test_claims_are_declared_once_and_completely():
    text = resources.files("icml24.test_time_entropy").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({c["id"] for c in claims}) == len(claims) == 15
    assert all(("accept" in c) != ("not_testable" in c) for c in claims)
