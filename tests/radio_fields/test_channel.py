"""Free space, the score, and the room: closed forms and symmetries."""

import math

import numpy as np
import pytest
import torch

import icml24.radio_fields as rf

F = 2.412e9
LAM = rf.wavelength(F)


def test_path_loss_at_one_metre():
    assert rf.fspl(1.0, F) == pytest.approx(40.095, abs=1e-3)
    h = rf.free_space(torch.tensor([2.5], dtype=torch.float64), F).numpy()[0]
    assert -20 * np.log10(abs(h)) == pytest.approx(float(rf.fspl(2.5, F)), abs=1e-10)
    assert np.angle(h * np.exp(2j * np.pi * 2.5 / LAM)) == pytest.approx(0, abs=1e-9)


def test_snr_of_known_predictions():
    h = np.random.default_rng(0).normal(size=(30, 2)) @ [1, 1j]
    assert rf.prediction_snr(0 * h, h) == 0
    assert rf.prediction_snr(1.1 * h, h) == pytest.approx(20)
    assert rf.prediction_snr(h, h) == math.inf
    assert rf.prediction_snr(torch.as_tensor(1.1 * h), h) == pytest.approx(20)
    far = np.array([10.0, 0.1 + 0j])  # a ratio of sums: the strong receiver decides
    assert rf.prediction_snr([10, 0.0], far) == pytest.approx(40, abs=0.01)
    assert rf.per_receiver_nmse([10, 0.0], far).tolist() == [0, 1]


@pytest.mark.parametrize("frequency", [0, -1, 2.4, 928, np.nan, np.inf])
def test_frequency_must_be_hertz(frequency):
    with pytest.raises(ValueError, match="hertz"):
        rf.ShoeboxRoom((4, 3), (1, 1), frequency=frequency)


@pytest.mark.parametrize(("size", "counts"), [((4, 3, 2.5), [1, 7, 25, 63]), ((4, 3), [1, 5, 13])])
def test_image_counts(size, counts):
    for order, count in enumerate(counts):
        room = rf.ShoeboxRoom(size, [1.0] * len(size), frequency=F, max_order=order)
        paths = room.trace(room.sample_receivers(5, seed=1))
        assert paths.images.shape == (count, len(size))
        assert paths.mask.all()


def test_images_are_mirror_images():
    room = rf.ShoeboxRoom((4, 3, 2.5), (1.0, 0.8, 2.0), frequency=F, max_order=2)
    images = {tuple(np.round(v, 9)) for v in room.images}
    assert (7.0, 0.8, 2.0) in images  # in the wall x = 4: 2 L - x
    assert (-1.0, 0.8, 2.0) in images
    assert (-1.0, -0.8, 2.0) in images  # corner
    assert (9.0, 0.8, 2.0) in images  # both walls of x: 2 L + x
    assert (1.0, 0.8, 3.0) in images


def test_folded_path_bounces_with_equal_angles():
    """The first-order path found by minimising the length over the wall point (Fermat)."""
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=1)
    rx = np.array([[3.1, 2.2]])
    y = np.linspace(0, 3, 3001)
    via = np.hypot(4 - 1.0, y - 0.8) + np.hypot(4 - 3.1, y - 2.2)
    paths = room.trace(rx)
    i = int(np.flatnonzero((room.images == [7.0, 0.8]).all(axis=1))[0])
    assert paths.lengths[0, i] == pytest.approx(via.min(), abs=1e-6)
    towards = np.array([4, y[via.argmin()]]) - rx[0]
    np.testing.assert_allclose(paths.doa[0, i], towards / np.linalg.norm(towards), atol=1e-3)


def test_two_ray_ground_model():
    """Far beyond 4 h_t h_r / lambda the sum over direct and ground path falls by 40 dB a decade."""
    ht, hr = 1.5, 1.0
    room = rf.ShoeboxRoom((5e4, 3e3), (1.0, ht), frequency=F, max_order=1, reflection=-1)
    d = np.array([1e3, 1e4])
    paths = room.trace(np.column_stack([1 + d, [hr, hr]]))
    ground = [int(np.flatnonzero((room.images == v).all(1))[0]) for v in ([1, ht], [1, -ht])]
    h = paths.gain[:, ground].sum(axis=1)
    k = 2 * np.pi / LAM
    r1, r2 = np.hypot(d, ht - hr), np.hypot(d, ht + hr)
    closed = LAM / (4 * np.pi) * (np.exp(-1j * k * r1) / r1 - np.exp(-1j * k * r2) / r2)
    np.testing.assert_allclose(h, closed, rtol=1e-4)  # the two nearly cancel
    slope = 20 * np.log10(abs(h[0]) / abs(h[1]))
    assert slope == pytest.approx(40, abs=0.3)


