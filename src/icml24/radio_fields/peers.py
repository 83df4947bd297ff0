"""Predictors that know less physics: neighbours, kernels, and a plain network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist
from scipy.special import j0
from torch import nn

from icml24.radio_fields.channel import Array, wavelength
from icml24.radio_fields.estimator import ChannelPredictor
from icml24.radio_fields.field import fourier_features

__all__ = ["CoordinateMLP", "HelmholtzGP", "NearestNeighbours", "RBFGP", "helmholtz_kernel"]


class NearestNeighbours(ChannelPredictor):
    """Mean of the ``k`` nearest measured channels, weighted by inverse distance.

    Parameters
    ----------
    ks : sequence of int
        The best one is chosen by leaving each receiver out in turn.

    Attributes
    ----------
    k_ : int

    Examples
    --------
    >>> model = NearestNeighbours().fit([[0.0, 0.0], [1.0, 0.0]], [1j, 2j])
    >>> model.predict([[0.0, 0.0]]).round(6).tolist()
    [1j]
    """

    def __init__(self, ks: Sequence[int] = (1, 2, 3, 5, 10, 20)) -> None:
        self.ks = ks

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        self.tree_, self.h_ = cKDTree(rx), h
        ks = [k for k in self.ks if k < len(rx)] or [1]
        errors = []
        for k in ks:
            distance, index = self.tree_.query(rx, k=k + 1)
            errors.append((np.abs(self._mean(distance[:, 1:], index[:, 1:]) - h) ** 2).sum())
        self.k_ = ks[int(np.argmin(errors))]

    def _mean(self, distance: Array, index: Array) -> Array:
        weight = 1 / np.maximum(distance, 1e-9)
        return (weight * self.h_[index]).sum(axis=1) / weight.sum(axis=1)

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        distance, index = self.tree_.query(rx, k=self.k_)
        shape = (len(rx), self.k_)
        return self._mean(distance.reshape(shape), index.reshape(shape))


def helmholtz_kernel(distance: ArrayLike, frequency: float, dim: int) -> Array:
    """Covariance of a field of waves of one frequency from all directions.

    Parameters
    ----------
    distance : array_like
        Metres.
    frequency : float
        Hertz.
    dim : {2, 3}
        ``sinc(k r)`` in space, the Bessel function ``J0(k r)`` in the plane.

    Returns
    -------
    numpy.ndarray

    Examples
    --------
    >>> helmholtz_kernel([0.0], 928e6, 3).tolist()
    [1.0]
    """
    phase = 2 * np.pi / wavelength(frequency) * np.asarray(distance, float)
    return np.sinc(phase / np.pi) if dim == 3 else j0(phase)


class _KernelGP(ChannelPredictor):
    """Gaussian process mean; kernel and noise are chosen by exact leave-one-out error."""

    noises: Sequence[float]

    def _kernels(self, dim: int) -> list[Callable[[Array], Array]]:
        raise NotImplementedError

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        distance, best = cdist(rx, rx), np.inf
        for kernel in self._kernels(rx.shape[1]):
            value, vector = np.linalg.eigh(kernel(distance))
            value, turned = np.maximum(value, 0), vector.T @ h
            for noise in self.noises:
                solution = vector @ (turned / (value + noise))
                leave = solution / ((vector**2) @ (1 / (value + noise)))
                error = float((np.abs(leave) ** 2).sum())
                if error < best:
                    best, self.kernel_, self.noise_ = error, kernel, noise
                    self.rx_, self.weights_ = rx, solution

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        return self.kernel_(cdist(rx, self.rx_)) @ self.weights_


NOISES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)


class RBFGP(_KernelGP):
    """Gaussian process with the kernel ``exp(-r^2 / (2 l^2))``.

    Parameters
    ----------
    lengths : sequence of float
        Candidate length scales, metres.
    noises : sequence of float
        Candidate noise variances, relative to the signal's.

    Examples
    --------
    >>> x = np.linspace(0, 1, 20)[:, None] * [1.0, 1.0]
    >>> model = RBFGP().fit(x, np.exp(3j * x[:, 0]))
    >>> bool(model.score(x[:5] + 0.02, np.exp(3j * (x[:5, 0] + 0.02))) > 30)
    True
    """

    def __init__(
        self,
        lengths: Sequence[float] = (0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0),
        noises: Sequence[float] = NOISES,
    ) -> None:
        self.lengths, self.noises = lengths, noises

    def _kernels(self, dim: int) -> list[Callable[[Array], Array]]:
        def smooth(length: float) -> Callable[[Array], Array]:
            return lambda r: np.exp(-(r**2) / (2 * length**2))

        return [smooth(length) for length in self.lengths]


class HelmholtzGP(_KernelGP):
    """Gaussian process with :func:`helmholtz_kernel`, the right prior for waves of one frequency.

    Parameters
    ----------
    frequency : float
        Hertz.
    noises : sequence of float
        Candidate noise variances.
    """

    def __init__(self, frequency: float, noises: Sequence[float] = NOISES) -> None:
        self.frequency, self.noises = frequency, noises

    def _kernels(self, dim: int) -> list[Callable[[Array], Array]]:
        return [lambda r: helmholtz_kernel(r, self.frequency, dim)]


class CoordinateMLP(ChannelPredictor):
    """Network from Fourier features of the position straight to the channel.

    Parameters
    ----------
    pos_freqs : int, default 5
        Octaves of the encoding.
    width, depth : int
        ReLU layers.
    steps : int, default 300
        Adam steps over the whole survey.
    lr : float, default 0.002
    validation_fraction : float, default 0.1
        The state with the best error on this share is kept.
    random_state : int, default 0

    Attributes
    ----------
    net_ : torch.nn.Module
    best_step_ : int
    """

    def __init__(
        self,
        *,
        pos_freqs: int = 5,
        width: int = 64,
        depth: int = 3,
        steps: int = 300,
        lr: float = 2e-3,
        validation_fraction: float = 0.1,
        random_state: int = 0,
    ) -> None:
        self.pos_freqs, self.width, self.depth = pos_freqs, width, depth
        self.steps, self.lr = steps, lr
        self.validation_fraction, self.random_state = validation_fraction, random_state

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        rng = np.random.default_rng(self.random_state)
        self.scale_ = float(np.sqrt((np.abs(h) ** 2).mean()))
        x = fourier_features(torch.as_tensor(rx, dtype=torch.float32), self.pos_freqs)
        y = torch.as_tensor(np.column_stack([h.real, h.imag]) / self.scale_, dtype=torch.float32)
        order = torch.as_tensor(rng.permutation(len(rx)))
        n = max(1, round(self.validation_fraction * len(rx)))
        held, train = order[:n], order[n:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**31)))
            sizes = [x.shape[1]] + [self.width] * self.depth
            layers: list[nn.Module] = []
            for i in range(self.depth):
                layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
            self.net_ = nn.Sequential(*layers, nn.Linear(sizes[-1], 2))
        optimizer = torch.optim.Adam(self.net_.parameters(), lr=self.lr)
        best, kept = np.inf, None
        for step in range(self.steps):
            optimizer.zero_grad()
            (self.net_(x[train]) - y[train]).pow(2).sum().div(y[train].pow(2).sum()).backward()
            optimizer.step()
            if step % 5 == 4:
                with torch.no_grad():
                    error = float((self.net_(x[held]) - y[held]).pow(2).sum())
                if error < best:
                    best, self.best_step_ = error, step
                    kept = {k: v.clone() for k, v in self.net_.state_dict().items()}
        if kept is not None:
            self.net_.load_state_dict(kept)

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        x = fourier_features(torch.as_tensor(rx, dtype=torch.float32), self.pos_freqs)
        with torch.no_grad():
            out = self.net_(x).double().numpy() * self.scale_
        return out[:, 0] + 1j * out[:, 1]
