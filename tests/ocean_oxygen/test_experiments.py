"""All experiments at tiny scale; and stored records that agree with a run of today."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from icml24.core.data import DataUnavailableError
from icml24.core.experiments import run
from icml24.ocean_oxygen import experiments as ex

TINY = replace(
    ex.Config(), step=12, levels=2, first=1990, last=2001, steps=3, batch_size=30, every=4, tracks=8
)


@pytest.mark.parametrize("method", list(ex.METHODS))
def test_every_method(method):
    record = ex.held_out(replace(TINY, method=method), 0)
    assert record["rmse"] > 0
    assert 0 <= record["coverage"] <= 1
    assert set(record["basins"]) == {
        "Atlantic",
        "Pacific",
        "Indian",
        "Southern",
        "Arctic",
        "marginal",
    }
    if isinstance(ex.build(replace(TINY, method=method), 0), ex.Reconstructor):
        assert len(record["validation"]) == 1
    assert ("sensitivity" in record) == (method in ("OxyGenerator", "chemistry"))
    assert ("century" in record) == (method in TINY.dense)


def test_other_experiments():
    record = ex.simulations(TINY, 0)
    assert record["best"]["mape"] == min(m["mape"] for m in record["members"].values())
    record = ex.held_out(replace(TINY, method="IDW"), 0)["century"]
    assert record["ratio"] == pytest.approx(record["change_model"] / record["change_truth"])
    assert len(record["years"]) == len(record["low_truth"]) == 3
    assert (record["low_lower"] <= record["low_model"]).all()
    assert (record["low_model"] <= record["low_upper"]).all()
    record = ex.real_temperature(replace(TINY, method="IDW"), 0)
    assert record["r2"] > 0.5
    assert 0.02 < record["share"] < 0.5


def test_hidden_temperature_is_hidden():
    ds, split = ex.hidden_temperature(TINY, 0)
    model = ex.IDW("temperature", "raw").fit(ds, split)
    known = np.isfinite(model.problem_.known)
    assert known.sum() == (model.problem_.role == 0).sum()
    assert (model.problem_.role[known] == 0).all()
    test = model.problem_.role == 3
    columns = np.isfinite(model.problem_.nodes.scatter(np.where(known, 1.0, np.nan))).any(1)
    tested = np.isfinite(model.problem_.nodes.scatter(np.where(test, 1.0, np.nan))).any(1)
    assert not (columns & tested).any()  # a month's track is never tested


def tiny_bottles(monkeypatch):
    """Forty cruises of made-up bottles, so that the test needs no package."""
    rng = np.random.default_rng(0)
    lat, lon = rng.uniform(-60, 60, 4000), rng.uniform(-179, -121, 4000)
    temperature = 25 - np.abs(lat) / 3 + rng.normal(0, 0.5, 4000)
    place = {"lat": lat, "lon": lon, "depth": rng.choice([0, 100], 4000)}
    values = {"temperature": temperature, "salinity": 34 + lat / 100}
    names = {
        "source": np.repeat(np.arange(40), 100),
        "year": np.repeat(1990 + np.arange(40) % 9, 100),
    }
    monkeypatch.setattr(ex, "load_bottles", lambda: pd.DataFrame(place | values | names))


def test_real_bottles(monkeypatch):
    tiny_bottles(monkeypatch)
    ds, split = ex.bottles(TINY, 0)
    assert not {"salinity", "phosphate"} & set(ds.data_vars)  # no climatology, nothing simulated
    assert ds.temperature.attrs["units"] == "degree_Celsius"
    idw = ex.real_bottles(replace(TINY, method="IDW"), 0)
    atlas = ex.real_bottles(replace(TINY, method="Levitus"), 0)
    assert idw["n"] == atlas["n"] == int((split == 3).sum()) > 50
    assert idw["mae"] <= idw["rmse"] < 2  # a smooth field with errors of half a degree
    assert 0 <= idw["coverage"] <= 1
    assert atlas["coverage"] is None
    assert atlas["rmse"] > idw["rmse"]  # the made-up field is not the real one
    salty = ex.real_bottles(replace(TINY, method="IDW", quantity="salinity"), 0)
    assert salty["rmse"] < 0.3
    net = ex.real_bottles(replace(TINY, method="no zones"), 0)
    assert net["n"] == idw["n"]


def test_late_bottles_are_those_since_1995(monkeypatch):
    tiny_bottles(monkeypatch)
    record = ex.real_bottles(replace(TINY, method="Levitus"), 1)
    ds, split = ex.bottles(TINY, 1)
    error = (ds.temperature - ex.ocean_grid(12, 2).temperature).where(split == 3)
    late = error.sel(year=slice(1995, None)).to_numpy()
    assert record["late"] == pytest.approx(np.sqrt(np.nanmean(late**2)), rel=1e-5)
    assert record["mae"] == pytest.approx(np.nanmean(np.abs(error)), rel=1e-5)


@pytest.mark.parametrize("split", list(ex.SPLITS))
def test_splits(split):
    record = ex.held_out(replace(TINY, method="IDW", split=split), 1)
    assert record["rmse"] > 0


def test_records_are_made_and_read(tmp_path, monkeypatch):
    tables = {"simulations": (ex.simulations, {}), "held_out": (ex.held_out, {"method": ["IDW"]})}
    monkeypatch.setattr(ex, "TABLES", tables)
    ex.make_records(TINY, [0, 1], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["held_out.json", "simulations.json"]


def test_settings():
    assert ex.Config.laptop() == ex.Config()
    assert ex.Config.paper().step == 4
    assert ex.Config.small().step == 12
    with pytest.raises(ValueError, match="method must be one of"):
        ex.build(replace(TINY, method="magic"), 0)


@pytest.mark.parametrize("method", ["IDW"])
def test_stored_records_are_those_of_this_code(method):
    """A cheap piece of the stored table, computed anew at full size."""
    table = ex.stored("held_out").query("method == @method and seed == 0").iloc[0]
    record = run(ex.held_out, replace(ex.Config(), method=method), [0]).iloc[0]
    for name in ("rmse", "mape", "r2", "coverage"):
        assert record[name] == pytest.approx(table[name], rel=1e-3)
    assert sorted(ex.stored("held_out")["seed"].unique()) == [0, 1, 2, 3, 4]
    strict = ex.stored("splits").query("method == @method and seed == 1 and split == 'spatial'")
    record = run(ex.held_out, replace(ex.Config(), method=method, split="spatial"), [1]).iloc[0]
    assert record["rmse"] == pytest.approx(strict["rmse"].item(), rel=1e-3)


def test_stored_bottles_are_those_of_this_code():
    try:
        record = run(ex.real_bottles, replace(ex.Config(), method="kriging"), [2]).iloc[0]
    except DataUnavailableError as error:
        pytest.skip(str(error))
    row = "quantity == 'temperature' and method == 'kriging' and seed == 2"
    table = ex.stored("bottles").query(row).iloc[0]
    for name in ("rmse", "mae", "late", "coverage", "n"):
        assert record[name] == pytest.approx(table[name], rel=1e-3)


def test_stored_tables_are_complete():
    for name, (_, grid) in ex.TABLES.items():
        table = ex.stored(name)
        expected = 5 * int(np.prod([len(values) for values in grid.values()], initial=1))
        assert len(table) == expected
        if name == "bottles":  # the atlas has no intervals
            assert (table["coverage"].isna() == (table["method"] == "Levitus")).all()
            table = table.fillna({"coverage": 0.0})
        assert (
            not table.drop(columns=["sensitivity", "validation", "century"], errors="ignore")
            .isna()
            .any(axis=None)
        )
