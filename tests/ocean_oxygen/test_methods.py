"""The reconstructor and its peers: what they learn, what they must not see, what they return."""

import numpy as np
import pytest
import torch
import xarray as xr
from sklearn.linear_model import LinearRegression, Ridge

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.reconstructor import inner_updates

QUICK = {"hidden_channels": 4, "steps": 6, "validate_every": 3, "batch_size": 40}


@pytest.fixture(scope="module")
def ds():
    return oo.make_ocean(1, step=12, years=(1985, 2004), levels=3)


@pytest.fixture(scope="module")
def split(ds):
    return oo.block_split(ds, 0)


def methods():
    return [
        oo.Reconstructor(**QUICK),
        oo.Reconstructor(**QUICK, records=True, adaptive=True),
        oo.IDW(),
        oo.Kriging(),
        oo.Tabular(estimators=[Ridge()], window=0),
    ]


def with_other_test_values(ds, split):
    oxygen = ds.oxygen.copy(deep=True)
    oxygen.values[split.values == 3] = 333.0
    return ds.assign(oxygen=oxygen)


@pytest.mark.parametrize("model", methods(), ids=lambda m: type(m).__name__)
def test_test_values_change_no_prediction(ds, split, model):
    a = model.fit(ds, split).held_out()
    b = model.fit(with_other_test_values(ds, split), split).held_out()
    np.testing.assert_array_equal(a[["mean", "lower", "upper"]], b[["mean", "lower", "upper"]])
    assert (b["truth"] == 333).all()


@pytest.mark.parametrize("model", methods(), ids=lambda m: type(m).__name__)
def test_places_of_the_test_change_no_prediction(ds, split, model):
    """Not even where the test was measured may show: hubs and counts are those of training."""
    without = ds.assign(oxygen=ds.oxygen.where(split != 3))
    a, b = (model.fit(d, split).predict([1990, 2001]) for d in (ds, without))
    xr.testing.assert_identical(a.drop_attrs(), b.drop_attrs())


@pytest.mark.parametrize("model", methods(), ids=lambda m: type(m).__name__)
def test_the_field_agrees_with_single_places(ds, split, model):
    before = ds.copy(deep=True)
    field = model.fit(ds, split).predict(years=[1990, 2001])
    xr.testing.assert_identical(ds, before)
    assert dict(field.sizes) == {"depth": 3, "lat": 15, "lon": 30, "year": 2}
    wet = np.asarray(ds.wet)
    assert np.isfinite(field.oxygen.to_numpy()[:, wet]).all()
    assert np.isnan(field.oxygen.to_numpy()[:, ~wet]).all()
    assert (field.oxygen_lower <= field.oxygen_upper).to_numpy()[:, wet].all()
    place = field.oxygen.sel(year=2001, depth=100, lat=0, lon=-150, method="nearest")
    import pandas as pd

    row = pd.DataFrame({"lat": [place.lat], "lon": [place.lon], "depth": [100], "year": [2001]})
    answer = model.predict_table(row.astype(float))
    assert answer["mean"][0] == pytest.approx(float(place), rel=1e-4)
    width = (answer["upper"] - answer["lower"])[0] / 2
    assert width == pytest.approx(model.conformal_.half_width_[1])
    attrs = field.oxygen.attrs
    assert attrs["units"] == "umol kg-1"
    assert attrs["standard_name"] == "moles_of_oxygen_per_unit_mass_in_sea_water"
    assert attrs["ancillary_variables"] == "oxygen_lower oxygen_upper"
    assert field.attrs["Conventions"].startswith("CF-")
    assert field.depth.attrs["positive"] == "down"


