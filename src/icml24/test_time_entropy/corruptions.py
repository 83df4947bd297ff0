"""Twenty-two image corruptions at five severities, on whole batches of tensors.

The types follow ImageNet-C (Hendrycks and Dietterich 2019) and MNIST-C (Mu and Gilmer 2019); the
code and the strengths are ours, chosen for images of 28 pixels. Lengths (blur radii, shifts) are in
pixels of an image 28 pixels high and grow with the height, so the functions also take photographs.
Four types are held out: labelled, they calibrate an estimator that is then tested on the other 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FAMILIES", "HOLDOUT", "NAMES", "SEVERITIES", "TEST", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)


def _rand(x: Tensor, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, device=x.device, dtype=x.dtype)


def _randn(x: Tensor, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, device=x.device, dtype=x.dtype)


def _unit(x: Tensor) -> float:
    return x.shape[2] / 28


# -- filters ------------------------------------------------------------------------------------


def _gaussian(x: Tensor, sigma: float) -> Tensor:
    """Smooth with a separable Gaussian kernel cut at four sigma; borders are repeated."""
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return x
    t = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (t / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    x = F.conv2d(F.pad(x, (radius, radius, 0, 0), "replicate"), kernel, groups=x.shape[1])
    kernel = kernel.transpose(2, 3)
    return F.conv2d(F.pad(x, (0, 0, radius, radius), "replicate"), kernel, groups=x.shape[1])


def _each_own_kernel(x: Tensor, kernels: Tensor) -> Tensor:
    """Convolve image i with kernel i; ``kernels`` has shape (n, k, k) or (1, k, k), k odd."""
    n, c, height, width = x.shape
    pad = kernels.shape[-1] // 2
    flat = F.pad(x, (pad, pad, pad, pad), "replicate").reshape(1, n * c, height + 2 * pad, -1)
    weight = kernels.expand(n, -1, -1).repeat_interleave(c, 0).unsqueeze(1)
    return F.conv2d(flat, weight, groups=n * c).view(n, c, height, width)


def _affine(x: Tensor, matrix: Tensor, padding: str = "zeros") -> Tensor:
    """Resample with one 2 x 2 matrix and shift per image; ``matrix`` has shape (n, 2, 3)."""
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bilinear", padding, align_corners=False)


def _matrix(x: Tensor, rows: list[list[Tensor | float]]) -> Tensor:
    n = len(x)
    entries = [[torch.as_tensor(v, dtype=x.dtype).expand(n) for v in row] for row in rows]
    return torch.stack([torch.stack(row, -1) for row in entries], 1).to(x.device)


def _sign(x: Tensor, g: torch.Generator) -> Tensor:
    return torch.where(_rand(x, (len(x),), g) < 0.5, -1.0, 1.0).to(x.dtype)


# -- noise --------------------------------------------------------------------------------------


def _gaussian_noise(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return x + c * _randn(x, tuple(x.shape), g)


def _shot_noise(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return torch.poisson(x * c, generator=g) / c


def _impulse_noise(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    u = _rand(x, tuple(x.shape), g)
    return torch.where(u < c / 2, 0.0, torch.where(u > 1 - c / 2, 1.0, x))


def _speckle_noise(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return x + x * c * _randn(x, tuple(x.shape), g)


# -- blur ---------------------------------------------------------------------------------------


def _gaussian_blur(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return _gaussian(x, c * _unit(x))


def _defocus_blur(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    radius = c * _unit(x)
    t = torch.arange(-math.ceil(radius), math.ceil(radius) + 1, device=x.device, dtype=x.dtype)
    distance = (t.view(-1, 1) ** 2 + t.view(1, -1) ** 2).sqrt()
    disk = (radius + 0.5 - distance).clamp(0, 1)
    return _each_own_kernel(x, (disk / disk.sum()).unsqueeze(0))


def _glass_blur(x: Tensor, c: tuple[float, int, int], g: torch.Generator) -> Tensor:
    sigma, reach, rounds = c[0] * _unit(x), max(1, round(c[1] * _unit(x))), c[2]
    n, channels, height, width = x.shape
    x = _gaussian(x, sigma)
    rows = torch.arange(height, device=x.device).view(1, -1, 1)
    columns = torch.arange(width, device=x.device).view(1, 1, -1)
    for _ in range(rounds):
        shift = torch.randint(
            -reach, reach + 1, (2, n, height, width), generator=g, device=x.device
        )
        source = (rows + shift[0]).clamp(0, height - 1) * width
        source = (source + (columns + shift[1]).clamp(0, width - 1)).reshape(n, 1, -1)
        x = x.flatten(2).gather(2, source.expand(-1, channels, -1)).view(n, channels, height, width)
    return _gaussian(x, sigma)


def _motion_blur(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    reach = c * _unit(x)
    t = torch.arange(-math.ceil(reach), math.ceil(reach) + 1, device=x.device, dtype=x.dtype)
    angle = (_rand(x, (len(x), 1, 1), g) - 0.5) * (math.pi / 2)
    along = t.view(1, 1, -1) * angle.cos() + t.view(1, -1, 1) * angle.sin()
    across = t.view(1, -1, 1) * angle.cos() - t.view(1, 1, -1) * angle.sin()
    kernels = (reach + 0.5 - along.abs()).clamp(0, 1) * (1 - across.abs()).clamp(0, 1)
    return _each_own_kernel(x, kernels / kernels.sum((1, 2), keepdim=True))


def _zoom_blur(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    factors = torch.linspace(1, c, 8).tolist()
    frames = [_affine(x, _matrix(x, [[1 / f, 0.0, 0.0], [0.0, 1 / f, 0.0]])) for f in factors]
    return torch.stack(frames).mean(0)


# -- weather, intensity, digital ----------------------------------------------------------------


def _fog(x: Tensor, c: tuple[float, float], g: torch.Generator) -> Tensor:
    strength, roughness = c
    n, _, height, width = x.shape
    fy = torch.fft.fftfreq(height, device=x.device).view(-1, 1)
    fx = torch.fft.rfftfreq(width, device=x.device).view(1, -1)
    amplitude = (fy**2 + fx**2).clamp(min=1 / max(height, width) ** 2) ** (-roughness / 2)
    spectrum = torch.fft.rfft2(_randn(x, (n, 1, height, width), g)) * amplitude
    cloud = torch.fft.irfft2(spectrum, s=(height, width)).to(x.dtype)
    low, high = cloud.amin((2, 3), keepdim=True), cloud.amax((2, 3), keepdim=True)
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * (cloud - low) / (high - low)) * top / (top + strength)


def _spatter(x: Tensor, c: tuple[float, float], g: torch.Generator) -> Tensor:
    share, strength = c
    n, _, height, width = x.shape
    liquid = _gaussian(_randn(x, (n, 1, height, width), g), 1.2 * _unit(x))
    edge = liquid.flatten(1).quantile(1 - share, dim=1).view(-1, 1, 1, 1)
    drops = _gaussian((liquid > edge).to(x.dtype), 0.6 * _unit(x))
    return x * (1 - strength * drops) + 0.8 * strength * drops


def _brightness(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return x + c


def _contrast(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * c + mean


def _gamma(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return x**c


def _pixelate(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    size = (max(1, int(x.shape[2] * c)), max(1, int(x.shape[3] * c)))
    return F.interpolate(F.adaptive_avg_pool2d(x, size), x.shape[2:], mode="nearest")


#: Luminance quantisation table of the JPEG standard (ITU-T T.81, Annex K).
_QUANTISATION = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def _jpeg(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    """Quantise 8 x 8 cosine coefficients as a JPEG encoder of quality ``c`` (grey) does."""
    n, channels, height, width = x.shape
    scale = 5000 / c if c < 50 else 200 - 2 * c
    table = torch.tensor(_QUANTISATION, device=x.device, dtype=x.dtype)
    table = ((table * scale + 50) / 100).floor().clamp(1, 255)
    k = torch.arange(8, device=x.device, dtype=x.dtype)
    dct = torch.cos((2 * k + 1) * k.view(-1, 1) * (math.pi / 16)) / 2
    dct[0] /= math.sqrt(2)
    padded = F.pad(x, (0, -width % 8, 0, -height % 8), "replicate")
    rows, columns = padded.shape[2] // 8, padded.shape[3] // 8
    blocks = (padded * 255).round().reshape(n * channels, rows, 8, columns, 8) - 128
    frequency = torch.einsum("ui,nrics,vs->nrucv", dct, blocks, dct)
    quantised = (frequency / table.view(1, 1, 8, 1, 8)).round() * table.view(1, 1, 8, 1, 8)
    restored = torch.einsum("ui,nrucv,vs->nrics", dct, quantised, dct) + 128
    return restored.reshape(n, channels, rows * 8, columns * 8)[:, :, :height, :width] / 255


# -- geometry -----------------------------------------------------------------------------------


def _elastic(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    n, _, height, width = x.shape
    field = _gaussian(2 * _rand(x, (n, 2, height, width), g) - 1, 3 * _unit(x))
    field = field / field.flatten(1).std(1).view(-1, 1, 1, 1)
    shift = field.permute(0, 2, 3, 1) * (2 * c * _unit(x) / height)
    still = F.affine_grid(
        _matrix(x, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), list(x.shape), align_corners=False
    )
    return F.grid_sample(x, still + shift, "bilinear", "zeros", align_corners=False)


def _rotate(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    angle = _sign(x, g) * math.radians(c)
    return _affine(
        x, _matrix(x, [[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    )


def _shear(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return _affine(x, _matrix(x, [[1.0, _sign(x, g) * c, 0.0], [0.0, 1.0, 0.0]]))


def _translate(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    angle = 2 * math.pi * _rand(x, (len(x),), g)
    reach = 2 * c / 28
    return _affine(
        x, _matrix(x, [[1.0, 0.0, reach * angle.cos()], [0.0, 1.0, reach * angle.sin()]])
    )


def _scale(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    return _affine(x, _matrix(x, [[1 / c, 0.0, 0.0], [0.0, 1 / c, 0.0]]))


def _stripe(x: Tensor, c: float, g: torch.Generator) -> Tensor:
    width = x.shape[3]
    start = _rand(x, (len(x), 1), g) * (width - c * _unit(x))
    column = torch.arange(width, device=x.device).view(1, -1)
    inside = (column >= start) & (column < start + c * _unit(x))
    return torch.where(inside.view(-1, 1, 1, width), 1 - x, x)


#: family, function, and the parameter at each severity
_TYPES: dict[str, tuple[str, Callable[..., Tensor], tuple]] = {
    "gaussian_noise": ("noise", _gaussian_noise, (0.05, 0.1, 0.18, 0.26, 0.35)),
    "shot_noise": ("noise", _shot_noise, (60, 25, 12, 6, 3)),
    "impulse_noise": ("noise", _impulse_noise, (0.03, 0.07, 0.12, 0.2, 0.3)),
    "defocus_blur": ("blur", _defocus_blur, (1.0, 1.5, 2.0, 2.6, 3.3)),
    "glass_blur": (
        "blur",
        _glass_blur,
        ((0.3, 1, 1), (0.4, 1, 2), (0.5, 2, 2), (0.6, 3, 2), (0.8, 3, 3)),
    ),
    "motion_blur": ("blur", _motion_blur, (2.0, 3.5, 5.0, 7.0, 9.0)),
    "zoom_blur": ("blur", _zoom_blur, (1.15, 1.3, 1.5, 1.75, 2.0)),
    "fog": ("weather", _fog, ((0.4, 1.6), (0.7, 1.6), (1.1, 1.5), (1.6, 1.4), (2.2, 1.3))),
    "brightness": ("weather", _brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": ("weather", _contrast, (0.6, 0.4, 0.25, 0.15, 0.08)),
    "elastic": ("geometry", _elastic, (0.6, 1.0, 1.5, 2.0, 2.6)),
    "pixelate": ("digital", _pixelate, (0.5, 0.36, 0.29, 0.25, 0.18)),
    "jpeg": ("digital", _jpeg, (30, 15, 8, 5, 3)),
    "rotate": ("geometry", _rotate, (10, 18, 27, 38, 50)),
    "shear": ("geometry", _shear, (0.15, 0.25, 0.4, 0.55, 0.75)),
    "translate": ("geometry", _translate, (2, 3, 4.5, 6, 8)),
    "scale": ("geometry", _scale, (0.85, 0.75, 0.65, 0.55, 0.45)),
    "stripe": ("digital", _stripe, (2, 4, 6, 9, 12)),
    "speckle_noise": ("noise", _speckle_noise, (0.15, 0.3, 0.5, 0.75, 1.0)),
    "gaussian_blur": ("blur", _gaussian_blur, (0.6, 1.0, 1.5, 2.0, 2.6)),
    "spatter": (
        "weather",
        _spatter,
        ((0.08, 0.6), (0.14, 0.7), (0.2, 0.8), (0.28, 0.9), (0.36, 1.0)),
    ),
    "gamma": ("weather", _gamma, (0.75, 0.55, 0.4, 0.28, 0.18)),
}

NAMES: tuple[str, ...] = tuple(_TYPES)
#: Types whose labelled images may calibrate an estimator.
HOLDOUT: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "gamma")
#: Types on which estimators are tested.
TEST: tuple[str, ...] = tuple(name for name in NAMES if name not in HOLDOUT)
FAMILIES: dict[str, str] = {name: entry[0] for name, entry in _TYPES.items()}


def corrupt(
    x: Tensor, name: str, severity: int, generator: torch.Generator | None = None
) -> Tensor:
    """Corrupt a batch of images.

    Parameters
    ----------
    x : Tensor of floating point, shape (n, channels, height, width)
        Values in [0, 1]. Not changed.
    name : str
        One of :data:`NAMES`.
    severity : int
        From 1 (mild) to 5 (strong).
    generator : torch.Generator, optional
        Source of randomness, on the device of ``x``; without one a fresh generator of seed 0.

    Returns
    -------
    Tensor, shape of ``x``
        Clipped to [0, 1] and rounded to multiples of 1/255, as image files are.

    Raises
    ------
    ValueError
        If the name or the severity is unknown, or ``x`` is not such a batch.
    TypeError
        If ``x`` is not a tensor of floating point numbers.

    Examples
    --------
    >>> round(corrupt(torch.full((1, 1, 28, 28), 0.2), "brightness", 5).max().item(), 3)
    0.698
    """
    if name not in _TYPES:
        raise ValueError(f"There is no corruption {name!r}; there are {', '.join(NAMES)}.")
    if severity not in SEVERITIES or isinstance(severity, bool):
        raise ValueError(f"severity must be an integer from 1 to 5, got {severity!r}.")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x must be a tensor of floats in [0, 1], got {kind}; divide bytes by 255 first."
        )
    if x.ndim != 4 or x.numel() == 0:
        raise ValueError(
            "x must be a non-empty batch of shape (n, channels, height, width), got "
            f"{tuple(x.shape)}."
        )
    low, high = x.aminmax()
    if not (low >= 0 and high <= 1):  # also false for NaN
        raise ValueError(
            f"x must lie in [0, 1] without NaN, got values from {low:.3g} to {high:.3g}."
        )
    if generator is None:
        generator = torch.Generator(x.device).manual_seed(0)
    _, function, parameters = _TYPES[name]
    y = function(x, parameters[severity - 1], generator)
    return (y.clamp(0, 1) * 255).round() / 255
