import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from icml24.test_time_entropy import corrupt
from icml24.test_time_entropy.corruptions import FAMILIES, HOLDOUT, NAMES, SEVERITIES, TEST
from icml24.test_time_entropy.data import images, shifted


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def x():
    return images()["test"].x[:60]


def test_lists():
    assert len(NAMES) == 22 and len(TEST) == 18 and len(HOLDOUT) == 4
    assert set(TEST) | set(HOLDOUT) == set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_every_corruption(name, x):
    kept = x.clone()
    distortion = []
    for severity in SEVERITIES:
        y = corrupt(x, name, severity, generator(1))
        assert y.shape == x.shape and y.dtype == x.dtype
        assert y.min() >= 0 and y.max() <= 1
        assert torch.allclose(y * 255, (y * 255).round(), atol=1e-4)
        assert torch.equal(y, corrupt(x, name, severity, generator(1)))
        distortion.append(float((y - x).square().mean()))
    assert torch.equal(x, kept)
    assert distortion == sorted(distortion), "distortion grows with severity"
    assert distortion[0] > 0
    if name not in ("brightness", "contrast", "gamma", "pixelate", "jpeg", "scale", "zoom_blur"):
        deterministic = name in ("gaussian_blur", "defocus_blur")
        assert torch.equal(y, corrupt(x, name, 5, generator(2))) == deterministic


@pytest.mark.parametrize("name", NAMES)
def test_colour_photographs_of_any_size_and_single_images(name):
    photo = torch.rand(2, 3, 45, 61, generator=generator())
    y = corrupt(photo, name, 3)
    assert y.shape == photo.shape and torch.isfinite(y).all()
    other = photo.to(memory_format=torch.channels_last)  # strides must not matter
    assert torch.allclose(corrupt(other, name, 3), y, atol=1.01 / 255)


@pytest.mark.parametrize("name", NAMES)
def test_images_do_not_mix(name, x):
    """What happens to one image does not depend on the others, only on the noise."""
    batch = x[:4].clone()
    y = corrupt(batch, name, 3, generator(0))
    batch[2] = 1 - batch[2]
    z = corrupt(batch, name, 3, generator(0))
    keep = [0, 1] if name == "shot_noise" else [0, 1, 3]  # Poisson draws vary in number
    assert torch.equal(y[keep], z[keep])
    assert not torch.equal(y[2], z[2])


def test_gaussian_blur_agrees_with_scipy(x):
    wanted = ndimage.gaussian_filter(
        x.double().numpy(), sigma=(0, 0, 1.5, 1.5), mode="nearest", truncate=4
    )
    assert np.abs(corrupt(x, "gaussian_blur", 3).numpy() - wanted).max() <= 0.5 / 255 + 1e-5


def test_defocus_is_a_mean_over_a_disk():
    x = torch.zeros(1, 1, 28, 28)
    x[0, 0, 14, 14] = 1
    y = corrupt(x, "defocus_blur", 3)[0, 0]  # radius 2
    area = np.pi * 2.0**2
    assert abs(y[14, 14] - 1 / area) < 0.02 and abs(y.sum() - 1) < 0.1
    assert torch.allclose(y, y.T) and y[14, 11] < y[14, 12]


@pytest.mark.parametrize(("severity", "quality"), [(1, 30), (3, 8), (5, 3)])
def test_jpeg_agrees_with_a_real_encoder(severity, quality):
    """Pillow's encoder uses the same tables and an integer cosine transform."""
    x = images()["test"].x[:30]
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    ours = corrupt(padded, "jpeg", severity)
    error = []
    for image, decoded in zip(padded, ours, strict=True):
        file = io.BytesIO()
        pixels = (image[0] * 255).round().byte().numpy()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        wanted = np.asarray(Image.open(file)).astype(float)
        error.append(np.abs(decoded[0].numpy() * 255 - wanted).mean())
    # a coefficient exactly half-way between two steps may go either way
    assert np.median(error) < 0.5 and np.mean(error) < 1.5


