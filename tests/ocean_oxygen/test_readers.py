"""Small files in the formats of WOD, GLODAP and WOA, written here and read back."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import icml24.ocean_oxygen as oo


def wod_file(path, units="umol/kg", **changes):
    """Three casts with 3, 2 and 1 depths; the second without oxygen."""
    data = {
        "lat": ("casts", [10.0, 20.0, -30.0]),
        "lon": ("casts", [-150.0, -40.0, 80.0]),
        "time": ("casts", [80000.5, 80001.0, 80400.0], {"units": "days since 1770-01-01 00:00:00"}),
        "z_row_size": ("casts", [3, 2, 1]),
        "Oxygen_row_size": ("casts", [3.0, np.nan, 1.0]),
        "Temperature_row_size": ("casts", [3.0, 2.0, 1.0]),
        "Salinity_row_size": ("casts", [3.0, 2.0, 1.0]),
        "z": ("z_obs", [0.0, 100.0, 500.0, 0.0, 50.0, 200.0], {"units": "m"}),
        "Oxygen": ("Oxygen_obs", [210.0, 150.0, 30.0, 180.0], {"units": units}),
        "Oxygen_WODflag": ("Oxygen_obs", np.array([0, 0, 3, 0], np.int8)),
        "Temperature": ("Temperature_obs", [20.0, 15.0, 8.0, 18.0, 17.0, 12.0]),
        "Salinity": ("Salinity_obs", [35.0, 35.0, 34.5, 36.0, 36.0, 34.8]),
    }
    xr.Dataset(data | changes).to_netcdf(path, engine="h5netcdf")
    return path


def test_wod_by_hand(tmp_path):
    table = oo.read_wod(wod_file(tmp_path / "wod_osd_1989.nc"))
    assert table["oxygen"].tolist() == [210, 150, 180]  # the third has a bad flag
    assert table["depth"].tolist() == [0, 100, 200]
    assert table["cast"].tolist() == [0, 0, 2]
    assert table["lat"].tolist() == [10, 10, -30]
    assert table["temperature"].tolist() == [20, 15, 12]
    assert table["year"].tolist() == [1989, 1989, 1990]
    assert table["phosphate"].isna().all()


def test_wod_per_volume_and_several_files(tmp_path):
    values = ("Oxygen_obs", [4.0, 3.0, 1.0, 5.0], {"units": "ml/l"})
    one = wod_file(tmp_path / "a.nc", Oxygen=values)
    two = wod_file(tmp_path / "b.nc")
    table = oo.read_wod([one, two])
    rho = oo.density(15.0, 35.0, 100.0)
    assert table["oxygen"][1] == pytest.approx(3 * 44.6596 / (rho / 1000))
    assert table["cast"].tolist() == [0, 0, 2, 3, 3, 5]
    ds = oo.grid_profiles(table, oo.ocean_grid(12, levels=3), (1985, 1995), reducer="mean")
    assert int(np.isfinite(ds.oxygen).sum()) == 3


def test_wod_problems(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        oo.read_wod(tmp_path / "missing.nc")
    xr.Dataset({"lat": ("casts", [1.0])}).to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match="has no variable lon; is it a WOD file"):
        oo.read_wod(tmp_path / "x.nc")
    sizes = ("casts", [2.0, np.nan, 2.0])
    with pytest.raises(ValueError, match="Cast 0 has 2 values of Oxygen for 3 depths"):
        oo.read_wod(wod_file(tmp_path / "y.nc", Oxygen_row_size=sizes))
    bare = ("Oxygen_obs", [210.0, 150.0, 30.0, 180.0])
    with pytest.raises(ValueError, match="no units"):
        oo.read_wod(wod_file(tmp_path / "z.nc", Oxygen=bare))


def test_glodap(tmp_path):
    rows = {
        "G2latitude": [10, 11, 12, 13],
        "G2longitude": [1, 2, 3, 4],
        "G2depth": [5, 10, 20, 40],
        "G2year": [1990] * 4,
        "G2oxygen": [200.0, -9999, 210, 220],
        "G2oxygenf": [2, 9, 3, 2],
        "G2salinity": [35, 35, 35, -9999],
        "G2phosphate": [1.0, 1.0, 1.0, 2.0],
    }
    path = tmp_path / "glodap.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    table = oo.read_glodap(path)
    assert table["oxygen"].tolist() == [200, 220]
    assert table["phosphate"].tolist() == [1, 2]
    assert np.isnan(table["salinity"][1])
    pd.DataFrame({"a": [1]}).to_csv(path, index=False)
    with pytest.raises(ValueError, match="is it a GLODAP table"):
        oo.read_glodap(path)


@pytest.mark.parametrize("engine", ["h5netcdf", "scipy"])
def test_woa(tmp_path, engine):
    field = xr.DataArray(
        np.arange(12.0).reshape(1, 2, 2, 3),
        {"time": [372.5], "depth": [0.0, 5.0], "lat": [-0.5, 0.5], "lon": [0.5, 1.5, 2.5]},
        ("time", "depth", "lat", "lon"),
        attrs={"units": "micromoles_per_kilogram"},
    )
    field["time"].attrs["units"] = "months since 1955-01-01 00:00:00"
    path = tmp_path / "woa.nc"
    field.to_dataset(name="o_an").to_netcdf(path, engine=engine)
    read = oo.read_woa(path)
    assert read.dims == ("depth", "lat", "lon")
    assert read.attrs["units"] == "umol kg-1"
    np.testing.assert_array_equal(read, field[0])
    with pytest.raises(ValueError, match="no variable t_an"):
        oo.read_woa(path, "t_an")
    two = field.assign_attrs(units="milliliters_per_liter").to_dataset(name="o_an")
    two.to_netcdf(tmp_path / "old.nc", engine=engine)
    with pytest.raises(ValueError, match="convert it with to_umol_per_kg"):
        oo.read_woa(tmp_path / "old.nc")
    xr.concat([field, field + 1], "time").to_dataset(name="o_an").to_netcdf(
        tmp_path / "many.nc", engine=engine
    )
    with pytest.raises(ValueError, match="holds 2 times"):
        oo.read_woa(tmp_path / "many.nc")
