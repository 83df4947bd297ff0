"""The real ocean, its nodes, and the synthetic century on top of it."""

import numpy as np
import pytest
import xarray as xr

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.extracts import block_mean
from icml24.ocean_oxygen.grid import check_grid
from icml24.ocean_oxygen.sampling import PORTS, great_circle
from icml24.ocean_oxygen.world import random_field


def test_real_fields_look_like_the_ocean():
    grid = oo.ocean_grid(6)
    assert int(grid.wet.sum()) == 8298
    sst = grid.temperature.isel(depth=0)
    assert float(sst.sel(lat=3, lon=-177)) > 27  # the warm pool
    assert float(sst.sel(lat=-69, lon=-177)) < 1
    assert not bool(grid.wet.sel(lat=27, lon=27).any())  # the Sahara
    mediterranean = grid.salinity.isel(depth=1).sel(lat=33, lon=21)
    assert float(mediterranean) > 37.5
    assert oo.BASINS[int(grid.basin.sel(lat=33, lon=21))] == "marginal"


@pytest.mark.parametrize(
    ("step", "shape"), [(4, (12, 45, 90)), (6, (8, 30, 60)), (12, (8, 15, 30))]
)
def test_steps(step, shape):
    grid = oo.ocean_grid(step)
    assert grid.wet.shape == shape
    wet = grid.wet.to_numpy()
    assert np.isfinite(grid.temperature.to_numpy()[wet]).all()
    assert not (wet[1:] & ~wet[:-1]).any()  # no sea below land
    with pytest.raises(ValueError, match="4, 6 or 12"):
        oo.ocean_grid(5)


def test_block_mean():
    field = np.array([[[1.0, 2, np.nan, np.nan], [3, 4, np.nan, 8]]])
    np.testing.assert_allclose(block_mean(field, 2), [[[2.5, np.nan]]])
    np.testing.assert_allclose(block_mean(field, 2, 0.25), [[[2.5, 8.0]]])
    with pytest.raises(ValueError, match="does not divide"):
        block_mean(field, 3)


def test_volume_by_hand():
    ds = xr.Dataset(coords={"depth": [0.0, 100.0, 300.0], "lat": [0.0, 60.0], "lon": [0.0]})
    volume = oo.cell_volume(ds).to_numpy()[:, :, 0]
    np.testing.assert_allclose(volume[:, 0], [50, 150, 200])
    np.testing.assert_allclose(volume[:, 1], [25, 75, 100])


def test_nodes_round_trip():
    grid = oo.ocean_grid(12, levels=4)
    nodes = oo.Nodes.of(grid)
    values = np.random.default_rng(0).normal(size=(2, len(nodes))).astype(np.float32)
    np.testing.assert_array_equal(nodes.gather(nodes.scatter(values)), values)
    np.testing.assert_array_equal(
        nodes.gather(grid.bathymetry)[:3], grid.bathymetry.values[grid.wet[0].values][:3]
    )
    assert np.isnan(nodes.scatter(values)[:, ~nodes.wet]).all()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda g: g.isel(depth=slice(None, None, -1)), "must increase"),
        (lambda g: g.assign_coords(depth=g.depth - 10), "below the surface"),
        (lambda g: g.assign_coords(lon=g.lon + 90), "one convention"),
        (lambda g: g.assign_coords(lat=g.lat * 1.2), "between -90 and 90"),
        (lambda g: g.drop_vars("wet"), "mask wet"),
        (lambda g: g.assign(wet=g.wet & False), "no sea cell"),
        (lambda g: g.drop_vars("lon"), "coordinate 'lon'"),
    ],
)
def test_bad_grids(change, match):
    with pytest.raises(ValueError, match=match):
        check_grid(change(oo.ocean_grid(12, levels=2)))


def test_argo_positions_are_real_places():
    argo = oo.argo_positions()
    assert argo["year"].min() == 2002
    assert argo["year"].max() == 2023
    assert argo["lat"].between(-90, 90).all()
    assert argo["lon"].between(-180, 180).all()
    assert argo.groupby("year").size()[2022] > argo.groupby("year").size()[2005]


