"""The experiments: same test set for all sizes, and records that mean what they say."""

from dataclasses import replace

import numpy as np
import pytest

from icml24.radio_fields import experiments as ex

SMALL = ex.Config(n_train=30, n_test=20, steps=6, batch=6)


def test_training_sets_are_nested_and_the_test_set_stays():
    small, large = (ex.simulate(replace(SMALL, n_train=n), 3) for n in (30, 60))
    for a, b in zip(small.test, large.test, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(small.train, large.train, strict=True):
        np.testing.assert_array_equal(a, b[:30])
    other = ex.simulate(SMALL, 4)
    assert not np.isin(other.test[0], small.test[0]).any()
    overlap = (small.train[0][:, None] == small.test[0]).all(axis=-1)
    assert not overlap.any()


def test_noise_has_the_asked_power_and_stays_off_the_test_set():
    clean, noisy = (
        ex.simulate(replace(SMALL, n_train=4000, noise_db=db), 0) for db in (None, -10.0)
    )
    np.testing.assert_array_equal(clean.test[1], noisy.test[1])
    power = (np.abs(noisy.train[1] - clean.train[1]) ** 2).mean()
    assert power / (np.abs(clean.train[1]) ** 2).mean() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("variant", ex.VARIANTS)
def test_every_variant(variant):
    config = replace(SMALL, variant=variant)
    record = ex.newrf(config, 0)
    assert np.isfinite([record["snr"], record["searched"], record["train"]]).all()
    assert record == ex.newrf(config, 0)
    model = ex.build_newrf(config, 0)
    assert model.phase == (variant not in ("optical", "no phase"))
    assert model.path_loss == (variant not in ("optical", "no path loss"))
    assert (model.directions == "uniform") == (variant == "uniform")
    assert (model.extra_rays > 0) == (variant == "extra rays")


def test_uniform_rays_get_no_less_work():
    """The peer without directions may evaluate its network at least as often."""
    config = ex.Config.laptop()
    work = {}
    for variant in ("newrf", "uniform"):
        model = ex.build_newrf(replace(config, variant=variant), 0)
        rays = model.n_directions if variant == "uniform" else 5
        work[variant] = model.max_steps * model.batch_size * rays * model.n_samples
    assert work["uniform"] >= work["newrf"]


def test_paper_settings():
    model = ex.build_newrf(ex.Config.paper(), 0)
    assert (model.width, model.depth, model.n_samples, model.n_importance) == (128, 6, 128, 128)
    assert (model.max_steps, model.batch_size, model.extra_rays) == (100_000, 32, 10)
    assert len(ex.simulate(replace(ex.Config.paper(), n_train=3, n_test=2), 0).room.images) == 25


def test_interpolators_and_closed_form():
    record = ex.interpolators(SMALL, 0)
    assert record["best"] == max(v for k, v in record.items() if k != "best")
    linear = ex.closed_form(replace(SMALL, n_train=60), 0)
    assert linear["VTx-LS"] > record["best"] + 10
    assert linear["found"] == 5


def test_search_record():
    record = ex.search(replace(SMALL, n_train=80, doa_error_deg=0.0), 0)
    assert record == {"within 1 cm": 1.0, "within 10 cm": 1.0, "false": 0}


def test_stored_ablations_are_whole():
    stored = ex.stored_ablations()
    counts = stored.groupby("variant", sort=False)["seed"].apply(list)
    assert counts.to_dict() == {name: list(range(5)) for name in ex.STORED_VARIANTS}
    twice = stored.groupby("variant")["evaluations"].first()
    assert twice["extra rays"] == pytest.approx(2 * twice["no phase"])  # five rays more than five


@pytest.mark.slow
def test_a_stored_ablation_is_what_the_experiment_gives():
    record = ex.newrf(replace(ex.Config.laptop(), variant="no phase"), 2)
    stored = ex.stored_ablations().query("variant == 'no phase' and seed == 2").iloc[0]
    assert record["snr"] == pytest.approx(stored["snr"], abs=1.0)
    assert record["train"] == pytest.approx(stored["train"], abs=2.0)