def test_noise_has_the_stated_moments():
    x = torch.full((200, 1, 28, 28), 0.5)
    assert abs(corrupt(x, "gaussian_noise", 3).std() - 0.18) < 0.002
    assert abs(corrupt(x, "speckle_noise", 2).std() - 0.15) < 0.002
    assert abs(corrupt(x, "shot_noise", 2).std() - (0.5 / 25) ** 0.5) < 0.002
    y = corrupt(x, "impulse_noise", 4)
    assert abs((y == 0).float().mean() - 0.1) < 0.005
    assert abs((y == 1).float().mean() - 0.1) < 0.005


def test_exact_intensity_changes():
    x = torch.rand(3, 1, 28, 28, generator=generator())
    quantised = lambda v: (v.clamp(0, 1) * 255).round() / 255  # noqa: E731
    assert torch.equal(corrupt(x, "brightness", 2), quantised(x + 0.2))
    assert torch.equal(corrupt(x, "gamma", 3), quantised(x**0.4))
    mean = x.mean((2, 3), keepdim=True)
    assert torch.equal(corrupt(x, "contrast", 1), quantised((x - mean) * 0.6 + mean))


def test_pixelate_is_a_mean_over_blocks():
    x = torch.rand(2, 1, 28, 28, generator=generator())
    y = corrupt(x, "pixelate", 1)  # 14 x 14 blocks of 2 x 2
    blocks = x.view(2, 1, 14, 2, 14, 2).mean((3, 5))
    assert torch.allclose(y[..., ::2, ::2], blocks, atol=0.5 / 255 + 1e-6)
    assert torch.equal(y[..., ::2, ::2], y[..., 1::2, 1::2])


def test_rotation_agrees_with_scipy():
    x = images()["test"].x[:1]
    y = corrupt(x, "rotate", 3, generator(0))[0, 0].numpy()
    turned = [ndimage.rotate(x[0, 0].numpy(), angle, reshape=False, order=1) for angle in (27, -27)]
    inside = np.hypot(*np.mgrid[-13.5:14, -13.5:14]) < 12
    assert min(np.abs(y - t)[inside].max() for t in turned) < 0.02


def test_translation_moves_the_mass():
    x = torch.zeros(20, 1, 28, 28)
    x[:, :, 13:15, 13:15] = 1
    y = corrupt(x, "translate", 1, generator(0))[:, 0]
    grid = torch.arange(28.0)
    rows = (y.sum(2) * grid).sum(1) / y.sum((1, 2)) - 13.5
    columns = (y.sum(1) * grid).sum(1) / y.sum((1, 2)) - 13.5
    assert torch.allclose((rows**2 + columns**2).sqrt(), torch.tensor(2.0), atol=0.05)


def test_stripe_inverts_a_band(x):
    y = corrupt(x, "stripe", 3, generator(0))
    flipped = ((y - (1 - x)).abs() < 1e-3).all(2).sum(2)[:, 0]
    same = ((y - x).abs() < 1e-3).all(2).sum(2)[:, 0]
    assert ((flipped >= 6) | (same >= 22)).all() and (same >= 22).all()


def test_bad_input_is_named(x):
    for call, match in (
        (lambda: corrupt(x, "rain", 1), "no corruption 'rain'"),
        (lambda: corrupt(x, "fog", 6), "severity"),
        (lambda: corrupt(x, "fog", 0), "severity"),
        (lambda: corrupt(x * 255, "fog", 1), r"\[0, 1\]"),
        (lambda: corrupt(x * float("nan"), "fog", 1), "NaN"),
        (lambda: corrupt(x[0], "fog", 1), "batch"),
        (lambda: shifted("holdout", "fog", 1), "split"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="divide bytes by 255"):
        corrupt((x * 255).byte(), "fog", 1)


def test_shifted_sets_are_reproducible_and_differ_by_stream():
    a, b = shifted("test", "gaussian_noise", 3, 20), shifted("test", "gaussian_noise", 3, 20)
    assert torch.equal(a.x, b.x) and len(a) == 20
    noise = a.x - images()["test"].x[:20]
    other = shifted("validation", "gaussian_noise", 3, 20).x - images()["validation"].x[:20]
    assert not torch.equal(noise, other)
    assert torch.equal(shifted("test", "clean", 0, 5).x, images()["test"].x[:5])
    splits = images()
    assert [len(s) for s in splits.values()] == [8000, 2000, 2000]
