"""The search for virtual transmitters, and the two predictors that rest on it."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import icml24.radio_fields as rf

F = 928e6


def turn(doa, degrees, seed=0):
    """Directions with uniform errors of up to ``degrees`` in both angles."""
    rng = np.random.default_rng(seed)
    error = np.radians(rng.uniform(-degrees, degrees, (*doa.shape[:2], 2)))
    azimuth = np.arctan2(doa[..., 1], doa[..., 0]) + error[..., 0]
    flat = np.stack([np.cos(azimuth), np.sin(azimuth)], axis=-1)
    if doa.shape[-1] == 2:
        return flat
    elevation = np.arcsin(doa[..., 2].clip(-1, 1)) + error[..., 1]
    return np.concatenate([np.cos(elevation)[..., None] * flat, np.sin(elevation)[..., None]], -1)


def plane(n=60, order=1, seed=0, **options):
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=order, **options)
    rx = room.sample_receivers(n, seed=seed)
    return room, rx, room.trace(rx), room.channel(rx)


def test_two_lines_in_space():
    rng = np.random.default_rng(0)
    meet = rng.normal(size=(50, 3))
    w1, w2 = (w / np.linalg.norm(w, axis=1, keepdims=True) for w in rng.normal(size=(2, 50, 3)))
    t1, t2 = rng.uniform(1, 5, (2, 50))
    point, gap, s1, s2 = rf.closest_points(meet - t1[:, None] * w1, w1, meet - t2[:, None] * w2, w2)
    np.testing.assert_allclose(point, meet, atol=1e-9)
    np.testing.assert_allclose(gap, 0, atol=1e-9)
    np.testing.assert_allclose([s1, s2], [t1, t2])
    normal = np.cross(w1, w2)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    apart = meet - t2[:, None] * w2 + 0.02 * normal
    point, gap, _, _ = rf.closest_points(meet - t1[:, None] * w1, w1, apart, w2)
    np.testing.assert_allclose(gap, 0.02, rtol=1e-6)
    np.testing.assert_allclose(point, meet + 0.01 * normal, atol=1e-9)


def test_parallel_and_diverging_rays_meet_nowhere():
    rx = np.array([[0.0, 0.0], [0.0, 1.0]])
    parallel = np.array([[[1.0, 0.0]], [[1.0, 0.0]]])
    with pytest.raises(ValueError, match="No two rays"):
        rf.DoASearch().fit(rx, parallel)
    s = np.sqrt(0.5)
    with pytest.raises(ValueError, match="No two rays"):  # the lines meet behind both receivers
        rf.DoASearch().fit(rx, np.array([[[s, -s]], [[s, s]]]))
    search = rf.DoASearch(min_support=2).fit(rx, np.array([[[s, s]], [[s, -s]]]))
    np.testing.assert_allclose(search.virtual_transmitters_, [[0.5, 0.5]], atol=1e-12)


def test_point_of_many_lines():
    rng = np.random.default_rng(1)
    v, o = np.array([1.0, -2.0, 0.5]), rng.normal(size=(20, 3)) * 4
    w = (v - o) / np.linalg.norm(v - o, axis=1, keepdims=True)
    np.testing.assert_allclose(rf.least_squares_point(o, w), v, atol=1e-10)
    w[0] = [1, 0, 0]  # an outlier of weight zero does not matter
    weights = np.r_[0, np.ones(19)]
    np.testing.assert_allclose(rf.least_squares_point(o, w, weights), v, atol=1e-10)


def test_all_images_of_a_noise_free_room():
    room = rf.ShoeboxRoom((4.2, 3.1, 2.6), (1.0, 0.8, 1.9), frequency=F, max_order=2)
    rx = room.sample_receivers(80, seed=4)
    paths = room.trace(rx)
    search = rf.DoASearch().fit(rx, paths.doa, paths.mask)
    assert len(search.virtual_transmitters_) == 25
    assert rf.recall(search.virtual_transmitters_, room.images, 1e-6) == 1
    assert search.explained_ == 1


def test_noise_and_false_alarms():
    room, rx, paths, _ = plane(100)
    search = rf.DoASearch().fit(rx, turn(paths.doa, 0.1))
    assert rf.recall(search.virtual_transmitters_, room.images, 0.05) == 1
    assert len(search.virtual_transmitters_) <= 7
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, (60, 1))  # directions that mean nothing
    noise = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    junk = np.concatenate([paths.doa[:60], noise], axis=1)
    found = rf.DoASearch().fit(rx[:60], junk)
    assert rf.recall(found.virtual_transmitters_, room.images, 1e-3) == 1


def test_directions_at_new_places():
    room, rx, paths, _ = plane(100, obstacles=[((1.9, 1.2), (2.4, 1.7))])
    search = rf.DoASearch().fit(rx, paths.doa, paths.mask)
    new = room.sample_receivers(200, seed=9)
    true = room.trace(new)
    doa, mask = search.predict(new)
    np.testing.assert_allclose(np.linalg.norm(doa, axis=-1), 1)
    to = search.virtual_transmitters_[:, None] - room.images
    match = np.linalg.norm(to, axis=-1).argmin(axis=1)  # found -> image
    right = mask == true.mask[:, match]
    assert right.mean() > 0.9
    assert 0.6 < true.mask.mean() < 0.99  # the obstacle matters
    measured = search.visible(new, true.doa, true.mask)
    assert (measured == true.mask[:, match]).all()


def test_search_checks_its_input():
    _, rx, paths, _ = plane(10)
    with pytest.raises(ValueError, match="unit"):
        rf.DoASearch().fit(rx, 2 * paths.doa)
    with pytest.raises(ValueError, match="shape"):
        rf.DoASearch().fit(rx, paths.doa[:5])
    empty = paths.mask.copy()
    empty[3] = False
    with pytest.raises(ValueError, match="Receiver 3"):
        rf.DoASearch().fit(rx, paths.doa, empty)
    with pytest.raises(NotFittedError):
        rf.DoASearch().predict(rx)


def test_true_sources_give_back_random_gains():
    rng = np.random.default_rng(2)
    sources = rng.uniform(-4, 8, (6, 2))
    rx = rng.uniform(0, 3, (40, 2))
    gains = rng.normal(size=(6, 2)) @ [1, 1j]
    seen = np.ones((40, 6), bool)
    h = rf.design_matrix(rx, sources, seen, F) @ gains
    to = sources - rx[:, None]
    doa = to / np.linalg.norm(to, axis=-1, keepdims=True)
    model = rf.VirtualTransmitterRegressor(F, ridge=0).fit(rx[:30], h[:30], doa[:30])
    order = np.linalg.norm(model.search_.virtual_transmitters_[:, None] - sources, axis=-1)
    np.testing.assert_allclose(model.gains_, gains[order.argmin(axis=1)], atol=1e-8)
    assert model.score(rx[30:], h[30:], doa[30:]) > 100


def test_closed_form_on_noisy_directions_and_bad_reflectors():
    _, rx, paths, h = plane(150, reflection=-0.7)
    noisy = turn(paths.doa, 0.1)
    model = rf.VirtualTransmitterRegressor(F).fit(rx[:100], h[:100], noisy[:100])
    assert model.score(rx[100:], h[100:]) > 25
    gains = sorted(model.gains_.real)
    assert gains[-1] == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(gains[:4], -0.7, atol=0.08)


def test_source_field_improves_positions():
    """Directions with a large error: the gradient through the phase finds the positions."""
    room, rx, paths, h = plane(150)
    noisy = turn(paths.doa, 0.5)
    search = rf.DoASearch(angle_tol_deg=1.5)
    before = rf.VirtualTransmitterRegressor(F, search=search)
    after = rf.SourceField(F, search=search, steps=200)
    scores = [
        m.fit(rx[:100], h[:100], noisy[:100]).score(rx[100:], h[100:]) for m in (before, after)
    ]
    assert scores[1] > scores[0] + 6
    assert after.losses_[-1] < 0.7 * after.losses_[0]
    assert rf.recall(after.sources_, room.images, 0.02) == 1
    assert search.get_params() == rf.DoASearch(angle_tol_deg=1.5).get_params()
    assert not hasattr(search, "labels_")  # the user's object is not touched


def test_contract():
    _, rx, paths, h = plane(30)
    for model in (rf.VirtualTransmitterRegressor(F), rf.SourceField(F, steps=3)):
        assert clone(model).get_params().keys() == model.get_params().keys()
        with pytest.raises(ValueError, match="directions of arrival"):
            model.fit(rx, h)
        with pytest.raises(NotFittedError):
            clone(model).predict(rx)
        copies = rx.copy(), h.copy(), paths.doa.copy()
        model.fit(rx, h, paths.doa)
        for kept, given in zip(copies, (rx, h, paths.doa), strict=True):
            np.testing.assert_array_equal(kept, given)
    with pytest.raises(ValueError, match="ridge"):
        rf.VirtualTransmitterRegressor(F, ridge=-1).fit(rx, h, paths.doa)
