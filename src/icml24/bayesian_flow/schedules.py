"""How the belief of a Bayesian flow network spreads with time.

There are two clocks. A network is trained with ``s``: 0 knows nothing, 1 knows the data. The
stochastic differential equations use ``t = 1 - s``: 0 is data, 1 is pure noise. Every function
here takes ``t``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ContinuousBFNSchedule", "DiscreteBFNSchedule"]


def as_time(t: float | Tensor) -> Tensor:
    """Turn a time into a floating tensor (a number into float64) and check that it is in [0, 1]."""
    t = torch.as_tensor(t, dtype=None if isinstance(t, Tensor) else torch.float64)
    if not t.is_floating_point():
        raise TypeError(f"A time must be a floating-point tensor or number, got {t.dtype}.")
    if not bool(((t >= 0) & (t <= 1)).all()):
        raise ValueError("Times must lie in [0, 1]: 0 is the data, 1 is the prior.")
    return t


@dataclass(frozen=True)
class ContinuousBFNSchedule:
    """Schedule of the belief about continuous data, section 4 of the paper.

    The belief mean is ``mu ~ N(gamma x, gamma (1 - gamma))``, ``gamma = 1 - sigma_1**(2(1-t))``. It
    solves the linear equation ``d mu = F mu dt + G dw`` (Theorem 4.1), and
    ``mu / sqrt(gamma)`` is a variance-preserving diffusion with ``alphas_cumprod = gamma``.

    Parameters
    ----------
    sigma_1 : float, default 1e-3
        Standard deviation of the belief when the flow ends, for data scaled to [-1, 1].

    Examples
    --------
    >>> schedule = ContinuousBFNSchedule(sigma_1=0.1)
    >>> round(float(schedule.gamma(0.0)), 3), round(float(schedule.gamma(1.0)), 3)
    (0.99, 0.0)
    """

    sigma_1: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.sigma_1 < 1:
            raise ValueError(f"sigma_1 must lie strictly between 0 and 1, got {self.sigma_1}.")

    @property
    def _log(self) -> float:
        return math.log(self.sigma_1)

    def omega(self, t: float | Tensor) -> Tensor:
        """Variance of the belief, ``sigma_1**(2(1-t))``: the inverse of its precision."""
        return torch.exp(2 * (1 - as_time(t)) * self._log)

    def gamma(self, t: float | Tensor) -> Tensor:
        """Weight of the data in the belief mean, ``1 - omega``."""
        return -torch.expm1(2 * (1 - as_time(t)) * self._log)

    def beta(self, t: float | Tensor) -> Tensor:
        """Accuracy of all observations so far, ``1 / omega - 1``."""
        return torch.expm1(-2 * (1 - as_time(t)) * self._log)

    def alpha_sigma(self, t: float | Tensor) -> tuple[Tensor, Tensor]:
        """Mean factor ``gamma`` and standard deviation ``sqrt(gamma (1 - gamma))`` of ``mu``."""
        gamma = self.gamma(t)
        return gamma, (gamma * self.omega(t)).sqrt()

    def log_snr(self, t: float | Tensor) -> Tensor:
        """Half the logarithm of the signal-to-noise ratio, ``ln(gamma / (1 - gamma)) / 2``."""
        return 0.5 * self.gamma(t).log() - (1 - as_time(t)) * self._log

    def t_from_log_snr(self, log_snr: float | Tensor) -> Tensor:
        """Invert :meth:`log_snr`: ``t = 1 - ln(sigmoid(-2 log_snr)) / (2 ln sigma_1)``."""
        dtype = None if isinstance(log_snr, Tensor) else torch.float64
        value = torch.as_tensor(log_snr, dtype=dtype)
        return 1 - torch.nn.functional.logsigmoid(-2 * value) / (2 * self._log)

    def drift(self, t: float | Tensor) -> Tensor:
        """Coefficient ``F = gamma' / gamma`` of Theorem 4.1; it diverges at ``t = 1``."""
        return 2 * self._log * self.omega(t) / self.gamma(t)

    def diffusion2(self, t: float | Tensor) -> Tensor:
        """Squared noise coefficient ``G**2 = -gamma'`` of Theorem 4.1."""
        return -2 * self._log * self.omega(t)

    def alphas_cumprod(self, t: float | Tensor) -> Tensor:
        """Return ``gamma``, by the name it has in a variance-preserving diffusion."""
        return self.gamma(t)

    def timesteps(self, steps: int, eta: float, spacing: str = "uniform") -> Tensor:
        """Grid of ``steps + 1`` times from ``1 - eta`` down to 0, float64.

        Parameters
        ----------
        steps : int
        eta : float
            Distance of the first time from the prior, in [0, 1).
        spacing : {"uniform", "logsnr"}
            Equal steps in ``t`` (the paper), or in :meth:`log_snr`, which needs ``eta > 0``.

        Returns
        -------
        Tensor, shape (steps + 1,)
        """
        first = check_grid(steps, eta, spacing)
        if spacing == "uniform":
            return first
        ends = self.log_snr(first[[0, -1]])
        grid = self.t_from_log_snr(torch.linspace(*ends.tolist(), steps + 1, dtype=torch.float64))
        grid[0], grid[-1] = first[0], 0.0
        return grid