def test_great_circle_takes_the_short_way():
    path = great_circle(np.array([[40.0, -73.0]]), np.array([[51.0, 0.0]]), 101)[0]
    xyz = oo.grid.unit_vectors(*path.T)
    steps = np.arccos((xyz[1:] * xyz[:-1]).sum(1))
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)  # the same length each
    total = np.arccos(xyz[0] @ xyz[-1])
    assert steps.sum() == pytest.approx(total, rel=1e-9)


def test_tracks_start_and_end_in_ports():
    tracks = oo.ship_tracks(5, np.random.default_rng(0))
    ports = np.array(list(PORTS.values()))
    for end in (tracks[:, 0], tracks[:, -1]):
        assert np.abs(end[:, None] - ports).max(-1).min(1).max() < 1e-9


@pytest.fixture(scope="module")
def century():
    return oo.make_ocean(3, step=12, years=(1950, 2020), levels=5)


def test_share_and_measurement_errors(century):
    nodes = oo.Nodes.of(century)
    measured, truth = nodes.gather(century.oxygen), nodes.gather(century.truth)
    seen = np.isfinite(measured)
    assert seen.mean() == pytest.approx(0.0374, abs=0.004)
    error = (measured - truth)[seen]
    assert abs(error.mean()) < 0.3
    assert error.std() == pytest.approx(5, abs=0.3)
    assert np.isfinite(truth).all()
    nutrients = np.isfinite(nodes.gather(century.phosphate))
    assert not (nutrients & ~seen).any()
    assert 0.15 < nutrients.sum() / seen.sum() < 0.5


def test_the_century_loses_oxygen_and_repeats(century):
    again = oo.make_ocean(3, step=12, years=(1950, 2020), levels=5)
    xr.testing.assert_identical(century, again)
    other = oo.make_ocean(4, step=12, years=(1950, 2020), levels=5)
    assert not other.truth.equals(century.truth)
    mean = oo.weighted_mean(century.truth, oo.cell_volume(century))
    change = oo.trend(mean, century.year, 1960, 2010)
    assert -6 < change < -1


def test_floats_measure_only_where_argo_went():
    ds = oo.make_ocean(0, step=12, years=(2015, 2016), levels=2, share=0.001)
    columns = np.isfinite(ds.oxygen.to_numpy()).any(axis=(0, 1))
    argo = oo.argo_positions().query("2015 <= year <= 2016")
    i = ((argo["lat"] + 90) / 12).astype(int).clip(0, 14)
    j = ((argo["lon"] + 180) / 12).astype(int) % 30
    real = np.zeros((15, 30), bool)
    real[i, j] = True
    nutrient = np.isfinite(ds.phosphate.to_numpy()).any(axis=(0, 1))
    assert columns.any()
    assert (columns & real).sum() >= 1
    assert not (columns & ~real & ~nutrient).sum() > 60  # the rest are ships


def test_members_are_biased_but_related(century):
    nodes = oo.Nodes.of(century)
    truth = nodes.gather(century.truth)
    members = oo.simulate_members(century, seed=3)
    for member in members:
        assert 0.3 < oo.r2(truth, nodes.gather(member)) < 0.9
    assert not np.allclose(members[0], members[1], equal_nan=True)


def test_random_field_has_unit_variance():
    nodes = oo.Nodes.of(oo.ocean_grid(12, levels=3))
    fields = random_field(nodes, 200, 20.0, np.random.default_rng(0))
    assert fields.std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"years": (2000, 1990)}, "years must be"), ({"share": 0.0}, "share must")],
)
def test_bad_oceans(options, match):
    with pytest.raises(ValueError, match=match):
        oo.make_ocean(0, step=12, **options)
    with pytest.raises(ValueError, match="at least one member"):
        oo.simulate_members(oo.ocean_grid(12), n=0)