def test_reciprocity_and_mirror_symmetry():
    a, b = (1.0, 0.8, 1.9), (3.1, 2.2, 0.7)
    box = [((1.5, 1.0, 0.2), (2.0, 1.6, 1.4))]
    for options in ({}, {"permittivity": 5.0}, {"obstacles": box}):
        there = rf.ShoeboxRoom((4, 3, 2.5), a, frequency=F, **options).channel([b])
        back = rf.ShoeboxRoom((4, 3, 2.5), b, frequency=F, **options).channel([a])
        np.testing.assert_allclose(there, back, rtol=1e-9)
    turned = rf.ShoeboxRoom((4, 3, 2.5), (3.0, 0.8, 1.9), frequency=F).channel([(0.9, 2.2, 0.7)])
    np.testing.assert_allclose(turned, rf.ShoeboxRoom((4, 3, 2.5), a, frequency=F).channel([b]))
    swapped = rf.ShoeboxRoom((3, 4, 2.5), (0.8, 1.0, 1.9), frequency=F).channel([(2.2, 3.1, 0.7)])
    np.testing.assert_allclose(swapped, rf.ShoeboxRoom((4, 3, 2.5), a, frequency=F).channel([b]))


def folded_polyline_blocked(room, rx, image, low, high, n=4001):
    """Walk along the straight line, fold every point back into the room, look inside the box."""
    t = np.linspace(0, 1, n)[1:-1, None]
    points = rx + t * (image - rx)
    folded = np.mod(points, 2 * room.size)
    folded = np.where(folded > room.size, 2 * room.size - folded, folded)
    return bool(((folded > low) & (folded < high)).all(axis=1).any())


def test_obstacles_block_exactly_the_folded_paths():
    low, high = np.array([1.6, 0.9]), np.array([2.4, 1.7])
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=3, obstacles=[(low, high)])
    rx = room.sample_receivers(25, seed=3)
    mask = room.trace(rx).mask
    assert 0.3 < mask.mean() < 0.9
    slow = [[not folded_polyline_blocked(room, x, v, low, high) for v in room.images] for x in rx]
    assert (mask == np.array(slow)).mean() > 0.995  # the walk may miss a grazed corner
    free = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=3)
    np.testing.assert_allclose(
        room.trace(rx).gain, np.where(mask, free.trace(rx).gain, 0), rtol=1e-12
    )


def test_waves_obey_helmholtz():
    """(laplacian + k^2) h = 0 away from the sources, through the differentiable simulator."""
    room = rf.ShoeboxRoom((4, 3, 2.5), (1.0, 0.8, 1.9), frequency=928e6, max_order=2)
    x0 = torch.tensor([2.7, 1.9, 0.8], dtype=torch.float64)
    k2 = (2 * math.pi / rf.wavelength(928e6)) ** 2
    parts = torch.view_as_real
    for c in (0, 1):
        hessian = torch.autograd.functional.hessian(
            lambda x, c=c: parts(room.channel(x[None]))[0, c], x0
        )
        value = parts(room.channel(x0[None]))[0, c]
        assert abs(hessian.trace() + k2 * value) < 1e-8 * k2 * abs(value)


def test_fresnel_limits():
    c = torch.linspace(0.01, 1, 20, dtype=torch.float64)
    assert rf.fresnel(c, 1.0).abs().max() < 1e-12
    assert rf.fresnel(torch.tensor(0.0), 5.0) == -1
    assert rf.fresnel(torch.tensor(1.0), 9.0) == pytest.approx(-0.5)


def test_vertical_polarization_signs():
    """A vertical wall turns the sign of the vertical field, floor and ceiling keep it."""
    room = rf.ShoeboxRoom(
        (4, 3, 2), (1.0, 1.5, 1.0), frequency=F, max_order=1, polarization="vertical"
    )
    rx = [[3.0, 1.5, 1.0]]
    plain = rf.ShoeboxRoom((4, 3, 2), (1.0, 1.5, 1.0), frequency=F, max_order=1).trace(rx)
    ratio = (room.trace(rx).gain / plain.gain)[0].real
    images = room.images - room.tx
    np.testing.assert_allclose(ratio[0], 1)
    np.testing.assert_allclose(ratio[np.abs(images[:, 0]) > 0], -1)
    np.testing.assert_allclose(ratio[np.abs(images[:, 1]) > 0], -1)
    vertical = np.abs(images[:, 2]) > 0  # image theory: z-directed dipole, +; theta patterns, +
    np.testing.assert_allclose(ratio[vertical], 1)


@pytest.mark.parametrize(
    ("rx", "message"),
    [
        ([[4.5, 1.0]], "outside the room"),
        ([[2000.0, 1500.0]], "units metres"),
        ([[1.0, 0.8]], "on top of the transmitter"),
        ([[1.0, 0.8, 1.0]], "2 coordinates"),
        ([[np.nan, 0.8]], "NaN"),
        ([1.0, 0.8], "shape"),
    ],
)
def test_bad_receivers(rx, message):
    with pytest.raises(ValueError, match=message):
        rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F).channel(rx)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tx": (5, 1)}, "inside the room"),
        ({"size": (4, -1)}, "positive"),
        ({"max_order": -1}, "max_order"),
        ({"permittivity": 0.5}, "permittivity"),
        ({"obstacles": [((2, 2), (1, 1))]}, "low corner"),
        ({"polarization": "vertical"}, "three-dimensional"),
    ],
)
def test_bad_rooms(options, message):
    with pytest.raises(ValueError, match=message):
        rf.ShoeboxRoom(**{"size": (4, 3), "tx": (1, 1), "frequency": F, **options})
