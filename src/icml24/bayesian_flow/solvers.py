"""The update rules: pure functions of state, prediction and two times.

Each moves a state from time ``s`` to ``t < s`` (``t = 0`` is the data) and takes the network's
estimate at ``s``. A second-order rule also takes ``slope``, the derivative of the estimate: with
respect to the log-SNR for continuous data, to ``t`` for discrete data. Without it, it is the
first-order rule. ``noise`` has the state's shape and is standard normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule

__all__ = [
    "ALIASES",
    "SOLVERS",
    "Solver",
    "bayesian_update",
    "bayesian_update_discrete",
    "bfn_solver",
    "bfn_solver_discrete",
    "euler_maruyama",
    "sde_bfn_solver",
    "sde_bfn_solver_discrete",
]


def bayesian_update(
    schedule: ContinuousBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    r"""Observe the estimate with noise and update the belief: the original BFN sampler.

    .. math::
        y = \hat x + u / \sqrt\alpha, \qquad
        \mu_t = \frac{\rho_s \mu_s + \alpha y}{\rho_s + \alpha}, \qquad
        \alpha = \beta(t) - \beta(s), \quad \rho = 1 + \beta.
    """
    beta = float(schedule.beta(s))
    accuracy = float(schedule.beta(t)) - beta
    observed = prediction + noise / math.sqrt(accuracy)
    return ((1 + beta) * state + accuracy * observed) / (1 + beta + accuracy)


def bfn_solver(
    schedule: ContinuousBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    r"""BFN-Solver++1 (Algorithm 1) and, with a slope, BFN-Solver++2 (Algorithm 2).

    .. math::
        \mu_t = \frac{\sigma_t}{\sigma_s} \mu_s
                - \alpha_t (e^{-h} - 1) (\hat x_s + \tfrac h2 D), \quad h = \lambda_t - \lambda_s,

    with mean factor :math:`\alpha = \gamma`, deviation :math:`\sigma`, log-SNR :math:`\lambda`.
    """
    alpha, _, ratio, h = _continuous(schedule, s, t)
    gain = -alpha * math.expm1(-h)
    moved = (ratio * state).add_(prediction, alpha=gain)
    return moved if slope is None else moved.add_(slope, alpha=0.5 * h * gain)


def sde_bfn_solver(
    schedule: ContinuousBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    r"""SDE-BFN-Solver++1 and, with a slope, SDE-BFN-Solver++2 (Algorithm 3).

    .. math::
        \mu_t = \frac{\sigma_t}{\sigma_s} e^{-h} \mu_s
                - \alpha_t (e^{-2h} - 1) (\hat x_s + \tfrac h2 D) + \sigma_t \sqrt{1 - e^{-2h}} u.
    """
    alpha, sigma, ratio, h = _continuous(schedule, s, t)
    gain = -alpha * math.expm1(-2 * h)
    moved = (ratio * math.exp(-h) * state).add_(prediction, alpha=gain)
    if slope is not None:
        moved.add_(slope, alpha=0.5 * h * gain)
    return moved.add_(noise, alpha=sigma * math.sqrt(-math.expm1(-2 * h)))


def euler_maruyama(
    schedule: ContinuousBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    r"""Euler-Maruyama on the reverse equation, which is in the official code only.

    .. math:: \mu_t = \mu_s - (F_s \mu_s - G_s^2 \nabla \log p)(s - t) + G_s \sqrt{s - t}\, u.
    """
    drift, squared = float(schedule.drift(s)), float(schedule.diffusion2(s))
    gamma, omega = float(schedule.gamma(s)), float(schedule.omega(s))
    score = (gamma * prediction - state) / (gamma * omega)
    step = s - t
    return state - (drift * state - squared * score) * step + math.sqrt(squared * step) * noise


def bayesian_update_discrete(
    schedule: DiscreteBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    r"""Observe a symbol with noise: the original discrete sampler after its categorical draw.

    ``prediction`` is the one-hot vector that was drawn.

    .. math::
        z_t = z_s + \alpha (K e_k - 1) + \sqrt{K \alpha}\, u, \qquad \alpha = \beta_t - \beta_s.
    """
    accuracy = float(schedule.beta(t)) - float(schedule.beta(s))
    classes = schedule.num_classes
    return state + accuracy * (classes * prediction - 1) + math.sqrt(classes * accuracy) * noise


def sde_bfn_solver_discrete(
    schedule: DiscreteBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor,
    slope: Tensor | None = None,
) -> Tensor:
    r"""SDE-BFN-Solver1 (Algorithm 4) and, with a slope, SDE-BFN-Solver2 (Algorithm 5).

    .. math::
        z_t = z_s + (\beta_t - \beta_s)(K \hat e_s - 1)
              + \tfrac13 K \beta_1 (t-s)^2 (s + 2t - 3) D + \sqrt{K (\beta_t - \beta_s)}\, u.
    """
    classes, beta_1 = schedule.num_classes, schedule.beta_1
    accuracy = beta_1 * (s - t) * (2 - s - t)
    state = state + accuracy * (classes * prediction - 1)
    if slope is not None:
        state = state + classes * beta_1 * (t - s) ** 2 * (s + 2 * t - 3) / 3 * slope
    return state + math.sqrt(classes * accuracy) * noise


def bfn_solver_discrete(
    schedule: DiscreteBFNSchedule,
    state: Tensor,
    prediction: Tensor,
    s: float,
    t: float,
    *,
    noise: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    r"""BFN-Solver1 (Algorithm 6) and, with a slope, BFN-Solver2 (Algorithm 7).

    .. math::
        z_t = \frac{1-t}{1-s} z_s + (1-t) \beta_1 (t-s) (1 - K \hat e_s)
              - \tfrac12 K \beta_1 (1-t)(t-s)^2 D.
    """
    classes, beta_1 = schedule.num_classes, schedule.beta_1
    update = (t - s) * (1 - classes * prediction)
    if slope is not None:
        update = update - 0.5 * classes * (t - s) ** 2 * slope
    return (1 - t) * (state / (1 - s) + beta_1 * update)


@lru_cache(maxsize=4096)
def _continuous(
    schedule: ContinuousBFNSchedule, s: float, t: float
) -> tuple[float, float, float, float]:
    alpha, sigma = (float(c) for c in schedule.alpha_sigma(t))
    ratio = sigma / float(schedule.alpha_sigma(s)[1])
    return alpha, sigma, ratio, float(schedule.log_snr(t)) - float(schedule.log_snr(s))


Rule = Callable[..., Tensor]


@dataclass(frozen=True)
class Solver:
    """A sampling algorithm: a rule for each kind of flow and how it is driven.

    Parameters
    ----------
    order : {1, 2}
    stochastic : bool
    continuous, discrete : callable or None
        The update rules; None where the solver does not exist.
    singlestep : bool
        Get the slope from an extra evaluation inside the step, not from the step before.
    original : bool
        Start at the prior itself and evaluate once more at the end, as the original sampler does.
    """

    order: int
    stochastic: bool
    continuous: Rule | None
    discrete: Rule | None
    singlestep: bool = False
    original: bool = False


SOLVERS = {
    "bfn": Solver(1, True, bayesian_update, bayesian_update_discrete, original=True),
    "bfn-solver1": Solver(1, False, bfn_solver, bfn_solver_discrete),
    "bfn-solver2": Solver(2, False, bfn_solver, bfn_solver_discrete),
    "bfn-solver2-single": Solver(2, False, bfn_solver, bfn_solver_discrete, singlestep=True),
    "sde-bfn-solver1": Solver(1, True, sde_bfn_solver, sde_bfn_solver_discrete),
    "sde-bfn-solver2": Solver(2, True, sde_bfn_solver, sde_bfn_solver_discrete),
    "euler-maruyama": Solver(1, True, euler_maruyama, None),
}
ALIASES = {
    "bfn-solver++1": "bfn-solver1",
    "bfn-solver++2": "bfn-solver2",
    "sde-bfn-solver++1": "sde-bfn-solver1",
    "sde-bfn-solver++2": "sde-bfn-solver2",
    "bfn1": "bfn-solver1",
    "bfn2": "bfn-solver2",
    "sde1": "sde-bfn-solver1",
    "sde2": "sde-bfn-solver2",
}


def one_hot_draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a symbol at every position and return it as one-hot vectors."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    draw = torch.multinomial(flat, 1, generator=generator)
    return torch.zeros_like(flat).scatter_(1, draw, 1.0).reshape(probabilities.shape)