@dataclass(frozen=True)
class DiscreteBFNSchedule:
    """Schedule of the belief about discrete data, section 5 of the paper.

    The logits are ``z ~ N(beta (K e_x - 1), K beta)`` with ``beta = beta_1 (1 - t)**2``, and solve
    ``d z = H z dt + L dw`` (Theorem 5.1). The network sees ``theta = softmax(z)``.

    Parameters
    ----------
    num_classes : int
        Number of symbols K, at least 2.
    beta_1 : float, default 0.5625
        Accuracy at the data end. A rule that fits the published models: ``sqrt(K beta_1)`` near 4.

    Examples
    --------
    >>> schedule = DiscreteBFNSchedule(num_classes=27)
    >>> float(schedule.beta(0.0))
    0.5625
    """

    num_classes: int
    beta_1: float = 0.75**2

    def __post_init__(self) -> None:
        if self.num_classes != int(self.num_classes) or self.num_classes < 2:
            raise ValueError(f"num_classes must be an integer from 2 on, got {self.num_classes}.")
        if not 0 < self.beta_1 < math.inf:
            raise ValueError(f"beta_1 must be positive and finite, got {self.beta_1}.")

    def beta(self, t: float | Tensor) -> Tensor:
        """Accuracy of all observations so far, ``beta_1 (1 - t)**2``."""
        return self.beta_1 * (1 - as_time(t)) ** 2

    def log_snr(self, t: float | Tensor) -> Tensor:
        """Half the logarithm of the signal-to-noise ratio, ``ln(beta) / 2`` up to a constant."""
        return 0.5 * self.beta(t).log()

    def t_from_log_snr(self, log_snr: float | Tensor) -> Tensor:
        """Invert :meth:`log_snr`."""
        dtype = None if isinstance(log_snr, Tensor) else torch.float64
        return 1 - (torch.as_tensor(log_snr, dtype=dtype) - 0.5 * math.log(self.beta_1)).exp()

    def drift(self, t: float | Tensor) -> Tensor:
        """Coefficient ``H = -2 / (1 - t)`` of Theorem 5.1; it diverges at ``t = 1``."""
        return -2 / (1 - as_time(t))

    def diffusion2(self, t: float | Tensor) -> Tensor:
        """Squared noise coefficient ``L**2 = 2 K beta_1 (1 - t)`` of Theorem 5.1."""
        return 2 * self.num_classes * self.beta_1 * (1 - as_time(t))

    def timesteps(self, steps: int, eta: float, spacing: str = "uniform") -> Tensor:
        """Grid of ``steps + 1`` times from ``1 - eta`` down to 0, float64.

        Parameters
        ----------
        steps : int
        eta : float
            Distance of the first time from the prior, in [0, 1).
        spacing : {"uniform", "logsnr"}
            Equal steps in ``t`` (the paper), or in :meth:`log_snr`, which needs ``eta > 0``.

        Returns
        -------
        Tensor, shape (steps + 1,)
        """
        first = check_grid(steps, eta, spacing)
        if spacing == "uniform":
            return first
        grid = 1 - torch.logspace(math.log10(eta), 0, steps + 1, dtype=torch.float64)
        grid[0], grid[-1] = first[0], 0.0
        return grid


def check_grid(steps: int, eta: float, spacing: str) -> Tensor:
    """Check the settings of a time grid and return the grid that is uniform in ``t``."""
    if steps != int(steps) or steps < 1:
        raise ValueError(f"The number of steps must be an integer from 1 on, got {steps}.")
    if not 0 <= eta < 1:
        raise ValueError(f"eta must lie in [0, 1), got {eta}.")
    if spacing not in ("uniform", "logsnr"):
        raise ValueError(f"timestep_spacing must be 'uniform' or 'logsnr', got {spacing!r}.")
    if spacing == "logsnr" and eta == 0:
        raise ValueError("timestep_spacing='logsnr' needs eta > 0: the prior has no signal.")
    return (1 - eta) * (1 - torch.arange(steps + 1, dtype=torch.float64) / steps)
