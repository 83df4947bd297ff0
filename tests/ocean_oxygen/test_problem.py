"""Splits, targets and features; and that nothing of the test leaks into any of them."""

import numpy as np
import pytest
import xarray as xr
from scipy.sparse import csr_matrix

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.problem import window_of
from icml24.ocean_oxygen.splits import area_of


@pytest.fixture(scope="module")
def ds():
    return oo.make_ocean(1, step=12, years=(1985, 2004), levels=3)


@pytest.fixture(scope="module")
def split(ds):
    return oo.block_split(ds, 0)


@pytest.mark.parametrize("make", [oo.block_split, oo.temporal_split, oo.spatial_split])
def test_splits_keep_groups_whole(ds, make):
    role = make(ds, 3)
    codes = role.to_numpy()
    seen = np.isfinite(ds.oxygen.to_numpy())
    assert ((codes >= 0) == seen).all()
    shares = np.bincount(codes[seen], minlength=4) / seen.sum()
    np.testing.assert_allclose(shares, [0.6, 0.075, 0.075, 0.25], atol=0.12)
    lat, lon = np.meshgrid(ds.lat, ds.lon, indexing="ij")
    year = np.arange(20)[:, None, None, None]
    area = area_of(lat, lon, 30)
    group = {
        oo.block_split: year * 1000 + area,
        oo.temporal_split: year,
        oo.spatial_split: area,
    }[make]
    group = np.broadcast_to(group, codes.shape)[seen]
    for name in np.unique(group):
        assert len(np.unique(codes[seen][group == name])) == 1
    xr.testing.assert_identical(role, make(ds, 3))
    assert not role.equals(make(ds, 4))


def test_a_block_is_one_area_in_one_year(ds, split):
    """Neither a year nor an area has one role for all its blocks."""
    area = area_of(*np.meshgrid(ds.lat, ds.lon, indexing="ij"), 30)
    codes = split.to_numpy()
    by_year = [np.unique(part[part >= 0]) for part in codes]
    by_area = [np.unique(part[part >= 0]) for part in (codes[..., area == i] for i in range(72))]
    for roles in (by_year, by_area):
        assert sum(len(found) > 1 for found in roles) > 10


def test_areas_by_hand():
    assert area_of([-90, 89.9, 90], [-180, 179.9, 180], 30).tolist() == [0, 71, 60]
    assert area_of(0.0, 350.0, 30) == area_of(0.0, -10.0, 30)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.1, 0.1, 0.1), (1.2, -0.2, 0, 0)])
def test_bad_shares(ds, shares):
    with pytest.raises(ValueError, match="4 parts that sum to one"):
        oo.block_split(ds, 0, shares)


def test_window_by_hand():
    values = np.array([[1.0, np.nan], [2.0, 7.0], [3.0, np.nan], [4.0, 8.0]])
    window = window_of(values, 1, 2)
    np.testing.assert_array_equal(
        window, [[np.nan, 1, np.nan, 3, 4], [np.nan, np.nan, np.nan, np.nan, 8]]
    )
    assert window_of(values, 3, 0).shape == (2, 1)


def test_target_and_its_inverse(ds, split):
    for target in ("aou", "raw"):
        problem = oo.Problem(ds, split, target=target)
        t, v = problem.pairs("test")
        np.testing.assert_allclose(
            problem.invert(problem.standard[t, v], t, v), problem.observed[t, v], rtol=1e-5
        )
        train = problem.known[np.isfinite(problem.known)]
        assert abs(train.mean()) < 1e-3
        assert train.std() == pytest.approx(1, abs=1e-3)
    aou = oo.Problem(ds, split)
    t, v = (int(x[aou.nodes.depth[aou.pairs("train")[1]].argmax()]) for x in aou.pairs("train"))
    assert aou.nodes.depth[v] == 200  # where depth tells: the water is colder when lifted
    where = {"year": t}
    temperature = aou.nodes.gather(ds.temperature.isel(where))[v]
    by_hand = oo.solubility(temperature, aou.nodes.gather(ds.salinity)[v], aou.nodes.depth[v])
    by_hand -= aou.nodes.gather(ds.oxygen.isel(where))[v]
    assert aou.standard[t, v] * aou.sd[v] + aou.mean[v] == pytest.approx(by_hand, rel=1e-5)


def changed(ds, split, role):
    """The same dataset with other values at the measurements of a role."""
    oxygen = ds.oxygen.copy(deep=True)
    oxygen.values[split.values == role] = 300.0
    return ds.assign(oxygen=oxygen)


@pytest.mark.parametrize("role", [1, 2, 3])
def test_held_out_values_are_nowhere_in_the_inputs(ds, split, role):
    a = oo.Problem(ds, split)
    b = oo.Problem(changed(ds, split, role), split)
    np.testing.assert_array_equal(a.known, b.known)
    np.testing.assert_array_equal(a.mean, b.mean)
    np.testing.assert_array_equal(a.sd, b.sd)
    near = csr_matrix(np.ones((len(a.nodes), len(a.nodes)), np.float32))
    for t in (3, 12):
        np.testing.assert_array_equal(a.features(t), b.features(t))
        np.testing.assert_array_equal(a.records(t, near), b.records(t, near))
    assert not np.array_equal(oo.Problem(changed(ds, split, 0), split).mean, a.mean)


