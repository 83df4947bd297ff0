"""Training on cases whose answer is known, and every switch."""

import numpy as np
import pytest
import torch

import icml24.radio_fields as rf

F = 928e6


def plane(n=60, order=0, seed=0):
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=order)
    rx = room.sample_receivers(n, seed=seed)
    return room, rx, room.channel(rx), room.trace(rx)


def small(**changes):
    return rf.NeWRF.compact(
        F, far=4.5, **{"n_restarts": 1, "max_steps": 12, "batch_size": 8, **changes}
    )


@pytest.fixture(scope="module")
def line_of_sight():
    """One virtual transmitter only, the transmitter itself."""
    room, rx, h, paths = plane(60)
    model = small(max_steps=300, batch_size=50, lr=4e-3).fit(rx[:50], h[:50], paths.doa[:50])
    return room, rx, h, paths, model


def test_learns_one_transmitter(line_of_sight):
    _, rx, h, paths, model = line_of_sight
    assert model.score(rx[:50], h[:50], paths.doa[:50]) > 15
    assert model.score(rx[50:], h[50:], paths.doa[50:]) > 8
    assert np.mean(model.losses_[-20:]) < 0.1 * np.mean(model.losses_[:20])


def test_searched_directions_equal_known_ones_here(line_of_sight):
    _, rx, _, paths, model = line_of_sight
    np.testing.assert_allclose(
        model.predict(rx[50:]), model.predict(rx[50:], paths.doa[50:]), rtol=1e-3, atol=1e-7
    )


def test_density_is_high_at_the_transmitter(line_of_sight):
    """Along rays towards the transmitter, most of what is rendered comes from close to it."""
    model = line_of_sight[-1]
    behind = np.array([1.0, 0.8])
    grid = np.stack(np.meshgrid(np.linspace(0.1, 3.9, 39), np.linspace(0.1, 2.9, 29)), -1)
    flat = grid.reshape(-1, 2)
    dense = model.density_at(flat)
    near = np.linalg.norm(flat - behind, axis=1) < 0.5
    assert dense[near].mean() > 2 * dense[~near].mean()


def test_same_seed_same_bits():
    _, rx, h, paths = plane(20, order=1)
    state = torch.random.get_rng_state()
    a = small(max_steps=5).fit(rx, h, paths.doa).predict(rx, paths.doa)
    b = small(max_steps=5).fit(rx, h, paths.doa).predict(rx, paths.doa)
    c = small(max_steps=5, random_state=1).fit(rx, h, paths.doa).predict(rx, paths.doa)
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_masked_rays_do_not_count():
    _, rx, h, paths = plane(20, order=1)
    model = small().fit(rx, h, paths.doa)
    mask = paths.mask.copy()
    mask[:, 2] = False
    other = paths.doa.copy()
    other[:, 2] = [1.0, 0.0]
    np.testing.assert_array_equal(
        model.predict(rx, paths.doa, mask), model.predict(rx, other, mask)
    )
    none = np.zeros_like(mask)
    assert np.abs(model.predict(rx, paths.doa, none)).max() == 0  # nothing arrives


def test_prediction_is_the_sum_over_rays():
    """Eq. (3): all paths at once equal the paths one by one."""
    _, rx, h, paths = plane(15, order=1)
    model = small().fit(rx, h, paths.doa)
    each = [model.predict(rx, paths.doa[:, [p]]) for p in range(5)]
    np.testing.assert_allclose(model.predict(rx, paths.doa), sum(each), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_importance": 16},
        {"extra_rays": 3},
        {"extra_rays": 3, "extra_rays_mode": "sum"},
        {"directions": "uniform", "n_directions": 6},
        {"phase": False, "path_loss": False},
        {"density": "softplus"},
        {"schedule": "plateau"},
        {"n_restarts": 2, "screen_steps": 3},
        {"doa_noise_deg": 0.0},
    ],
)
def test_every_switch_trains(changes):
    _, rx, h, paths = plane(12, order=1)
    model = small(max_steps=6, **changes).fit(rx, h, paths.doa)
    assert len(model.losses_) == 6
    assert np.isfinite(model.losses_).all()
    assert len(model.nets_) == (2 if "n_importance" in changes else 1)
    assert len(model.validation_snr_) == (2 if "n_restarts" in changes else 0)
    assert np.isfinite(model.predict(rx[:2], paths.doa[:2])).all()


def test_restarts_keep_the_best_on_held_out_receivers():
    _, rx, h, paths = plane(30)
    model = small(n_restarts=3, screen_steps=40, max_steps=41).fit(rx, h, paths.doa)
    best = int(np.argmax(model.validation_snr_))
    seeds = np.random.default_rng(0).integers(2**31, size=3)
    chosen = small(max_steps=41)
    chosen.dim_ = 2
    chosen._check()
    fresh = chosen._start(int(seeds[best])).nets[0].trunk[0].weight
    trained = model.nets_[0].trunk[0].weight
    distance = [
        (chosen._start(int(s)).nets[0].trunk[0].weight - trained).norm().item() for s in seeds
    ]
    assert int(np.argmin(distance)) == best
    assert fresh.shape == trained.shape


def test_uniform_rays_need_no_directions():
    _, rx, h, _ = plane(12)
    model = small(directions="uniform", n_directions=4).fit(rx, h)
    assert model.search_ is None
    assert np.isfinite(model.predict(rx)).all()
    with pytest.raises(ValueError, match="directions of arrival"):
        small().fit(rx, h)


def test_space_works_like_the_plane():
    room = rf.ShoeboxRoom((4, 3, 2.5), (1.0, 0.8, 1.9), frequency=F, max_order=1)
    rx = room.sample_receivers(10, seed=0)
    paths = room.trace(rx)
    model = small(max_steps=3, extra_rays=2).fit(rx, room.channel(rx), paths.doa)
    assert model.predict(rx).shape == (10,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frequency": 2.4}, "hertz"),
        ({"near": 0.0}, "near"),
        ({"near": 5.0}, "near"),
        ({"n_samples": 8}, "half a wavelength"),
        ({"directions": "grid"}, "directions"),
        ({"schedule": "cosine"}, "schedule"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_settings(changes, message):
    _, rx, h, paths = plane(6)
    with pytest.raises(ValueError, match=message):
        small().set_params(**changes).fit(rx, h, paths.doa)


def test_directions():
    g = torch.Generator().manual_seed(0)
    w = rf.random_directions(20_000, 3, g)
    assert w.mean(0).abs().max() < 0.02
    assert (w[:, 2].abs() < 0.5).float().mean() == pytest.approx(0.5, abs=0.02)  # equal areas
    even = rf.uniform_directions(400, 3)
    torch.testing.assert_close(even.norm(dim=1), torch.ones(400))
    assert (even @ even.T - 2 * torch.eye(400)).max() < np.cos(np.radians(5))
    for dim in (2, 3):
        w = rf.random_directions(2000, dim, g)
        turned = rf.perturb_directions(w, 0.1, g)
        angle = torch.rad2deg(torch.acos((w.double() * turned.double()).sum(1).clamp(-1, 1)))
        assert angle.max() < 0.1 * np.sqrt(dim - 1) + 0.03
        assert angle.median() > 0.03
        torch.testing.assert_close(rf.perturb_directions(w, 0, g), w)
