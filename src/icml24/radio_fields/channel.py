r"""The channel model: waves along straight lines, and how a prediction is scored.

Every quantity is in SI units: metres, hertz, radians. A path of length ``d`` contributes (eq. 1)

.. math:: h = \Gamma \, \frac{\lambda}{4 \pi d} \, e^{-j k d}, \qquad k = 2 \pi / \lambda .
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

__all__ = [
    "SPEED_OF_LIGHT",
    "Array",
    "check_frequency",
    "check_positions",
    "free_space",
    "fspl",
    "per_receiver_nmse",
    "prediction_snr",
    "wavelength",
]

SPEED_OF_LIGHT = 299_792_458.0
Array = np.ndarray[Any, Any]


def check_frequency(frequency: float) -> float:
    """Return the frequency, or say what is wrong with it.

    Parameters
    ----------
    frequency : float
        Carrier frequency in hertz.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If it is not positive, not finite, or so small that megahertz or gigahertz were meant.

    Examples
    --------
    >>> check_frequency(2.4)
    Traceback (most recent call last):
    ...
    ValueError: frequency must be in hertz (for example 2.4e9), got 2.4.
    """
    value = float(frequency)
    if not np.isfinite(value) or value <= 0:
        raise ValueError(f"frequency must be a positive number of hertz, got {value:g}.")
    if value < 1e6:
        raise ValueError(f"frequency must be in hertz (for example 2.4e9), got {value:g}.")
    return value


def check_positions(x: ArrayLike, name: str = "rx", dim: int | None = None) -> Array:
    """Return positions as a float array of shape (n, D), D = 2 or 3.

    Parameters
    ----------
    x : array_like
        Positions in metres, one in a row.
    name : str
        What to call them in messages.
    dim : int, optional
        The number of coordinates they must have.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    ValueError
        If the shape is wrong or a number is not finite.
    """
    array = np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x, dtype=float)
    if array.ndim != 2 or array.shape[1] not in (2, 3) or len(array) == 0:
        raise ValueError(f"{name} must have shape (n, 2) or (n, 3), got {array.shape}.")
    if dim is not None and array.shape[1] != dim:
        raise ValueError(f"{name} must have {dim} coordinates, got {array.shape[1]}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite coordinates.")
    return array


def wavelength(frequency: float) -> float:
    """Return the wavelength in metres.

    Examples
    --------
    >>> round(wavelength(928e6), 4)
    0.3231
    """
    return SPEED_OF_LIGHT / check_frequency(frequency)


def fspl(distance: ArrayLike, frequency: float) -> Array:
    r"""Free-space path loss, :math:`20 \log_{10}(4 \pi d / \lambda)`.

    Parameters
    ----------
    distance : array_like
        Distance in metres, positive.
    frequency : float
        Hertz.

    Returns
    -------
    numpy.ndarray
        Loss in decibel.

    Examples
    --------
    >>> round(float(fspl(1.0, 2.412e9)), 3)
    40.095
    """
    d = np.asarray(distance, dtype=float)
    if not (d > 0).all():
        raise ValueError("distance must be positive.")
    return 20 * np.log10(4 * np.pi * d / wavelength(frequency))


def free_space(distance: torch.Tensor, frequency: float) -> torch.Tensor:
    r"""Complex gain of a lossless path of given length: eq. (1) with :math:`\Gamma = 1`.

    Parameters
    ----------
    distance : torch.Tensor
        Lengths in metres.
    frequency : float
        Hertz.

    Returns
    -------
    torch.Tensor
        Complex, differentiable in ``distance``.

    Examples
    --------
    >>> h = free_space(torch.tensor([1.0], dtype=torch.float64), 928e6)
    >>> round(h.abs().item(), 5)
    0.02571
    """
    lam = wavelength(frequency)
    return torch.polar(lam / (4 * torch.pi * distance), -2 * torch.pi / lam * distance)


def _channels(h: ArrayLike, name: str) -> Array:
    return np.asarray(h.detach().cpu() if isinstance(h, torch.Tensor) else h)


def prediction_snr(h_pred: ArrayLike, h_true: ArrayLike) -> float:
    r"""Prediction SNR in decibel: :math:`-10 \log_{10} \sum |\hat h - h|^2 / \sum |h|^2`.

    Parameters
    ----------
    h_pred, h_true : array_like of complex, shape (n,)
        Predicted and true channels.

    Returns
    -------
    float
        0 for predicting nothing, infinite for a perfect prediction.

    Raises
    ------
    ValueError
        If the shapes differ or all true channels are zero.

    Examples
    --------
    >>> h = np.array([1.0 + 1.0j, -2.0j])
    >>> round(prediction_snr(1.1 * h, h), 6), prediction_snr(0 * h, h) == 0
    (20.0, True)
    """
    pred, true = _channels(h_pred, "h_pred"), _channels(h_true, "h_true")
    if pred.shape != true.shape:
        raise ValueError(f"h_pred and h_true must have one shape, got {pred.shape}, {true.shape}.")
    power = float((np.abs(true) ** 2).sum())
    if power == 0:
        raise ValueError("The SNR is undefined: all true channels are zero.")
    error = float((np.abs(pred - true) ** 2).sum())
    return float("inf") if error == 0 else float(10 * np.log10(power / error))


def per_receiver_nmse(h_pred: ArrayLike, h_true: ArrayLike) -> Array:
    """Squared error of each receiver relative to its own power.

    The prediction SNR is a ratio of sums and so dominated by receivers near the transmitter; the
    median of these numbers is not.

    Examples
    --------
    >>> per_receiver_nmse([0.0, 1.0], [1.0, 2.0]).tolist()
    [1.0, 0.25]
    """
    pred, true = _channels(h_pred, "h_pred"), _channels(h_true, "h_true")
    if (true == 0).any():
        raise ValueError("The error relative to a channel of zero is undefined.")
    return np.abs(pred - true) ** 2 / np.abs(true) ** 2