@pytest.mark.parametrize("conv", ["zone", "area", "plain", "gcn", "sage", "gat", "none"])
def test_every_conv_fits_and_repeats(ds, split, conv):
    model = oo.Reconstructor(conv=conv, **QUICK)
    state = torch.random.get_rng_state()
    a = model.fit(ds, split).held_out()["mean"]
    assert torch.equal(state, torch.random.get_rng_state())
    np.testing.assert_array_equal(a, model.fit(ds, split).held_out()["mean"])
    other = oo.Reconstructor(conv=conv, **QUICK, random_state=1).fit(ds, split)
    assert not np.allclose(a, other.held_out()["mean"])


def test_zones_are_continuous_or_areas(ds, split):
    """The zone code is that of the problem; with areas it says in which of them a node lies."""
    zone, area = (oo.Reconstructor(conv=c, **QUICK).fit(ds, split) for c in ("zone", "area"))
    np.testing.assert_array_equal(zone._meta.numpy(), zone.problem_.meta)
    code = area._meta.numpy()
    assert set(np.unique(code)) == {0.0, 1.0}
    assert (code.sum(axis=1) == 1).all()
    nodes = area.problem_.nodes
    by_hand = np.floor((nodes.lat + 90) / 45) * 8 + np.floor((nodes.lon + 180) / 45)
    same = by_hand[:, None] == by_hand[None]
    np.testing.assert_array_equal(code @ code.T == 1, same)


def test_training_learns(ds, split):
    settings = {"hidden_channels": 16, "validate_every": 10, "lr": 2e-2, "lstm_layers": 1}
    model = oo.Reconstructor(steps=60, **settings).fit(ds, split)
    curve = [entry["validation"] for entry in model.history_]
    assert curve[-1] < 0.7 * curve[0]
    table = model.held_out("train")
    level_means = model.problem_.invert(np.zeros(len(table)), *model.problem_.pairs("train"))
    assert oo.rmse(table["truth"], table["mean"]) < 0.7 * oo.rmse(table["truth"], level_means)


def test_best_weights_are_kept(ds, split):
    model = oo.Reconstructor(steps=12, lr=0.3, validate_every=3, hidden_channels=4).fit(ds, split)
    best = min(entry["validation"] for entry in model.history_)
    assert model._validate(model._validation_set()) == pytest.approx(best)