def test_nutrients_are_scaled_by_training_stations(ds, split):
    """Other nutrients where others are held out leave the features everywhere else alone."""
    moved = ds.assign(phosphate=ds.phosphate.where(split <= 0, 9.0).where(ds.phosphate.notnull()))
    a, b = oo.Problem(ds, split), oo.Problem(moved, split)
    t = int(((a.role > 0) & np.isfinite(a.nodes.gather(ds.phosphate))).sum(axis=1).argmax())
    elsewhere = a.role[t] <= 0
    x, y = a.features(t), b.features(t)
    np.testing.assert_array_equal(x[elsewhere], y[elsewhere])
    assert not np.array_equal(x[~elsewhere], y[~elsewhere])


def test_a_years_own_values_are_not_in_its_inputs(ds, split):
    problem = oo.Problem(ds, split)
    other = oo.Problem(ds, split)
    other.known = problem.known.copy()
    t = int(np.isfinite(problem.known).sum(axis=1).argmax())
    other.known[t] += 5
    near = csr_matrix(np.ones((len(problem.nodes), len(problem.nodes)), np.float32))
    np.testing.assert_allclose(problem.records(t, near), other.records(t, near), atol=1e-4)
    np.testing.assert_array_equal(window_of(problem.known, t, 5), window_of(other.known, t, 5))
    assert not np.allclose(problem.records(t - 1, near), other.records(t - 1, near))


def test_records_by_hand(ds, split):
    problem = oo.Problem(ds, split)
    problem.known[:] = np.nan
    problem.known[2, 0], problem.known[5, 0], problem.known[5, 1] = 1.0, 3.0, -2.0
    near = csr_matrix(([1.0, 1.0], ([2, 2], [0, 1])), (len(problem.nodes), len(problem.nodes)))
    record = problem.records(5, near)
    np.testing.assert_allclose(record[0], [1.0, np.log(2), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(record[1], 0)
    np.testing.assert_allclose(record[2], [0, 0, 1.0, np.log(2)], rtol=1e-6)
    later = problem.records(9, near)
    np.testing.assert_allclose(later[2], [0, 0, 2 / 3, np.log(4)], rtol=1e-6)


def test_features_have_their_names(ds, split):
    problem = oo.Problem(ds, split)
    x = problem.features(4)
    assert x.shape == (len(problem.nodes), len(problem.feature_names))
    assert np.isfinite(x).all()
    column = problem.feature_names.index("phosphate")
    known = x[:, problem.feature_names.index("phosphate known")]
    measured = np.isfinite(problem.nodes.gather(ds.phosphate.isel(year=4)))
    np.testing.assert_array_equal(known, measured)
    assert (x[known == 0, column] == 0).all()
    assert problem.meta.shape[1] == 7
    np.testing.assert_allclose(problem.meta.mean(0), 0, atol=1e-4)
    bare = oo.Problem(ds, split, fourier=False)
    assert len(problem.feature_names) - len(bare.feature_names) == 18


def test_any_tracer_without_chemistry(ds, split):
    tracer = ds[["wet", "bathymetry"]].assign(cfc=ds.oxygen / 100)
    problem = oo.Problem(tracer, split, "cfc", "raw")
    assert problem.nutrients == ()
    assert problem.meta_names == ("lat", "abs lat", "sin lon", "cos lon", "depth")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.drop_vars("oxygen"), "no variable 'oxygen'"),
        (lambda d: d.assign(oxygen=d.oxygen.isel(year=0)), "dimensions year, depth"),
        (lambda d: d.assign(oxygen=d.oxygen.drop_attrs()), "has no units"),
        (lambda d: d.assign(oxygen=d.oxygen.assign_attrs(units="ml/l")), "convert it with"),
        (lambda d: d.assign(oxygen=(d.oxygen * 4).assign_attrs(units="umol/kg")), "lies between"),
        (lambda d: d.assign(oxygen=(d.oxygen - 600).assign_attrs(units="umol/kg")), "lies between"),
        (lambda d: d.drop_vars("salinity"), "salinity is missing"),
        (lambda d: d.assign(salinity=d.salinity.where(d.lat > 0)), "has gaps on sea cells"),
        (lambda d: d.isel(year=slice(None, None, -1)), "must increase"),
        (lambda d: d.isel(year=slice(0, 5)), "sizes of oxygen"),
        (lambda d: d.assign(oxygen=d.oxygen / 0), "infinite values"),
    ],
)
def test_bad_datasets(ds, split, change, match):
    with pytest.raises(ValueError, match=match):
        oo.Problem(change(ds), split)


def test_nothing_to_train_on(ds, split):
    with pytest.raises(ValueError, match="no measurement on a sea cell for training"):
        oo.Problem(ds, split.where(split != 0, 3))
    with pytest.raises(ValueError, match="'aou' or 'raw'"):
        oo.Problem(ds, split, target="log")
