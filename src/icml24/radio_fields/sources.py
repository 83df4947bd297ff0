"""Two shortcuts past the network: virtual transmitters with gains, by algebra or by gradient."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.base import clone

from icml24.radio_fields.channel import Array, check_frequency, free_space, wavelength
from icml24.radio_fields.doa_search import DoASearch
from icml24.radio_fields.estimator import ChannelPredictor

__all__ = ["SourceField", "VirtualTransmitterRegressor", "design_matrix"]


def design_matrix(rx: Array, sources: Array, visible: Array, frequency: float) -> Array:
    """Channel of each receiver from each source of unit gain, zero where it is not visible.

    Parameters
    ----------
    rx : numpy.ndarray, shape (n, D)
    sources : numpy.ndarray, shape (V, D)
    visible : numpy.ndarray of bool, shape (n, V)
    frequency : float
        Hertz.

    Returns
    -------
    numpy.ndarray of complex, shape (n, V)
    """
    distance = np.linalg.norm(rx[:, None] - sources[None], axis=-1)
    distance = np.maximum(distance, wavelength(frequency) / 8)
    return free_space(torch.as_tensor(distance), frequency).numpy() * visible


class VirtualTransmitterRegressor(ChannelPredictor):
    r"""VTx-LS: search virtual transmitters, then solve for their complex gains by ridge regression.

    .. math:: \hat h(x) = \sum_v 1[v \text{ visible at } x]\; g_v
              \frac{\lambda}{4\pi |x - v|} e^{-j k |x - v|}

    Parameters
    ----------
    frequency : float
        Hertz.
    search : DoASearch, optional
        Finds the virtual transmitters; it is copied, not changed.
    ridge : float, default 1e-3
        Relative to the mean squared norm of the columns.

    Attributes
    ----------
    gains_ : numpy.ndarray of complex, shape (V,)
    search_ : DoASearch

    Examples
    --------
    >>> from icml24.radio_fields import ShoeboxRoom
    >>> room = ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=1)
    >>> rx = room.sample_receivers(60, seed=0)
    >>> paths, h = room.trace(rx), room.channel(rx)
    >>> model = VirtualTransmitterRegressor(928e6).fit(rx[:40], h[:40], paths.doa[:40])
    >>> bool(model.score(rx[40:], h[40:]) > 40)
    True
    """

    needs_doa = True

    def __init__(
        self, frequency: float, *, search: DoASearch | None = None, ridge: float = 1e-3
    ) -> None:
        self.frequency, self.search, self.ridge = frequency, search, ridge

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        check_frequency(self.frequency)
        if self.ridge < 0:
            raise ValueError(f"ridge must not be negative, got {self.ridge}.")
        assert doa is not None
        self.search_ = (clone(self.search) if self.search else DoASearch()).fit(rx, *doa)
        sources, seen = self.search_.virtual_transmitters_, self.search_.seen_
        self.gains_ = _ridge(design_matrix(rx, sources, seen, self.frequency), h, self.ridge)

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        seen = self.search_.visible(rx, *(doa or ()))
        sources = self.search_.virtual_transmitters_
        return design_matrix(rx, sources, seen, self.frequency) @ self.gains_


def _ridge(a: Array, h: Array, ridge: float) -> Array:
    """Solve the least-squares problem with rows appended for the penalty."""
    norm2 = (np.abs(a) ** 2).sum(axis=0)
    root = np.sqrt(ridge * norm2.mean())
    rows = np.concatenate([a, root * np.eye(a.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([h, np.zeros(a.shape[1])]), rcond=None)[0]


class SourceField(ChannelPredictor):
    """Learnable sources: the differentiable VTx-LS, a radio Gaussian field of width zero.

    Positions and complex gains of the virtual transmitters start from the search and its
    least-squares gains, and follow the gradient of the NMSE. Positions matter most: an error of a
    tenth of a wavelength turns the phase by 36 degrees.

    Parameters
    ----------
    frequency : float
        Hertz.
    search : DoASearch, optional
    steps : int, default 300
        Adam steps over the whole survey.
    lr : float, default 0.003
        Rate for positions, in wavelengths, and for gains, relative to the largest.
    ridge : float, default 1e-3
        For the initial gains.

    Attributes
    ----------
    sources_ : numpy.ndarray, shape (V, D)
    gains_ : numpy.ndarray of complex, shape (V,)
    losses_ : list of float
        NMSE during training.
    """

    needs_doa = True

    def __init__(
        self,
        frequency: float,
        *,
        search: DoASearch | None = None,
        steps: int = 300,
        lr: float = 3e-3,
        ridge: float = 1e-3,
    ) -> None:
        self.frequency, self.search, self.steps = frequency, search, steps
        self.lr, self.ridge = lr, ridge

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        start = VirtualTransmitterRegressor(self.frequency, search=self.search, ridge=self.ridge)
        assert doa is not None
        start._fit(rx, h, doa)
        self.search_ = start.search_
        lam = wavelength(self.frequency)
        x, y = torch.as_tensor(rx), torch.as_tensor(h)
        seen = torch.as_tensor(self.search_.seen_)
        origin = torch.as_tensor(self.search_.virtual_transmitters_)
        gain0 = torch.as_tensor(start.gains_)
        scale = gain0.abs().max()
        shift = torch.zeros_like(origin, requires_grad=True)
        gain = torch.view_as_real(gain0 / scale).clone().requires_grad_()
        optimizer = torch.optim.Adam([shift, gain], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps))
        power = y.abs().pow(2).sum()
        self.losses_ = []
        for _ in range(self.steps):
            sources = origin + lam * shift
            distance = (x[:, None] - sources).norm(dim=-1).clamp_min(lam / 8)
            columns = free_space(distance, self.frequency) * seen
            error = columns @ (torch.view_as_complex(gain) * scale) - y
            loss = error.abs().pow(2).sum() / power
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            self.losses_.append(loss.item())
        self.sources_ = (origin + lam * shift).detach().numpy()
        self.gains_ = (torch.view_as_complex(gain.detach()) * scale).numpy()

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        seen = self.search_.visible(rx, *(doa or ()))
        return design_matrix(rx, self.sources_, seen, self.frequency) @ self.gains_