def test_weights_of_the_best_score_are_kept_even_if_not_the_last(ds, split, monkeypatch):
    scores, states = iter([3.0, 1.0, 2.0, 4.0]), []

    def scripted(self, years):
        states.append({k: p.clone() for k, p in self.network_.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(oo.Reconstructor, "_validate", scripted)
    model = oo.Reconstructor(steps=12, validate_every=3, hidden_channels=4).fit(ds, split)
    for name, value in model.network_.state_dict().items():
        assert torch.equal(value, states[1][name])
    assert any(not torch.equal(states[1][k], p) for k, p in states[3].items())


def test_chemistry_lowers_the_variance_of_the_sensitivity(ds, split):
    plain, bound = (
        oo.Reconstructor(**(QUICK | {"steps": 40, "lr": 2e-2}), lam_chem=lam).fit(ds, split)
        for lam in (0.0, 20.0)
    )
    assert bound.sensitivity_variance() < 0.3 * plain.sensitivity_variance()
    no_nutrients = ds.drop_vars(["phosphate", "nitrate"])
    with pytest.raises(ValueError, match="needs phosphate or nitrate"):
        oo.Reconstructor(**QUICK, lam_chem=1.0).fit(no_nutrients, split)
    with pytest.raises(ValueError, match="neither phosphate nor nitrate"):
        oo.Reconstructor(**QUICK).fit(no_nutrients, split).sensitivity_variance()


def test_loss_is_the_error_plus_the_penalty_over_all_known_nutrients(ds, split):
    model = oo.Reconstructor(**QUICK, lam_chem=2.0).fit(ds, split)
    nodes, train = model.problem_.nodes, model.problem_.role == 0
    known = np.isfinite(nodes.gather(ds.phosphate)) | np.isfinite(nodes.gather(ds.nitrate))
    t = int((known.sum(axis=1) * train.any(axis=1)).argmax())
    v = np.flatnonzero(train[t])[:7]
    others = np.setdiff1d(np.flatnonzero(known[t]), v)
    assert len(others) > 10
    _, penalty = model._with_penalty(t, np.concatenate([v, others]))
    error = ((model._at(t, v) - torch.from_numpy(model.problem_.known[t, v])) ** 2).mean()
    torch.testing.assert_close(model._loss(t, v), error + 2 * penalty)
    assert penalty != model._with_penalty(t, v)[1]


def test_inner_updates():
    shares = inner_updates(np.array([0.0, 5.0, 10.0]), 3000)
    assert shares.tolist() == [558, 921, 1519]
    assert shares.max() / shares.min() == pytest.approx(np.e, rel=0.01)
    assert inner_updates(np.ones(4), 8).tolist() == [2, 2, 2, 2]
    assert inner_updates(np.array([0.0, 1.0]), 1).tolist() == [1, 1]


def test_adaptive_batches_stay_in_one_area(ds, split):
    model = oo.Reconstructor(**QUICK, adaptive=True).fit(ds, split)
    batches = model._areas(np.random.default_rng(0))
    for _ in range(50):
        t, v = next(batches)
        assert len(np.unique(model._area[v])) == 1
        assert (model.problem_.role[t, v] == 0).all()
        assert len(np.unique(v)) == len(v) <= 40


def test_another_tracer_with_missing_years_of_data(ds):
    tracer = ds[["wet", "bathymetry", "basin"]].assign(cfc=ds.oxygen.drop_attrs() / 100)
    model = oo.Reconstructor("cfc", "raw", **QUICK).fit(tracer)
    field = model.predict([1999])
    assert sorted(field.data_vars)[2:5] == ["cfc", "cfc_lower", "cfc_upper"]
    assert "units" not in field.cfc.attrs


def test_idw_limits(ds, split):
    """Great power: the nearest datum; at a datum: itself."""
    nearest = oo.IDW(power=60.0, n_neighbours=8).fit(ds, split)
    t, v = nearest.problem_.pairs("test")
    _, distance, index = nearest._nearest(t, v)
    clear = distance[:, 1] > 1.5 * distance[:, 0]
    assert clear.sum() > 20
    np.testing.assert_allclose(
        nearest._standard(t, v)[clear], nearest._values[index[clear, 0]], rtol=1e-5, atol=1e-6
    )
    t, v = nearest.problem_.pairs("train")
    np.testing.assert_allclose(
        oo.IDW().fit(ds, split)._standard(t, v), nearest.problem_.known[t, v], atol=1e-3
    )


def test_kriging_limits(ds, split):
    model = oo.Kriging().fit(ds, split)
    model._settings = {**model.lengths_, "nugget": 0.0}
    t, v = model.problem_.pairs("train")
    np.testing.assert_allclose(model._standard(t, v), model.problem_.known[t, v], atol=1e-4)
    model._set({**model.lengths_, "km": 1e-3, "years": 1e-6})
    t, v = model.problem_.pairs("test")
    np.testing.assert_allclose(model._standard(t, v), 0, atol=1e-6)  # far from all: the mean


def test_kriging_by_hand(ds, split):
    """Two data at known distances: the textbook's two equations."""
    model = oo.Kriging(n_neighbours=2).fit(ds, split)
    t, v = (x[:1] for x in model.problem_.pairs("test"))
    _, distance, index = model._nearest(t, v)
    near = model._scaled(model._t, model._v)[index[0]]
    c, nugget = np.exp(-np.linalg.norm(near[0] - near[1])), model._settings["nugget"]
    matrix = np.array([[1, (1 - nugget) * c], [(1 - nugget) * c, 1]])
    weight = np.linalg.solve(matrix, (1 - nugget) * np.exp(-distance[0]))
    assert model._standard(t, v)[0] == pytest.approx(weight @ model._values[index[0]], rel=1e-6)


def test_lengths_come_from_validation(ds, split):
    model = oo.IDW().fit(ds, split)
    t, v = model.problem_.pairs("validate")

    def score(settings):
        model._set(settings)
        return ((model._standard(t, v) - model.problem_.standard[t, v]) ** 2).mean()

    best = dict(model.lengths_)
    for years in oo.IDW.candidates["years"]:
        assert score(best) <= score({**best, "years": years}) + 1e-12


def test_tabular_chooses_by_validation(ds, split):
    class Wrong(LinearRegression):
        def predict(self, X):
            return super().predict(X) + 3

    model = oo.Tabular(estimators=[Wrong(), LinearRegression()], window=0).fit(ds, split)
    assert type(model.estimator_) is LinearRegression
    assert oo.rmse(*model.held_out()[["truth", "mean"]].to_numpy().T) < 40


def test_tabular_does_not_choose_by_the_test(ds, split):
    """Test values moved up favour a regressor that is off by as much; it is not taken."""

    class Off(LinearRegression):
        def predict(self, X):
            return super().predict(X) - 3  # of AOU, so more oxygen

    moved = ds.assign(oxygen=(ds.oxygen + 150 * (split == 3)).assign_attrs(ds.oxygen.attrs))
    right, off = (
        oo.Tabular(estimators=[kind()], window=0).fit(moved, split).held_out()
        for kind in (LinearRegression, Off)
    )
    assert oo.rmse(off["truth"], off["mean"]) < oo.rmse(right["truth"], right["mean"])
    model = oo.Tabular(estimators=[Off(), LinearRegression()], window=0).fit(moved, split)
    assert type(model.estimator_) is LinearRegression


def test_trees_see_the_window(ds, split):
    model = oo.Tabular().fit(ds, split)
    assert model.estimator_.n_features_in_ == len(model.problem_.feature_names) + 10
    assert oo.r2(*model.held_out()[["truth", "mean"]].to_numpy().T) > 0.7


def test_an_empty_zone_takes_the_pooled_width(ds, split):
    """No calibration data in the Arctic: its interval is the one of all basins together."""
    nodes = oo.Nodes.of(ds)
    role = nodes.gather(split).copy()
    role[:, nodes.basin == 4] = np.where(
        role[:, nodes.basin == 4] == 2, 0, role[:, nodes.basin == 4]
    )
    grid = split.copy(data=np.nan_to_num(nodes.scatter(role), nan=-1).astype(int))
    model = oo.IDW().fit(ds, grid)
    t, v = model.problem_.pairs("calibrate")
    error = np.sort(np.abs(model.problem_.observed[t, v] - model.predict_nodes(t, v)))
    rank = int(np.ceil((len(error) + 1) * 0.9)) - 1
    assert model.conformal_.half_width_[4] == pytest.approx(error[rank])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": -1}, "window must not be negative"),
        ({"steps": 0}, "be positive"),
        ({"lam_chem": -1.0}, "must not be negative"),
        ({"conv": "fancy"}, "conv must be one of"),
        ({"target": "x"}, "target must be"),
    ],
)
def test_bad_settings(ds, split, options, match):
    with pytest.raises(ValueError, match=match):
        oo.Reconstructor(**(QUICK | options)).fit(ds, split)


def test_bad_questions(ds, split):
    import pandas as pd

    model = oo.IDW().fit(ds, split)
    with pytest.raises(ValueError, match="1850 is not among those of the data, 1985 to 2004"):
        model.predict([1850])
    desert = pd.DataFrame({"lat": [42.0], "lon": [87.0], "depth": [0.0], "year": [1990]})
    with pytest.raises(ValueError, match="from any sea cell"):
        model.predict_table(desert)
    with pytest.raises(ValueError, match="lacks the columns depth"):
        model.predict_table(desert.drop(columns="depth"))
