"""Tables of measurements: gridding by hand, and every mistake a table can hold."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import icml24.ocean_oxygen as oo


@pytest.fixture(scope="module")
def grid():
    return oo.ocean_grid(12, levels=3)


def table(**columns):
    rows = {"lat": 1.0, "lon": -150.0, "depth": 90.0, "year": 1987, "oxygen": 150.0}
    n = max((len(v) for v in columns.values() if isinstance(v, list)), default=1)
    return pd.DataFrame(
        {k: v if isinstance(v, list) else [v] * n for k, v in (rows | columns).items()}
    )


def cell(ds, year=1987, **where):
    where = {"lat": 0, "lon": -150, "depth": 100} | where
    return float(ds.oxygen.sel(year=year).sel(**where, method="nearest"))


def test_median_of_a_cell_by_hand(grid):
    rows = table(oxygen=[100.0, 120.0, 300.0, 200.0], year=[1987, 1987, 1987, 1989])
    before = rows.copy()
    ds = oo.grid_profiles(rows, grid, (1985, 1990))
    pd.testing.assert_frame_equal(rows, before)
    assert cell(ds) == 120
    assert cell(ds, 1989) == 200
    assert np.isfinite(ds.oxygen).sum() == 2
    assert ds.attrs["dropped"] == "none"
    mean = oo.grid_profiles(rows, grid, (1985, 1990), reducer="mean")
    assert cell(mean) == pytest.approx(520 / 3)


def test_dates_conventions_of_longitude_and_nutrients(grid):
    rows = table(lon=[210.0], date=["1987-06-01"], phosphate=[1.5]).drop(columns="year")
    ds = oo.grid_profiles(rows, grid, (1985, 1990))
    assert cell(ds) == 150
    assert float(ds.phosphate.max()) == 1.5
    east = grid.assign_coords(lon=(grid.lon + 360) % 360).sortby("lon")
    assert np.nanmax(oo.grid_profiles(table(), east, (1985, 1990)).oxygen.sel(lon=210)) == 150
    line = oo.grid_profiles(table(lon=[180.0, -180.0]), grid, (1985, 1990))
    assert np.isfinite(line.oxygen).sum() == 1


def test_mixed_units_are_converted_row_by_row(grid):
    rows = table(
        oxygen=[260.9, 6.0],
        units=["umol/kg", "ml/l"],
        temperature=10.0,
        salinity=35.0,
        lat=[1.0, 40.0],
    )
    ds = oo.grid_profiles(rows, grid, (1985, 1990))
    assert cell(ds) == pytest.approx(260.9, abs=0.01)
    assert cell(ds, lat=36) == pytest.approx(260.9, abs=0.1)
    with pytest.raises(ValueError, match="columns temperature and salinity"):
        oo.grid_profiles(rows.drop(columns="salinity"), grid, (1985, 1990))


def test_wrong_unit_is_noticed(grid):
    with pytest.raises(ValueError, match="look like ml/l or mg/l"):
        oo.grid_profiles(table(oxygen=[4.0, 5.0, 6.0, 5.5, 3.0, 4.4]), grid, (1985, 1990))
    with pytest.raises(ValueError, match="6 rows with negative oxygen"):
        oo.grid_profiles(table(oxygen=[-4.0] * 6), grid, (1985, 1990))
    with pytest.raises(ValueError, match="is the unit right"):
        oo.grid_profiles(table(oxygen=[4000.0] * 6), grid, (1985, 1990))


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"oxygen": [-3.0]}, "1 rows with negative oxygen"),
        ({"oxygen": [900.0]}, "more than 700"),
        ({"oxygen": [np.nan]}, "without a value"),
        ({"depth": [np.nan]}, "with a missing depth"),
        ({"depth": [-5.0]}, "with a negative depth"),
        ({"lat": [95.0]}, "without a position on the globe"),
        ({"lon": [np.nan]}, "without a position on the globe"),
        ({"year": [1800]}, "dated outside 1985 to 1990"),
        ({"year": [1991]}, "dated outside 1985 to 1990"),
    ],
)
def test_bad_rows_are_refused_or_dropped_and_counted(grid, columns, match):
    rows = pd.concat([table(lat=[-1.0]), table(**columns)], ignore_index=True)
    with pytest.raises(ValueError, match=match + r".*invalid='drop'"):
        oo.grid_profiles(rows, grid, (1985, 1990))
    ds = oo.grid_profiles(rows, grid, (1985, 1990), invalid="drop")
    assert np.isfinite(ds.oxygen).sum() == 1
    assert match.removeprefix("1 rows ") in ds.attrs["dropped"]
    with pytest.raises(ValueError, match="No usable row"):
        oo.grid_profiles(table(**columns), grid, (1985, 1990), invalid="drop")


def test_points_on_land(grid):
    rows = table(lat=[1.0, 46.0], lon=[-150.0, 85.0])  # the second is in Central Asia
    ds = oo.grid_profiles(rows, grid, (1985, 1990))
    assert ds.attrs["dropped"] == "1 on land"
    with pytest.raises(ValueError, match="1 rows lie on land"):
        oo.grid_profiles(rows, grid, (1985, 1990), on_land="raise")
    coast = table(lat=[60.0], lon=[-66.0])
    assert not np.isfinite(oo.grid_profiles(coast, grid, (1985, 1990)).oxygen).any()
    moved = oo.grid_profiles(coast, grid, (1985, 1990), on_land="nearest")
    assert np.isfinite(moved.oxygen).sum() == 1
    with pytest.raises(ValueError, match="from any sea cell"):
        oo.grid_profiles(rows, grid, (1985, 1990), on_land="nearest")


def test_missing_columns_and_years(grid):
    with pytest.raises(ValueError, match="lacks the columns depth"):
        oo.grid_profiles(table().drop(columns="depth"), grid, (1985, 1990))
    with pytest.raises(ValueError, match="first < last"):
        oo.grid_profiles(table(), grid, (1990, 1985))
    with pytest.raises(ValueError, match="is empty"):
        oo.grid_profiles(table().iloc[:0], grid, (1985, 1990))


def test_another_variable_keeps_its_unit(grid):
    rows = table(cfc=[1.5])
    ds = oo.grid_profiles(rows, grid, (1985, 1990), variable="cfc", units="pmol kg-1")
    assert ds.cfc.attrs["units"] == "pmol kg-1"
    assert float(ds.cfc.max()) == 1.5


def test_a_table_goes_all_the_way(grid, tmp_path):
    """Measure a simulated ocean, write it as rows, grid the rows, get the dataset back."""
    ds = oo.make_ocean(2, step=12, years=(1990, 1995), levels=3)
    rows = ds.oxygen.to_dataframe().reset_index().dropna()
    again = oo.grid_profiles(rows, grid, (1990, 1995), reducer="mean")
    xr.testing.assert_allclose(again.oxygen, ds.oxygen)
    field = oo.IDW().fit(again).predict([1992])
    for name in ("field.nc", "field.zarr"):
        oo.save_field(field, tmp_path / name)
        xr.testing.assert_identical(oo.open_field(tmp_path / name), field)
        oo.save_field(field.isel(depth=[0]), tmp_path / name)  # over the old one
        assert oo.open_field(tmp_path / name).sizes["depth"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["field.nc", "field.zarr"]


def test_no_half_written_files(tmp_path, grid, monkeypatch):
    path = tmp_path / "grid.nc"
    oo.save_field(grid, path)
    bad = grid.assign(broken=("lat", np.array([object()] * 15)))
    with pytest.raises((TypeError, ValueError)):
        oo.save_field(bad, path)
    assert [p.name for p in tmp_path.iterdir()] == ["grid.nc"]
    xr.testing.assert_identical(oo.open_field(path), grid)
    with pytest.raises(ValueError, match=r"must end in \.nc"):
        oo.save_field(grid, tmp_path / "grid.txt")
    with pytest.raises(FileNotFoundError, match="no folder"):
        oo.save_field(grid, tmp_path / "nowhere" / "grid.nc")
    with pytest.raises(FileNotFoundError, match="no file"):
        oo.open_field(tmp_path / "other.nc")
