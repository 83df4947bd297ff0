"""A continuous Bayesian flow network *is* a variance-preserving diffusion, and back.

With ``x_vp = mu / sqrt(gamma)`` the belief mean becomes ``sqrt(gamma) x + sqrt(1 - gamma) eps``:
the noisy sample of a DDPM whose ``alphas_cumprod`` is ``gamma``. The noise prediction is the same
number on both sides. So a network of a diffusion library can be sampled with this chapter's
solvers (:func:`from_vp`), and a flow with the schedulers of ``diffusers`` (:func:`to_vp`,
:func:`as_diffusers_scheduler`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from icml24.bayesian_flow.flows import ContinuousBFN, Model, over
from icml24.bayesian_flow.schedules import ContinuousBFNSchedule

__all__ = ["VPModel", "as_diffusers_scheduler", "from_nnaisense", "from_vp", "to_vp"]


class _FromVP(nn.Module):
    def __init__(self, model: Model, alphas_cumprod: Tensor, schedule: Any) -> None:
        super().__init__()
        self.model, self.schedule = model, schedule
        log_snr = (alphas_cumprod.log() - (-alphas_cumprod).log1p()).flip(0)
        self._log_snr = log_snr.numpy()
        self._index = np.arange(len(log_snr) - 1.0, -1.0, -1.0)

    def forward(self, mu: Tensor, s: Tensor) -> Tensor:
        gamma = self.schedule.gamma(1 - s.double())
        log_snr = 2 * self.schedule.log_snr(1 - s.double())
        index = np.interp(log_snr.cpu().numpy(), self._log_snr, self._index)
        time = torch.as_tensor(index, dtype=mu.dtype, device=mu.device)
        output = self.model(mu / over(gamma.sqrt(), mu), time)
        return getattr(output, "sample", output)


def from_vp(model: Model, alphas_cumprod: ArrayLike | Tensor) -> tuple[ContinuousBFN, float]:
    """Turn a noise-predicting diffusion network into a flow, to be sampled by our solvers.

    Parameters
    ----------
    model : callable or torch.nn.Module
        ``model(x_vp, k)`` with (fractional) training step ``k`` of shape (B,) predicts the noise;
        its result may be a tensor or carry it as ``.sample``.
    alphas_cumprod : array_like, shape (T,)
        Of the network's training, falling, in (0, 1).

    Returns
    -------
    flow : ContinuousBFN
        With ``sigma_1 = sqrt(1 - alphas_cumprod[0])``; ``t`` is mapped to the training step of the
        same signal-to-noise ratio.
    eta : float
        Where to start, so that the first belief is as noisy as the last training step.

    Examples
    --------
    >>> flow, eta = from_vp(lambda x, k: x, [0.999, 0.5, 0.01])
    >>> round(flow.schedule.sigma_1**2, 6), round(float(flow.schedule.gamma(1 - eta)), 6)
    (0.001, 0.01)
    """
    abar = torch.as_tensor(np.asarray(alphas_cumprod, dtype=float))
    if abar.ndim != 1 or len(abar) < 2 or not bool((abar.diff() < 0).all()):
        raise ValueError("alphas_cumprod must be a falling vector of at least two entries.")
    if not 0 < abar[-1] < abar[0] < 1:
        raise ValueError("alphas_cumprod must lie strictly between 0 and 1.")
    schedule = ContinuousBFNSchedule(math.sqrt(1 - float(abar[0])))
    eta = math.log1p(-float(abar[-1])) / (2 * math.log(schedule.sigma_1))
    return ContinuousBFN(_FromVP(model, abar, schedule), schedule, "epsilon"), eta


class VPModel(nn.Module):
    """A continuous flow as the network of a variance-preserving diffusion.

    Parameters
    ----------
    bfn : ContinuousBFN
    num_train_timesteps : int, default 1000
        Training steps ``k`` are laid over ``t = k / (T - 1) * (1 - eta)``.
    eta : float, default 0.01
    """

    def __init__(
        self, bfn: ContinuousBFN, num_train_timesteps: int = 1000, eta: float = 0.01
    ) -> None:
        super().__init__()
        if not isinstance(bfn, ContinuousBFN):
            raise TypeError(f"Only a ContinuousBFN is a diffusion of x, got {type(bfn).__name__}.")
        if num_train_timesteps < 2 or not 0 < eta < 1:
            raise ValueError("Need num_train_timesteps >= 2 and 0 < eta < 1.")
        self.bfn, self.eta, self.last = bfn, eta, num_train_timesteps - 1

    @property
    def alphas_cumprod(self) -> Tensor:
        """Shape (T,), float64, falling."""
        k = torch.arange(self.last + 1, dtype=torch.float64)
        return self.bfn.schedule.gamma(self.time(k))

    def time(self, k: Tensor) -> Tensor:
        """Time ``t`` of a training step."""
        return k / self.last * (1 - self.eta)

    def forward(self, x_vp: Tensor, k: float | Tensor) -> Tensor:
        """Predict the noise in ``x_vp`` at training step ``k`` (one, or one per example)."""
        t = self.time(torch.as_tensor(k, dtype=torch.float64, device=x_vp.device).reshape(-1))
        t = t.expand(len(x_vp))
        gamma = over(self.bfn.schedule.gamma(t), x_vp)
        return self.bfn.predict_noise(gamma.sqrt() * x_vp, t)


def to_vp(bfn: ContinuousBFN, num_train_timesteps: int = 1000, eta: float = 0.01) -> VPModel:
    """Turn a continuous flow into a diffusion network ``model(x_vp, k)`` that predicts noise.

    Parameters
    ----------
    bfn : ContinuousBFN
    num_train_timesteps : int, default 1000
    eta : float, default 0.01

    Returns
    -------
    VPModel

    Examples
    --------
    >>> flow = ContinuousBFN(lambda mu, s: 0 * mu, ContinuousBFNSchedule(0.1))
    >>> to_vp(flow)(torch.ones(2, 3), 10).shape
    torch.Size([2, 3])
    """
    return VPModel(bfn, num_train_timesteps, eta)


def as_diffusers_scheduler(
    model: VPModel, name: str = "DPMSolverMultistepScheduler", **settings: Any
) -> Any:
    """Return a scheduler of ``diffusers`` with the noise levels of a flow.

    Parameters
    ----------
    model : VPModel
        From :func:`to_vp`.
    name : str
        A scheduler class of ``diffusers`` that accepts ``trained_betas``.
    **settings
        Passed on, for example ``algorithm_type="sde-dpmsolver++"``.

    Returns
    -------
    diffusers scheduler

    Raises
    ------
    ImportError
        If diffusers is not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("This needs diffusers: pip install diffusers") from error
    if not hasattr(diffusers, name):
        raise ValueError(f"diffusers has no scheduler {name!r}.")
    abar = model.alphas_cumprod
    betas = 1 - torch.cat([abar[:1], abar[1:] / abar[:-1]])
    return getattr(diffusers, name)(
        num_train_timesteps=len(abar), trained_betas=betas.numpy(), **settings
    )


def from_nnaisense(network: Model) -> Model:
    """Adapt a network of the original BFN code, which takes the time with the shape of the data.

    Parameters
    ----------
    network : callable
        ``network(data, t)`` with ``t`` broadcast to the data (without the axis of symbols for
        discrete data, which the original flattens to (B, D)).

    Returns
    -------
    callable
        ``model(input, s)`` for the flows of this package.

    Examples
    --------
    >>> model = from_nnaisense(lambda x, t: x * t)
    >>> model(torch.ones(2, 3), torch.tensor([0.0, 1.0])).sum(1)
    tensor([0., 3.])
    """

    def model(network_input: Tensor, s: Tensor) -> Tensor:
        time = s.reshape(-1, *[1] * (network_input.ndim - 1))
        return network(network_input, time.expand_as(network_input))

    return model
