"""What all predictors of channels share: the contract and the checks of their input."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from icml24.radio_fields.channel import Array, check_positions, prediction_snr

__all__ = ["ChannelPredictor", "check_channels", "check_directions"]


def check_channels(h: ArrayLike, n: int, name: str = "h") -> Array:
    """Return measured channels as a complex array of shape (n,).

    Raises
    ------
    ValueError
        If they are real, not finite, all zero, or not ``n``.
    """
    array = np.asarray(h.detach().cpu() if isinstance(h, torch.Tensor) else h)
    if array.shape != (n,):
        raise ValueError(f"{name} must have shape ({n},), one channel a receiver: {array.shape}.")
    if not np.iscomplexobj(array):
        raise ValueError(f"{name} must be complex: amplitude and phase are both needed.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite channels.")
    if not array.any():
        raise ValueError(f"{name} is zero everywhere: there is nothing to learn.")
    return array.astype(np.complex128)


def check_directions(
    doa: ArrayLike, mask: ArrayLike | None, rx: Array, *, allow_empty: bool = False
) -> tuple[Array, Array]:
    """Return directions of arrival (n, P, D) and their mask (n, P).

    Parameters
    ----------
    doa : array_like, shape (n, P, D)
        Unit vectors from the receiver towards the arriving path; padded entries may hold anything.
    mask : array_like of bool, shape (n, P), optional
        Which entries are paths; by default those without NaN.
    rx : numpy.ndarray, shape (n, D)
        Receivers, for the shape.
    allow_empty : bool, default False
        Whether a receiver may have no path at all.

    Raises
    ------
    ValueError
        If shapes do not fit, a direction is not of unit length, or a receiver has none.
    """
    array = np.array(doa.detach().cpu() if isinstance(doa, torch.Tensor) else doa, dtype=float)
    n, dim = rx.shape
    if array.ndim != 3 or array.shape[0] != n or array.shape[2] != dim:
        raise ValueError(f"doa must have shape ({n}, paths, {dim}), got {array.shape}.")
    if mask is None:
        valid = ~np.isnan(array).any(axis=-1)
    else:
        valid = np.array(mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask, bool)
    if valid.shape != array.shape[:2]:
        raise ValueError(f"mask must have shape {array.shape[:2]}, got {valid.shape}.")
    length = np.linalg.norm(array, axis=-1)
    if not (np.abs(length[valid] - 1) < 1e-3).all():
        raise ValueError("doa must hold unit vectors; at least one has another length or is NaN.")
    if not allow_empty and not valid.any(axis=1).all():
        i = int(np.flatnonzero(~valid.any(axis=1))[0])
        raise ValueError(f"Receiver {i} has no direction of arrival; drop it or measure one.")
    array[~valid] = 0.0
    return array, valid


class ChannelPredictor(BaseEstimator):
    """Base of the predictors: ``fit(rx, h, doa, mask)``, ``predict(rx, doa, mask)``, ``score``.

    ``rx`` are positions in metres of shape (n, D), ``h`` complex channels of shape (n,), ``doa``
    unit vectors of shape (n, P, D), ``mask`` of shape (n, P). Methods that need no directions
    accept and ignore them, so that all can stand in one table.
    """

    needs_doa: bool = False

    def fit(
        self, rx: ArrayLike, h: ArrayLike, doa: ArrayLike | None = None, mask: Any = None
    ) -> Self:
        """Learn from measured channels.

        Parameters
        ----------
        rx, h, doa, mask : array_like
            The survey, as in the class.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If the input is not a usable survey.
        """
        positions = check_positions(rx)
        if len(positions) < 2:
            raise ValueError("At least two receivers are needed to learn anything.")
        channels = check_channels(h, len(positions))
        directions: tuple[Array, Array] | None = None
        if doa is not None:
            directions = check_directions(doa, mask, positions)
        elif self.needs_doa:
            raise ValueError(
                f"{type(self).__name__} needs the directions of arrival of the measured points "
                "(doa=...); without an antenna array use HelmholtzGP or NeWRF with "
                "directions='uniform'."
            )
        self.dim_ = positions.shape[1]
        self._fit(positions, channels, directions)
        return self

    def predict(self, rx: ArrayLike, doa: ArrayLike | None = None, mask: Any = None) -> Any:
        """Predict complex channels.

        Parameters
        ----------
        rx : array_like, shape (n, D)
            New places, metres.
        doa, mask : array_like, optional
            Measured directions there; without them, those that need directions search for them.

        Returns
        -------
        numpy.ndarray of complex, shape (n,)
            Or a tensor when ``rx`` is one.
        """
        if not hasattr(self, "dim_"):
            raise NotFittedError(f"Call fit before predict of this {type(self).__name__}.")
        positions = check_positions(rx, dim=self.dim_)
        directions = None
        if doa is not None:
            directions = check_directions(doa, mask, positions, allow_empty=True)
        h = self._predict(positions, directions)
        return torch.as_tensor(h) if isinstance(rx, torch.Tensor) else h

    def score(
        self, rx: ArrayLike, h: ArrayLike, doa: ArrayLike | None = None, mask: Any = None
    ) -> float:
        """Return the prediction SNR in decibel."""
        return prediction_snr(self.predict(rx, doa, mask), h)

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        raise NotImplementedError

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        raise NotImplementedError
